"""Calls of public functions with one or two odd arguments."""

from __future__ import annotations

import contextlib
import functools
import inspect
import multiprocessing
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from case import Case, drawn
from hypothesis import strategies as st

import fedtangent


def pool() -> dict[str, Any]:
    """A value that is right for each name of a parameter; what has a parameter of another name is not called."""
    rng = np.random.default_rng(0)
    x, labels = rng.normal(size=(24, 5)), rng.integers(0, 3, 24)
    model = fedtangent.models.mlp(5, 3, (6,))
    clients = fedtangent.partition.iid(24, 4, 0)
    data = fedtangent.data.federated_data(x, labels, clients)
    gram = x @ x.T + np.eye(24)
    kernels = fedtangent.kernels.KernelBlocks(gram, gram[:4], gram, gram[:4], gram[:4, :4])
    schedule = fedtangent.schedules.uniform_sampling(4, 2)
    work = fedtangent.Work(steps=2, batch_size=4)
    algorithm = fedtangent.fed_avg(model, schedule, client_learning_rate=0.1, work=work)
    cohorts = fedtangent.types.Cohort(*(np.zeros((2, 1), kind) for kind in (int, int, float)))
    return {
        "model": model,
        "schedule": schedule,
        "work": work,
        "algorithm": algorithm,
        "data": data,
        "x": x,
        "y": labels,
        "client_learning_rate": 0.1,
        "learning_rate": 0.1,
        "num_clients": 4,
        "seed": 0,
        "labels": labels,
        "partition": clients,
        "num_rounds": 2,
        "members": rng.normal(size=(2, 24, 3)),
        "targets": labels,
        "loss": "cross_entropy",
        "output_size": 3,
        "input_size": 5,
        "num_models": 2,
        "bits": 8,
        "kernels": kernels,
        "mu": 0.1,
        "y_train": rng.normal(size=(24, 2)),
        "theta": gram,
        "matrix": gram,
        "values": x[:, 0],
        "sparsity": 0.5,
        "num_nodes": 4,
        "rate": 0.1,
        "num_examples": 24,
        "rule": fedtangent.theory.Rule(2, 0.1),
        "gamma": 1.0,
        "local_steps": 2,
        "num_classes": 3,
        "dimension": 2,
        "noise_multiplier": 1.0,
        "clip_norm": 1.0,
        "alpha": 0.5,
        "probability": 0.2,
        "text": "ring",
        "rows": 2,
        "cols": 2,
        "initial": 0.1,
        "clients_per_round": 2,
        "x1": x,
        "x_train": x,
        "x_test": x[:4],
        "kernel_fn": model.kernel,
        "input_shape": (5,),
        "lambda_min": 0.5,
        "width": 8,
        "name": "digits",
        "cohorts": cohorts,
        "seeds": (0, 1),
        "losses": x[0] ** 2,
        "predictions": x,
        "epochs": 1,
        "users": np.arange(24) % 4,
        "num_shards": 2,
        "shards_per_client": 2,
        "classes_per_client": 2,
        "beta": 0.5,
        "delta": 1e-5,
        "sizes": (5,),
        "level": 0.9,
        "params": model.init(jax.random.key(0)),
        "keep": 1,
        "graph": fedtangent.graphs.ring(4),
        "norm": 1.0,
        "k": 1,
    }


ODD = (
    *(None, "", "x", True, 0, 1, 2, 3, -1, 7, 2**31, 2**63, 10**30, 0.0, -0.0, 0.5, 1.5, 1e308, 1e-308, 5e-324, -1.0),
    *(float("nan"), float("inf"), -float("inf"), 1j, (), [], {}, object(), "3", b"x", (1, 2), [[1], [1, 2]]),
)
ARRAYS: dict[str, Callable[[np.ndarray], Any]] = {
    "empty": lambda a: a[:0],
    "a row less": lambda a: a[:-1],
    "one": lambda a: a[:1],
    "flat": np.ravel,
    "another axis": lambda a: a[None],
    "complex": lambda a: a + 1j,
    "text": lambda a: a.astype(str),
    "minus": lambda a: -a,
    "bool": lambda a: a > 0,
    "zero": np.zeros_like,
    "nan": lambda a: np.where(a == a.flat[-1], np.nan, a),
    "huge": lambda a: a * 1e300,
    "large": lambda a: a.astype(np.int64) + 2**32,
    "tiny": lambda a: a * 1e-300,
    "objects": lambda a: a.astype(object),
    "half": lambda a: a.astype(np.float16),
    "list": np.ndarray.tolist,
    "scalar": lambda a: a.ravel()[0],
    "transposed": lambda a: a.T,
}


