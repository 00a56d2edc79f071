"""Checks of the federated kernel flow, which predicts the outputs of infinitely wide networks after every round.

"flow.exact": linear models equal the flow, and networks approach it as they become wider. Each option of the algorithms
is one entry of ``OPTIONS``: its arguments for the simulator and for ``federated_flow``, and the arguments of a wrong
theory that ignores it.

"flow.centralised": FedAvg of infinitely wide networks beside centralised training with as many steps. Both predictions
are equal for one local step, and equal to first order in the learning rate for several.

"flow.ledger": the residual ledger of whole runs. Each client's residual, its outputs minus its targets, equals the
flow's: to rounding for a linear model, and within a measured bound for a network.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fedtangent as ft
from fedtangent._src.comparison import cases
from fedtangent._src.comparison.ledger import LedgerRow, ResidualLedger, residual_ledger
from fedtangent._src.comparison.predicted import networks
from fedtangent._src.comparison.settings import Problem, Scale, Setting
from fedtangent._src.comparison.simulated import Simulated, train, training_of
from fedtangent._src.comparison.statistics import Interval, log_slope, relative_distance, relative_errors, width_slope
from fedtangent._src.comparison.theorems import Claim, TheoremEntry, of_scale
from fedtangent._src.comparison.verdicts import Verdict, slope_verdict
from fedtangent._src.data import partition
from fedtangent._src.data.partition.given import consecutive
from fedtangent._src.federated import algorithms, graph, schedule
from fedtangent._src.federated.algorithms.entry import arguments_of
from fedtangent._src.kernels.gram import KernelBlocks, kernel_blocks
from fedtangent._src.models.dense import mlp
from fedtangent._src.theory.flow.build import federated_flow
from fedtangent._src.theory.flow.flow import Flow

EXACT_FLOW = "federated flow (FE-2021 section 9.2, exact)"
LOCAL_STEPS = 4
SLOWER = 0.95  # factor of the learning rate in a wrong theory
SLOWER_STILL = (0.75, 0.5, 0.25, 0.1)  # the same for networks, which are themselves some percent off their flow
EXACT_SIZES = Scale((128, 512, 2048), 48, 10), Scale((128, 256, 512, 1024, 2048, 4096), 30, 20)
LINEAR_ROUNDS = {"default": 30, "paper": 300}
NUM_CLIENTS, NUM_EXAMPLES = 5, 24
NUM_STRATA = 2
DECAY = 0.2
SHRINKING = (1.0, 0.5, 0.25, 0.125)  # factor of each local step's size
Arguments = Mapping[str, Any]  # values by name, of a recipe or a Rule
NONE: Arguments = MappingProxyType({})


class Option(NamedTuple):
    """One option of the algorithms, such as server momentum, with its arguments for simulator and theory.

    Attributes:
        name: Name in the verdicts.
        schedule: Builds the schedule.
        recipe: Builds the algorithm.
        both: Arguments of the recipe that are also fields of the theory's ``Rule``.
        simulated, predicted: Further arguments of the recipe, and further fields of the ``Rule``.
        ignored: Fields of the ``Rule`` to replace (or "schedule", "uniform", as in ``_flow``) for a theory that ignores
            the option; None: it ignores the schedule.
        uniform: Whether clients have equal weights instead of their numbers of examples.
        lazy: Whether networks approach the flow as their width grows.
    """

    name: str
    schedule: Callable[[], ft.types.Schedule]
    recipe: ft.types.Recipe = algorithms.fed_avg
    both: Arguments = NONE
    simulated: Arguments = NONE
    predicted: Arguments = NONE
    ignored: Arguments | None = None
    uniform: bool = False
    lazy: bool = True

    def _rule(self, case: Case, changes: Arguments = NONE) -> ft.theory.Rule:
        """Returns the theory's ``Rule`` of the option for ``case``, with the fields in ``changes`` replaced.

        It is built from the option's arguments, not from the simulated algorithm, so that the two are independent.
        """
        rates = {"local_steps": LOCAL_STEPS, "learning_rate": case.learning_rate}
        return ft.theory.Rule(**{**rates, **self.both, **self.predicted, **changes})

    def _flow(self, case: Case, blocks: KernelBlocks, changes: Arguments = NONE) -> Flow:
        """Builds the flow that predicts training under the option on ``case``, whose kernels are ``blocks``.

        ``changes`` are fields of the ``Rule`` to replace, another "schedule", or "uniform" (whether clients have equal
        weights).
        """
        plan, clients = self.schedule(), case.problem.partition
        weighting = "uniform" if changes.get("uniform", self.uniform) else "examples"
        followed = changes.get("schedule", plan)
        cohorts = schedule.drawn_cohorts(followed, clients, case.num_rounds, case.seed, weighting)
        rule = self._rule(case, {name: v for name, v in changes.items() if name not in ("schedule", "uniform")})
        return federated_flow(blocks, case.problem.y_train, clients, cohorts, rule, num_models=plan.num_models)

    def _wrong_flows(self, case: Case, blocks: KernelBlocks, slower: tuple[float, ...] = (SLOWER,)) -> dict[str, Flow]:
        """Builds flows of wrong theories, keyed by the mistake, as negative controls.

        The mistakes are: the option (or the schedule) is ignored, clients take one local step less, or their learning
        rate is multiplied by one of the factors ``slower``.
        """
        wrong: dict[str, Arguments] = {}
        if self.ignored is None:
            wrong["schedule ignored"] = {"schedule": every_client(self.schedule().num_models)}
        else:
            wrong["local steps ignored" if "local_steps" in self.ignored else "option ignored"] = self.ignored
        wrong["one local step less"] = {"local_steps": LOCAL_STEPS - 1}
        wrong |= {f"client rate x {by}": {"learning_rate": by * case.learning_rate} for by in slower}
        return {name: self._flow(case, blocks, changes) for name, changes in wrong.items()}

    def _run(self, case: Case, width: int, draws: int, evaluate_every: int = 1) -> Simulated:
        """Trains the models of ``case`` at ``width`` under the option, from ``draws`` independent initialisations.

        The result has their outputs at start, at every ``evaluate_every``-th round, and at the end; with 0, only at
        start and end.
        """
        arguments = {"client_learning_rate": case.learning_rate, **self.both, **self.simulated}
        if "client_optimizer" in arguments:  # a function from the rate
            arguments["client_optimizer"] = arguments["client_optimizer"](arguments.pop("client_learning_rate"))
        work, more = ft.Work(steps=LOCAL_STEPS, batch_size=None), arguments_of(self.recipe, arguments)
        algorithm = self.recipe(case.model, self.schedule(), work=work, **more)
        size = Scale((width,), draws, case.num_rounds, evaluate_every)
        setting = Setting(self.name, self.name, case.problem, algorithm, self._rule(case), size, case.seed)
        return train([training_of(setting, algorithm.on(setting.model(width)), self.name, width, mapping="scan")])[0]


def every_client(num_models: int = 1) -> ft.types.Schedule:
    """Builds the schedule in which every client trains every model in every round."""
    return schedule.all_clients(NUM_CLIENTS, num_models)


def sampled(clients_per_round: int) -> Callable[[], ft.types.Schedule]:
    """Returns a builder of schedules that draw ``clients_per_round`` clients in every round."""
    return partial(schedule.uniform_sampling, NUM_CLIENTS, clients_per_round)


def permuted(num_models: int) -> Callable[[], ft.types.Schedule]:
    """Returns a builder of schedules in which each client trains the models in a separate random order."""
    return partial(schedule.per_client_permutations, NUM_CLIENTS, num_models)


def shrinking(rate: float | jax.Array) -> optax.GradientTransformation:
    """Builds gradient descent of a client whose step size is ``rate`` at first, and halves after each of four steps."""
    return optax.chain(optax.sgd(rate), optax.scale_by_schedule(lambda step: jnp.asarray(SHRINKING)[step]))


def decaying(rate: float | jax.Array) -> optax.GradientTransformation:
    """Builds gradient descent of a client with weight decay 0.2 (``DECAY``) and step size ``rate``."""
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
    model: ft.types.Model  # network, whose width may change
    learning_rate: float  # of the clients
    num_rounds: int
    seed: int  # of initialisations and schedules

    def blocks(self) -> KernelBlocks:
        """Computes the model's kernels at the training and test points."""
        assert self.model.kernel is not None
        return kernel_blocks(self.model.kernel, self.problem.x_train, self.problem.x_test)


