"""Checks of FedAsync and FedBuff, whose answers may be late: the flow of given delays, and the largest stable rates.

"stale.rounds" trains linearised networks, which equal the flow of the same delays in every round. "stale.stability"
runs a linear model at learning rates just below and just above the predicted edge of stability, from many random starts
each. The rate at which the distance from the solution neither grows nor shrinks is interpolated between the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float64

import fedtangent as ft
from fedtangent._src.comparison.followed import setting_of
from fedtangent._src.comparison.linear_models import linearised_verdict
from fedtangent._src.comparison.settings import Scale
from fedtangent._src.comparison.simulated import cohorts
from fedtangent._src.comparison.statistics import log_slope, width_slope
from fedtangent._src.comparison.theorems import Claim, TheoremEntry, of_scale
from fedtangent._src.comparison.verdicts import Verdict
from fedtangent._src.data.partition.given import consecutive
from fedtangent._src.engine.run import examples_of
from fedtangent._src.intervals import Interval
from fedtangent._src.kernels.gram import KernelBlocks
from fedtangent._src.theory.flow.build import federated_flow
from fedtangent._src.theory.flow.flow import Flow
from fedtangent._src.types import Algorithm, Partition, PyTree, Schedule

SUBJECT = "late answers (FedAsync, FedBuff)"
SIZES = (4, 2, 7, 3, 5)  # examples of each client, of the networks
LATE: dict[str, tuple[Schedule, ft.Staleness]] = {
    "FedBuff, K = 2, each client with another delay": (
        ft.schedules.per_client_permutations(5, 2),
        ft.Staleness((0, 3, 1, 2, 0), buffered=True, discount="hinge", discount_rate=2.0, grace=1),
    ),
    "FedAsync, 1 of 5 clients, 0 to 3 rounds late": (
        ft.schedules.uniform_sampling(5, 1),
        ft.Staleness(probabilities=(0.5, 0.25, 0.15, 0.1), mu=0.2),
    ),
}


def _check_rounds(scale: str, seed: int) -> list[Verdict]:
    """Checks that linearised networks, trained with late answers, equal the flow with the delays that their run drew.

    There is a verdict for FedBuff and one for FedAsync. Slightly wrong flows are the controls, and must fail.
    """
    rng, num_rounds, verdicts = np.random.default_rng(seed), of_scale(scale, 12, 60), list[Verdict]()
    x, y = rng.normal(size=(sum(SIZES) + 8, 3)), rng.normal(size=(sum(SIZES) + 8, 2))
    train, test = slice(0, sum(SIZES)), slice(sum(SIZES), None)
    model = ft.models.mlp(3, 2, (8,), "erf", dtype=jnp.float64)
    work, averaging = ft.Work(steps=4, batch_size=3), ft.Averaging(server_learning_rate=0.7)
    for name, (schedule, staleness) in LATE.items():
        algorithm = ft.fed_async(model, schedule, 0.2, work, staleness, averaging=averaging)
        examples = examples_of(algorithm, (x[train], y[train], x[test], y[test]), consecutive(SIZES))
        setting = setting_of(algorithm, examples, Scale((1,), 1, num_rounds, 1), seed)
        verdict = linearised_verdict(setting, cohorts(setting))
        statement = f"linearised network = flow of its delays, every round: {name}"
        verdicts.append(verdict._replace(subject=SUBJECT, statement=statement, sizes=f"{num_rounds} rounds"))
    return verdicts


MOST, FEATURES, STEPS = 4, 3, 2  # the largest delay; weights of the linear model; local steps
SIDE, LONG = 0.02, 480  # distance of the rates from the edge; rounds for each round of delay, few enough for rounding
WIDE_SIDE, SHORT = 0.1, 80  # the same at random delays, whose mean square soon comes from a few runs
BAND, RANDOM_BAND = (0.98, 1.02), (0.9, 1.1)  # of slopes
RESAMPLED = 400  # sets of runs


class Federation(NamedTuple):
    """Examples ``y = x w`` of clients that all take part in every round, and the clients' learning rate ``rate``.

    ``w`` are the true weights, the solution to which training tends.
    """

    x: Float64[np.ndarray, "n d"]
    w: Float64[np.ndarray, "d 1"]
    clients: Partition
    rate: float

    def flow(self, algorithm: str, ages: int) -> Flow:
        """Returns the flow of one round in which all answers have the largest possible delay, ``ages - 1`` rounds.

        Args:
            algorithm: Name of the algorithm in the ``Rule``: "fed_async" or "fed_buff".
            ages: Number of possible delays.
        """
        rule = ft.theory.Rule(STEPS, self.rate, algorithm=algorithm, delays=ages - 1, delay_weights=np.ones(ages))
        kernel, schedule = self.x @ self.x.T, ft.schedules.all_clients(self.clients.num_clients)
        cohorts = ft.schedules.drawn_cohorts(schedule, self.clients, 1)
        return federated_flow(KernelBlocks(kernel, kernel), self.x @ self.w, self.clients, cohorts, rule)

    def distances(
        self, staleness: ft.Staleness, rates: tuple[float, float], side: float, num_rounds: int, seeds: Sequence[int]
    ) -> Float64[np.ndarray, "seeds 2 5"]:
        """Trains at a rate below and at one above a given rate, and measures distances of the weights from the true w.

        The varied rate is the server's if answers are buffered (FedBuff), else the clients' (FedAsync).

        Args:
            staleness: Delays of the answers, and whether the answers are ``buffered``.
            rates: Server and client learning rate; the varied one is multiplied by ``1 - side`` and ``1 + side``.
            side: Relative change of the varied rate.
            num_rounds: Rounds of a run.
            seeds: Seeds of the runs, which draw their starts and delays.

        Returns:
            Logarithms of the distances by seed, rate and time: at the start and after each quarter of the rounds.
        """
        model = ft.models.linear(FEATURES, sigma=1.0, dtype=jnp.float64)
        schedule, work = ft.schedules.all_clients(self.clients.num_clients), ft.Work(steps=STEPS, batch_size=None)

        def build(factor: float | jax.Array) -> Algorithm:
            server, client = (factor, 1.0) if staleness.buffered else (1.0, factor)
            averaging = ft.Averaging(server_learning_rate=server * rates[0])
            return ft.fed_async(model, schedule, client * rates[1], work, staleness, averaging=averaging)

        def distance(algorithm: Algorithm, state: PyTree) -> dict[str, jax.Array]:
            weights = jax.tree.leaves(state.server)[0]
            return {"distance": jnp.log(jnp.linalg.norm(weights - jnp.broadcast_to(self.w, weights.shape)))}

        data = ft.data.federated_data(self.x, self.x @ self.w, self.clients, dtype=jnp.float64)
        run = partial(ft.sweep, build, data, num_rounds=num_rounds, seeds=seeds, devices=ft.Devices("vmap", "vmap"))
        grid, look = {"factor": [1 - side, 1 + side]}, ft.Evaluation(num_rounds // 4, distance)
        return run(grid=grid, evaluation=look).metrics["distance"]


def _federation(num_clients: int, examples: int, seed: int) -> Federation:
    """Draws a federation whose clients have ``examples`` examples each.

    The clients' rate is half of the largest at which every client's local steps are stable.
    """
    rng, clients = np.random.default_rng(seed), consecutive([examples] * num_clients)
    x, w = rng.normal(size=(num_clients * examples, FEATURES)), rng.normal(size=(FEATURES, 1))
    steepest = max(np.linalg.norm(x[clients.client(i)], 2) ** 2 for i in range(num_clients)) / examples
    return Federation(x, w, clients, float(1 / steepest))


def _crossed(growth: Float64[np.ndarray, "*runs 2"], side: float) -> Float64[np.ndarray, "*runs"]:
    """Interpolates the rate at which the distance from the solution, of a run or a mean of runs, does not change.

    The unit is the predicted edge of stability. ``growth`` is the increase of the log distance (or of the log of a mean
    squared distance) at ``1 - side`` and at ``1 + side`` times the edge; it is interpolated in the log of the rate.
    """
    below, above = np.log(1 - side), np.log(1 + side)
    share = -growth[..., 0] / (growth[..., 1] - growth[..., 0])
    return np.asarray(np.exp(below + share * (above - below)))


def _constant(of: Federation, seeds: Sequence[int]) -> list[Verdict]:
    """Checks the largest stable rates under constant delays of 0 to 4 rounds, run by run.

    They are FedBuff's server rate, and FedAsync's client rate, which is the same at all delays. ``of`` has the clients
    and their examples, ``seeds`` one seed for each run.
    """
    added = np.array([of.flow("fed_buff", d + 1).largest_stable_server_rate(np.eye(d + 1)[d]) for d in range(MOST + 2)])
    mixed, wrong = (
        np.array([of.flow(algorithm, d + 1).largest_stable_learning_rate() for d in range(MOST + 1)])
        for algorithm in ("fed_async", "fed_buff")
    )

    def simulated(buffered: bool, delay: int) -> np.ndarray:
        """Returns each run's largest stable rate: FedBuff's server rate if ``buffered``, or FedAsync's client rate."""
        staleness = ft.Staleness(delay, buffered=buffered, discount="constant")
        rates = (float(added[delay]), of.rate) if buffered else (1.0, float(mixed[delay]))
        distances = of.distances(staleness, rates, SIDE, LONG * (delay + 1), seeds)  # the later, the slower
        crossed = _crossed(distances[..., -1] - distances[..., 1], SIDE)
        return crossed * (added if buffered else mixed)[delay]

    def off(edges: list[np.ndarray], predicted: np.ndarray) -> float:
        """Returns the largest relative distance of runs' stable rates from predicted ones, in units of 2 % (``SIDE``).

        ``edges`` has the rates of all runs for each delay, ``predicted`` one rate for each delay.
        """
        return max(float(np.max(np.abs(of_runs / p - 1))) for of_runs, p in zip(edges, predicted, strict=True)) / SIDE

    of_buff, of_async = ([simulated(buffered, d) for d in range(MOST + 1)] for buffered in (True, False))
    slope, late = width_slope(added[:-1], of_buff), width_slope(added[1:], of_buff)
    sizes, grows = f"delays 0 to {MOST}, {len(seeds)} runs per side", f"every run grows only above it (+- {SIDE:.0%})"
    statements = f"FedBuff's server rate: {grows}", f"FedAsync's client rate, the same at all delays: {grows}"
    return [
        Claim(SUBJECT, "FedBuff, constant delays: slope of simulated edges over predicted ones", sizes).between(
            slope, ("delays one round longer", late), BAND, f"{BAND[0]:g} to {BAND[1]:g}", f"a slope off by {SIDE:.0%}"
        ),
        Claim(SUBJECT, statements[0], sizes).bounded(
            off(of_buff, added[:-1]), "edge without delay", off(of_buff, np.full_like(mixed, added[0]))
        ),
        Claim(SUBJECT, statements[1], sizes).bounded(
            off(of_async, np.full_like(mixed, mixed[0])), "edge of FedBuff", off(of_async, wrong)
        ),
    ]


