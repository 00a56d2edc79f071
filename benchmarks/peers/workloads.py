"""The workloads: data, initial parameters and counts, the same for every tool. NumPy only: every environment reads it.

Every client holds exactly ``batch_size * local_steps`` examples, so that a visit is one pass over them whatever a tool
does at the end of an epoch, and every tool draws a fresh order of the examples at each visit.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

SIDE, CLASSES = 28, 10
SEQUENCE, VOCABULARY, EMBEDDING, HIDDEN = 80, 80, 8, 256
LOGISTIC_INPUTS = 60
EVALUATION_BATCH = 250


class Workload(NamedTuple):
    """One workload; the work of a round is ``clients_per_round * local_steps`` client steps of ``batch_size``."""

    name: str
    title: str
    num_clients: int
    clients_per_round: int
    batch_size: int
    local_steps: int
    learning_rate: float
    warmup_rounds: int
    rounds: int
    smoke_rounds: int

    @property
    def examples_per_client(self) -> int:
        """Examples of each client."""
        return self.batch_size * self.local_steps

    @property
    def steps_per_round(self) -> int:
        """Client steps of one round."""
        return self.clients_per_round * self.local_steps


WORKLOADS = {
    w.name: w
    for w in (
        Workload("logistic", "logistic 60-10, 1,000 of 1,000 clients", 1000, 1000, 10, 1, 0.1, 1, 2, 1),
        Workload("mlp", "MLP 784-100-10, 20 of 100 clients", 100, 20, 10, 10, 0.01, 2, 10, 3),
        Workload("cnn", "CNN 5x5x32, 5x5x64, 128, 10 of 20 clients", 20, 10, 10, 5, 0.02, 1, 10, 2),
        Workload("lstm", "LSTM 2 x 256, 80 characters, 10 of 20 clients", 20, 10, 10, 2, 1.0, 1, 6, 1),
    )
}


def _images(rng: np.random.Generator, count: int, shape: tuple[int, ...], signal: float) -> tuple[np.ndarray, ...]:
    """Noise around one template a class."""
    y = rng.integers(0, CLASSES, count)
    templates = signal * rng.standard_normal((CLASSES, *shape))
    return (templates[y] + rng.standard_normal((count, *shape))).astype(np.float32), y.astype(np.int32)


def _text(rng: np.random.Generator, count: int) -> tuple[np.ndarray, ...]:
    """Sequences of a Markov chain in which four of five symbols are decided by the one before, and the next symbol."""
    follows = rng.permutation(VOCABULARY)
    symbols = rng.integers(0, VOCABULARY, (count, SEQUENCE + 1))
    decided = rng.random((count, SEQUENCE + 1)) < 0.8
    for t in range(1, SEQUENCE + 1):
        symbols[:, t] = np.where(decided[:, t], follows[symbols[:, t - 1]], symbols[:, t])
    return symbols[:, :-1].astype(np.int32), symbols[:, -1].astype(np.int32)


def examples(workload: Workload, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """``x`` float32 [n, ...] (int32 [n, 80] for text) and labels ``y`` int32 [n], client after client."""
    rng = np.random.default_rng(seed)
    count = workload.num_clients * workload.examples_per_client
    if workload.name == "lstm":
        x, y = _text(rng, count)
    elif workload.name == "logistic":
        x, y = _images(rng, count, (LOGISTIC_INPUTS,), 0.3)
    else:
        shape = (SIDE, SIDE, 1) if workload.name == "cnn" else (SIDE * SIDE,)
        x, y = _images(rng, count, shape, 0.1)
    return x, y


def _dense(rng: np.random.Generator, name: str, *shape: int, gain: float = 1.0) -> dict[str, np.ndarray]:
    """A kernel [..., fan_in, fan_out] with N(0, gain / fan_in) entries and a bias of zeros."""
    kernel = rng.standard_normal(shape) * np.sqrt(gain / np.prod(shape[:-1]))
    return {f"{name}.kernel": kernel.astype(np.float32), f"{name}.bias": np.zeros(shape[-1], np.float32)}


def initial_parameters(name: str, seed: int) -> dict[str, np.ndarray]:
    """Where every tool starts: kernels [in, out], convolutions [height, width, in, out], images channels last.

    An LSTM layer has ``input`` [in, 4 H] and ``recurrent`` [H, 4 H], gates in the order input, forget, cell, output,
    and one bias [4 H].
    """
    rng = np.random.default_rng(seed + 1)
    if name == "logistic":
        return _dense(rng, "dense0", LOGISTIC_INPUTS, CLASSES)
    if name == "mlp":
        return _dense(rng, "dense0", SIDE * SIDE, 100, gain=2.0) | _dense(rng, "dense1", 100, CLASSES)
    if name == "cnn":
        found = _dense(rng, "conv0", 5, 5, 1, 32, gain=2.0) | _dense(rng, "conv1", 5, 5, 32, 64, gain=2.0)
        flat = (SIDE // 4) ** 2 * 64
        return found | _dense(rng, "dense0", flat, 128, gain=2.0) | _dense(rng, "dense1", 128, CLASSES)
    found = {"embedding": rng.standard_normal((VOCABULARY, EMBEDDING)).astype(np.float32)}
    for layer, inputs in enumerate((EMBEDDING, HIDDEN)):
        of_input, of_state = rng.standard_normal((inputs, 4 * HIDDEN)), rng.standard_normal((HIDDEN, 4 * HIDDEN))
        found[f"lstm{layer}.input"] = (of_input / np.sqrt(inputs)).astype(np.float32)
        found[f"lstm{layer}.recurrent"] = (of_state / np.sqrt(HIDDEN)).astype(np.float32)
        found[f"lstm{layer}.bias"] = np.zeros(4 * HIDDEN, np.float32)
    return found | _dense(rng, "dense0", HIDDEN, VOCABULARY)


def write(workload: Workload, seed: int, path: Path) -> None:
    """Data and initial parameters (``init/...``) of a workload as one .npz."""
    x, y = examples(workload, seed)
    start = {f"init/{key}": value for key, value in initial_parameters(workload.name, seed).items()}
    np.savez(path, x=x, y=y, **start)  # type: ignore[arg-type]


class Problem(NamedTuple):
    """What ``write`` wrote."""

    x: np.ndarray
    y: np.ndarray
    initial: dict[str, np.ndarray]


def read(path: str | Path) -> Problem:
    """The data and initial parameters in ``path``."""
    with np.load(path) as stored:
        start = {key.removeprefix("init/"): stored[key] for key in stored.files if key.startswith("init/")}
        return Problem(stored["x"], stored["y"], start)


# ---- the command line that every worker has, and the one line it prints ----


def worker_arguments() -> argparse.Namespace:
    """Arguments of a worker: one measurement."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workload", required=True, choices=sorted(WORKLOADS))
    parser.add_argument("--data", required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--min-seconds", type=float, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--mapping", default="auto")
    parser.add_argument("--spread", action="store_true")
    return parser.parse_args()


def result(
    workload: Workload, rounds: int, seconds: float, losses: tuple[float, float], steps: int, versions: dict[str, str]
) -> dict[str, Any]:
    """A measurement: ``rounds`` timed rounds in ``seconds``; losses before training and after the compared rounds."""
    return {
        "workload": workload.name,
        "rounds": rounds,
        "seconds": seconds,
        "rounds_per_second": rounds / seconds,
        "client_steps_per_second": rounds * workload.steps_per_round / seconds,
        "client_steps_counted": steps,
        "initial_loss": losses[0],
        "final_loss": losses[1],
        "versions": versions,
    }


def emit(measurement: dict[str, Any]) -> None:
    """Print a measurement as the process's one line of JSON."""
    sys.stdout.flush()
    print(json.dumps(measurement), flush=True)
