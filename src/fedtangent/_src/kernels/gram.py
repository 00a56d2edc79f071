"""Analytic kernels, the kernel (Gram) matrices of training and test points, and their factorisation.

Factorisations run on the host in NumPy float64, because inverting a kernel costs digits.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import scipy
from jaxtyping import Float, Float64, Int, Shaped

from fedtangent._src.checks import finite, number, real_array, symmetric
from fedtangent._src.models.kernels import KERNELS, AnalyticKernel, Kernels, Tick, check_get
from fedtangent._src.pytrees import on_device
from fedtangent._src.types import AnyArray, Array, ArrayLike, Model

# A factor is accepted when the reciprocal condition number leaves at least three of float64's sixteen digits.
MIN_RECIPROCAL_CONDITION = 1e-13
SMALLEST_RELATIVE_JITTER = 1e-16
MOST_CHECKED = 2048


@runtime_checkable
class KernelPair(Protocol):
    """A function that computes the NNGP and the tangent kernel of a network, such as ``Model.kernel``."""

    def __call__(
        self, x1: Shaped[Array, "n1 ..."], x2: Shaped[Array, "n2 ..."] | None, /
    ) -> Kernels | tuple[Float[Array, "n1 _"], Float[Array, "n1 _"]]:
        """Returns the pair of kernels (nngp, ntk) between inputs, or a record with these fields, [n1, n2] each.

        Args:
            x1: Inputs [n1, ...].
            x2: Inputs [n2, ...]; None for ``x1``.
        """


class SingularKernelError(ValueError):
    """Error for a kernel matrix that cannot be inverted in float64, even with the largest allowed jitter."""


class KernelBlocks(NamedTuple):
    """Kernel matrices of ``n`` training and ``m`` test points, float64.

    ``nngp`` is the covariance of the network's outputs at initialisation (the papers' K), ``ntk`` the tangent kernel
    (Theta). Each is per output, [n, n], if the outputs share the kernel; a kernel that couples C outputs is [n C, n C]
    in example-major order (row ``j C + c``). The nngp blocks may be None for predictions from known initial functions,
    for example of a linearised network; covariances then raise an error. Few functions need ``ntk_test``; those that
    cannot do without it, such as ``kernel_features``, raise an error if it is None.
    """

    ntk_train: Float64[np.ndarray, "n n"]
    ntk_test_train: Float64[np.ndarray, "m n"]
    nngp_train: Float64[np.ndarray, "n n"] | None = None
    nngp_test_train: Float64[np.ndarray, "m n"] | None = None
    nngp_test: Float64[np.ndarray, "m m"] | None = None
    ntk_test: Float64[np.ndarray, "m m"] | None = None

    def at_test(self, a: ArrayLike) -> Float[Array, "m ..."]:
        """Multiplies the tangent kernel of test and training points by coefficients a [n, ..]; returns [m, ..]."""
        return product(jnp.asarray(self.ntk_test_train), jnp.asarray(a))


class CholeskyFactor(NamedTuple):
    """Lower Cholesky factor of a kernel theta and the added jitter: ``lower @ lower.T = theta + jitter * I``."""

    lower: Float64[np.ndarray, "n n"]  # lower triangular, float64
    jitter: float  # absolute value added to the diagonal, 0.0 if none was needed


def joined(
    train: Float[AnyArray, "n n"], test_train: Float[AnyArray, "m n"], test: Float[AnyArray, "m m"]
) -> Float[np.ndarray, "p p"]:
    """Puts the three blocks of a kernel together, [n + m, n + m], training points first.

    Args:
        train: Kernel of the training points.
        test_train: Kernel between test and training points.
        test: Kernel of the test points.
    """
    cross = np.asarray(test_train)
    return np.block([[np.asarray(train), cross.T], [cross, np.asarray(test)]])


@jax.jit
def product(theta: Float[Array, "rows p"], a: Float[Array, "n *columns"]) -> Float[Array, "rows *columns"]:
    """Computes ``theta a`` in the precision of theta and returns it in the dtype of a.

    Args:
        theta: Matrix [rows, p] with p >= n; columns beyond n are padding.
        a: Coefficients [n, ...].
    """
    flat = a.reshape(a.shape[0], -1).astype(theta.dtype)
    flat = jnp.pad(flat, ((0, theta.shape[1] - len(flat)), (0, 0)))
    # both by their last axis: on a CPU two to four times as fast as theta @ flat of few columns
    products = jax.lax.dot_general(theta, flat.T, (((1,), (1,)), ((), ())), precision=jax.lax.Precision.HIGHEST)
    return products.astype(a.dtype).reshape(theta.shape[0], *a.shape[1:])


def analytic(model: Model, x1: ArrayLike, x2: ArrayLike | None = None, get: str | tuple[str, ...] = KERNELS) -> Any:
    """Computes the NNGP kernel, the tangent kernel or both, of the infinitely wide network that ``model`` describes.

    ``analytic(model, x_test, x_train, get="ntk")`` is the tangent kernel of m test and n training points, [m, n].
    Outputs are independent and share the kernel. For float64 inputs in JAX's 64-bit mode the result is float64.

    Args:
        model: Model with an analytic kernel.
        x1, x2: Inputs [n1, ...] and [n2, ...]; without ``x2`` the kernel is between ``x1`` and itself.
        get: ``"nngp"`` (the covariance of the outputs at initialisation) or ``"ntk"`` for one block [n1, n2]; a tuple
            of these names for a named tuple of both blocks, with None for a kernel without its name in ``get``.

    Raises:
        ValueError: A model without an analytic kernel, another ``get``, inputs that are not batches of examples of one
            shape, or too little memory for a pair of images.
    """
    if model.kernel is None:
        raise ValueError(f"model: got {model.name!r}, must have an analytic kernel (kernels.empirical_ntk needs none)")
    names = check_get(get)
    shape1 = np.shape(x1)
    shape2 = shape1 if x2 is None else np.shape(x2)
    if min(len(shape1), len(shape2)) < 2 or shape1[1:] != shape2[1:]:
        raise ValueError(f"x1 and x2: got shapes {shape1} and {shape2}, must be [n, ...] with examples of one shape")
    return model.kernel(x1, x2, get if isinstance(get, str) else names)


def known_modes(theta: Float[AnyArray, "n n"]) -> tuple[Float64[np.ndarray, "n"], Float64[np.ndarray, "n n"]]:
    """Computes eigenvalues [n], rising, and eigenvectors [n, n] of a kernel, with zeros in place of rounding errors.

    An eigenvalue that is 0 up to rounding, and its eigenvector, are returned as 0. Otherwise an error would grow:
    training adds to the coefficient along an eigenvector v of eigenvalue 0 for ever, and ``Theta(x, X) v``, which
    multiplies it in the function, is 0 only up to the rounding of the kernel's dtype.

    Args:
        theta: Symmetric positive semidefinite kernel.
    """
    eigenvalues, vectors = np.linalg.eigh(np.asarray(theta, np.float64))
    lost = np.abs(eigenvalues) <= 10 * len(eigenvalues) * rounding(theta) * eigenvalues[-1]
    return np.where(lost, 0.0, eigenvalues), np.where(lost, 0.0, vectors)


def rounding(kernel: Shaped[AnyArray, "..."]) -> float:
    """Returns the relative rounding error of a kernel's dtype; whole numbers count as float64."""
    dtype = np.asarray(kernel).dtype
    return float(jnp.finfo(dtype if jnp.issubdtype(dtype, jnp.floating) else np.float64).eps)