def _linear_case(seed: int, num_rounds: int) -> Case:
    """Builds a linear problem: 40 radial basis functions, 2 outputs, 24 examples on 5 clients of unequal size."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(-1, 1, (24, 1))
    y = np.concatenate([np.sin(2 * np.pi * x), np.cos(3 * x)], axis=1) + 0.2 * rng.standard_normal((24, 2))
    model = ft.models.rbf_linear(40, bandwidth=0.2, seed=seed, output_size=2, dtype=jnp.float64)
    return _case((x, y, np.linspace(-1, 1, 15)[:, None]), model, num_rounds, seed)


def _network_case(seed: int, num_rounds: int) -> Case:
    """Builds a problem for ReLU networks of one hidden layer: 24 digits, three outputs, 5 clients of unequal size."""
    digits = cases.digits(None, "smoke", seed).problem
    model = mlp(digits.x_train.shape[1], 3, widths=(64,), activation="relu", w_std=2**0.5, b_std=0.1, dtype=jnp.float64)
    return _case((digits.x_train[:24], digits.y_train[:24, :3], digits.x_test[:20]), model, num_rounds, seed)


def _case(
    points: tuple[np.ndarray, ...],
    model: ft.types.Model,
    num_rounds: int,
    seed: int,
    clients: ft.types.Partition | None = None,
) -> Case:
    """Builds a ``Case`` for all options; its learning rate is half the largest at which every client is stable.

    ``points`` are training inputs, training targets and test inputs. Without ``clients`` client sizes are random.
    """
    x_train, y_train, x_test = points
    if clients is None:
        clients = partition.quantity_skew(len(x_train), NUM_CLIENTS, alpha=2.0, seed=seed, min_client_size=2)
    problem = Problem(x_train, y_train, x_test, np.zeros((len(x_test), y_train.shape[1])), clients)
    theta = Case(problem, model, 0.0, num_rounds, seed).blocks().ntk_train
    rows = [clients.client(i) for i in range(NUM_CLIENTS)]
    rate = 1 / max(float(np.linalg.eigvalsh(theta[np.ix_(i, i)])[-1]) / len(i) for i in rows)
    return Case(problem, model, rate, num_rounds, seed)


def _largest_error(flow: Flow, run: Simulated) -> float:
    """Computes the largest distance of a trained model from the flow at any round, as a share of the flow's movement.

    The flow's movement is the distance between its outputs at the start and after the last round; all outputs are at
    the test points.
    """
    predicted = networks(flow, [run], run.rounds)[0]
    return float(np.max(relative_errors(predicted, run.test, predicted[-1:] - predicted[:1])))


def _exact(option: Option, case: Case) -> Verdict:
    """Checks that the linear model, trained under ``option``, equals the flow at every round to a relative 1e-9."""
    blocks, run = case.blocks(), option._run(case, 1, 2)
    controls = {name: _largest_error(flow, run) for name, flow in option._wrong_flows(case, blocks).items()}
    sizes = f"n = 24, N = 5, {case.num_rounds} rounds of {LOCAL_STEPS} steps"
    claim = Claim(EXACT_FLOW, f"linear model = flow, every round: {option.name}", sizes)
    return claim.exact(_largest_error(option._flow(case, blocks), run), controls)


def _network_slope(option: Option, case: Case, widths: tuple[int, ...], num_networks: int) -> Verdict:
    """Checks that the distance of networks from the flow, at test points after the last round, falls as width^-1/2."""
    blocks, draws = case.blocks(), -(-num_networks // option.schedule().num_models)
    runs = [option._run(case, width, draws, evaluate_every=0) for width in widths]
    last = runs[0].rounds[-1:]
    right = networks(option._flow(case, blocks), runs, last)
    wrong = option._wrong_flows(case, blocks, SLOWER_STILL).items()
    controls = {name: networks(flow, runs, last) for name, flow in wrong}
    return slope_verdict(EXACT_FLOW, widths, runs, right, controls)._replace(
        statement=f"networks' error falls as width^-1/2: {option.name}",
        sizes=f"widths {widths[0]} to {widths[-1]}, {num_networks} networks each, {case.num_rounds} rounds",
    )


def _check_exact(scale: str, seed: int) -> list[Verdict]:
    """Checks every option: a linear model equals the flow, and if ``lazy``, networks' errors fall as width^-1/2."""
    size = of_scale(scale, *EXACT_SIZES)
    linear, network = _linear_case(seed, LINEAR_ROUNDS[scale]), _network_case(seed, size.num_rounds)
    verdicts = [_exact(option, linear) for option in OPTIONS]
    return verdicts + [_network_slope(option, network, size.widths, size.draws) for option in OPTIONS if option.lazy]


