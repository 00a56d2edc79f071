"""The distance of a network from its prediction, and its two parts.

A network leaves the prediction of infinite width for two reasons. First, it learns features: it leaves its
linearisation ``g(w) = f(w_0) + J(w_0) (w - w_0)``, trained from the same start by the same algorithm, cohorts,
minibatches and keys. Second, the kernel of the linearisation is the empirical one at initialisation, not the limit's.
As functions the two add up, ``f - f_inf = (f - g) + (g - f_inf)``; their norms obey only the triangle inequality: the
two may add up to more than the total, and each may be larger than it.

Every distance is a root mean square over examples and outputs, relative to how far training has moved the linearised
network by then, ``|g_r - f_0|``: one scale for all parts.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from fedtangent._src.checks import real_array
from fedtangent._src.comparison.statistics import relative_errors
from fedtangent._src.types import ArrayLike

METRICS = ("feature_learning", "initial_kernel", "total", "drift")  # the parts, and the kernel's drift beside them


class Parts(NamedTuple):
    """A network's relative distance from its prediction, and the two parts of it (see the module).

    Attributes:
        feature_learning: Distance of the network from its linearisation.
        initial_kernel: Distance of the linearisation from infinite width; None without a prediction there.
        total: Distance of the network from infinite width.
    """

    feature_learning: Float[np.ndarray, "..."]
    initial_kernel: Float[np.ndarray, "..."] | None = None
    total: Float[np.ndarray, "..."] | None = None


def parts(network: ArrayLike, linear: ArrayLike, infinite: ArrayLike | None = None) -> Parts:
    """Splits the distance of ``network`` from ``infinite`` into its parts.

    Each argument is a movement ``f_r - f_0`` from the common start. If nothing has moved, all parts are 0; parts of
    values that are not finite are not finite.

    Args:
        network: Movement of the network, [..., n, C].
        linear: Movement of its linearisation, [..., n, C].
        infinite: Movement at infinite width, [..., n, C]; None: only ``feature_learning`` is computed.

    Returns:
        Root mean squares over the last two axes, [...].
    """
    network, linear = real_array("network", network), real_array("linear", linear)
    with np.errstate(invalid="ignore", over="ignore"):
        features = relative_errors(linear, network, linear)
        if infinite is None:
            return Parts(features)
        infinite = real_array("infinite", infinite)
        return Parts(features, relative_errors(infinite, linear, linear), relative_errors(infinite, network, linear))
