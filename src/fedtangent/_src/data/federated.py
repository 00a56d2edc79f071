"""The training examples of all clients and their partition, as four arrays on the device."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Shaped

from fedtangent._src import checks
from fedtangent._src.data import partition as partitions
from fedtangent._src.data.dataset import check_float32, check_resolution, finite_rows, pixels
from fedtangent._src.data.partition.given import Clients
from fedtangent._src.pytrees import on_device
from fedtangent._src.types import ArrayLike, FederatedData


def federated_data(
    x: ArrayLike,
    y: ArrayLike,
    partition: Clients,
    dtype: DTypeLike | None = None,
    num_classes: int | None = None,
) -> FederatedData:
    """Checks examples and their partition among clients, and moves them to the device.

    Args:
        x: Inputs [n, ...], real numbers; uint8 are pixels, which are divided by 255 unless ``dtype`` is int32.
        y: Targets: [n, C] floating for regression, or [n] integer class labels, which become int32.
        partition: Rows of ``x`` that each client holds: a ``Partition``, or lists of rows as for ``partition.of``;
            clients may overlap (``partition.validate(exact=True)`` forbids it).
        dtype: Type of ``x`` on the device, and of ``y`` if that is floating: float32, float64 or, for inputs that are
            tokens, int32 (``y`` is then float32). By default int32 for signed whole numbers, float64 if ``x`` is
            float64 and JAX has ``jax_enable_x64`` on, float32 otherwise.
        num_classes: Number that integer labels must lie below; None for no limit.

    Raises:
        ValueError: There are no examples, x and y have different lengths, values are NaN or infinite, or too large or
            too close together for the dtype, targets have another shape or kind, labels are out of range, or the
            partition or the dtype is invalid.

    Example, three examples of two clients, where the second client holds two:

        >>> import fedtangent as ft
        >>> data = ft.data.federated_data([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]], [0, 1, 0], [[0], [1, 2]], num_classes=2)
        >>> data.x.shape, data.y.tolist(), data.offsets.tolist()
        ((3, 2), [0, 1, 0], [0, 1, 3])
    """
    x, y = np.asarray(x), np.asarray(y)
    dtype = _device_dtype(dtype, x)
    _check_inputs(x, dtype)
    if x.dtype == np.uint8 and dtype != jnp.int32:
        x = pixels(x)
    if len(x) != (len(y) if y.ndim else -1):
        raise ValueError(f"x and y: got x {x.shape}, y {y.shape}, must be the same number of examples")
    _check_targets(y, num_classes, dtype)
    clients = partitions.of(partition, len(x))
    floating = jnp.float64 if dtype == jnp.float64 else jnp.float32
    target_dtype = jnp.int32 if np.issubdtype(y.dtype, np.integer) else floating
    return FederatedData(*on_device((x.astype(dtype), y.astype(target_dtype), *clients)))


def max_client_size(data: FederatedData) -> int:
    """Returns the number of examples of the largest client as a Python integer; ``data`` must not be traced."""
    return int(np.max(np.diff(np.asarray(data.offsets))))


def _device_dtype(dtype: DTypeLike | None, x: np.ndarray) -> np.dtype:
    """Returns the dtype of the inputs ``x`` on the device: ``dtype``, by default one that suits ``x``.

    Raises ``ValueError`` for a dtype other than float32, float64 and int32, and for float64 where JAX has it off.
    """
    widest = jnp.dtype(jnp.result_type(float))  # float64 where JAX keeps it, globally or in an ``enable_x64`` context
    if dtype is None:
        if np.issubdtype(x.dtype, np.signedinteger):
            return jnp.dtype(jnp.int32)
        return widest if x.dtype == np.float64 else jnp.dtype(jnp.float32)
    checked = checks.dtype(dtype, "float32", "float64", "int32")
    if checked == np.float64 and widest != np.float64:
        raise ValueError("dtype: got float64, must be float32, or call fedtangent.enable_x64() first")
    return checked


def _check_inputs(x: Shaped[np.ndarray, "n ..."], dtype: np.dtype) -> None:
    if x.ndim == 0 or len(x) == 0:
        raise ValueError(f"x: got shape {x.shape}, must hold at least one example along its first axis")
    _check_finite("x", x, dtype)
    if dtype == jnp.int32:
        if not np.issubdtype(x.dtype, np.integer):
            raise ValueError(f"x: got {x.dtype}, must be whole numbers for dtype int32")
        limits = np.iinfo(np.int32)
        if x.size and (x.min() < limits.min or x.max() > limits.max):
            raise ValueError("x: got values beyond the range of int32, must be within it")


def _check_targets(y: Shaped[np.ndarray, "n ..."], num_classes: int | None, dtype: np.dtype) -> None:
    if y.ndim == 1 and np.issubdtype(y.dtype, np.integer):
        if num_classes is not None:
            num_classes = checks.whole("num_classes", num_classes)
        checks.class_labels("y", y, num_classes)
    elif y.ndim == 2 and jnp.issubdtype(y.dtype, jnp.floating) and y.shape[1] > 0:
        _check_finite("y", y, dtype)
    else:
        raise ValueError(
            f"y: got shape {y.shape}, dtype {y.dtype}, must be [n, C] floating (regression; use y[:, None] for one "
            "output) or [n] integer (classes)"
        )


def _check_finite(name: str, array: np.ndarray, dtype: np.dtype) -> None:
    """Raises ``ValueError`` unless ``array`` holds finite real numbers that ``dtype`` can hold and tell apart."""
    if not (jnp.issubdtype(array.dtype, jnp.floating) or np.issubdtype(array.dtype, np.integer)):
        raise ValueError(f"{name}: got dtype {array.dtype}, must be real numbers")
    if jnp.issubdtype(array.dtype, jnp.floating):
        finite_rows(name, array)
        if dtype != jnp.float64:
            check_float32(name, array, "must be rescaled, or dtype float64")
            check_resolution(name, array)