WIDE = "FedAvg and centralised training, infinitely wide (Jian and Liu)"
HALVED = 2.0 ** -np.arange(3, 7)  # factors of the learning rate; rounds grow by their inverse
FEW_ROUNDS = 2  # after more of them, both have nearly learned the targets
FIRST_ORDER = 0.1  # how far the slope may be from 1


def _of_classes(case: Case) -> Case:
    """Returns the case with its examples divided by class among clients of the same sizes.

    The learning rate is chosen anew, as for every case.
    """
    problem = case.problem
    order = np.argsort(problem.y_train @ np.arange(1, problem.y_train.shape[1] + 1), kind="stable")
    clients = problem.partition._replace(indices=order.astype(np.int32))
    points = problem.x_train, problem.y_train, problem.x_test
    return _case(points, case.model, case.num_rounds, case.seed, clients)


def _central_flow(option: Option, case: Case, blocks: KernelBlocks, changes: Arguments = NONE) -> Flow:
    """Builds the flow of centralised training, in which one client has all examples.

    It takes as many steps in a round as each client of FedAvg. ``changes`` are fields of the ``Rule`` to replace, as in
    ``Option._flow``.
    """
    whole = case._replace(problem=dataclasses.replace(case.problem, partition=consecutive([NUM_EXAMPLES])))
    return option._flow(whole, blocks, {"schedule": schedule.all_clients(1), **changes})