def _is_ours(function: Callable[..., Any]) -> bool:
    """Whether it is this package's, and may be called by names."""
    kinds = {p.kind for p in inspect.signature(function).parameters.values()}
    return function.__module__.startswith("fedtangent") and inspect.Parameter.POSITIONAL_ONLY not in kinds


class Callee(NamedTuple):
    """A public function whose needed parameters are all in the pool."""

    run: Callable[..., Any]
    names: list[str]  # of the parameters that it is given
    varied: list[str]  # and of those among them for which odd values may stand


def functions() -> dict[str, Callee]:
    """What is called, by its public name."""
    with multiprocessing.get_context("fork").Pool(1) as process:  # a process that has used JAX cannot be forked
        known = process.apply(_names)
    found, seen = dict[str, Callee](), set()
    rooms, done = [("fedtangent", fedtangent)], set()
    while rooms:
        path, room = rooms.pop()
        for name in sorted(set(dir(room))):
            value = getattr(room, name)
            if inspect.ismodule(value) and value.__name__.startswith("fedtangent") and value not in done:
                done.add(value)
                rooms.append((f"{path}.{name}", value))
            elif inspect.isfunction(value) and _is_ours(value) and value not in seen:
                seen.add(value)
                parameters = inspect.signature(value).parameters.values()
                named = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
                names = [p.name for p in named if p.name in known]
                varied = [one for one in names if known[one]]
                if varied and all(p.name in known or p.default is not p.empty for p in named):
                    found[f"{path}.{name}"] = Callee(value, names, varied)
    return found


def _names() -> dict[str, bool]:
    """The names of the pool, and whether odd values may stand for one: for a number, a name, an array."""
    plain = bool, int, float, str, tuple, np.ndarray
    return {name: type(value) in plain for name, value in pool().items()}


@st.composite
def calls(draw: Any, of: dict[str, Callee]) -> tuple[str, list[tuple[str, Any]]]:
    """A function's name, and one or two of its parameters with what they are given, a value or an array's change."""
    name = draw(st.sampled_from(sorted(of)))
    names = draw(st.lists(st.sampled_from(of[name].varied), min_size=1, max_size=2, unique=True))
    return name, [(one, draw(st.sampled_from([*ARRAYS, *range(len(ODD))]))) for one in names]


def _call(of: Callee, changes: list[tuple[str, Any]]) -> int:
    right = pool()
    given_ = {one: right[one] for one in of.names}
    for one, change in changes:
        if isinstance(change, int):
            given_[one] = ODD[change]
        elif isinstance(right[one], np.ndarray):
            with contextlib.suppress(ValueError, TypeError, IndexError):  # no such change of this array
                given_[one] = ARRAYS[change](right[one])
    # what is of another kind altogether, text for an array, may meet Python's own errors
    other = any(_kind(given_[one]) is not _kind(right[one]) for one, _ in changes)
    try:
        of.run(**given_)
    except (ValueError, TypeError, AttributeError) as error:
        if not (other or isinstance(error, ValueError)):
            raise
        print("refused:", error)
    except MemoryError as error:  # NumPy says what it cannot allocate
        print("refused:", error)
    except KeyboardInterrupt:
        return 130
    return 0


def _kind(value: Any) -> type:
    if isinstance(value, np.ndarray) and value.dtype == object:
        return object
    return float if isinstance(value, int | float) else type(value)


def some_calls(number: int, start: int) -> list[Case]:
    """Cases of so many calls."""
    of = functions()
    return [
        Case(_written(name, changes), functools.partial(_call, of[name], changes), False)
        for name, changes in drawn(calls(of), number, start)
    ]


def _written(name: str, changes: list[tuple[str, Any]]) -> str:
    return f"{name}({', '.join(f'{one}={_shown(change)}' for one, change in changes)})"


def _shown(change: Any) -> str:
    return f"<{change}>" if isinstance(change, str) else repr(ODD[change])