def _random(of: Federation, seeds: Sequence[int]) -> Verdict:
    """Checks the largest server rate of FedBuff at which the mean squared distance from the solution does not grow.

    The mean is over runs; the measured rates must be proportional to the predicted ones (the slope of their logarithms
    is 1). Each client of ``of`` draws a delay from 0 to D rounds in every round; D is 1 to 4 (``MOST``).
    """
    laws = [np.full(most + 1, 1 / (most + 1)) for most in range(1, MOST + 1)]
    edges, latest = (
        np.array([of.flow("fed_buff", len(law)).largest_stable_server_rate(p) for law, p in pairs])
        for pairs in ([(law, law) for law in laws], [(law, np.eye(len(law))[-1]) for law in laws])
    )
    squares = []
    for law, edge in zip(laws, edges, strict=True):
        staleness = ft.Staleness(probabilities=law, buffered=True, discount="constant")
        squares.append(np.exp(2 * of.distances(staleness, (float(edge), of.rate), WIDE_SIDE, SHORT, seeds)))

    def simulated(rows: np.ndarray) -> np.ndarray:
        means = np.log([of_law[rows].mean(axis=0) for of_law in squares])
        return edges * _crossed(means[..., -1] - means[..., 1], WIDE_SIDE)

    rng, count = np.random.default_rng(0), len(seeds)
    measured = simulated(np.arange(count))
    resampled = [simulated(rng.integers(0, count, count)) for _ in range(RESAMPLED)]
    slope, late = (
        Interval(log_slope(x, measured), *np.quantile([log_slope(x, y) for y in resampled], (0.025, 0.975)))
        for x in (edges, latest)
    )
    sizes = f"D = 1 to {MOST}, {of.clients.num_clients} clients, {count} runs per side"
    ratios = measured / edges
    notices = (
        f"a slope off by {RANDOM_BAND[1] - 1:.0%}; edges {ratios.min():.2f} to {ratios.max():.2f} of the predicted"
    )
    return Claim(SUBJECT, "FedBuff, delays drawn from 0 to D: slope of edges in mean square", sizes).between(
        slope, ("every answer D rounds late", late), RANDOM_BAND, f"{RANDOM_BAND[0]:g} to {RANDOM_BAND[1]:g}", notices
    )


def _check_stability(scale: str, seed: int) -> list[Verdict]:
    """Checks how the largest stable learning rates of FedBuff and FedAsync depend on the delay."""
    runs = of_scale(scale, 100, 1000)
    seeds = ((np.arange(runs) + seed * runs) % 2**32).tolist()
    return [*_constant(_federation(4, 8, seed), seeds), _random(_federation(16, 4, seed), seeds)]


ENTRIES = (
    TheoremEntry(
        "stale.rounds",
        "late answers: linearised networks equal the flow of the delays that their run drew",
        _check_rounds,
        papers=("xie2019", "nguyen2022"),
        statement="algorithm 1 of FedAsync and of FedBuff",
        functions=(federated_flow,),
        is_quick=True,
    ),
    TheoremEntry(
        "stale.stability",
        "late answers: the largest stable rates against the delay, fixed and random",
        _check_stability,
        papers=("xie2019", "nguyen2022"),
        statement="stability of the delayed flow",
        functions=(federated_flow,),
    ),
)
