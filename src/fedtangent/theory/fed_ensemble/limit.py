"""The Gaussian process that every model of Fed-ensemble is a draw of, after sufficiently many rounds."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.sparse.linalg import cg
from scipy.linalg import lapack

from fedtangent import checks
from fedtangent.checks import whole
from fedtangent.kernels.gram import KernelBlocks, SingularKernelError, jittered_cholesky, product
from fedtangent.kernels.large import LargeKernel
from fedtangent.theory.checks import check_blocks, check_large, check_shape, check_targets
from fedtangent.types import Gaussian

TOLERANCE, MOST_STEPS = 1e-3, 200  # of conjugate gradients: residual left, relative (float32 has no fewer), and steps


class CovarianceTerms(NamedTuple):
    """The terms of Theorem 2's covariance at m points: ``prior + propagated - cross``. Each is [m, m], float64."""

    prior: Any  # K(x, x)
    propagated: Any  # B K(X, X) B'
    cross: Any  # B K(X, x) + K(x, X) B', the theorem's last two terms

    @property
    def total(self) -> Any:
        """The covariance itself, made exactly symmetric."""
        covariance = self.prior + self.propagated - self.cross
        return 0.5 * (covariance + covariance.T)


def prior_blocks(k: KernelBlocks) -> tuple[Any, Any, Any]:
    """The blocks nngp_train, nngp_test_train and nngp_test of ``k``; ``ValueError`` where one was left out."""
    if k.nngp_train is None or k.nngp_test_train is None or k.nngp_test is None:
        raise ValueError("kernels: got None among nngp_train, nngp_test_train and nngp_test, must be all given")
    return k.nngp_train, k.nngp_test_train, k.nngp_test


def prior_functions(k: KernelBlocks, count: int, seed: int = 0) -> np.ndarray:
    """``count`` initial functions f0 ~ GP(0, K) at the n training and the m test points, [n + m, count] float64.

    What a law is averaged over that has no closed form, as that of a run by the cross entropy (``Flow.predict`` of
    each). A jitter of at most 1e-8 of K's mean diagonal is added where K is singular in float64.

    Raises ``ValueError`` for kernel blocks without the nngp parts.
    """
    train, cross, test = (np.asarray(part) for part in prior_blocks(k))
    drawn = np.random.default_rng(checks.seed(seed)).standard_normal((len(train) + len(test), whole("count", count)))
    whole_prior = np.block([[train, cross.T], [cross, test]])
    if not np.any(whole_prior):  # every model starts as the zero function
        return np.zeros_like(drawn)
    return np.asarray(np.tril(jittered_cholesky(whole_prior, 1e-8).lower) @ drawn)


def covariance_terms(k: KernelBlocks, b: Any, gamma: Any = 1.0) -> CovarianceTerms:
    """Covariance of ``f(x) = gamma f0(x) - B f0(X) + ...`` for ``f0 ~ GP(0, K)``, term by term.

    With ``B = Theta(x, X) Theta^-1`` this is the covariance of Theorem 2 (FE-2024) / 4.2 (FE-2021); with
    ``B = Theta(x, X) M_r`` it is that of round r of a federated run; gamma is 1 but where weight decay shrinks f0.

    Args:
        k: kernel blocks with the nngp parts.
        b: [m, n] float64, NumPy or JAX; the terms come back in kind.
    """
    prior, prior_cross, prior_test = prior_blocks(k)
    check_shape("b", b, prior_cross.shape)
    half = gamma * (b @ prior_cross.T)
    return CovarianceTerms(gamma**2 * prior_test, b @ prior @ b.T, half + half.T)


