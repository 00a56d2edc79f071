"""The Gaussian process that describes Fed-ensemble's models once training has converged: each is a draw from it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import scipy
from jax.scipy.sparse.linalg import cg
from jaxtyping import Float64

from fedtangent._src.checks import real_array, whole
from fedtangent._src.kernels.gram import KernelBlocks, SingularKernelError, jittered_cholesky, product
from fedtangent._src.kernels.large import LargeKernel
from fedtangent._src.theory.checks import check_blocks, check_large, check_rows
from fedtangent._src.theory.prior import covariance_terms
from fedtangent._src.types import Array, ArrayLike, Gaussian

TOLERANCE, MOST_STEPS = 1e-3, 200  # of conjugate gradients: relative residual (float32 reaches no less), and steps


def gp_limit(
    kernels: KernelBlocks | LargeKernel,
    y_train: ArrayLike,
    *,
    max_relative_jitter: float = 1e-10,
    outputs: str = "shared",
) -> Gaussian:
    """Computes mean and covariance of a model trained to convergence, Theorem 2 of FE-2024 (4.2 and eq. 17 of FE-2021).

    They are ``m(x) = Theta(x, X) Theta^-1 Y`` and ``k(x, x') = K(x, x') + B K B' - (B K(X, x') + K(x, X) B')`` with
    ``B = Theta(x, X) Theta^-1``, for the squared loss, an infinitely wide (or linear) model, and a zero-mean initial
    function of covariance K. The theorem assumes that Theta has full rank. If Theta is singular in float64, the least
    sufficient jitter is added to its diagonal and reported in the result. The papers' remainder ``o(eta_0^2)`` is 0
    here (erratum `fe2024.remainder`): every stable step size has exactly this fixed point.

    The function cannot be traced. With ``KernelBlocks`` it runs on the host in NumPy float64.

    Args:
        kernels: Kernel blocks of n training and m test points, with the nngp parts. With a ``LargeKernel`` the result
            has a mean and no covariance, by conjugate gradients in float32, preconditioned by Nystroem's method and
            without jitter.
        y_train: Targets [n, C], finite.
        max_relative_jitter: Largest allowed jitter, relative to Theta's mean diagonal; 0 for none. A ``LargeKernel``
            does not use it.
        outputs: "shared", one kernel for every output; or "full", blocks of [n C, n C] in example-major order, which a
            ``LargeKernel`` does not have.

    Returns:
        Gaussian(mean [m, C], cov [m, m], jitter), float64; for "full", cov is [m C, m C]. ``jitter`` is the number that
        was added to Theta's diagonal. A ``LargeKernel`` leaves cov None.

    Raises:
        SingularKernelError: Theta is singular beyond the allowed jitter, or too nearly singular for conjugate
            gradients.
        ValueError: Blocks without nngp parts, even if only the mean is used; blocks that are not symmetric, positive
            semidefinite and finite; or shapes that do not fit ``y_train`` and ``outputs``.

    Example; at a training point the mean is its target, and the variance is 0:

        >>> import numpy as np, fedtangent as ft
        >>> x, y = np.array([[-1.0], [0.0], [1.0]]), np.array([[0.0], [1.0], [0.0]])
        >>> model = ft.models.mlp(input_size=1, output_size=1, widths=(64,))
        >>> limit = ft.theory.gp_limit(ft.kernels.kernel_blocks(model.kernel, x, [[0.0], [2.0]]), y)
        >>> bool(abs(limit.mean[0, 0] - 1) < 1e-9), bool(abs(limit.cov[0, 0]) < 1e-9)
        (True, True)
    """
    targets = check_rows("y_train", y_train, "n, C")
    if isinstance(kernels, LargeKernel):
        large = check_large(kernels, len(targets), outputs)
        return Gaussian(large.at_test(_solved(large, targets)), None)  # type: ignore[arg-type]
    blocks = check_blocks(kernels, targets.shape, outputs)
    factor = jittered_cholesky(blocks.ntk_train, max_relative_jitter)
    solution, _ = scipy.linalg.lapack.dpotrs(factor.lower, blocks.ntk_test_train.T, lower=1)
    b = np.ascontiguousarray(solution.T)
    mean = b @ (targets if outputs == "shared" else targets.reshape(-1, 1))
    return Gaussian(mean.reshape(-1, targets.shape[1]), covariance_terms(blocks, b).total, factor.jitter)


def _solved(kernels: LargeKernel, targets: Float64[np.ndarray, "n C"]) -> Float64[np.ndarray, "n C"]:
    """Computes ``Theta^-1 Y`` [n, C] by conjugate gradients, to a relative residual of 1e-3 (``TOLERANCE``).

    Raises ``SingularKernelError`` if ``MOST_STEPS`` steps do not reach this residual.
    """
    sizes = np.linalg.norm(targets, axis=0)  # each output counts alike, however large it is
    factor, y = kernels.preconditioner(), jnp.asarray(targets / np.where(sizes > 0, sizes, 1.0), jnp.float32)

    @jax.jit
    def solve(theta: Array, factor: Array, y: Array) -> tuple[Array, Array]:
        # (F F' + rest I)^-1 by Woodbury's identity, times rest: what F leaves of Theta's trace, spread evenly
        rest = jnp.maximum(jnp.trace(theta) - jnp.sum(factor**2), 1e-6 * jnp.trace(theta)) / len(y)
        inner = jnp.linalg.cholesky(product(factor.T, factor) + rest * jnp.eye(factor.shape[1], dtype=factor.dtype))

        def preconditioned(v: Array) -> Array:
            return v - product(factor, jax.scipy.linalg.cho_solve((inner, True), product(factor.T, v)))

        solution, _ = cg(lambda v: product(theta, v), y, tol=TOLERANCE / 2, maxiter=MOST_STEPS, M=preconditioned)
        return solution, jnp.linalg.norm(product(theta, solution) - y) / jnp.maximum(jnp.linalg.norm(y), 1.0)

    solution, residual = solve(kernels.ntk_train, factor, y)
    if not float(residual) <= TOLERANCE:
        raise SingularKernelError(
            f"the kernel of the {len(y)} training points is too nearly singular for {MOST_STEPS} steps of conjugate "
            f"gradients: a residual of {float(residual):.3g} is left, must be at most {TOLERANCE:g}"
        )
    return np.asarray(solution, np.float64) * sizes


def corollary_4_1(limit: Gaussian, num_models: int, epsilon: ArrayLike) -> Float64[np.ndarray, "m"]:
    """Bounds the probability that an output of the average of K models is ``epsilon`` or more from its limit m(x).

    Source: Corollary 4.1 of FE-2021, eq. (5). The bound is ``k(x, x) / (K epsilon^2)``, by Chebyshev's inequality; the
    paper prints ``O(1 / (epsilon^2 K))``. The K models are independent with mean m (the most probable function) and
    variance k(x, x). It holds after sufficiently many rounds, for kernels that outputs share.

    Args:
        limit: Mean m [m, C] and covariance k [m, m], for example from ``gp_limit``.
        num_models: Number K of models.
        epsilon: A number above 0, or one for each point [m].

    Returns:
        The bound for each output at each point, [m], at most 1.
    """
    whole("num_models", num_models)
    far, variance = real_array("epsilon", epsilon), np.diag(np.asarray(limit.cov))
    if far.shape not in ((), variance.shape) or not np.all(far > 0):
        got = f"shape {far.shape}, least {far.min():g}"
        raise ValueError(f"epsilon: got {got}, must be above 0, of shape () or {variance.shape}")
    return np.asarray(np.minimum(np.maximum(variance, 0.0) / (num_models * far**2), 1.0))
