"""Checks of the exact federated flow: linear models equal it, and networks approach it as they become wider.

Every option of the algorithms is one entry of ``OPTIONS``: the arguments that set it in the simulator and in
``federated_flow``, and the arguments of a wrong theory that ignores it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedtangent._src.comparison import cases
from fedtangent._src.comparison.predicted import networks
from fedtangent._src.comparison.settings import Problem, Scale, Setting
from fedtangent._src.comparison.simulated import Simulated, trained
from fedtangent._src.comparison.statistics import relative_errors
from fedtangent._src.comparison.theorems import Claim, TheoremEntry, of_scale
from fedtangent._src.comparison.verdicts import Verdict, slope_verdict
from fedtangent._src.data import partition
from fedtangent._src.federated import algorithms, graph, schedule
from fedtangent._src.federated.algorithms.entry import arguments_of
from fedtangent._src.federated.local import Work
from fedtangent._src.kernels.gram import KernelBlocks, kernel_blocks
from fedtangent._src.models.dense import mlp
from fedtangent._src.models.features import rbf_linear
from fedtangent._src.theory.flow.build import federated_flow
from fedtangent._src.theory.flow.flow import Flow
from fedtangent._src.theory.flow.rules import Rule
from fedtangent._src.types import Model, Recipe, Schedule

THEOREM = "federated flow (FE-2021 section 9.2, exact)"
LOCAL_STEPS = 4
SLOWER = 0.95  # factor of the learning rate in a wrong theory
SLOWER_STILL = (0.75, 0.5, 0.25, 0.1)  # the same for networks, which are themselves some percent off their flow
SIZES = Scale((128, 512, 2048), 48, 10), Scale((128, 256, 512, 1024, 2048, 4096), 30, 20)
LINEAR_ROUNDS = {"default": 30, "paper": 300}
NUM_CLIENTS = 5
NUM_STRATA = 2
DECAY = 0.2
SHRINKING = (1.0, 0.5, 0.25, 0.125)  # factor of each local step's size
Arguments = Mapping[str, Any]  # values by name, of a recipe or a Rule
NONE: Arguments = MappingProxyType({})


class Option(NamedTuple):
    """One option of the algorithms, with its arguments for the simulator and for the theory."""

    name: str
    schedule: Callable[[], Schedule]
    recipe: Recipe = algorithms.fed_avg
    both: Arguments = NONE  # arguments of the recipe, and fields of the Rule with the same names
    simulated: Arguments = NONE  # further arguments of the recipe
    predicted: Arguments = NONE  # further fields of the Rule
    ignored: Arguments | None = None  # fields of a wrong Rule that ignores the option; None: the schedule is ignored
    uniform: bool = False  # clients have equal weights, instead of their numbers of examples
    lazy: bool = True  # networks approach the flow as their width grows

    def _rule(self, case: Case, changes: Arguments = NONE) -> Rule:
        """Returns the rule of the option, as the paper states it and not as the algorithm carries it."""
        rates = {"local_steps": LOCAL_STEPS, "learning_rate": case.learning_rate}
        return Rule(**{**rates, **self.both, **self.predicted, **changes})

    def _flow(self, case: Case, blocks: KernelBlocks, changes: Arguments = NONE) -> Flow:
        """Builds the flow; ``changes`` of the Rule, "schedule" or "uniform" weights make it a wrong theory."""
        plan, clients = self.schedule(), case.problem.partition
        weighting = "uniform" if changes.get("uniform", self.uniform) else "examples"
        followed = changes.get("schedule", plan)
        cohorts = schedule.drawn_cohorts(followed, clients, case.num_rounds, case.seed, weighting)
        rule = self._rule(case, {name: v for name, v in changes.items() if name not in ("schedule", "uniform")})
        return federated_flow(blocks, case.problem.y_train, clients, cohorts, rule, num_models=plan.num_models)

    def _wrong_flows(self, case: Case, blocks: KernelBlocks, slower: tuple[float, ...] = (SLOWER,)) -> dict[str, Flow]:
        """Builds wrong theories: the option ignored, one local step less, and smaller client learning rates."""
        wrong: dict[str, Arguments] = {}
        if self.ignored is None:
            wrong["schedule ignored"] = {"schedule": every_client(self.schedule().num_models)}
        else:
            wrong["local steps ignored" if "local_steps" in self.ignored else "option ignored"] = self.ignored
        wrong["one local step less"] = {"local_steps": LOCAL_STEPS - 1}
        wrong |= {f"client rate x {by}": {"learning_rate": by * case.learning_rate} for by in slower}
        return {name: self._flow(case, blocks, changes) for name, changes in wrong.items()}

    def _run(self, case: Case, width: int, draws: int, evaluate_every: int = 1) -> Simulated:
        """Trains ``draws`` initialisations under the option; ``evaluate_every`` 0: only at the start and at the end."""
        arguments = {"client_learning_rate": case.learning_rate, **self.both, **self.simulated}
        if "client_optimizer" in arguments:  # a function from the rate
            arguments["client_optimizer"] = arguments["client_optimizer"](arguments.pop("client_learning_rate"))
        work, more = Work(steps=LOCAL_STEPS, batch_size=None), arguments_of(self.recipe, arguments)
        algorithm = self.recipe(case.model, self.schedule(), work=work, **more)
        size = Scale((width,), draws, case.num_rounds, evaluate_every)
        setting = Setting(self.name, self.name, case.problem, algorithm, self._rule(case), size, case.seed)
        return trained(setting, algorithm.on(setting.model(width)), self.name, width, mapping="scan")


def every_client(num_models: int = 1) -> Schedule:
    """Builds the schedule in which every client trains every model in every round."""
    return schedule.all_clients(NUM_CLIENTS, num_models)


def sampled(clients_per_round: int) -> Callable[[], Schedule]:
    """Returns a builder of schedules that draw ``clients_per_round`` clients in every round."""
    return partial(schedule.uniform_sampling, NUM_CLIENTS, clients_per_round)


def permuted(num_models: int) -> Callable[[], Schedule]:
    """Returns a builder of schedules in which each client trains the models in a separate random order."""
    return partial(schedule.per_client_permutations, NUM_CLIENTS, num_models)


def shrinking(rate: float | jax.Array) -> optax.GradientTransformation:
    """Builds local gradient descent with steps of ``SHRINKING`` times the rate."""
    return optax.chain(optax.sgd(rate), optax.scale_by_schedule(lambda step: jnp.asarray(SHRINKING)[step]))


def decaying(rate: float | jax.Array) -> optax.GradientTransformation:
    """Builds local gradient descent with weight decay."""
    return optax.chain(optax.add_decayed_weights(DECAY), optax.sgd(rate))


OPTIONS = (
    Option("every client, every round", every_client, ignored={"local_steps": 1}),
    Option("2 of 5 clients drawn", sampled(2)),
    Option("permutations, K = 3", permuted(3)),
    Option("strata, 1 of each, K = 2", partial(schedule.strata, NUM_CLIENTS, 2, NUM_STRATA, 1)),
    Option("random models, K = 3", partial(schedule.random_models, NUM_CLIENTS, 3)),
    Option("random walk on a ring, K = 2", lambda: schedule.random_walk(graph.ring(NUM_CLIENTS), 2)),
    Option("equal weights", sampled(3), simulated={"weighting": "uniform"}, ignored={"uniform": False}, uniform=True),
    Option("server rate 0.7", every_client, both={"server_learning_rate": 0.7}, ignored={"server_learning_rate": 1.0}),
    Option("FedProx, 2 of 5 clients", sampled(2), algorithms.fed_prox, both={"mu": 0.5}, ignored={"mu": 0.0}),
    Option(
        "FedDyn, 3 of 5 clients",
        sampled(3),
        algorithms.fed_dyn,
        both={"mu": 0.5},
        predicted={"algorithm": "fed_dyn"},
        ignored={"algorithm": "fed_avg", "mu": 0.0},
        uniform=True,
    ),
    Option(
        "SCAFFOLD, permutations, K = 2",
        permuted(2),
        algorithms.scaffold,
        predicted={"algorithm": "scaffold"},
        ignored={"algorithm": "fed_avg"},
        uniform=True,
    ),
    Option(
        "FedAvgM, 2 of 5 clients",
        sampled(2),
        algorithms.fed_avg_m,
        both={"server_learning_rate": 0.5},
        simulated={"momentum": 0.5},
        predicted={"server_momentum": 0.5},
        ignored={"server_momentum": 0.0},
    ),
    Option(
        "Nesterov momentum of the server",
        every_client,
        algorithms.fed_avg_m,
        both={"nesterov": True, "server_learning_rate": 0.5},
        simulated={"momentum": 0.5},
        predicted={"server_momentum": 0.5},
        ignored={"nesterov": False, "server_momentum": 0.0},  # the look-ahead alone is less than a network's own gap
    ),
    Option(
        "local steps that shrink",
        every_client,
        simulated={"client_optimizer": shrinking},
        predicted={"step_weights": SHRINKING},
        ignored={"step_weights": None},
    ),
    Option(
        "weight decay",
        every_client,
        simulated={"client_optimizer": decaying},
        predicted={"weight_decay": DECAY},
        ignored={"weight_decay": 0.0},
        lazy=False,  # weights, and so the tangent kernel, shrink by the same factor at every width
    ),
)


class Case(NamedTuple):
    """A problem and a model, on which every option is run."""

    problem: Problem
    model: Model  # network, whose width may change
    learning_rate: float  # of the clients
    num_rounds: int
    seed: int  # of initialisations and schedules

    def blocks(self) -> KernelBlocks:
        """Computes the model's kernels at the training and test points."""
        assert self.model.kernel is not None
        return kernel_blocks(self.model.kernel, self.problem.x_train, self.problem.x_test)