def kernel_blocks(
    kernel_fn: KernelPair, x_train: ArrayLike, x_test: ArrayLike, *, tick: Tick = lambda done, total: None
) -> KernelBlocks:
    """Computes all kernel blocks of training and test points in float64, regardless of JAX's default precision.

    ``theory.gp_limit`` and ``theory.federated_flow`` take ``kernel_blocks(model.kernel, x_train, x_test)``. The square
    blocks are exactly symmetric.

    Args:
        kernel_fn: Function like ``Model.kernel``: ``(x1, x2) -> (nngp, ntk)``, [n1, n2] each, where ``x2=None`` means
            ``x1``.
        x_train: Finite training inputs [n, ...].
        x_test: Finite test inputs [m, ...].
        tick: Called with the numbers of finished and of all tiles, which only large kernels of images have; the count
            begins anew for each of the three pairs of blocks.

    Raises:
        ValueError: Inputs that are empty, not finite, or of different shapes; a ``kernel_fn`` that does not return a
            pair; a kernel that has the wrong shape, is not float64 or is not finite; too little memory for a pair of
            images.

    Example, four training points and two test points, at infinite width:

        >>> import numpy as np, fedtangent as ft
        >>> model = ft.models.mlp(input_size=1, output_size=1, widths=(64,))
        >>> kernels = ft.kernels.kernel_blocks(model.kernel, np.linspace(-1, 1, 4)[:, None], [[-0.5], [0.5]])
        >>> kernels.ntk_train.shape, kernels.ntk_test_train.shape
        ((4, 4), (2, 4))
    """
    train, test = _inputs("x_train", x_train), _inputs("x_test", x_test)
    if train.shape[1:] != test.shape[1:]:
        raise ValueError(f"x_train and x_test: got {train.shape} and {test.shape}, must hold examples of one shape")
    with jax.enable_x64(True):
        nngp_train, ntk_train = _evaluate(kernel_fn, train, None, tick)
        nngp_cross, ntk_cross = _evaluate(kernel_fn, test, train, tick)
        nngp_test, ntk_test = _evaluate(kernel_fn, test, None, tick)
    return KernelBlocks(ntk_train, ntk_cross, nngp_train, nngp_cross, nngp_test, ntk_test)


