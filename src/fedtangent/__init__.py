"""fedtangent: federated learning in the kernel regime, simulation and theory side by side.

The public API on one screen::

    data.load(name)            data sets                    partition.dirichlet(...)     clients
    data.federated_data(...)   data on the device           models.mlp(...)              networks with kernels
    federated.recipes          the algorithms: fed_avg, fed_ensemble, scaffold, fed_dyn, ditto, fed_be, ntk_fl, ..
    federated.schedule, walks  who trains which model when
    federated.channel          compression and clipping     federated.personal           what clients predict
    cite(algorithm)            BibTeX of its papers         privacy.epsilon(...)         of a private run
    simulate(algorithm, data, num_rounds, seed)             compiled rounds
    attacks.from_jacobians, ssim                            what a curious server reads
    sweep.sweep, paired.differences, seeds.simulate_seeds   many runs, with intervals
    checkpointing.Checkpoints, distributed.start            runs that survive; several processes
    hypergradient.hypergradient                             derivatives through rounds
    kernels.analytic, kernels.empirical_ntk                 tangent kernels
    diagnostics.kernel_diagnostics(...)                     kernels along training: drift, alignment, commutators
    theory.gp_limit, theory.federated_flow                  what must come out
    uncertainty.expected_calibration_error(...)             entropies, calibration, intervals, bias and variance
    compare.run(setting)                                    the two side by side
"""

import importlib as _importlib
from typing import Any as _Any

import jax as _jax

from fedtangent import (
    attacks,
    checkpointing,
    data,
    diagnostics,
    distributed,
    federated,
    hypergradient,
    kernels,
    losses,
    models,
    paired,
    partition,
    privacy,
    pytrees,
    seeds,
    sharing,
    sweep,
    theory,
    types,
    uncertainty,
)
from fedtangent.citations import cite
from fedtangent.simulate import simulate

__version__ = "0.1.0"

__all__ = [
    "attacks",
    "checkpointing",
    "cite",
    "compare",
    "data",
    "diagnostics",
    "distributed",
    "enable_x64",
    "federated",
    "hypergradient",
    "kernels",
    "losses",
    "models",
    "paired",
    "partition",
    "privacy",
    "pytrees",
    "seeds",
    "sharing",
    "simulate",
    "sweep",
    "theory",
    "types",
    "uncertainty",
]


def __getattr__(name: str) -> _Any:
    if name == "compare":  # imported when first asked for: it brings what only comparisons need
        return _importlib.import_module("fedtangent.compare")
    raise AttributeError(f"module 'fedtangent' has no attribute {name!r}")


def enable_x64(enabled: bool = True) -> None:
    """Switch JAX to 64-bit types: theory, NTK-FL's evolution and comparisons run in float64.

    Training stays in the dtype its model and data were made with. The command line does this by itself.
    """
    _jax.config.update("jax_enable_x64", enabled)
