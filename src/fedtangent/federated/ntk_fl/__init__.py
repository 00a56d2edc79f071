"""NTK-FL: the server evolves the tangent kernel of the cohort's examples (Yue et al., ICML 2022).

::

    options     ``Evolution``: how the kernel is evolved, on what, and the losses that it descends
    tangent     the network linearised on the pooled examples
    sparse      the same behind sparsified Jacobians (CP-NTK-FL)
    dual        where t steps of gradient descent lead, for many t at once
    multirate   the same for the cross entropy, by fewer products with the kernel
    evolution   ``ntk_evolve``: one round at the server, with the choice of t
    server      the parts of an algorithm; the recipes are in ``federated.algorithms.tangent``
"""

from fedtangent.federated.ntk_fl.evolution import ntk_evolve
from fedtangent.federated.ntk_fl.options import Evolution
from fedtangent.federated.ntk_fl.server import ntk_server, send_examples
from fedtangent.federated.ntk_fl.sparse import sparse_linearise
from fedtangent.federated.ntk_fl.tangent import Examples

__all__ = ["Evolution", "Examples", "ntk_evolve", "ntk_server", "send_examples", "sparse_linearise"]
