"""Where a federated kernel flow ends if its rounds are repeated for ever, without assuming that it is Theta^-1.

A pass over all R rounds maps ``a -> a + M_R (g - Theta a)``, so its fixed point solves ``M_R Theta a = M_R g``. It is
found from the run's own operator M_R; it is ``Theta^-1 g`` (Theorem 2) whenever it is unique; whether the rounds
get there is another question, which ``contraction`` answers.
"""

from __future__ import annotations

import numpy as np
from scipy.linalg import lapack

from fedtangent.kernels.gram import MIN_RECIPROCAL_CONDITION, KernelBlocks, SingularKernelError
from fedtangent.theory.gp_limit import covariance_terms
from fedtangent.types import Gaussian


def fixed_point(k: KernelBlocks, target: np.ndarray, operator: np.ndarray, outputs_per_row: int) -> Gaussian:
    """Law of the model at the fixed point of repeated passes with operator M_R.

    Args:
        k: kernel blocks with q training rows.
        target: [q, D]; operator: [q, q], M_R of one pass.
        outputs_per_row: columns of the mean returned, [m, outputs_per_row].

    Raises:
        SingularKernelError: ``M_R Theta`` is singular in float64: Theta is, or the pass never trains some direction.
    """
    system = operator @ k.ntk_train
    norm = float(np.max(np.sum(np.abs(system), axis=0)))
    factor, pivots, failed = lapack.dgetrf(system)
    reciprocal = 0.0 if failed or not np.isfinite(norm) else float(lapack.dgecon(factor, norm)[0])
    if reciprocal < MIN_RECIPROCAL_CONDITION:
        raise SingularKernelError(
            f"the fixed point of these rounds is not unique in float64: M_R Theta of the {len(system)} training rows "
            f"has reciprocal condition number {reciprocal:.3g}, less than {MIN_RECIPROCAL_CONDITION:g}; "
            "train every client, for more rounds, or choose a better conditioned kernel"
        )
    solved, _ = lapack.dgetrs(factor, pivots, operator)
    b = k.ntk_test_train @ solved
    mean = (b @ target).reshape(-1, outputs_per_row)
    return Gaussian(mean, covariance_terms(k, b).total)


def contraction(theta: np.ndarray, operator: np.ndarray) -> float:
    """Spectral radius of ``I - M_R Theta``: below 1, repeated passes converge; its power is the rate per pass."""
    return float(np.max(np.abs(1 - np.linalg.eigvals(operator @ theta))))
