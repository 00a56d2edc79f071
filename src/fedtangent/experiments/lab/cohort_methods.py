"""NTK-FL and its baselines as functions of a learning rate and of the steps in a round (NTK-FL, section 6)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import optax

from fedtangent import models
from fedtangent.experiments.lab.cohort_settings import Settings
from fedtangent.experiments.lab.cohort_trials import one_hot, projected, with_global_set
from fedtangent.experiments.lab.trials import Split, Trial
from fedtangent.federated import algorithms, schedule
from fedtangent.federated.local import Work
from fedtangent.federated.rates import sgd
from fedtangent.federated.wire.subsample import largest_sample
from fedtangent.types import Algorithm, Array, FederatedData, Model, Partition, Schedule

Count = Any  # of steps: a whole number, which may be traced
Build = Callable[[Count, float | Array], Algorithm]


class Method(NamedTuple):
    """One line of a figure."""

    label: str
    federated: bool  # whether clients keep their examples: the centralised baseline is the ideal, not a rival
    rates: tuple[float, ...]
    steps: tuple[int, ...]  # in a round: of each client, or of the server; (0,) where that is not a choice
    build: Build  # (steps, rate) -> algorithm; both may be traced
    data: FederatedData  # the trial's, as this method is given it
    splits: dict[str, Split]  # what it is evaluated on
    pool_size: int = 0  # examples that the server of NTK-FL pools at most


LABELS = {
    "centralised": "centralised",
    "ntk_fl": "NTK-FL",
    "ntk_fl_cross_entropy": "NTK-FL, cross entropy",
    "data_sharing": "data sharing",
    "fed_nova": "FedNova",
    "fed_avg": "FedAvg",
    "cp_ntk_fl": "CP-NTK-FL",
    "cp_ntk_fl_cross_entropy": "CP-NTK-FL, cross entropy",
    "cp_fed_avg": "FedAvg, subsampled and projected",
    "fed_com": "FedCOM, 8 bit",
    "qsgd": "QSGD, 4 bit",
}
# The methods that evolve a kernel, each with its loss.
EVOLVED = {
    "ntk_fl": "squared_error",
    "ntk_fl_cross_entropy": "cross_entropy",
    "cp_ntk_fl": "squared_error",
    "cp_ntk_fl_cross_entropy": "cross_entropy",
}
# Each with what it makes smaller.
PAIRED = {"cp_ntk_fl": "ntk_fl", "cp_ntk_fl_cross_entropy": "ntk_fl_cross_entropy", "cp_fed_avg": "fed_avg"}


def network(s: Settings, trial: Trial) -> Model:
    """The paper's multilayer perceptron of one hidden layer, in the standard parameterization, biases from zero.

    Hidden weights are Kaiming's N(0, 2 / fan_in). The last layer's are ``last_w_std / sqrt(width)``: the paper does not
    say; from larger ones the halved squared error starts far above its value at zero.
    """
    return models.build(
        "mlp",
        int(np.prod(trial.data.x.shape[1:])),
        trial.num_classes,
        widths=(s.width,),
        parameterization="standard",
        b_std=0.0,
        last_w_std=s.last_w_std,
    )


def methods(s: Settings, trial: Trial) -> dict[str, Method]:
    """The methods of the settings on one seed's data, under one schedule; all start from the same network.

    Those with a projection (``cp_``) see projected inputs of ``s.projected`` numbers and have a network for these.
    """
    makers = {
        "centralised": _centralised,
        **{name: _evolving(name) for name in EVOLVED},
        "data_sharing": _data_sharing,
        "fed_nova": _averaging(algorithms.fed_nova, "fed_nova", client_optimizer=_momentum(s.momentum)),
        "fed_avg": _averaging(algorithms.fed_avg, "fed_avg"),
        "cp_fed_avg": _averaging(algorithms.fed_avg, "cp_fed_avg", beta=s.beta),
        "fed_com": _averaging(algorithms.fed_com, "fed_com"),
        "qsgd": _averaging(algorithms.fed_paq, "qsgd"),
    }
    plan = schedule.uniform_sampling(s.num_clients, s.clients_per_round)
    small = projected(trial, s.projected) if s.projected and any(n in PAIRED for n in s.methods) else trial
    seen = {name: small if name in PAIRED else trial for name in s.methods}
    return {name: makers[name](s, own, network(s, own), plan) for name, own in seen.items()}


def _targets(s: Settings, trial: Trial) -> FederatedData:
    """What the gradient methods are given: class labels, or one-hot targets under the squared error."""
    return trial.data if s.loss == "cross_entropy" else one_hot(trial)


def _momentum(momentum: float) -> Callable[[float | Array], optax.GradientTransformation]:
    """FedNova's clients have momentum: with plain SGD and equally many local steps it would be FedAvg itself."""

    def make(rate: float | Array) -> optax.GradientTransformation:
        descend = sgd(rate)
        assert isinstance(descend, optax.GradientTransformation)
        return optax.chain(optax.trace(momentum), descend)

    return make