def _from_central(option: Option, case: Case, blocks: KernelBlocks, changes: Arguments = NONE) -> float:
    """Computes the relative distance of FedAvg's mean prediction from centralised training's after the last round.

    The predictions are flows of infinite width. ``changes`` are fields of the ``Rule`` to replace in both flows;
    "uniform" client weights change FedAvg only.
    """
    central = _central_flow(option, case, blocks, {k: v for k, v in changes.items() if k != "uniform"})
    means = (flow.mean(case.num_rounds) for flow in (option._flow(case, blocks, changes), central))
    return relative_distance(*map(np.asarray, means))


def _check_centralised(scale: str, seed: int) -> list[Verdict]:
    """Compares FedAvg with centralised training of as many steps, in three verdicts.

    At infinite width both predictions are equal for one local step, and their distance falls as the learning rate for
    several. Networks under FedAvg tend to FedAvg's flow as the width grows, and not to the centralised one.
    """
    size, option = of_scale(scale, *EXACT_SIZES), OPTIONS[0]
    case = _of_classes(_network_case(seed, FEW_ROUNDS))
    blocks = case.blocks()
    one_step, equal = {"local_steps": 1}, {"uniform": True}
    controls = {
        "clients weighted equally": _from_central(option, case, blocks, {**one_step, **equal}),
        f"{LOCAL_STEPS} local steps": _from_central(option, case, blocks),
    }
    sizes = f"n = {NUM_EXAMPLES}, N = {NUM_CLIENTS}, {case.num_rounds} rounds"
    verdicts = [
        Claim(WIDE, "one local step: prediction of FedAvg = centralised", sizes).exact(
            _from_central(option, case, blocks, one_step), controls
        )
    ]

    def slope(changes: Arguments) -> float:
        distances = []
        for factor in HALVED:
            slower = case._replace(
                learning_rate=factor * case.learning_rate, num_rounds=round(case.num_rounds / factor)
            )
            distances.append(_from_central(option, slower, blocks, changes))
        return log_slope(HALVED, distances)

    verdicts.append(
        Claim(WIDE, f"{LOCAL_STEPS} local steps: distance falls as the rate, at equal rate x rounds", sizes).near(
            slope(NONE), ("clients weighted equally", slope(equal)), FIRST_ORDER, "a distance that stays"
        )
    )
    runs = [option._run(case, width, size.draws, evaluate_every=0) for width in size.widths]
    last = runs[0].rounds[-1:]
    right, central = (
        networks(flow, runs, last) for flow in (option._flow(case, blocks), _central_flow(option, case, blocks))
    )
    statement = f"{LOCAL_STEPS} local steps: wide networks under FedAvg tend to its flow, not to the centralised one"
    widths = f"widths {size.widths[0]} to {size.widths[-1]}, {size.draws} networks each"
    verdict = slope_verdict(WIDE, size.widths, runs, right, {"the centralised flow": central})
    return [*verdicts, verdict._replace(statement=statement, sizes=f"{widths}, {case.num_rounds} rounds")]


