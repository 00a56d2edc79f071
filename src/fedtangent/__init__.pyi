# The names that stand at the root of the package, each imported when it is first used (``lazy_loader``).

from . import (
    attacks,
    channels,
    data,
    faults,
    graphs,
    kernels,
    losses,
    measures,
    models,
    optimizers,
    partition,
    parts,
    processes,
    schedules,
    testing,
    theory,
    types,
)
from ._src.comparison.comparing import compare, compare_case
from ._src.comparison.forecast import Forecasting, predict
from ._src.engine.checkpoints import Checkpoints
from ._src.engine.clients import Devices
from ._src.engine.hypergradients import hypergradient
from ._src.engine.loop import Evaluation
from ._src.engine.processes import use_cores
from ._src.engine.run import params_by_round, simulate
from ._src.engine.sweeps import sweep
from ._src.federated.algorithms import (
    centralised,
    cp_ntk_fl,
    data_sharing,
    ditto,
    dp_fed_avg,
    fed_adagrad,
    fed_adam,
    fed_async,
    fed_avg,
    fed_avg_m,
    fed_be,
    fed_be_no_distillation,
    fed_com,
    fed_dyn,
    fed_ensemble,
    fed_nova,
    fed_paq,
    fed_prox,
    fed_sgd,
    fed_yogi,
    gossip,
    lg_fed_avg,
    local_only,
    modified_local_gd,
    ntk_dfl,
    ntk_fl,
    random_walk,
    scaffold,
)
from ._src.federated.algorithms.adaptive import Adaptivity, ServerMomentum
from ._src.federated.algorithms.bayesian import DistilledEnsemble, EnsembleOfClients
from ._src.federated.algorithms.common import Averaging
from ._src.federated.algorithms.compressed import Quantiser
from ._src.federated.algorithms.corrected import Anchoring
from ._src.federated.algorithms.decentralised import Mixing
from ._src.federated.algorithms.entry import recipe
from ._src.federated.algorithms.normalised import Normalisation
from ._src.federated.algorithms.personalised import PersonalTraining
from ._src.federated.algorithms.private import ClientPrivacy
from ._src.federated.algorithms.stale import Staleness
from ._src.federated.algorithms.tangent import Compression, Pooling
from ._src.federated.local import Work
from ._src.federated.ntk_fl.options import Evolution
from ._src.output.explorer import explore
from ._src.papers import cite

__version__: str
__all__ = [
    "Adaptivity",
    "Anchoring",
    "Averaging",
    "Checkpoints",
    "ClientPrivacy",
    "Compression",
    "Devices",
    "DistilledEnsemble",
    "EnsembleOfClients",
    "Evaluation",
    "Evolution",
    "Forecasting",
    "Mixing",
    "Normalisation",
    "PersonalTraining",
    "Pooling",
    "Quantiser",
    "ServerMomentum",
    "Staleness",
    "Work",
    "attacks",
    "centralised",
    "channels",
    "cite",
    "compare",
    "compare_case",
    "cp_ntk_fl",
    "data",
    "data_sharing",
    "ditto",
    "dp_fed_avg",
    "enable_x64",
    "explore",
    "faults",
    "fed_adagrad",
    "fed_adam",
    "fed_async",
    "fed_avg",
    "fed_avg_m",
    "fed_be",
    "fed_be_no_distillation",
    "fed_com",
    "fed_dyn",
    "fed_ensemble",
    "fed_nova",
    "fed_paq",
    "fed_prox",
    "fed_sgd",
    "fed_yogi",
    "gossip",
    "graphs",
    "hypergradient",
    "kernels",
    "lg_fed_avg",
    "local_only",
    "losses",
    "measures",
    "models",
    "modified_local_gd",
    "ntk_dfl",
    "ntk_fl",
    "optimizers",
    "params_by_round",
    "partition",
    "parts",
    "predict",
    "processes",
    "random_walk",
    "recipe",
    "scaffold",
    "schedules",
    "simulate",
    "sweep",
    "testing",
    "theory",
    "types",
    "use_cores",
]

def enable_x64(enabled: bool = True) -> None: ...
