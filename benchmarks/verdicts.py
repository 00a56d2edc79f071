"""How often sampled verdicts of ``fedtangent compare`` are right: over many seeds, for a right and for wrong theories.

A small problem with the draws and the ratios of widths of a comparison, whose networks are drawn anew for every seed.
For every verdict: how often the theory is rejected or left undecided, and how often the control is caught; of the right
theory, and of some that are wrong by a little: rates 5 % off, one client missing, covariances 10 % off. The exact
verdicts on the theory's laws, in which nothing is drawn, are taken once. With ``--rung 2`` the theory is the kernel's
features, for FedAvg with clipped updates, which has no closed form. Of n seeds without a rejection the chance of one is
below 3 / n (95 %). A right theory should hold with its control caught; a wrong one should be rejected where it
is off by what the verdict ``notices`` or more, and may hold where it is off by less than the margin: such mistakes are
for the exact verdicts to find.

    python benchmarks/verdicts.py --seeds 100 --output results/bench
    python benchmarks/verdicts.py --seeds 100 --rung 2
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

import fedtangent
from fedtangent._src.comparison.all_verdicts import sampled_verdicts, without_clients, wrong_flows
from fedtangent._src.comparison.cases import ensemble, standard_case
from fedtangent._src.comparison.linear_models import law_verdicts
from fedtangent._src.comparison.on_features import feature_outputs, feature_verdicts, scaled
from fedtangent._src.comparison.predicted import Predicted, predict, starts_of
from fedtangent._src.comparison.rotations import feature_paths
from fedtangent._src.comparison.settings import NTKRuns, Problem, Scale, Setting, step_size
from fedtangent._src.comparison.simulated import Simulated, cohorts, ntk_fl_training, train, trained_networks
from fedtangent._src.comparison.verdicts import Verdict
from fedtangent._src.data import partition
from fedtangent._src.federated import schedule
from fedtangent._src.kernels.features import kernel_features
from fedtangent._src.models import mlp
from fedtangent._src.output.tables import TextTable, console
from fedtangent._src.types import Array, Cohort, Key, PyTree, Schedule

EXAMPLES, POINTS, CLIENTS, INPUTS, NUM_MODELS = 20, 20, 5, 3, 5
AT_ONCE = 100  # draws of the K models that are trained as models of one run


def problem(draws: int) -> Setting:
    """Twenty examples on the sphere, on five unequal clients; networks of 64 to 1024 units."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(EXAMPLES + POINTS, INPUTS))
    x *= np.sqrt(INPUTS) / np.linalg.norm(x, axis=1, keepdims=True)
    y = np.sin(2 * x[:, :1]) + x[:, 1:2]
    clients = partition.quantity_skew(EXAMPLES, CLIENTS, 2.0, 0, min_client_size=2)
    of = Problem(x[:EXAMPLES], y[:EXAMPLES], x[EXAMPLES:], y[EXAMPLES:], clients)
    plan, size = schedule.per_client_permutations(CLIENTS, NUM_MODELS), Scale((64, 256, 1024), draws, 10, 5)
    model = mlp(INPUTS, 1, (64,), "erf", w_std=1.5, b_std=0.1, dtype=jnp.float64)
    return standard_case("small", "small", of, ensemble(of, model, plan, 5), size, 0, NTKRuns((5, 10, 20, 40)))