def _averaging(recipe: Callable[..., Algorithm], name: str, **options: Any) -> Callable[..., Method]:
    """Local training and an average: the recipe's, of which the number of local steps is searched over."""

    def make(s: Settings, trial: Trial, model: Model, plan: Schedule) -> Method:
        def build(steps: Count, rate: float | Array) -> Algorithm:
            work = Work(steps=steps, batch_size=s.batch_size)
            return recipe(model, plan, client_learning_rate=rate, work=work, loss=s.loss, **options)

        held = _targets(s, trial)
        return Method(LABELS[name], True, s.learning_rates, s.local_steps, build, held, trial.splits)

    return make


def _data_sharing(s: Settings, trial: Trial, model: Model, plan: Schedule) -> Method:
    held, shared = with_global_set(trial._replace(data=_targets(s, trial)), s.shared, trial.data.y)
    own = _averaging(algorithms.data_sharing, "data_sharing", shared=shared)(s, trial, model, plan)
    return own._replace(data=held)


def _centralised(s: Settings, trial: Trial, model: Model, plan: Schedule) -> Method:
    def build(steps: Count, rate: float | Array) -> Algorithm:
        work = Work(steps=steps, batch_size=s.batch_size)
        return algorithms.centralised(model, plan, learning_rate=rate, work=work, loss=s.loss)

    held = _targets(s, trial)
    return Method(LABELS["centralised"], False, s.learning_rates, s.server_steps, build, held, trial.splits)


def _evolving(name: str) -> Callable[..., Method]:
    """NTK-FL or, with the settings' switches, CP-NTK-FL, under the loss that ``EVOLVED`` gives for the name."""
    compressed = name.startswith("cp_")

    def make(s: Settings, trial: Trial, model: Model, plan: Schedule) -> Method:
        pool = _rounded(largest_sample(_partition(trial), s.clients_per_round, s.beta if compressed else 1.0))
        recipe: Callable[..., Algorithm] = algorithms.cp_ntk_fl if compressed else algorithms.ntk_fl
        bits = s.value_bits or None
        own: dict[str, Any] = (
            {} if not compressed else {"beta": s.beta, "sparsity": s.sparsity, "value_bits": bits, "shuffle": True}
        )

        def build(steps: Count, rate: float | Array) -> Algorithm:
            return recipe(
                model,
                plan,
                learning_rate=rate,
                times=s.times,
                pool_size=pool,
                unstable="clip",
                loss=EVOLVED[name],
                **own,
            )

        return Method(LABELS[name], True, s.tangent_rates, (0,), build, one_hot(trial), trial.splits, pool)

    return make


def _partition(trial: Trial) -> Partition:
    return Partition(np.asarray(trial.data.indices), np.asarray(trial.data.offsets))


def _rounded(pool: int) -> int:
    """The next multiple of 8: pools of like size share a compiled round, and no example is dropped."""
    return -(-pool // 8) * 8
