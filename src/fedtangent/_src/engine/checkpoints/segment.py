"""Segments of a run's history: each has the rounds and evaluations between two checkpoints, in one file.

So each checkpoint writes only the new part of the history. A segment names the previous segment with its SHA-256, so
that the last one verifies all of them.
"""

from __future__ import annotations

import io
import json
from typing import Any, NamedTuple

import jax
import numpy as np

from fedtangent._src.data.files import unpacked
from fedtangent._src.engine.checkpoints.files import DamagedError
from fedtangent._src.engine.history import Measurement
from fedtangent._src.types import PyTree

HEADER = ("start", "stop", "previous", "evaluations", "seconds", "layout", "dtypes")  # names of a segment's header


class Link(NamedTuple):
    """The file of a segment of a run's history: its name and its SHA-256."""

    name: str
    sha256: str


class Segment(NamedTuple):
    """The part of a run's history from round ``start`` to round ``stop`` (exclusive), between two checkpoints.

    Attributes:
        start, stop: First round, and the round after the last one.
        previous: File of the segment before; None for the first segment.
        infos: Numbers that the rounds reported, NumPy arrays [stop - start, ...].
        evaluations: Evaluations between the two checkpoints.
        seconds: Run time from the beginning of the run to the end of the segment.
    """

    start: int
    stop: int
    previous: Link | None
    infos: PyTree
    evaluations: list[Measurement]
    seconds: float


def _lower(value: Any, arrays: dict[str, np.ndarray], where: str) -> Any:
    """Converts a metric to a value that JSON can hold; its arrays go into the dictionary ``arrays``, under new names.

    ``where`` names the metric in the ``ValueError`` for a value of another type.
    """
    if isinstance(value, (jax.Array, np.ndarray, np.generic)):
        array, name = np.asarray(value), f"metric {len(arrays)}"
        if array.dtype.hasobject or array.dtype.names:
            raise ValueError(f"{where}: a checkpoint cannot hold an array of dtype {array.dtype}")
        arrays[name] = array
        return {"scalar" if isinstance(value, np.generic) else "array": name}
    if isinstance(value, dict) and all(isinstance(k, str) for k in value):
        return {"dict": {k: _lower(v, arrays, f"{where}[{k!r}]") for k, v in value.items()}}
    if type(value) in (list, tuple):
        return {type(value).__name__: [_lower(v, arrays, f"{where}[{i}]") for i, v in enumerate(value)]}
    if value is None or type(value) in (str, bool, int, float):
        return value
    raise ValueError(
        f"{where}: a checkpoint cannot hold a {type(value).__name__}; allowed are numbers, strings, booleans, None, "
        "arrays, and lists, tuples and dictionaries of them"
    )


def _raise(value: Any, arrays: dict[str, np.ndarray]) -> Any:
    """Rebuilds a metric from the JSON ``value`` that ``_lower`` wrote and the ``arrays`` stored beside it, by name.

    Arrays come back as NumPy arrays.
    """
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind == "dict":
        return {k: _raise(v, arrays) for k, v in inner.items()}
    if kind in ("list", "tuple"):
        items = [_raise(v, arrays) for v in inner]
        return items if kind == "list" else tuple(items)
    return arrays[inner][()] if kind == "scalar" else arrays[inner]


def _layout(infos: PyTree) -> list[list[object]]:
    """Returns the path, dtype and shape of each of the arrays that a round reports, its infos."""
    leaves = jax.tree_util.tree_flatten_with_path(infos)[0]
    return [[jax.tree_util.keystr(path), str(leaf.dtype), list(leaf.shape)] for path, leaf in leaves]


def encode(segment: Segment, shapes: PyTree) -> bytes:
    """Returns a segment of a run's history as the bytes of an .npz file.

    Args:
        segment: The segment.
        shapes: Shapes of one round's infos, the numbers that it reports.

    Raises:
        ValueError: A metric that is not a number, a string, a boolean, None, an array or a container of them.
    """
    arrays: dict[str, np.ndarray] = {}
    rows = [
        [e.round, _lower(e.metrics, arrays, f"metrics of round {e.round}"), e.uplink_bytes, e.downlink_bytes, e.seconds]
        for e in segment.evaluations
    ]
    arrays |= {f"info {i}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(segment.infos))}
    header = {
        "start": segment.start,
        "stop": segment.stop,
        "previous": segment.previous,
        "evaluations": rows,
        "seconds": segment.seconds,
        "layout": _layout(shapes),
        "dtypes": {name: str(array.dtype) for name, array in arrays.items()},
    }
    file = io.BytesIO()
    # npz knows NumPy's own dtypes only: bfloat16 and its like travel as bytes and are viewed again.
    raw: dict[str, Any] = {
        name: array if array.dtype.isbuiltin == 1 else array.view(f"V{array.itemsize}")
        for name, array in arrays.items()
    }
    np.savez(file, header=np.frombuffer(json.dumps(header).encode(), np.uint8), **raw)
    return file.getvalue()


def decode(content: bytes, shapes: PyTree) -> Segment:
    """Returns the segment of a run's history that ``encode`` turned into bytes.

    Args:
        content: The bytes.
        shapes: Shapes of one round's infos, the numbers that it reports.

    Raises:
        DamagedError: The bytes are not a segment, or its infos have other shapes.
    """
    try:
        arrays = unpacked(io.BytesIO(content))
        header = json.loads(arrays.pop("header").tobytes())
        missing = [name for name in HEADER if name not in header]
    except Exception as error:  # readers of formats raise anything
        raise DamagedError(f"a segment of the history cannot be read: {error}") from error
    if missing:
        raise DamagedError(f"a segment of the history has no {', '.join(missing)}")
    if header["layout"] != _layout(shapes):
        raise DamagedError("a segment of the history has other numbers per round than this algorithm reports")
    arrays = {name: array.view(np.dtype(header["dtypes"][name])) for name, array in arrays.items()}
    leaves, structure = jax.tree.flatten(shapes)
    infos = jax.tree.unflatten(structure, [arrays[f"info {i}"] for i in range(len(leaves))])
    rows = [Measurement(round_, _raise(metrics, arrays), *more) for round_, metrics, *more in header["evaluations"]]
    previous = None if header["previous"] is None else Link(*header["previous"])
    return Segment(header["start"], header["stop"], previous, infos, rows, header["seconds"])