def jittered_cholesky(theta: ArrayLike, max_relative_jitter: float = 1e-10) -> CholeskyFactor:
    """Computes the Cholesky factor of a symmetric positive definite matrix, with the least jitter that float64 needs.

    The jitters tried are 0, then 1e-16, 1e-15, ... times the mean of the diagonal, and at last the largest allowed. A
    factor counts only if the matrix's reciprocal condition number (LAPACK dpocon) is at least 1e-13, so that a matrix
    that is singular up to rounding is not inverted into noise.

    Args:
        theta: Matrix [n, n].
        max_relative_jitter: Largest jitter, relative to the mean of the diagonal.

    Raises:
        SingularKernelError: No allowed jitter is enough; the message has lambda_min, lambda_max and the largest jitter.
        ValueError: ``theta`` is not square, symmetric and finite, or ``max_relative_jitter`` is negative.
    """
    theta = symmetric("theta", theta)
    number("max_relative_jitter", max_relative_jitter, at_least=0)
    scale = float(np.mean(np.diag(theta)))
    largest = 0.0
    for relative in _jitter_ladder(max_relative_jitter):
        largest = relative * scale
        lower = _well_conditioned_factor(theta, largest)
        if lower is not None:
            return CholeskyFactor(lower, largest)
    eigenvalues = np.linalg.eigvalsh(theta)
    raise SingularKernelError(
        f"the kernel of the {len(theta)} training rows is singular: lambda_min = {eigenvalues[0]:.3g}, "
        f"lambda_max = {eigenvalues[-1]:.3g}; the largest jitter tried was {largest:.3g} "
        f"(max_relative_jitter = {max_relative_jitter:g}); remove repeated inputs or allow more jitter"
    )


