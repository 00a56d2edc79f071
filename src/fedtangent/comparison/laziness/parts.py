"""The distance of a network to its prediction, and its two parts.

A network leaves the prediction of infinite width for two reasons. It learns features: it leaves its own linearisation
``g(w) = f(w_0) + J(w_0) (w - w_0)``, trained from the same start by the same algorithm, cohorts, minibatches and keys.
And its linearisation has the kernel that it was initialised with, not the limit's. As functions the two add up,
``f - f_inf = (f - g) + (g - f_inf)``; their norms obey the triangle inequality and no more: the two may add up to more
than the total, and each may be larger than it.

Every distance is a root mean square over examples and outputs, relative to how far training has moved the linearised
network by then, ``|g_r - f_0|``: one scale for all parts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fedtangent.checks import real_array
from fedtangent.comparison.statistics import relative_errors

METRICS = ("feature_learning", "initial_kernel", "total", "drift")  # the parts, and the kernel's drift beside them


class Parts(NamedTuple):
    """A network's distance to its prediction and the two parts of it, relative (see the module), [...]."""

    feature_learning: np.ndarray  # network to its own linearisation
    initial_kernel: np.ndarray | None = None  # linearisation to infinite width; None where there is no such prediction
    total: np.ndarray | None = None  # network to infinite width


def parts(network: Any, linear: Any, infinite: Any = None) -> Parts:
    """The parts of the distance of ``network`` to ``infinite``, over the last two axes of arrays [..., n, C].

    Each is how far training has moved a function from the start that all have in common: ``f_r - f_0`` of the network,
    of its linearisation and of infinite width. Where nothing has moved all parts are 0; where numbers are not finite,
    they are not either.
    """
    network, linear = real_array("network", network), real_array("linear", linear)
    with np.errstate(invalid="ignore", over="ignore"):
        features = relative_errors(linear, network, linear)
        if infinite is None:
            return Parts(features)
        infinite = real_array("infinite", infinite)
        return Parts(features, relative_errors(infinite, linear, linear), relative_errors(infinite, network, linear))
