"""Every model, in tiny, is trained for two rounds by the command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedtangent._src import entries
from fedtangent._src.data import Dataset
from fedtangent._src.data.dataset import DatasetEntry, SourceInfo

from ..metrics_file import rows_of
from ..nightly import nightly
from .test_bad_input import assert_refused

MODELS = {
    "cnn": ["--filters", "2", "--hidden", "4", "--window", "3", "--convolution", "gemm"],
    "deep_linear": ["--width", "3"],
    "linear": [],
    "logistic": [],
    "lstm": ["--dataset", "text", "--partition", "iid", "--units", "4", "--embedding", "2"],
    "mlp": ["--widths", "3"],
    "mobilenet_v2": ["--width", "0.1", "--blocks", "1"],
    "ntk_cnn": ["--width", "2", "--depth", "1"],
    "ntk_resnet": ["--width", "2", "--blocks", "1"],
    "ntk_transformer": ["--width", "2", "--patch", "4"],
    "rbf_linear": ["--dataset", "sine", "--partition", "iid"],
    "resnet18": ["--width", "2", "--blocks", "1", "--convolution", "gemm"],
    "resnet34": ["--width", "2", "--blocks", "1", "--convolution", "gemm"],
    "shufflenet_v2": ["--width", "0.5", "--blocks", "1"],
}
DAILY = ("logistic",)  # by day test_data.py trains an lstm, and the other tests of the command dense networks
SHORT = ["--num-clients", "2", "--num-rounds", "2", "--evaluate-every", "2", "--local-steps", "1", "--batch-size", "4"]
SHORT += ["--mapping", "scan", "--checkpoint-every", "0", "--output", "out"]


@pytest.fixture
def text(monkeypatch: pytest.MonkeyPatch) -> None:
    """A data set of texts of five characters, of which there are seven."""

    def load(options: Any, folder: Path | None, seed: int) -> Dataset:
        x = np.random.default_rng(seed).integers(0, 7, (20, 5), np.int32)
        info = SourceInfo("made", "none", "generated")
        return Dataset("text", x[:16], x[:16, 0], x[16:], x[16:, 0], 7, None, info, "tokens")

    entry = DatasetEntry("text", "made", load, kind="tokens")
    monkeypatch.setitem(entries.catalogue("datasets"), "text", entry)  # type: ignore[arg-type]


@pytest.mark.usefixtures("text")
@pytest.mark.parametrize("name", nightly(entries.catalogue("models"), DAILY))
def test_two_rounds(run: Callable, folder: Path, name: str) -> None:
    few = [] if "--dataset" in MODELS[name] else ["--num-train", "16", "--num-test", "4"]
    ended = run("train", "--model", name, *MODELS[name], *SHORT, *few)
    assert ended.code == 0, ended
    rows = [r for r in rows_of(folder / "out") if (r["split"], r["metric"]) in (("train", "nll"), ("train", "mse"))]
    losses = {int(r["round"]): float(r["value"]) for r in rows}
    assert set(losses) == {0, 2} and np.isfinite(list(losses.values())).all() and losses[0] != losses[2]


REFUSED = {
    "text": (
        ["--model", "resnet18", "--dataset", "text"],
        "model: got 'resnet18', which reads image inputs, but the",
    ),
    "images": (["--model", "lstm"], "model: got 'lstm', which reads tokens inputs, but the data are of kind image"),
    "vectors": (["--model", "mobilenet_v2", "--flatten"], "input_shape: got (64,), must be (height, width, channels)"),
    "too small": (["--model", "cnn", "--pool", "3"], "input_shape: got (8, 8, 1), must be at least 9 high and wide"),
    "groups": (["--model", "shufflenet_v2", "--groups", "5"], "groups: got 5, must divide the channels of every layer"),
    "width": (["--model", "shufflenet_v2", "--width", "3"], "width: got 3.0, allowed are 0.5, 1.0, 1.5, 2.0"),
    "stages": (["--model", "resnet34", "--blocks", "1", "1", "1", "1", "1"], "blocks: got (1, 1, 1, 1, 1), must be of"),
    "another's option": (["--model", "resnet18", "--filters", "3"], "filters: is not used with model 'resnet18', only"),
}


@pytest.mark.usefixtures("text")
@pytest.mark.parametrize("case", REFUSED)
def test_what_a_network_cannot_take(run: Callable, folder: Path, case: str) -> None:
    arguments, says = REFUSED[case]
    assert_refused(run("train", *arguments, *SHORT), folder, says)
