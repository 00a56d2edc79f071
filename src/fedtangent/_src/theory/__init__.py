"""Theory of federated runs: quantities that a run must match, computed without a simulation.

Nothing here imports the simulation, so that theory and simulation cannot share a mistake. ``fedtangent.theory`` has the
index of theorems.
"""

from fedtangent._src.theory import deep_linear, fed_ensemble, flow, local_gd, ntk_fl
from fedtangent._src.theory.assumptions import Assumption
from fedtangent._src.theory.deep_linear import *  # noqa: F403
from fedtangent._src.theory.fed_ensemble import *  # noqa: F403
from fedtangent._src.theory.flow import *  # noqa: F403
from fedtangent._src.theory.local_gd import *  # noqa: F403
from fedtangent._src.theory.ntk_fl import *  # noqa: F403

__all__ = ["Assumption"]
__all__ += deep_linear.__all__
__all__ += fed_ensemble.__all__
__all__ += flow.__all__
__all__ += local_gd.__all__
__all__ += ntk_fl.__all__
