"""Metrics in TensorBoard's files, written by tensorboardX, which needs no TensorFlow."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from fedtangent._src.output.files import Metric


def check_tensorboard() -> None:
    """Raises ``ValueError`` if tensorboardX is not installed."""
    if importlib.util.find_spec("tensorboardX") is None:
        raise ValueError(
            "log: got tensorboard, but tensorboardX is not installed: pip install 'fedtangent[tensorboard]'"
        )


@contextlib.contextmanager
def tensorboard(folder: Path) -> Iterator[Callable[[Iterable[Metric]], None]]:
    """Opens a writer of metrics for TensorBoard below ``folder``/tensorboard, with one TensorBoard run for each seed.

    Yields a function that writes the metrics of an evaluation to disk. Its first call removes earlier files, since a
    resumed run writes all its evaluations again. A metric is the scalar ``split/metric`` at its round; the bytes sent
    until then are ``bytes/uplink`` and ``bytes/downlink``.
    """
    from tensorboardX.event_file_writer import EventsWriter
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.proto.summary_pb2 import Summary

    place, begun, writers = folder / "tensorboard", time.time(), dict[int, EventsWriter]()

    def write(metrics: Iterable[Metric]) -> None:
        if not writers:
            shutil.rmtree(place, ignore_errors=True)
        for m in metrics:
            if m.seed not in writers:
                (place / f"seed-{m.seed}").mkdir(parents=True)
                writers[m.seed] = EventsWriter(str(place / f"seed-{m.seed}" / "events"))
            scalars = {f"{m.split}/{m.metric}": m.value}
            scalars |= {"bytes/uplink": m.uplink_bytes, "bytes/downlink": m.downlink_bytes}
            values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
            at = begun + (m.seconds or 0.0)  # so that the axis of time has the run's seconds
            writers[m.seed].write_event(Event(step=m.round, wall_time=at, summary=Summary(value=values)))
        for writer in writers.values():
            writer.flush()

    try:
        yield write
    finally:
        for writer in writers.values():
            writer.close()
