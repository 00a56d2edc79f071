"""Algorithms of the papers as compositions of the shared parts, a few lines each."""

from fedtangent.federated.algorithms.adaptive import fed_adagrad, fed_adam, fed_avg_m, fed_yogi
from fedtangent.federated.algorithms.averaging import fed_avg, fed_ensemble, fed_sgd
from fedtangent.federated.algorithms.bayesian import fed_be, fed_be_no_distillation
from fedtangent.federated.algorithms.compressed import fed_com, fed_paq
from fedtangent.federated.algorithms.corrected import fed_dyn, fed_nova, fed_prox, modified_local_gd, scaffold
from fedtangent.federated.algorithms.decentralised import gossip, random_walk
from fedtangent.federated.algorithms.personalised import ditto, lg_fed_avg, local_only
from fedtangent.federated.algorithms.pooled import centralised, data_sharing, warm_started
from fedtangent.federated.algorithms.private import dp_fed_avg
from fedtangent.federated.algorithms.tangent import cp_ntk_fl, ntk_fl

__all__ = [
    "centralised",
    "cp_ntk_fl",
    "data_sharing",
    "ditto",
    "dp_fed_avg",
    "fed_adagrad",
    "fed_adam",
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
    "lg_fed_avg",
    "local_only",
    "modified_local_gd",
    "ntk_fl",
    "random_walk",
    "scaffold",
    "warm_started",
]
