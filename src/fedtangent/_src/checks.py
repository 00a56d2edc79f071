"""Checks of arguments for the whole package: each raises ``ValueError`` with one line of text before any work starts.

Every message has the form ``name: got X, must be ..``, or ``name: got X, allowed are a, b`` for a choice among names.
"""

from __future__ import annotations

import difflib
import numbers
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

MAX_INDEX = int(np.iinfo(np.int32).max)  # the largest whole number: compiled programs hold them in 32 bits
MAX_SEED = 2**32 - 1
MAX_NUMBER = 1e19  # the largest magnitude of other numbers: float32 still holds their squares
_ROWS = 256  # rows of a matrix that ``symmetric`` compares at a time


def number(
    name: str,
    value: object,
    *,
    above: float | None = None,
    at_least: float | None = None,
    below: float | None = None,
    at_most: float | None = None,
) -> Any:
    """Returns ``value`` as a ``float`` if it is one finite real number within the bounds.

    An array of shape [] counts as a number. A traced value of shape [] (in a sweep or a hypergradient) has no number to
    compare yet and is returned unchanged.

    Args:
        name, value: Name of the argument, for the error message, and the value that the user passed.
        above: Lower bound that the number must exceed.
        at_least: Lower bound that the number may equal.
        below: Upper bound that the number must stay under.
        at_most: Upper bound that the number may equal.

    Raises:
        ValueError: ``value`` is not one number, is not finite, or is outside a bound.
    """
    array = value if isinstance(value, jax.core.Tracer) else np.asarray(value)
    if not (jnp.issubdtype(array.dtype, jnp.floating) or jnp.issubdtype(array.dtype, jnp.integer)):
        raise ValueError(f"{name}: got {shown(value)}, must be a number")
    if array.ndim != 0:
        raise ValueError(f"{name}: got an array of shape {array.shape}, must be one number")
    if isinstance(value, jax.core.Tracer):
        return value
    bounds = {"above": above, "at least": at_least, "below": below, "at most": at_most}
    words = [f"{word} {bound:g}" for word, bound in bounds.items() if bound is not None]
    if below is None and at_most is None:
        words.append("finite")
    real = float(array)
    within = (
        (above is None or real > above)
        and (at_least is None or real >= at_least)
        and (below is None or real < below)
        and (at_most is None or real <= at_most)
    )
    if not (np.isfinite(real) and within):
        raise ValueError(f"{name}: got {value}, must be {' and '.join(words)}")
    return real


def whole(name: str, value: object, least: int = 1, most: int | None = None) -> int:
    """Returns ``value`` as an ``int`` if it is a whole number (no bool) from ``least`` to ``most``.

    Args:
        name, value: Name of the argument, for the error message, and the value that the user passed.
        least: Smallest number allowed.
        most: Largest number allowed; None for ``MAX_INDEX``, the largest number that 32 bits hold.

    Raises:
        ValueError: ``value`` is not a whole number, or is out of range.
    """
    is_bool = isinstance(value, bool | np.bool_)
    integer = int(value) if isinstance(value, numbers.Integral) and not is_bool else None
    bound = MAX_INDEX if most is None else most
    if integer is None or not least <= integer <= bound:
        is_large = integer is not None and integer > bound
        allowed = f"from {least} to {bound}" if most is not None or is_large else f"of at least {least}"
        raise ValueError(f"{name}: got {shown(value)}, must be a whole number {allowed}")
    return integer


def seed(value: object, name: str = "seed") -> int:
    """Returns ``value`` as an ``int``; raises ``ValueError`` unless it is a whole number from 0 to 2^32 - 1.

    Args:
        value: The value that the user passed.
        name: Name of the argument, for the error message.
    """
    return whole(name, value, 0, MAX_SEED)


# The types that compiled programs are kept by (``has_hash``), and how a user makes a value of each, for error messages.
MADE_BY = {
    "Model": ", such as models.mlp(64, 10), or models.from_flax(module, ..) for a network of your own",
    "Algorithm": ", such as fed_avg(model, schedule, ..), or the result of a recipe of your own",
}


def instance(name: str, value: object, of: type) -> None:
    """Raises ``ValueError`` if ``value`` is not an instance of a type, or is a model or algorithm without a hash.

    Args:
        name, value: Name of the argument, for the error message, and the value that the user passed.
        of: The type.
    """
    if not isinstance(value, of):
        article = "an" if of.__name__[0] in "AEIOU" else "a"
        advice = MADE_BY.get(of.__name__, "")
        raise ValueError(f"{name}: got {shown(value)}, must be {article} {of.__name__}{advice}")
    if of.__name__ in MADE_BY:
        has_hash(name, value)