def gp_limit(
    kernels: KernelBlocks | LargeKernel, y_train: Any, *, max_relative_jitter: float = 1e-10, outputs: str = "shared"
) -> Gaussian:
    """Theorem 2 of FE-2024 (4.2 and eq. 17 of FE-2021): the law of a model trained to convergence.

    ``m(x) = Theta(x, X) Theta^-1 Y`` and
    ``k(x, x') = K(x, x') + B K B' - (B K(X, x') + K(x, X) B')``, ``B = Theta(x, X) Theta^-1``,
    for the squared loss, an infinitely wide (or linear) model, and a zero-mean initial function of covariance K.
    The theorem assumes Theta to have full rank; where it has not in float64, the least sufficient jitter is added to
    its diagonal and reported in the result, or SingularKernelError raised. The papers' ``o(eta_0^2)`` remainder is
    absent from this regime: every stable step size has exactly this fixed point.

    Runs on the host in NumPy float64; not traceable.

    Args:
        kernels: kernel blocks of n training and m test points. Of a ``LargeKernel`` the mean is found by conjugate
            gradients, preconditioned by Nystroem's method, in float32; there is no covariance, and no jitter is added.
        y_train: [n, C] targets, finite.
        max_relative_jitter: the most jitter allowed, relative to Theta's mean diagonal; 0 for none.
        outputs: "shared", one kernel for every output; or "full", blocks of [n C, n C] in example-major order.

    Returns:
        Gaussian(mean [m, C], cov [m, m], jitter), float64; for "full", cov is [m C, m C].

    Raises:
        SingularKernelError: Theta singular beyond the jitter allowed, or too nearly so for conjugate gradients.

    Example; at a training point the mean is its target, and nothing is uncertain:

        >>> import numpy as np, fedtangent as ft
        >>> x, y = np.array([[-1.0], [0.0], [1.0]]), np.array([[0.0], [1.0], [0.0]])
        >>> model = ft.models.mlp(input_size=1, output_size=1, widths=(64,))
        >>> limit = ft.theory.gp_limit(ft.kernels.kernel_blocks(model.kernel, x, [[0.0], [2.0]]), y)
        >>> bool(abs(limit.mean[0, 0] - 1) < 1e-9), bool(abs(limit.cov[0, 0]) < 1e-9)
        (True, True)
    """
    targets = check_targets(y_train)
    if isinstance(kernels, LargeKernel):
        large = check_large(kernels, len(targets), outputs)
        return Gaussian(large.at_test(_solved(large, targets)), None)  # type: ignore[arg-type]
    k = check_blocks(kernels, targets.shape, outputs)
    factor = jittered_cholesky(k.ntk_train, max_relative_jitter)
    solution, _ = lapack.dpotrs(factor.lower, k.ntk_test_train.T, lower=1)
    b = np.ascontiguousarray(solution.T)
    mean = b @ (targets if outputs == "shared" else targets.reshape(-1, 1))
    return Gaussian(mean.reshape(-1, targets.shape[1]), covariance_terms(k, b).total, factor.jitter)


def _solved(kernels: LargeKernel, targets: np.ndarray) -> np.ndarray:
    """``Theta^-1 Y`` [n, C], to a relative residual of ``TOLERANCE``."""
    sizes = np.linalg.norm(targets, axis=0)  # each output counts alike, however large it is
    factor, y = kernels.preconditioner(), jnp.asarray(targets / np.where(sizes > 0, sizes, 1.0), jnp.float32)

    @jax.jit
    def solve(theta: Any, factor: Any, y: Any) -> Any:
        # (F F' + rest I)^-1 by Woodbury's identity, times rest: what F leaves of Theta's trace, spread evenly
        rest = jnp.maximum(jnp.trace(theta) - jnp.sum(factor**2), 1e-6 * jnp.trace(theta)) / len(y)
        inner = jnp.linalg.cholesky(product(factor.T, factor) + rest * jnp.eye(factor.shape[1], dtype=factor.dtype))

        def preconditioned(v: Any) -> Any:
            return v - product(factor, jax.scipy.linalg.cho_solve((inner, True), product(factor.T, v)))

        found, _ = cg(lambda v: product(theta, v), y, tol=TOLERANCE / 2, maxiter=MOST_STEPS, M=preconditioned)
        return found, jnp.linalg.norm(product(theta, found) - y) / jnp.maximum(jnp.linalg.norm(y), 1.0)

    found, left = solve(kernels.ntk_train, factor, y)
    if not float(left) <= TOLERANCE:
        raise SingularKernelError(
            f"the kernel of the {len(y)} training points is too nearly singular for {MOST_STEPS} steps of conjugate "
            f"gradients: a residual of {float(left):.3g} is left, must be at most {TOLERANCE:g}"
        )
    return np.asarray(found, np.float64) * sizes
