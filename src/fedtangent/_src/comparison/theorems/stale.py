"""Rounds with late answers (FedAsync, FedBuff): the flow of the drawn delays, and the largest stable rates by delay.

"stale.rounds" trains linearised networks, which equal the flow of their delays in every round. "stale.stability" runs a
linear model at rates just below and just above the predicted edge of stability, from 100 random starts each. The rate
at which a run neither grows nor shrinks is interpolated between its growth below and above.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Float64

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
from fedtangent._src.types import Algorithm, Partition, PyTree, Recipe, Schedule

SUBJECT = "late answers (FedAsync, FedBuff)"
SIZES = (4, 2, 7, 3, 5)  # examples of each client, of the networks
LATE: dict[str, tuple[Recipe, Schedule, ft.Staleness]] = {
    "FedBuff, 3 of 5 clients, always 2 rounds late": (
        ft.fed_buff,
        ft.schedules.uniform_sampling(5, 3),
        ft.Staleness(2, discount="hinge", discount_rate=2.0, grace=1),
    ),
    "FedBuff, K = 2, each client with a delay of its own": (
        ft.fed_buff,
        ft.schedules.per_client_permutations(5, 2),
        ft.Staleness((0, 3, 1, 2, 0)),
    ),
    "FedAsync, 1 of 5 clients, 0 to 3 rounds late": (
        ft.fed_async,
        ft.schedules.uniform_sampling(5, 1),
        ft.Staleness(probabilities=ft.faults.delay_probabilities(1.5, 3), mu=0.2),
    ),
}


def _check_rounds(scale: str, seed: int) -> list[Verdict]:
    """Checks that linearised networks equal the flow of the delays that their run drew; near misses must differ."""
    rng, num_rounds, verdicts = np.random.default_rng(seed), of_scale(scale, 12, 60), list[Verdict]()
    x, y = rng.normal(size=(sum(SIZES) + 8, 3)), rng.normal(size=(sum(SIZES) + 8, 2))
    train, test = slice(0, sum(SIZES)), slice(sum(SIZES), None)
    model = ft.models.mlp(3, 2, (8,), "erf", dtype=jnp.float64)
    work, averaging = ft.Work(steps=4, batch_size=3), ft.Averaging(server_learning_rate=0.7)
    for name, (recipe, schedule, staleness) in LATE.items():
        algorithm = recipe(model, schedule, 0.2, work, staleness=staleness, averaging=averaging)
        examples = examples_of(algorithm, (x[train], y[train], x[test], y[test]), consecutive(SIZES))
        setting = setting_of(algorithm, examples, Scale((1,), 1, num_rounds, 1), seed)
        verdict = linearised_verdict(setting, cohorts(setting))
        statement = f"linearised network = flow of its delays, every round: {name}"
        verdicts.append(verdict._replace(subject=SUBJECT, statement=statement, sizes=f"{num_rounds} rounds"))
    return verdicts


MOST, FEATURES, STEPS = 4, 3, 2  # the largest delay; weights of the linear model; local steps
SIDE, LONG = 0.02, 800  # distance of the rates from the edge, and rounds, at fixed delays
WIDE_SIDE, SHORT = 0.1, 80  # the same at random delays, whose mean squares are soon of few runs
FIXED_BAND, RANDOM_BAND = (0.98, 1.02), (0.9, 1.1)  # of slopes
RESAMPLED = 400  # sets of runs


class Federation(NamedTuple):
    """Examples ``y = x w`` of clients that all take part in every round, without noise, and the clients' rate."""

    x: Float64[np.ndarray, "n d"]
    w: Float64[np.ndarray, "d 1"]
    clients: Partition
    rate: float

    def flow(self, algorithm: str, delay: int, ages: int | None = None) -> Flow:
        """Returns the flow of a round with the constant delay ``delay`` and room for the delays below ``ages``."""
        kernel, schedule = self.x @ self.x.T, ft.schedules.all_clients(self.clients.num_clients)
        weights = np.ones(delay + 1 if ages is None else ages)
        rule = ft.theory.Rule(STEPS, self.rate, algorithm=algorithm, delays=delay, delay_weights=weights)
        drawn = ft.schedules.drawn_cohorts(schedule, self.clients, 1)
        return federated_flow(KernelBlocks(kernel, kernel), self.x @ self.w, self.clients, drawn, rule)

    def edge(self, law: Float64[np.ndarray, "ages"]) -> float:
        """Returns the largest stable server rate of FedBuff, in mean square, for a law of the delays."""
        return self.flow("fed_buff", 0, len(law)).largest_stable_server_rate(law)

    def distances(
        self,
        recipe: Recipe,
        law: Float64[np.ndarray, "ages"],
        rates: Sequence[tuple[float, float]],
        num_rounds: int,
        seeds: Sequence[int],
    ) -> Float[np.ndarray, "seeds rates 5"]:
        """Runs the algorithm; returns the log distance of its last models from w at every quarter of the run.

        Args:
            recipe: ``fed_async`` or ``fed_buff``.
            law: Probabilities of the delays, the same for all clients.
            rates: Server and client rate of each run.
            num_rounds: Rounds of a run.
            seeds: Seeds, which draw starts and delays.
        """
        model = ft.models.linear(FEATURES, sigma=1.0, dtype=jnp.float64)
        schedule, work = ft.schedules.all_clients(self.clients.num_clients), ft.Work(steps=STEPS, batch_size=None)
        staleness = ft.Staleness(probabilities=law, discount="constant")

        def build(server: float, client: float) -> Algorithm:
            averaging = ft.Averaging(server_learning_rate=server)
            return recipe(model, schedule, client, work, staleness=staleness, averaging=averaging)

        def distance(algorithm: Algorithm, state: PyTree) -> dict[str, jax.Array]:
            return {"distance": jnp.log(jnp.linalg.norm(jax.tree.leaves(state.server)[0] - self.w))}

        data = ft.data.federated_data(self.x, self.x @ self.w, self.clients, dtype=jnp.float64)
        every, found = ft.Evaluation(num_rounds // 4, distance), list[np.ndarray]()
        for server, client in rates:
            grid = {"server": [float(server)], "client": [float(client)]}
            devices = ft.Devices("vmap", "vmap")
            runs = ft.sweep(
                build, data, num_rounds=num_rounds, seeds=seeds, grid=grid, evaluation=every, devices=devices
            )
            found.append(runs.metrics["distance"][:, 0])
        return np.stack(found, axis=1)


def _federation(num_clients: int, examples: int, seed: int) -> Federation:
    """Draws the examples; the clients' rate is half of the rate at which the steepest client is stable."""
    rng, clients = np.random.default_rng(seed), consecutive([examples] * num_clients)
    x, w = rng.normal(size=(num_clients * examples, FEATURES)), rng.normal(size=(FEATURES, 1))
    steepest = max(np.linalg.norm(x[clients.client(i)], 2) ** 2 for i in range(num_clients)) / examples
    return Federation(x, w, clients, 1 / steepest)


def _always(delay: int) -> Float64[np.ndarray, "ages"]:
    """Returns the law of a constant delay."""
    return np.eye(delay + 1)[delay]


def _crossed(growth: Float[np.ndarray, "*runs 2"], side: float) -> Float[np.ndarray, "*runs"]:
    """Interpolates the rate of growth 0, relative to the edge, from the growth below and above it."""
    below, above = np.log(1 - side), np.log(1 + side)
    share = -growth[..., 0] / (growth[..., 1] - growth[..., 0])
    return np.asarray(np.exp(below + share * (above - below)))


def _sides(edge: float, side: float, client: float) -> list[tuple[float, float]]:
    return [((1 - side) * edge, client), ((1 + side) * edge, client)]


def _grows(distances: Float[np.ndarray, "runs rates 5"]) -> Float[np.ndarray, "runs rates"]:
    """Returns the growth of every run in its second half."""
    return np.asarray(distances[..., -1] - distances[..., 2])


def _fixed(federation: Federation, seeds: Sequence[int]) -> list[Verdict]:
    """Checks the edges of constant delays: their slope, and that runs grow above and shrink below."""
    edges = np.array([federation.edge(_always(delay)) for delay in range(MOST + 2)])
    growth = [
        _grows(federation.distances(ft.fed_buff, _always(delay), _sides(edge, SIDE, federation.rate), LONG, seeds))
        for delay, edge in enumerate(edges[:-1])
    ]
    simulated = [edge * _crossed(of_runs, SIDE) for edge, of_runs in zip(edges, growth, strict=False)]
    slope, wrong = width_slope(edges[:-1], simulated), width_slope(edges[1:], simulated)
    sizes = f"delays 0 to {MOST}, {len(seeds)} runs per side"
    worst = max(float(np.max(np.abs(runs / edge - 1))) for runs, edge in zip(simulated, edges, strict=False))
    claim = Claim(SUBJECT, "FedBuff, constant delays: slope of simulated edges over predicted ones", sizes)
    first = claim.between(
        slope, ("delays one round longer", wrong), FIXED_BAND, f"1 +- {SIDE:g}", f"an edge off by {worst:.1%}"
    )
    below, above = (int(sum(np.sum(g[:, side] > 0) for g in growth)) for side in (0, 1))
    without = [(1 - SIDE) * edges[0], federation.rate]
    late = [_grows(federation.distances(ft.fed_buff, _always(d), [tuple(without)], 40, seeds)) for d in (1, MOST)]
    control = int(sum(np.sum(g > 0) for g in late))
    total = (MOST + 1) * len(seeds)
    second = Claim(SUBJECT, f"FedBuff, constant delays: runs {SIDE:.0%} below and above the edge", sizes).judged(
        (f"{below} of {total} grow below, {above} above", "none and all", below == 0 and above == total),
        (f"{SIDE:.0%} below the edge without delay", f"{control} of {2 * len(seeds)} grow", control > 0),
        f"an edge off by {SIDE:.0%}",
    )
    return [first, second]


def _random(federation: Federation, seeds: Sequence[int]) -> Verdict:
    """Checks the edges, in mean square, of delays that every client draws in every round from 0 to D."""
    laws = [np.full(most + 1, 1 / (most + 1)) for most in range(1, MOST + 1)]
    edges = np.array([federation.edge(law) for law in laws])
    latest = np.array([federation.edge(_always(len(law) - 1)) for law in laws])
    squares = [
        np.exp(2 * federation.distances(ft.fed_buff, law, _sides(edge, WIDE_SIDE, federation.rate), SHORT, seeds))
        for law, edge in zip(laws, edges, strict=True)
    ]

    def simulated(rows: np.ndarray) -> np.ndarray:
        means = [np.log(np.mean(of_law[rows], axis=0)) for of_law in squares]
        return np.array([edge * _crossed(m[:, -1] - m[:, 1], WIDE_SIDE) for edge, m in zip(edges, means, strict=True)])

    rng, count = np.random.default_rng(0), len(seeds)
    drawn = [simulated(rng.integers(0, count, count)) for _ in range(RESAMPLED)]
    estimate, wrong = (
        Interval(
            log_slope(of, simulated(np.arange(count))), *np.quantile([log_slope(of, d) for d in drawn], (0.025, 0.975))
        )
        for of in (edges, latest)
    )
    sizes = f"D = 1 to {MOST}, {federation.clients.num_clients} clients, {count} runs per side"
    ratios = simulated(np.arange(count)) / edges
    return Claim(SUBJECT, "FedBuff, delays drawn from 0 to D: slope of edges in mean square", sizes).between(
        estimate,
        ("every answer D rounds late", wrong),
        RANDOM_BAND,
        f"{RANDOM_BAND[0]:g} to {RANDOM_BAND[1]:g}",
        f"edges {ratios.min():.2f} to {ratios.max():.2f} of the predicted ones",
    )


def _mixing(federation: Federation, seeds: Sequence[int]) -> Verdict:
    """Checks that FedAsync at server rate 1 loses stability at the same rate of the clients, whatever the delay."""
    growth = {}
    for recipe in (ft.fed_async, ft.fed_buff):
        for delay in range(0, MOST + 1, 2):
            edge = federation.flow("fed_async", delay).largest_stable_learning_rate()
            sides = [(1.0, (1 - SIDE) * edge), (1.0, (1 + SIDE) * edge)]
            growth[recipe, delay] = _grows(federation.distances(recipe, _always(delay), sides, LONG, seeds))
    mixed = np.stack([of_runs for (recipe, _), of_runs in growth.items() if recipe is ft.fed_async])
    below, above, total = int(np.sum(mixed[..., 0] > 0)), int(np.sum(mixed[..., 1] > 0)), mixed[..., 0].size
    added = growth[ft.fed_buff, MOST][:, 0]
    sizes = f"delays 0, 2, {MOST}, {len(seeds)} runs per side"
    return Claim(SUBJECT, "FedAsync: runs below and above the clients' edge, which no delay moves", sizes).judged(
        (f"{below} of {total} grow below, {above} above", "none and all", below == 0 and above == total),
        ("updates added (FedBuff)", f"{np.sum(~(added <= 0))} of {len(seeds)} grow below", bool(np.all(~(added <= 0)))),
        f"an edge off by {SIDE:.0%}",
    )


def _check_stability(scale: str, seed: int) -> list[Verdict]:
    """Checks the largest stable rates against the delay."""
    runs = of_scale(scale, 100, 1000)
    seeds = ((np.arange(runs) + seed * runs) % 2**32).tolist()
    few, many = _federation(4, 8, seed), _federation(16, 4, seed)
    return [*_fixed(few, seeds), _random(many, seeds), _mixing(few, seeds)]


ENTRIES = (
    TheoremEntry(
        "stale.rounds",
        "late answers: linearised networks equal the flow of the delays that their run drew",
        _check_rounds,
        papers=("xie2019", "nguyen2022"),
        statement="algorithm 1 of FedAsync and of FedBuff",
        functions=(federated_flow,),
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
