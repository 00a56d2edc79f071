"""fedtangent: federated learning in the kernel regime, simulation and theory side by side.

The public API on one screen::

    data.load(name)            data sets                    partition.dirichlet(...)     clients
    data.federated_data(...)   data on the device           models.mlp(...)              networks with kernels
    fed_avg(model, schedule, ..)    algorithms: fed_ensemble, scaffold, fed_dyn, ntk_fl, ..; ``recipe`` marks your own
    Work(..), Averaging(..)    local steps and batches; weights, server step and channel of averaging algorithms
    federated.schedule         who trains which model when
    federated.wire.channel     compression and clipping     federated.predict           what clients predict
    testing.check_laws(recipe)                              laws that an algorithm of your own must keep
    cite(algorithm)            BibTeX of its papers         measures.privacy.epsilon()   of a private run
    simulate(algorithm, data, clients, num_rounds=.., seed=..)   networks are trained
    predict(algorithm, data, clients, num_rounds=.., seed=..)    no network is trained: what theory says of the run
    compare(algorithm, data, clients, num_rounds=.., seed=..)    both, at several widths, with verdicts
    Evaluation, Forecasting, Devices, Checkpoints                settings
    use_cores()                                             first of all: every core is a device, trains clients
    sweep(...)                                              many runs; measures.paired has their intervals
    hypergradient(...)                                      derivatives through rounds
    engine.processes.start                                  several processes
    attacks.from_jacobians, ssim                            what a curious server reads
    kernels.analytic, kernels.empirical_ntk                 tangent kernels
    measures.tangent_kernels                                kernels along training: drift, alignment, commutators
    measures.uncertainty                                    entropies, calibration, intervals
    theory.gp_limit, theory.federated_flow                  what must come out
    comparison.residual_ledger, comparison.ranked           residuals along a run, forecasts by their loss
"""

import importlib as _importlib
import sys as _sys
from functools import partial as _partial
from types import ModuleType as _Module
from typing import TYPE_CHECKING
from typing import Any as _Any

if TYPE_CHECKING:  # each is imported when first used, so that the command line starts at once
    from fedtangent import (
        attacks,
        comparison,
        data,
        engine,
        federated,
        kernels,
        losses,
        measures,
        models,
        optimizers,
        pytrees,
        testing,
        theory,
        types,
    )
    from fedtangent.comparison import Forecasting, compare, predict
    from fedtangent.data import partition
    from fedtangent.engine import Checkpoints, Devices, Evaluation, hypergradient, simulate, sweep
    from fedtangent.engine.processes import use_cores
    from fedtangent.federated import schedule as schedules
    from fedtangent.federated.algorithms.common import Averaging
    from fedtangent.federated.algorithms.entry import recipe
    from fedtangent.federated.local import Work
    from fedtangent.papers import cite

__version__ = "0.1.0"

__all__ = [
    "Averaging",
    "Checkpoints",
    "Devices",
    "Evaluation",
    "Forecasting",
    "Work",
    "attacks",
    "cite",
    "compare",
    "comparison",
    "data",
    "enable_x64",
    "engine",
    "federated",
    "hypergradient",
    "kernels",
    "losses",
    "measures",
    "models",
    "optimizers",
    "partition",
    "predict",
    "pytrees",
    "recipe",
    "schedules",
    "simulate",
    "sweep",
    "testing",
    "theory",
    "types",
    "use_cores",
]


def __dir__() -> list[str]:
    return [*__all__, *_RECIPES, "__version__"]


_RECIPES = (  # public names of the algorithms' builders
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
)
_WITHIN = {  # public names that are not modules of the package itself -> the module that holds them
    "Averaging": "federated.algorithms.common",
    "Checkpoints": "engine",
    "Devices": "engine",
    "Evaluation": "engine",
    "Forecasting": "comparison",
    "Work": "federated.local",
    "cite": "papers",
    "compare": "comparison",
    "hypergradient": "engine",
    "partition": "data",
    "predict": "comparison",
    "schedules": "federated",
    "simulate": "engine",
    "sweep": "engine",
    "recipe": "federated.algorithms.entry",
    "use_cores": "engine.processes",
    **dict.fromkeys(_RECIPES, "federated.algorithms"),
}


def __getattr__(name: str) -> _Any:
    if name not in __all__ and name not in _RECIPES:
        raise AttributeError(f"module 'fedtangent' has no attribute {name!r}")
    module = _importlib.import_module(f"fedtangent.{_WITHIN.get(name, name)}")
    found = globals()[name] = getattr(module, name) if name in _WITHIN else module
    _show_public_names()
    return found


def enable_x64(enabled: bool = True) -> None:
    """Switch JAX to 64-bit types: theory, NTK-FL's evolution and comparisons run in float64.

    Training stays in the dtype its model and data were made with. The command line does this by itself.
    """
    import jax

    jax.config.update("jax_enable_x64", enabled)


def _public_names(module: _Module) -> list[str]:
    """The names that tab completion shows for ``module``: its ``__all__``, or else what is defined in it."""

    def is_own(name: str, value: object) -> bool:
        if isinstance(value, _Module):
            return value.__name__.rpartition(".")[0] == module.__name__
        return name.isupper() or getattr(value, "__module__", "") == module.__name__

    listed = vars(module).get("__all__")
    return listed or [n for n, value in vars(module).items() if not n.startswith("_") and is_own(n, value)]


def _show_public_names() -> None:
    """Lets tab completion show public names only, of all modules that are imported by now."""
    for name, module in list(_sys.modules.items()):
        if name.startswith("fedtangent."):
            vars(module).setdefault("__dir__", _partial(_public_names, module))