def check_covariance(kernels: KernelBlocks) -> None:
    """Raises ``ValueError`` unless the nngp blocks form one covariance, positive semidefinite up to rounding.

    A Cholesky factorisation checks the blocks together, after sqrt(eps) times the largest variance is added to the
    diagonal. At most ``MOST_CHECKED`` points are checked: the first test points, which are at most half of this number,
    and evenly spaced training points. If one of the three blocks is None, the square blocks are checked one by one.
    """
    train, cross, test = kernels.nngp_train, kernels.nngp_test_train, kernels.nngp_test
    if train is not None and cross is not None and test is not None:
        m = min(len(test), MOST_CHECKED // 2)
        rows = spaced(len(train), MOST_CHECKED - m)
        below = [cross[:m, rows], test[:m, :m]]
        checked = {"the nngp blocks together": np.block([[train[np.ix_(rows, rows)], below[0].T], below])}
    else:
        present = {n: b for n, b in (("nngp_train", train), ("nngp_test", test)) if b is not None}
        rows_of = {n: spaced(len(b), MOST_CHECKED) for n, b in present.items()}
        checked = {n: b[np.ix_(rows_of[n], rows_of[n])] for n, b in present.items()}
    for name, matrix in checked.items():
        shift = np.sqrt(np.finfo(np.float64).eps) * float(np.max(np.abs(np.diag(matrix))))
        if not is_semidefinite(matrix, shift):
            least = np.linalg.eigvalsh(matrix)[0]
            raise ValueError(
                f"{name}: got a smallest eigenvalue of {least:.3g}, must be a covariance (positive semidefinite)"
            )


def is_semidefinite(matrix: Float64[np.ndarray, "n n"], shift: float) -> bool:
    """Returns whether a matrix is positive semidefinite up to rounding, by a Cholesky factorisation.

    Args:
        matrix: Symmetric matrix [n, n].
        shift: Number that is added to the diagonal, to allow for rounding errors; with 0, as for a zero matrix, the
            result is True without a factorisation.
    """
    shifted = matrix.copy()
    shifted[np.diag_indices_from(shifted)] += shift
    return bool(shift == 0 or not scipy.linalg.lapack.dpotrf(shifted, lower=1)[1])


def spaced(count: int, most: int) -> Int[np.ndarray, "_"]:
    """Returns indices from 0 to ``count - 1``, evenly spaced, at most ``most``.

    Args:
        count: Number of points.
        most: Largest number of indices.
    """
    return np.unique(np.linspace(0, count - 1, min(count, most)).astype(int))


def read_only(array: Float64[np.ndarray, "*shape"]) -> Float64[np.ndarray, "*shape"]:
    """Returns a read-only copy that JAX can use without another copy, so that a large kernel is in memory only once."""
    copy = aligned(array.shape, np.dtype(np.float64))
    copy[...] = array
    copy.flags.writeable = False
    return copy


def aligned(shape: tuple[int, ...], dtype: np.dtype) -> Shaped[np.ndarray, "..."]:
    """Returns zeros at an aligned address: once the array is read-only, JAX can use it without a copy.

    Args:
        shape: Shape of the array.
        dtype: Type of the numbers.
    """
    size = int(np.prod(shape, dtype=np.int64))
    whole = np.zeros(size + 64 // dtype.itemsize, dtype)
    start = (-whole.ctypes.data % 64) // dtype.itemsize
    return whole[start : start + size].reshape(shape)


def _inputs(name: str, x: ArrayLike) -> Float64[np.ndarray, "n ..."]:
    array = real_array(name, x)
    if array.ndim < 1 or array.shape[0] == 0:
        raise ValueError(f"{name}: got shape {array.shape}, must hold at least one example along its first axis")
    finite(name, array)
    return array


def _evaluate(
    kernel_fn: KernelPair | AnalyticKernel,
    x1: Float64[np.ndarray, "n1 ..."],
    x2: Float64[np.ndarray, "n2 ..."] | None,
    tick: Tick,
) -> tuple[Float64[np.ndarray, "n1 _"], Float64[np.ndarray, "n1 _"]]:
    """Computes and checks nngp and tangent kernel of x1 and x2; without x2 both are made exactly symmetric."""
    if not callable(kernel_fn):
        raise ValueError(f"kernel_fn: got {kernel_fn!r:.60}, must be a function of (x1, x2), such as model.kernel")
    if isinstance(kernel_fn, AnalyticKernel):
        result: object = kernel_fn.blocks(x1, x2, tick=tick)
    else:
        result = kernel_fn(on_device(x1), None if x2 is None else on_device(x2))
    pair = tuple(getattr(result, name) for name in KERNELS) if hasattr(result, "ntk") else result
    if not isinstance(pair, tuple) or len(pair) != 2:
        raise ValueError(f"kernel_fn: returned {type(result).__name__}, must return the pair (nngp, ntk)")
    shape = (len(x1), len(x1 if x2 is None else x2))
    blocks = []
    for name, kernel in zip(KERNELS, pair, strict=True):
        block = np.asarray(kernel)
        if block.shape != shape or block.dtype != np.float64:
            raise ValueError(f"kernel_fn: returned {name} as {block.dtype} {block.shape}, must be float64 {shape}")
        finite(f"kernel_fn's {name}", block)
        blocks.append(read_only(0.5 * (block + block.T) if x2 is None else block))
    return blocks[0], blocks[1]


def _jitter_ladder(max_relative_jitter: float) -> list[float]:
    """Returns 0, 1e-16, 1e-15, ... up to and including the largest allowed relative jitter."""
    powers = [SMALLEST_RELATIVE_JITTER * 10.0**i for i in range(40)]
    ladder = [0.0] + [power for power in powers if power < max_relative_jitter * (1 - 1e-9)]
    return ladder + ([max_relative_jitter] if max_relative_jitter > 0 else [])


def _well_conditioned_factor(theta: Float64[np.ndarray, "n n"], jitter: float) -> Float64[np.ndarray, "n n"] | None:
    """Returns the lower Cholesky factor of ``theta + jitter I``; None if it is indefinite, or singular to rounding."""
    shifted = theta.copy()
    shifted[np.diag_indices_from(shifted)] += jitter
    norm = float(np.max(np.sum(np.abs(shifted), axis=0)))
    lower, failed = scipy.linalg.lapack.dpotrf(shifted, lower=1, clean=1)
    if failed:
        return None
    reciprocal, _ = scipy.linalg.lapack.dpocon(lower, norm, uplo="L")
    return lower if reciprocal >= MIN_RECIPROCAL_CONDITION else None
