"""Functions of infinitely wide networks before training, and the covariance of their functions after training."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Float64

from fedtangent._src import checks
from fedtangent._src.checks import whole
from fedtangent._src.kernels.gram import KernelBlocks, jittered_cholesky, joined
from fedtangent._src.theory.checks import check_shape
from fedtangent._src.types import AnyArray, Array

PriorBlocks = tuple[Float[AnyArray, "n n"], Float[AnyArray, "m n"], Float[AnyArray, "m m"]]  # nngp_train, .., nngp_test


class CovarianceTerms(NamedTuple):
    """Terms of the covariance of trained functions at m test points, ``prior + propagated - cross``, float64.

    Without weight decay ``prior`` is K(x, x), ``propagated`` is ``B K(X, X) B'``, and ``cross`` is
    ``B K(X, x) + K(x, X) B'``. K is the nngp kernel, and B [m, n] the matrix by which the initial function at the
    training points X enters the trained function at x, ``f(x) = f0(x) - B f0(X) + ..``. Theorem 2 of FE-2024 has the
    same terms. With weight decay f0(x) is multiplied by a factor gamma.
    """

    prior: Float[AnyArray, "m m"]  # K(x, x)
    propagated: Float[AnyArray, "m m"]  # B K(X, X) B'
    cross: Float[AnyArray, "m m"]  # B K(X, x) + K(x, X) B', the theorem's last two terms

    @property
    def total(self) -> Float[AnyArray, "m m"]:
        """Covariance ``prior + propagated - cross``, made exactly symmetric."""
        covariance = self.prior + self.propagated - self.cross
        return 0.5 * (covariance + covariance.T)


def prior_blocks(kernels: KernelBlocks) -> PriorBlocks:
    """Returns the nngp blocks train, test-train and test of ``kernels``; raises ``ValueError`` if one is missing."""
    if kernels.nngp_train is None or kernels.nngp_test_train is None or kernels.nngp_test is None:
        raise ValueError("kernels: got None as nngp_train, nngp_test_train or nngp_test, must have all three")
    return kernels.nngp_train, kernels.nngp_test_train, kernels.nngp_test


def prior_functions(kernels: KernelBlocks, count: int, seed: int = 0) -> Float64[np.ndarray, "points count"]:
    """Draws ``count`` functions of an untrained, infinitely wide network at the n training and m test points.

    Each draw has one output and is Gaussian with mean 0 and the nngp kernel K as its covariance; if K is 0, all draws
    are 0. Under a loss such as the cross entropy, mean and covariance after training have no closed form; average
    ``Flow.predict`` over such draws instead. If K is singular, a jitter of at most 1e-8 of K's mean diagonal is added.

    Args:
        kernels: Kernel blocks with the nngp parts.
        count: Number of draws.
        seed: Seed of the random numbers.

    Returns:
        [n + m, count] float64, training points first.

    Raises:
        SingularKernelError: The allowed jitter is not enough.
    """
    train, cross, test = (np.asarray(part) for part in prior_blocks(kernels))
    normal = np.random.default_rng(checks.seed(seed)).standard_normal((len(train) + len(test), whole("count", count)))
    prior = joined(train, cross, test)
    if not np.any(prior):  # every model starts as the zero function
        return np.zeros_like(normal)
    return np.asarray(np.tril(jittered_cholesky(prior, 1e-8).lower) @ normal)


def covariance_terms(
    kernels: KernelBlocks, b: Float[AnyArray, "m n"], gamma: float | Float[Array, ""] = 1.0
) -> CovarianceTerms:
    """Computes the covariance of a trained function over random initial functions f0, term by term.

    The trained function at the test points x is ``f(x) = gamma f0(x) - B f0(X) + c(x)``, where c does not depend on f0,
    and f0 is Gaussian with mean 0 and the nngp kernel K as its covariance. With ``B = Theta(x, X) Theta^-1`` this is
    the covariance after training to convergence (Theorem 2 of FE-2024, 4.2 of FE-2021). With ``B = Theta(x, X) M_r``
    (``Flow.operator``) it is the covariance after round r of a federated run.

    Args:
        kernels: Kernel blocks with the nngp parts.
        b: Matrix B [m, n] float64, a NumPy or a JAX array; the terms are arrays of the same kind.
        gamma: Factor by which weight decay has shrunk f0; 1 without weight decay.
    """
    prior = prior_blocks(kernels)
    check_shape("b", b, prior[1].shape)
    return terms_of(prior, b, gamma)


def terms_of(
    blocks: PriorBlocks, b: Float[AnyArray, "m n"], gamma: float | Float[AnyArray, ""] = 1.0
) -> CovarianceTerms:
    """Computes ``covariance_terms`` from the three nngp blocks, without checks.

    Args:
        blocks: nngp_train, nngp_test_train and nngp_test.
        b, gamma: As in ``covariance_terms``.
    """
    prior, prior_cross, prior_test = blocks
    half = gamma * (b @ prior_cross.T)
    return CovarianceTerms(gamma**2 * prior_test, b @ prior @ b.T, half + half.T)