def _linear_case(seed: int, num_rounds: int) -> Case:
    """Builds the case of a linear model: 40 radial basis functions, 2 outputs, 24 examples on 5 unequal clients."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(-1, 1, (24, 1))
    y = np.concatenate([np.sin(2 * np.pi * x), np.cos(3 * x)], axis=1) + 0.2 * rng.standard_normal((24, 2))
    model = rbf_linear(40, bandwidth=0.2, seed=seed, output_size=2, dtype=jnp.float64)
    return _case((x, y, np.linspace(-1, 1, 15)[:, None]), model, num_rounds, seed)


def _network_case(seed: int, num_rounds: int) -> Case:
    """Builds the case of ReLU networks of one hidden layer: 24 digits, three outputs, 5 unequal clients."""
    digits = cases.digits(None, "smoke", seed).problem
    model = mlp(digits.x_train.shape[1], 3, widths=(64,), activation="relu", w_std=2**0.5, b_std=0.1, dtype=jnp.float64)
    return _case((digits.x_train[:24], digits.y_train[:24, :3], digits.x_test[:20]), model, num_rounds, seed)


def _case(points: tuple[np.ndarray, ...], model: Model, num_rounds: int, seed: int) -> Case:
    """Builds the case of all options; the learning rate is half the largest step at which every client is stable."""
    x_train, y_train, x_test = points
    clients = partition.quantity_skew(len(x_train), NUM_CLIENTS, alpha=2.0, seed=seed, min_client_size=2)
    problem = Problem(x_train, y_train, x_test, np.zeros((len(x_test), y_train.shape[1])), clients)
    theta = Case(problem, model, 0.0, num_rounds, seed).blocks().ntk_train
    rows = [clients.client(i) for i in range(NUM_CLIENTS)]
    rate = 1 / max(float(np.linalg.eigvalsh(theta[np.ix_(i, i)])[-1]) / len(i) for i in rows)
    return Case(problem, model, rate, num_rounds, seed)


def _largest_error(flow: Flow, run: Simulated) -> float:
    """Computes the largest error of any network to the flow at any round, over how far the flow moves the function."""
    predicted = networks(flow, [run], run.rounds)[0]
    return float(np.max(relative_errors(predicted, run.test, predicted[-1:] - predicted[:1])))


def _exact(option: Option, case: Case) -> Verdict:
    """Checks that the linear model under ``option`` equals the flow at every round, to ``EXACT``."""
    blocks, run = case.blocks(), option._run(case, 1, 2)
    controls = {name: _largest_error(flow, run) for name, flow in option._wrong_flows(case, blocks).items()}
    sizes = f"n = 24, N = 5, {case.num_rounds} rounds of {LOCAL_STEPS} steps"
    claim = Claim(THEOREM, f"linear model = flow, every round: {option.name}", sizes)
    return claim.exact(_largest_error(option._flow(case, blocks), run), controls)


def _slope(option: Option, case: Case, widths: tuple[int, ...], num_networks: int) -> Verdict:
    """Checks that the error of networks to the flow at the last round falls as width^-1/2."""
    blocks, draws = case.blocks(), -(-num_networks // option.schedule().num_models)
    runs = [option._run(case, width, draws, evaluate_every=0) for width in widths]
    last = runs[0].rounds[-1:]
    right = networks(option._flow(case, blocks), runs, last)
    wrong = option._wrong_flows(case, blocks, SLOWER_STILL).items()
    controls = {name: networks(flow, runs, last) for name, flow in wrong}
    return slope_verdict(THEOREM, widths, runs, right, controls)._replace(
        statement=f"networks' error falls as width^-1/2: {option.name}",
        sizes=f"widths {widths[0]} to {widths[-1]}, {num_networks} networks each, {case.num_rounds} rounds",
    )


def _checks(scale: str, seed: int) -> list[Verdict]:
    """Checks every option: equality for a linear model, and the slope -1/2 of networks' errors in their width."""
    size = of_scale(scale, *SIZES)
    linear, network = _linear_case(seed, LINEAR_ROUNDS[scale]), _network_case(seed, size.num_rounds)
    verdicts = [_exact(option, linear) for option in OPTIONS]
    return verdicts + [_slope(option, network, size.widths, size.draws) for option in OPTIONS if option.lazy]


ENTRIES = (
    TheoremEntry(
        "flow.exact",
        "the exact federated flow: linear models equal it, networks come nearer to it with their width",
        _checks,
        papers=("shi2021",),
        statement="the discrete dynamics behind FE-2021, section 9.2",
        functions=(federated_flow,),
        figures=("local_gd.wide_network",),
    ),
)