def of_all_draws(setting: Setting, run: Callable[[Setting], Simulated]) -> Simulated:
    """``run`` of ``setting``, whose draws are models of a few runs: a hundred are trained nearly as fast as one."""
    groups, own = min(AT_ONCE, setting.size.draws), setting.algorithm
    algorithm = ensemble(setting.problem, own.model, in_groups(own.schedule, groups), 5)
    size = setting.size._replace(draws=-(-setting.size.draws // groups))
    together = dataclasses.replace(setting, algorithm=algorithm, size=size)
    seen = run(together)

    def apart(outputs: np.ndarray) -> np.ndarray:
        r, models, runs, *rest = outputs.shape  # models of one draw are neighbours
        each = outputs.reshape(r, groups, models // groups, runs, *rest).transpose(0, 2, 3, 1, 4, 5)
        return each.reshape(r, models // groups, runs * groups, *rest)[:, :, : setting.size.draws]

    info = {}
    if "time" in seen.info:  # [runs, 1, models]
        info["time"] = seen.info["time"].reshape(-1, 1, NUM_MODELS)[: setting.size.draws]
    return seen._replace(train=apart(seen.train), test=apart(seen.test), info=info)


def in_groups(base: Schedule, groups: int) -> Schedule:
    """Every one of ``groups`` groups of K models is trained as ``base`` has its K trained."""

    def sample(key: Key, state: PyTree, round_: Array) -> tuple[Cohort, PyTree]:
        cohort, after = base.sample(key, state, round_)
        each = jax.tree.map(lambda leaf: jnp.tile(leaf, groups), cohort)
        group = jnp.repeat(jnp.arange(groups, dtype=jnp.int32), base.num_slots)
        return each._replace(model=each.model + base.num_models * group), after

    slots = groups * base.num_slots
    return Schedule(groups * base.num_models, base.num_clients, slots, base.init, sample)


def of_seed(every: Simulated, seed: int, draws: int) -> Simulated:
    """The networks of one seed."""
    mine = slice(seed * draws, (seed + 1) * draws)
    info = {name: values[mine] for name, values in every.info.items()}
    return every._replace(train=every.train[:, :, mine], test=every.test[:, :, mine], info=info)


def theories(right: Predicted) -> dict[str, Predicted]:
    """The right one, and some that are wrong by a little."""
    setting, held = right.setting, right.cohorts

    def wrong(changed: Setting, among: Cohort) -> Predicted:
        return dataclasses.replace(predict(changed, among), setting=setting, cohorts=held)

    slower = dataclasses.replace(setting.followed, learning_rate=0.95 * setting.followed.learning_rate)
    more = [law._replace(cov=1.1 * law.cov) for law in right.moments]
    return {
        "right": right,
        "rate 5 % off": wrong(dataclasses.replace(setting, rule=slower), held),
        "one client missing": wrong(setting, without_clients(held, [0])),
        "covariance 10 % off": dataclasses.replace(right, moments=tuple(more)),
    }


def evolved(setting: Setting, width: int) -> Simulated:
    """Every draw of ``setting`` moved by NTK-FL."""
    return train([ntk_fl_training(setting, width, "averaged", setting.size.draws)], progress=True)[0]


def in_closed_form(seeds: int, draws: int) -> Iterator[tuple[str, Verdict]]:
    """Yields every theory's name with a verdict of one seed, for the closed form (rung 3)."""
    setting = problem(seeds * draws)
    right = predict(setting, cohorts(setting))
    every = [of_all_draws(setting, partial(trained_networks, width=w, progress=True)) for w in setting.size.widths]
    moved = [of_all_draws(setting, partial(evolved, width=w)) for w in setting.size.widths]
    for name, theory in theories(right).items():
        wrong = wrong_flows(theory)
        for seed in tqdm(range(seeds), name):
            seen, went = (tuple(of_seed(s, seed, draws) for s in all_of) for all_of in (every, moved))
            own = dataclasses.replace(theory, setting=dataclasses.replace(setting, seed=seed))
            for verdict in sampled_verdicts(own, seen, went, wrong) + (law_verdicts(theory) if seed == 0 else []):
                yield name, verdict


def on_features(seeds: int, draws: int) -> Iterator[tuple[str, Verdict]]:
    """Yields every theory's name with a verdict of one seed, for the features of the kernel (rung 2)."""
    base = problem(seeds * draws)
    model, clipped = base.algorithm.model, fedtangent.Averaging(channel=fedtangent.channels.clip(0.3))
    rate, work = step_size(base.problem, model), fedtangent.Work(steps=5, batch_size=None)
    plan = fedtangent.schedules.uniform_sampling(CLIENTS, 3)
    algorithm = fedtangent.fed_avg(model, plan, rate, work=work, averaging=clipped)
    setting = dataclasses.replace(base, algorithm=algorithm, rule="updates are clipped", ntk_fl=None)
    every = [trained_networks(setting, width, True) for width in setting.size.widths]
    setting = dataclasses.replace(setting, size=setting.size._replace(draws=draws))
    right = kernel_features(setting.blocks(), base.problem.y_train.shape[1])
    paths = feature_paths(algorithm, base.problem.y_train, base.problem.partition, setting.size.rounds)
    of_theories = {
        "right": (right, None),
        "rate 5 % off": (right, 0.95),
        "kernel 10 % off": (scaled(right, 0.9), None),
    }
    for name, (features, factor) in of_theories.items():
        for seed in tqdm(range(seeds), name):
            networks = tuple(of_seed(of_width, seed, draws) for of_width in every)
            predicted = [feature_outputs(paths, features, setting, starts_of(n), factor) for n in networks]
            for verdict in feature_verdicts(setting, paths, right, networks, predicted):
                yield name, verdict


RUNGS = {2: on_features, 3: in_closed_form}


def main() -> None:
    """Run all seeds, print the table and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--draws", type=int, default=48, help="of the K models, at every width (default: %(default)s)")
    parser.add_argument("--rung", type=int, choices=RUNGS, default=3, help="of theory: 2, features; 3, closed form")
    parser.add_argument("--output", type=Path, default=Path("results/bench"))
    arguments = parser.parse_args()
    fedtangent.enable_x64()
    said: dict[tuple[str, str], collections.Counter[str]] = collections.defaultdict(collections.Counter)
    with jax.default_matmul_precision("highest"):
        for name, verdict in RUNGS[arguments.rung](arguments.seeds, arguments.draws):
            counts = said[name, verdict.statement.split(", t = ")[0]]  # the times are chosen by the networks
            counts["of"] += 1
            counts[f"holds {verdict.holds}"] += 1
            counts[f"control {verdict.control_fails}"] += 1
    rows = [
        {
            "theory": theory,
            "verdict": statement,
            "of": counts["of"],
            "holds": counts["holds True"],
            "undecided": counts["holds None"],
            "rejected": counts["holds False"],
            "control caught": counts["control True"],
            "control undecided": counts["control None"],
            "control missed": counts["control False"],
        }
        for (theory, statement), counts in said.items()
    ]
    arguments.output.mkdir(parents=True, exist_ok=True)
    written = {"seeds": arguments.seeds, "draws": arguments.draws, "rows": rows}
    (arguments.output / f"verdicts_{arguments.rung}.json").write_text(json.dumps(written, indent=1))
    title = f"{arguments.seeds} seeds"
    console().print(TextTable(title, tuple(rows[0]), [[str(value) for value in row.values()] for row in rows]))


if __name__ == "__main__":
    main()