def has_hash(name: str, value: object) -> None:
    """Raises ``ValueError`` if ``value`` has no hash, by which compiled programs are kept and found again.

    Args:
        name, value: Name of the argument, for the error message, and the value that the user passed.
    """
    try:
        hash(value)
    except TypeError as error:
        allowed = "must have a hash, as functions and frozen dataclasses do"
        raise ValueError(f"{name}: got {shown(value)}, {allowed} ({error})") from error


def flag(name: str, value: object) -> bool:
    """Returns ``value`` as a ``bool``; raises ``ValueError`` if it is neither True nor False.

    Args:
        name, value: Name of the argument, for the error message, and the value that the user passed.
    """
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{name}: got {value!r}, must be True or False")
    return bool(value)


def folder(name: str, path: Path | None) -> None:
    """Raises ``ValueError`` if ``path`` is not None and is not an existing folder.

    Args:
        name: Name of the argument, for the error message.
        path: The path that the user passed, or None.
    """
    if path is not None and not path.is_dir():
        raise ValueError(f"{name}: got {path}, must be a folder")


def writable(name: str, path: Path, content: str) -> Path:
    """Returns ``path`` if it is, or can become, a folder that this process can write to.

    Args:
        name: Name of the argument, for the error message.
        path: Path of the folder, which need not exist yet.
        content: Name of the files that will be written there, for the error message.

    Raises:
        ValueError: The folder, or the closest parent that exists, cannot be written to.
    """
    above = next(p for p in (path, *path.absolute().parents) if p.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise ValueError(f"{name}: got {path} for {content}, must be a folder that can be written to")
    return path


def shares(name: str, weights: object, count: int) -> np.ndarray:
    """Returns ``count`` weights divided by their sum, float64 [count].

    Args:
        name, weights: Name of the argument, for the error message, and the weights that the user passed.
        count: Number of weights.

    Raises:
        ValueError: There are not ``count`` weights, a weight is negative or not finite, or all weights are 0.
    """
    values = real_array(name, weights)
    finite(name, values)
    if values.shape != (count,) or np.any(values < 0) or not values.any():
        raise ValueError(f"{name}: got {weights!r:.60}, must be {count} numbers, at least 0 and not all 0")
    return np.asarray(values / values.sum(), np.float64)


def choice(name: str, value: object, allowed: Iterable[str]) -> str:
    """Returns ``value`` if it is one of the ``allowed`` names.

    Args:
        name, value: Name of the argument, for the error message, and the value that the user passed.
        allowed: The allowed names.

    Raises:
        ValueError: ``value`` is not one of them; the message lists them all.
    """
    names = tuple(allowed)
    if not isinstance(value, str) or value not in names:
        raise ValueError(f"{name}: got {value!r}, allowed are {', '.join(names)}{nearest(value, names)}")
    return value


def nearest(value: object, names: Iterable[str]) -> str:
    """Returns "; did you mean NAME?" with the name spelt most like ``value``, or "" if no name is similar.

    Names that end with a dot and ``value``, such as fed_ensemble.table2 for table2, are preferred, and all are named.

    Args:
        value: The value that the user passed.
        names: The allowed names.
    """
    if not isinstance(value, str):
        return ""
    candidates = list(names)
    close = [n for n in candidates if n.endswith(f".{value}")] or difflib.get_close_matches(value, candidates, 1)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def dtype(value: object, *allowed: str) -> np.dtype:
    """Returns ``value`` as a NumPy dtype; raises ``ValueError`` if the dtype's name is not in ``allowed``."""
    try:
        name: object = np.dtype(value).name  # type: ignore[call-overload]
    except TypeError:
        name = value
    return np.dtype(choice("dtype", name, allowed))


def real_array(name: str, value: object) -> np.ndarray:
    """Returns ``value``, real numbers of any shape, as a float64 array.

    Args:
        name: Name of the argument, for the error message.
        value: A number, an array or nested lists; text, None, bools and complex numbers are refused.

    Raises:
        ValueError: ``value`` is not an array of real numbers.
    """
    try:
        array = np.asarray(value)
    except ValueError as error:  # rows of different lengths
        raise ValueError(f"{name}: got {shown(value)}, must be real numbers in one array") from error
    if not (np.issubdtype(array.dtype, np.integer) or jnp.issubdtype(array.dtype, jnp.floating)):
        raise ValueError(f"{name}: got {shown(value)}, must be a real number or an array of them")
    return array.astype(np.float64, copy=False)


def finite(name: str, array: np.ndarray) -> None:
    """Raises ``ValueError`` if an array holds NaN or infinity; the message names the first such entry.

    Args:
        name, array: Name of the argument, for the error message, and numbers of any shape.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        total = np.sum(array)
    if not np.isfinite(total):  # one pass; a sum that overflows is looked at entry by entry too
        bad = ~np.isfinite(array)
        if not bad.any():
            return
        where = tuple(int(i) for i in np.argwhere(bad)[0])
        raise ValueError(f"{name}: got {array[where]} at entry {where} of shape {array.shape}, must be finite")


def square(name: str, matrix: object) -> np.ndarray:
    """Returns ``matrix`` as float64 [n, n], which may hold NaN.

    Args:
        name, matrix: Name of the argument, for the error message, and the matrix [n, n].

    Raises:
        ValueError: The matrix is not an array of real numbers, is empty or is not square.
    """
    array = real_array(name, matrix)
    if array.ndim != 2 or array.shape[0] != array.shape[1] or array.shape[0] == 0:
        raise ValueError(f"{name}: got shape {array.shape}, must be a square matrix [n, n] with n >= 1")
    return array


def symmetric(name: str, matrix: object) -> np.ndarray:
    """Returns ``matrix`` as float64 [n, n] if it is square, not empty, finite, and symmetric up to rounding.

    Args:
        name, matrix: Name of the argument, for the error message, and the matrix [n, n].

    Raises:
        ValueError: The matrix lacks one of these properties.
    """
    array = square(name, matrix)
    finite(name, array)
    bands = (slice(start, start + _ROWS) for start in range(0, len(array), _ROWS))
    asymmetry = max(float(np.max(np.abs(array[b] - array[:, b].T))) for b in bands)
    # A kernel assembled from products in another order differs from its transpose by a few roundings per entry.
    if asymmetry > 1e3 * np.finfo(np.float64).eps * max(float(np.max(array)), -float(np.min(array))):
        raise ValueError(f"{name}: got a matrix up to {asymmetry:.3g} off its transpose, must be symmetric")
    return array


def class_labels(name: str, labels: object, num_classes: int | None = None) -> np.ndarray:
    """Returns class labels as an array [n] in the integer dtype of ``labels``.

    Args:
        name: Name of the argument, for the error message.
        labels: Whole numbers [n], n >= 1, at least 0.
        num_classes: Number of classes, which every label must be below; None: labels must fit into int32.

    Raises:
        ValueError: The labels are empty or have another shape or dtype, or one is out of range.
    """
    array = np.asarray(labels)
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer) or array.size == 0:
        raise ValueError(f"{name}: got shape {array.shape}, dtype {array.dtype}, must be whole numbers [n], n >= 1")
    most = MAX_INDEX if num_classes is None else num_classes - 1
    wrong = (array < 0) | (array > most)
    if wrong.any():
        at = int(np.argmax(wrong))
        allowed = "at least 0" if num_classes is None and array[at] < 0 else f"from 0 to {most}"
        raise ValueError(f"{name}: got {array[at]} at position {at} ({int(wrong.sum())} such), must be {allowed}")
    return array


def tokens(name: str, x: Any, vocabulary: int | None) -> None:
    """Raises ``ValueError`` unless all tokens are from 0 to ``vocabulary - 1``.

    Args:
        name: Name of the inputs, for the error message.
        x: Tokens, an array of whole numbers (which is not checked) of any shape.
        vocabulary: Number of different tokens that the model reads; None if unknown, when any number below 2^31 passes.
    """
    most = MAX_INDEX if vocabulary is None else vocabulary - 1
    if x.size and not (int(x.min()) >= 0 and int(x.max()) <= most):
        raise ValueError(f"{name}: got {x.min()} to {x.max()}, must be tokens from 0 to {most}")


def shown(value: object) -> str:
    """Returns the ``repr`` of ``value`` in one line, cut to 80 characters."""
    return f"{' '.join(repr(value).split()):.80}"
