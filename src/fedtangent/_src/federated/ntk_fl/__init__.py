"""NTK-FL: the server evolves the tangent kernel of the cohort's examples (Yue et al., ICML 2022).

::

    options     ``Evolution``, the options of the evolution, and the losses that it descends
    tangent     the network linearised on the pooled examples
    sparse      the network linearised with sparsified Jacobians (CP-NTK-FL)
    dual        the result of t steps of gradient descent, for many t at once
    multirate   the result of t steps for the cross entropy, with fewer products with the kernel
    evolution   ``ntk_evolve``: one round at the server, with the choice of t; and the parts of an algorithm, whose
                recipes are in ``federated.algorithms.tangent``
"""

from fedtangent._src.federated.ntk_fl.evolution import ntk_evolve, ntk_server, send_examples
from fedtangent._src.federated.ntk_fl.options import Evolution
from fedtangent._src.federated.ntk_fl.sparse import sparse_linearise
from fedtangent._src.federated.ntk_fl.tangent import Examples

__all__ = ["Evolution", "Examples", "ntk_evolve", "ntk_server", "send_examples", "sparse_linearise"]