LEDGER = "FE-2021 section 9.4 (residual ledger)"
CLIENTS, STEPS, EVALUATIONS = 6, 5, 6
SPLIT = 1  # seed of the partition: the same for all runs, so that they share compiled programs
LARGER = 1.1  # a step size that is wrong by 10 %
LARGER_STEPS = (1.01, 1.02, 1.03, 1.05, 1.07, LARGER, 1.15, 1.2)  # tried in turn until one is noticed
OFF = (1e-14, 1e-13, 1e-12, 1e-11, 1e-10, 1e-9)  # relative errors of the step size, tried on a linear model
SLOPE, BAND = -0.5, 0.1  # the gap's slope against the width is at most their sum
LEDGER_SIZES = Scale((256, 1024, 4096), 8, 24), Scale((512, 2048, 8192), 16, 48)  # draws: seeds


def _check_ledger(scale: str, seed: int) -> list[Verdict]:
    """Checks the residual ledgers of runs: tables of the gap between simulated and predicted residuals of clients.

    The gap must be rounding for a linear model, and within the ledger's tolerance for networks. For networks it must
    also fall with the width, at least as width^-1/2.
    """
    size = of_scale(scale, *LEDGER_SIZES)
    networks = {width: _networks(size, width, seed) for width in size.widths}
    return [_linear_check(size, seed), _bound_check(size, networks), _slope_check(size, networks)]


class Trainer(NamedTuple):
    """A model, its algorithm with the clients' learning rate ``rate``, and the model's width.

    All seeds use the same objects, so that their runs share compiled programs.
    """

    model: ft.types.Model
    rate: float
    algorithm: ft.types.Algorithm
    width: int


