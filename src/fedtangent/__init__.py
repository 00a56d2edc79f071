"""fedtangent: federated learning in the kernel regime, simulation and theory side by side.

The same arguments give three answers::

    simulate(algorithm, data, clients, num_rounds=.., seed=..)   networks are trained
    predict(algorithm, data, clients, num_rounds=.., seed=..)    no network is trained: the closed form of the run
    compare(algorithm, data, clients, num_rounds=.., seed=..)    both, at several widths, with verdicts

Public are the names in ``__init__.pyi`` and in the modules beside it, each listed on one screen:

    algorithms    ``fed_avg`` and the other recipes below; ``Work`` and ``Averaging`` are what they share
    data, partition, models, schedules                   what a recipe and a run are built from
    channels, faults, graphs, losses, optimizers         further choices
    parts, testing                                       the parts of a user's algorithm, and tests of it
    kernels, theory                                      tangent kernels; one function for each theorem
    measures, attacks                                    accuracy, uncertainty, privacy, kernels; what messages reveal
    processes, types                                     several machines; records and protocols
"""

import lazy_loader as _lazy

__version__ = "1.0.0"

__getattr__, _, __all__ = _lazy.attach_stub(__name__, __file__)
__all__ = sorted([*__all__, "enable_x64"])


def __dir__() -> list[str]:
    return __all__


def enable_x64(enabled: bool = True) -> None:
    """Switches JAX to 64-bit types, which theory, the server of NTK-FL and comparisons with theory need.

    Networks are still trained in the dtype of their parameters and data. The command line always uses 64-bit types.

    Args:
        enabled: False switches back to JAX's 32-bit types.
    """
    import jax

    jax.config.update("jax_enable_x64", enabled)
