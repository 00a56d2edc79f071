"""Metrics as TensorBoard reads them. tensorboardX, which needs no TensorFlow, is imported when it is asked for."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from fedtangent.output.files import Metric


def check_tensorboard() -> None:
    """Raise ``ValueError`` where tensorboardX is not installed."""
    if importlib.util.find_spec("tensorboardX") is None:
        raise ValueError(
            "log: got tensorboard, but tensorboardX is not installed: pip install 'fedtangent[tensorboard]'"
        )


def tensorboard(folder: Path) -> Callable[[Iterable[Metric]], None]:
    """What writes the metrics of an evaluation below ``folder``/tensorboard, each seed's as a run of its own.

    What is there is replaced, as a run that is resumed tells all its evaluations again. A metric is the scalar
    ``split/metric`` at its round, and the bytes sent until then are ``bytes/uplink`` and ``bytes/downlink``.
    """
    from tensorboardX import SummaryWriter

    place, writers = folder / "tensorboard", dict[int, SummaryWriter]()
    shutil.rmtree(place, ignore_errors=True)

    def write(metrics: Iterable[Metric]) -> None:
        for m in metrics:
            if m.seed not in writers:
                writers[m.seed] = SummaryWriter(str(place / f"seed-{m.seed}"))
            told = {
                f"{m.split}/{m.metric}": m.value,
                "bytes/uplink": m.uplink_bytes,
                "bytes/downlink": m.downlink_bytes,
            }
            for name, value in told.items():
                writers[m.seed].add_scalar(name, value, m.round)
        for writer in writers.values():
            writer.flush()

    return write