def _trainer(model: ft.types.Model, rate: float, width: int) -> Trainer:
    order = ft.schedules.per_client_permutations(CLIENTS, 2)
    algorithm = ft.fed_ensemble(model, order, client_learning_rate=rate, work=ft.Work(steps=STEPS, batch_size=None))
    return Trainer(model, rate, algorithm, width)


def _ledger(trainer: Trainer, x: np.ndarray, y: np.ndarray, size: Scale, seed: int) -> ResidualLedger:
    """Trains K = 2 models on inputs ``x`` and targets ``y``, and returns the residual ledger of the run.

    The ledger has the gap between the simulated and the predicted residual of every client, at six rounds of the run.
    ``size`` has the number of rounds.
    """
    model, rate, algorithm, width = trainer
    clients = ft.partition.quantity_skew(len(x), CLIENTS, 2.0, SPLIT, min_client_size=2)
    data, rounds = ft.data.federated_data(x, y, clients, dtype=jnp.float64), size.num_rounds
    key = jax.random.fold_in(jax.random.key(seed), width)  # with one key, narrow networks would be parts of wider ones
    ledger = residual_ledger(algorithm, model, data, rounds, ft.theory.Rule(STEPS, rate), seed=seed, start=key)
    look, scan = ft.Evaluation(rounds // EVALUATIONS, ledger), ft.Devices("scan")
    run = ft.simulate(algorithm, data, num_rounds=rounds, seed=seed, start=key, evaluation=look, devices=scan)
    if not ledger.is_of(run.history):
        raise AssertionError("the run's cohorts are not those that the ledger predicted")
    return ledger


def _examples(size: Scale) -> int:
    return 3 * size.num_rounds // 2


def _networks(size: Scale, width: int, seed: int) -> list[ResidualLedger]:
    """Trains erf networks of ``width``, one run for each of ``size.draws`` seeds; returns the runs' residual ledgers.

    A ledger has the gap between simulated and predicted residuals. Each run draws its own examples.
    """
    model = ft.models.mlp(5, 1, (width,), "erf", dtype=jnp.float64)
    theta = model.kernel(jnp.ones((1, 5)), None, get="ntk")  # type: ignore[misc]
    trainer, ledgers = _trainer(model, 1 / float(theta[0, 0]), width), []
    for draw in (np.arange(size.draws) + seed * size.draws) % 2**32:  # two values of ``seed`` share no draw
        x = np.random.default_rng(draw).standard_normal((_examples(size), 5))
        x *= np.sqrt(5) / np.linalg.norm(x, axis=1, keepdims=True)
        ledgers.append(_ledger(trainer, x, np.sin(2 * x[:, :1]), size, int(draw)))
    return ledgers


def _later(ledger: ResidualLedger) -> list[LedgerRow]:
    return [row for row in ledger.rows if row.round > 0]


def _share_failed(ledgers: list[ResidualLedger]) -> str:
    rows = [row for ledger in ledgers for row in _later(ledger)]
    return f"{sum(not row.passed for row in rows)} of {len(rows)} rows"


def _wrong_rate(ledger: ResidualLedger, factor: float) -> ResidualLedger:
    return ledger.against(learning_rate=factor * ledger.federation.rule.learning_rate)


def _linear_check(size: Scale, seed: int) -> Verdict:
    x = np.linspace(-1, 1, _examples(size))[:, None]
    model = ft.models.rbf_linear(num_features=60, bandwidth=0.1, seed=seed, dtype=jnp.float64)
    ledger = _ledger(_trainer(model, 0.1, 60), x, np.sin(4 * x), size, seed)
    wrong, rows = _wrong_rate(ledger, 1 + 1e-6), _later(ledger)
    noticed = next((off for off in OFF if not _wrong_rate(ledger, 1 + off).passed), np.inf)
    gap, tolerance = max(row.gap for row in rows), max(row.tolerance for row in rows)
    return Claim(
        LEDGER,
        "linear model: every client's residual at every evaluation is the flow's, to rounding",
        f"{len(rows)} rows: {CLIENTS} clients, 2 models, {EVALUATIONS} of {size.num_rounds} rounds",
    ).judged(
        (f"largest gap {gap:.1e}", f"<= {tolerance:.1e}", ledger.passed),
        ("step size wrong by 1e-6", f"{_share_failed([wrong])} fail", not wrong.passed),
        f"step size {noticed:.0e} off",
    )


def _sizes(size: Scale, networks: dict[int, list[ResidualLedger]]) -> str:
    return f"widths {', '.join(map(str, networks))}, {size.draws} seeds x 2 models, {size.num_rounds} rounds"


def _bound_check(size: Scale, networks: dict[int, list[ResidualLedger]]) -> Verdict:
    widest = networks[max(networks)]
    wrong = [_wrong_rate(ledger, LARGER) for ledger in widest]
    noticed = next((f for f in LARGER_STEPS if all(not _wrong_rate(of, f).passed for of in widest)), np.inf)
    ledgers = [ledger for same in networks.values() for ledger in same]
    worst = max(row.gap / row.tolerance for ledger in ledgers for row in _later(ledger))
    control, all_fail = f"step size x {LARGER} at width {max(networks)}", not any(ledger.passed for ledger in wrong)
    statement = "networks: gap within the kernel's measured change, propagated, and its second-order share"
    return Claim(LEDGER, statement, _sizes(size, networks)).judged(
        (f"largest gap / tolerance {worst:.2f}", "<= 1", all(ledger.passed for ledger in ledgers)),
        (control, f"{_share_failed(wrong)} fail", all_fail),
        f"step size x {noticed:g}",
    )


def _gap_slope(networks: dict[int, list[ResidualLedger]], factor: float = 1.0) -> Interval:
    """Fits the slope of log gap against log width; the gap is between networks and prediction in the last round.

    It is the root mean square over the models and clients of a run (``ResidualLedger.last_gap``). The prediction has
    the step size times ``factor``, which makes a wrong theory if it is not 1.
    """
    gaps = [
        np.array([of.last_gap(learning_rate=factor * of.federation.rule.learning_rate) for of in same])
        for same in networks.values()
    ]
    return width_slope(list(networks), gaps)


def _slope_check(size: Scale, networks: dict[int, list[ResidualLedger]]) -> Verdict:
    """Checks that the gap between networks and flow falls with the width, at least as width^-1/2."""
    slope, steep = _gap_slope(networks), (-np.inf, SLOPE + BAND)
    for factor in LARGER_STEPS:
        other = _gap_slope(networks, factor)
        if other.outside(*steep):
            break
    statement = "networks: gap of the last round against width, O(l^-1/2) at most"
    return Claim(LEDGER, statement, _sizes(size, networks)).judged(
        (f"slope {slope}", f"<= {SLOPE + BAND:g}", slope.within(*steep)),
        (f"step size x {factor:g}", f"slope {other}", other.outside(*steep)),
        f"step size x {factor:g}",
    )


ENTRIES = (
    TheoremEntry(
        "flow.exact",
        "the exact federated flow: linear models equal it, networks come nearer to it with their width",
        _check_exact,
        papers=("shi2021",),
        statement="the discrete dynamics behind FE-2021, section 9.2",
        functions=(federated_flow,),
        figures=("local_gd.wide_network",),
    ),
    TheoremEntry(
        "flow.centralised",
        "FedAvg of infinitely wide networks beside centralised training with the same number of steps",
        _check_centralised,
        papers=("jian2025",),
        statement="FedAvg generalises as centralised training with the same number of iterations",
        functions=(federated_flow,),
    ),
    TheoremEntry(
        "flow.ledger",
        "the residual ledger: simulated minus predicted residuals during training",
        _check_ledger,
        papers=("shi2021",),
        statement="section 9.4 of FE-2021",
        functions=(ft.theory.federated_flow,),
        is_quick=True,
    ),
)
