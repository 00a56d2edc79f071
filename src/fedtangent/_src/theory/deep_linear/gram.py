"""Gram matrices of deep linear networks, eq. (14) and (15) of DeepLin, as operators and for small problems as matrices.

With rows for examples, ``A_i = X (W^(i-1) .. W^1)'`` [n, fan_in of layer i] and ``B_i = W^L .. W^(i+1)`` [C, fan_out
of layer i] belong to the server's network at all inputs X, and A_ic, B_ic to client c's network at its n_c inputs. Eq.
(15) maps residuals R [n_c, C] of client c to ``1/(m^(L-1) C) sum_i A_i A_ic' R B_ic B_i'`` [n, C], m the hidden width;
eq. (14) is the case in which both networks and both sets of inputs are the same. No n C x n C matrix is needed.

The spectrum of the operator lies on the range of X, because every A_i is X times a matrix: in an orthonormal basis of
that range, of r vectors, the operator acts on r C numbers. The Lanczos method finds the largest eigenvalue of the
operator and, applied to its inverse, the least.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import scipy
from jaxtyping import Float64

from fedtangent._src.checks import finite, real_array
from fedtangent._src.theory import checks
from fedtangent._src.types import ArrayLike

SMALL = 300  # numbers of a residual up to which the spectrum is that of the dense matrix
TOLERANCE = 1e-12  # relative, of a solution's residual
MOST_STEPS = 10_000


Matrix = Float64[np.ndarray, "_ _"]
Layers = tuple[Matrix, ...]  # W^1 .. W^L, [fan_out, fan_in] each


class Products(NamedTuple):
    """Products of a network's layers below and above each layer, and its outputs, at n inputs, float64.

    ``below`` are the inputs A_i [n, fan_in] of each layer i, and ``above`` the products B_i [C, fan_out] of the layers
    above it. ``scale`` is the network's factor ``(m^(L-1) C)^(-1/2)``, with L layers of hidden width m.
    """

    below: tuple[Float64[np.ndarray, "n _"], ...]  # A_i [n, fan_in], i = 1 .. L; A_1 is X
    above: tuple[Float64[np.ndarray, "C _"], ...]  # B_i [C, fan_out], i = 1 .. L; B_L is the identity
    scale: float  # (m^(L-1) C)^(-1/2)
    outputs: Float64[np.ndarray, "n C"]


def layers_of(weights: Sequence[ArrayLike], dimension: int | None = None) -> Layers:
    """Checks weights ``W^1 .. W^L`` and returns them as float64, [fan_out, fan_in] each.

    Args:
        weights: One matrix per layer; hidden layers have one width.
        dimension: Required fan_in of the first layer; None for any.
    """
    if not isinstance(weights, list | tuple) or not weights:
        got = "none" if isinstance(weights, list | tuple) else f"{' '.join(repr(weights).split()):.60}"
        raise ValueError(f"weights: got {got}, must be a list of one matrix a layer")
    layers, fan_in = tuple(real_array("weights", w) for w in weights), dimension
    for i, w in enumerate(layers):
        if w.ndim != 2 or 0 in w.shape or fan_in not in (None, w.shape[1]):
            allowed = "fan_in" if fan_in is None else fan_in
            raise ValueError(f"weights: got shape {w.shape} of layer {i + 1}, must be [fan_out, {allowed}]")
        finite("weights", w)
        fan_in = w.shape[0]
    if len(widths := {w.shape[0] for w in layers[:-1]}) > 1:
        raise ValueError(f"weights: got hidden layers of widths {sorted(widths)}, must be of one width")
    return layers


def products(weights: Sequence[ArrayLike], x: ArrayLike) -> Products:
    """Computes products of the layers below and above each layer, and the outputs (eq. 5 of DeepLin), at inputs x.

    Args:
        weights: Weights ``W^1 .. W^L``, [fan_out, fan_in] each.
        x: Inputs [n, d].
    """
    inputs = checks.check_rows("x", x, "n, d")
    layers = layers_of(weights, inputs.shape[1])
    fan_in = layers[-1].shape[0]
    below, above = [inputs], [np.eye(fan_in)]
    for w in layers[:-1]:
        below.append(below[-1] @ w.T)
    for w in layers[:0:-1]:
        above.append(above[-1] @ w)
    width = layers[0].shape[0] if len(layers) > 1 else 1
    scale = float(width ** (-(len(layers) - 1) / 2) * fan_in**-0.5)
    return Products(tuple(below), tuple(above[::-1]), scale, scale * below[-1] @ layers[-1].T)


def applied(of: Products, residuals: ArrayLike, local: Products | None = None) -> Float64[np.ndarray, "n C"]:
    """Applies the tangent kernel between a server's and a client's network to residuals: [n, C] (DeepLin, eq. 15).

    It is ``1 / (m^(L-1) C) sum_i A_i A_ic' R B_ic B_i'`` with the products of layers below (A) and above (B) layer i. L
    is the number of layers, m the hidden width.

    Args:
        of: Products of the server's network at n examples.
        residuals: Residuals [n_c, C] of one client.
        local: Products of the client's network at its n_c examples; by default ``of``, which is eq. (14) of DeepLin.
    """
    client = of if local is None else local
    values = real_array("residuals", residuals)
    checks.check_shape("residuals", values, client.outputs.shape)
    total = np.zeros_like(of.outputs)
    for a, b, a_c, b_c in zip(of.below, of.above, client.below, client.above, strict=True):
        total += a @ ((a_c.T @ values) @ (b_c @ b.T))
    return of.scale * client.scale * total


def dense(of: Products, local: Products | None = None) -> Float64[np.ndarray, "nC n_cC"]:
    """Computes the tangent kernel between a server's and a client's network as a matrix (DeepLin, eq. 15).

    The matrix is [n C, n_c C]: C rows for each example of the server's network, C columns for each of the client's.
    ``applied`` multiplies residuals by it without building it. This is for tests and small problems.

    Args:
        of: Products of the server's network at n examples.
        local: Products of a client's network at its n_c examples; by default ``of``.
    """
    client = of if local is None else local
    layers = zip(of.below, of.above, client.below, client.above, strict=True)
    return np.asarray(of.scale * client.scale * sum(np.kron(a @ a_c.T, b @ b_c.T) for a, b, a_c, b_c in layers))


def spectrum(weights: Sequence[ArrayLike], x: ArrayLike) -> tuple[float, float]:
    """Computes least and largest eigenvalue of a network's tangent kernel (eq. 14 of DeepLin) on the range of X.

    The range of X are the residuals whose columns are combinations of the columns of X. The least is 0 if a hidden
    layer is narrower than both the rank of X and the number of outputs.

    Args:
        weights: Weights ``W^1 .. W^L``, [fan_out, fan_in] each.
        x: Inputs [n, d], not all 0.

    Raises:
        RuntimeError: The Lanczos method or the solver of linear systems does not converge.
    """
    of = products(weights, in_row_space(checks.check_rows("x", x, "n, d")))
    singular = np.linalg.norm(of.below[0], axis=1)
    rank, outputs = of.outputs.shape
    # residuals u v' with u beyond the range of X W^1', v beyond that of W^L .. W^2, which are of one width or less
    narrow = len(of.below) > 1 and of.below[1].shape[1] < min(rank, outputs)
    if rank * outputs <= SMALL:
        values = np.linalg.eigvalsh(dense(of))
        return 0.0 if narrow else float(values[0]), float(values[-1])
    without = [a / singular[:, None] for a in of.below]
    bare = [(of.scale**2 * a @ a.T, b @ b.T) for a, b in zip(without, of.above, strict=True)]
    scales = np.repeat(singular, outputs)
    size = rank * outputs

    def conditioned(column: np.ndarray) -> np.ndarray:
        residuals = column.reshape(rank, outputs)
        return np.asarray(sum(a @ residuals @ b for a, b in bare)).ravel()

    def solved(column: np.ndarray) -> np.ndarray:
        """Applies the kernel's inverse by conjugate gradients, preconditioned with the singular values of X."""
        solution, status = scipy.sparse.linalg.cg(
            operator(conditioned), column.ravel() / scales, rtol=TOLERANCE, maxiter=MOST_STEPS
        )
        if status != 0:
            raise RuntimeError(f"conjugate gradients did not end within {MOST_STEPS} steps")
        return np.asarray(solution / scales)

    def operator(function: Callable[[np.ndarray], np.ndarray]) -> scipy.sparse.linalg.LinearOperator:
        return scipy.sparse.linalg.LinearOperator(shape=(size, size), matvec=function, dtype=np.float64)

    whole = operator(lambda column: scales * conditioned(scales * column.ravel()))
    start = np.random.default_rng(0).standard_normal(size)
    largest = scipy.sparse.linalg.eigsh(whole, 1, v0=start, return_eigenvectors=False)
    if narrow:
        return 0.0, float(largest[0])
    least = scipy.sparse.linalg.eigsh(
        whole, 1, sigma=0.0, OPinv=operator(solved), v0=start / scales, return_eigenvectors=False
    )
    return float(least[0]), float(largest[0])


def in_row_space(x: Float64[np.ndarray, "n d"]) -> Float64[np.ndarray, "r d"]:
    """Computes ``U' X`` [r, d] of the thin decomposition ``X = U S V'``; raises ``ValueError`` if X is 0.

    r is the rank of X. The r rows serve as examples of an equivalent problem of full rank: a residual in the range of X
    has r rows in the basis U.
    """
    if not x.any():
        raise ValueError("x: got zeros only, must have an example that is not 0")
    _, singular, right = np.linalg.svd(x, full_matrices=False)
    nonzero = singular > max(x.shape) * np.finfo(float).eps * singular[0]
    return np.asarray(singular[nonzero, None] * right[nonzero])
