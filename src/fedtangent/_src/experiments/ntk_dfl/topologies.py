"""NTK-DFL beside gossip averaging on four graphs, and beside NTK-FL with its server (Thompson et al., 2025).

All methods start from the same network and have the same clients. The model that counts has the mean of the clients'
weights, as in the paper; beside it stands the mean accuracy of the clients' own models.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import fedtangent as ft
from fedtangent._src.experiments import lab
from fedtangent._src.experiments.lab import harness, trials
from fedtangent._src.experiments.lab.harness import Bench, EvaluationSets, Method, Record, Runs, Steps
from fedtangent._src.experiments.lab.runner import Study, by_scale, experiment, with_changes, within
from fedtangent._src.experiments.lab.trials import Trial
from fedtangent._src.federated.graph import Graph, named_graph
from fedtangent._src.output.run_plots import curves
from fedtangent._src.types import Algorithm, Array, PyTree, Recipe, Schedule

SERVER, NTK, GOSSIP = "ntk_fl", "ntk_dfl", "gossip"
LABELS = {SERVER: "NTK-FL", NTK: "NTK-DFL", GOSSIP: "gossip averaging"}
MEAN, CLIENTS = "test.accuracy", "test.accuracy_of_clients"
MIB = 2**20
DECISIVE = "graphs graph_seed width last_w_std batch_size loss times"
REMARKS = (
    "graphs stay the same in all rounds; the paper draws a new one in every round",
    "the clients' own accuracy is the mean over their models on the whole test set",
)


@dataclass(frozen=True)
class TopologySettings:
    """Clients, graphs, network and the methods' hyper-parameters."""

    graphs: tuple[str, ...] = ("ring", "torus", "erdos_renyi:0.3", "complete")
    graph_seed: int = within(0, least=0)
    num_clients: int = 16
    alpha: float = within(0.1, above=0)
    num_rounds: int = 15
    target: float = within(0.8, above=0, below=1)  # test accuracy to reach
    width: int = 100
    last_w_std: float = within(0.1, at_least=0)  # last layer's initial deviation times sqrt(width)
    batch_size: int = 25
    local_steps: tuple[int, ...] = within((5, 20), increasing=True)
    learning_rates: tuple[float, ...] = within((0.03, 0.1, 0.3, 1.0), above=0)
    tangent_rates: tuple[float, ...] = within((0.03, 0.1, 0.3), above=0)
    times: tuple[int, ...] = within((100, 200, 400, 800, 1400, 2000), increasing=True)
    loss: str = within("squared_error", of=("squared_error", "cross_entropy"))  # of NTK-FL and NTK-DFL
    tuning_rounds: int = 5
    tuning_seed: int = within(1000, least=0)
    num_train: int = 800
    num_validation: int = 200
    num_test: int = within(0, least=0)


def _divide(name: str, data_dir: Path | None, seed: int, settings: TopologySettings) -> Trial:
    """Divides the data of one seed among clients by label skew; pixels are standardised."""
    loaded = ft.data.load(name, data_dir=data_dir, seed=seed, flatten=True)
    examples = trials.draw(loaded, seed, settings.num_train, settings.num_validation, settings.num_test)
    mean, deviation = np.float32(loaded.x_train.mean()), np.float32(loaded.x_train.std())
    x = {part: (values - mean) / deviation for part, values in examples.x.items()}
    clients = ft.partition.dirichlet(examples.y["train"], settings.num_clients, settings.alpha, seed)
    return trials.trial_of(examples._replace(x=x), clients, seed, loaded.num_classes)


def _graph(text: str, settings: TopologySettings) -> Graph:
    return named_graph(text, settings.num_clients, settings.graph_seed)


def methods_of(settings: TopologySettings, trial: Trial) -> dict[str, Method]:
    """Returns NTK-FL, and both other methods on every graph, on one seed's data.

    Args:
        settings: The settings.
        trial: Data and clients of the seed.
    """
    count, size = settings.num_clients, int(np.prod(trial.data.x.shape[1:]))
    network = {"parameterization": "standard", "b_std": 0.0, "last_w_std": settings.last_w_std}
    model = ft.models.mlp(size, trial.num_classes, (settings.width,), **network)
    evolution = ft.Evolution(settings.times, unstable="clip", loss=settings.loss)
    targets, sizes = trials.one_hot(trial), np.diff(np.asarray(trial.data.offsets))

    def evolving(recipe: Recipe, schedule: Schedule, pooled: np.ndarray) -> Method:
        # room for the largest pool, rounded up, so that seeds whose pools are of similar size share a program
        pool = -(-int((pooled @ sizes).max()) // 8) * 8

        def build(steps: Steps, rate: float | Array) -> Algorithm:
            return recipe(model, schedule, rate, evolution=evolution, pooling=ft.Pooling(pool_size=pool))

        return Method(LABELS[recipe.__name__], settings.tangent_rates, (0,), build, targets, trial.splits, pool)

    def gossiping(graph: Graph) -> Method:
        def build(steps: Steps, rate: float | Array) -> Algorithm:
            own, work = ft.schedules.own_models(count), ft.Work(steps, batch_size=settings.batch_size)
            return ft.gossip(model, own, rate, work, ft.Mixing(graph), "cross_entropy")

        grids = settings.learning_rates, settings.local_steps
        return Method(LABELS[GOSSIP], *grids, build, trial.data, trial.splits)

    methods = {SERVER: evolving(ft.ntk_fl, ft.schedules.all_clients(count), np.ones((1, count)))}
    for text in settings.graphs:
        graph = _graph(text, settings)
        near = graph.adjacency | np.eye(count, dtype=bool)
        methods[_name(NTK, text)] = evolving(ft.ntk_dfl, ft.schedules.neighbourhoods(graph), near)
        methods[_name(GOSSIP, text)] = gossiping(graph)
    return methods


def _name(method: str, graph: str) -> str:
    """Returns the name of a method on a graph; NTK-FL has none."""
    return method if method == SERVER else f"{method}-{graph.replace(':', '')}"


def measure(algorithm: Algorithm, state: PyTree, splits: EvaluationSets) -> dict[str, Array]:
    """Computes the accuracy of the network of mean weights, and the mean accuracy of the models.

    Args:
        algorithm: The algorithm.
        state: State of its run.
        splits: Inputs and labels of each split.
    """
    read = algorithm.params
    assert read is not None
    mean, metrics = jax.tree.map(lambda leaf: leaf.mean(axis=0), read(state)), dict[str, Array]()
    for name, (x, labels) in splits.items():
        members = algorithm.predict(state, x).members
        of_clients = jnp.stack([harness.finite_accuracy(one[None], labels) for one in members])
        metrics[f"{name}.accuracy"] = harness.finite_accuracy(algorithm.model.apply(mean, x)[None], labels)
        metrics[f"{name}.accuracy_of_clients"] = of_clients.mean()
    return metrics


# ---- what is reported ---------------------------------------------------------------------------------------------


def _last(records: Sequence[Record], metric: str = MEAN) -> np.ndarray:
    """Returns a metric after the last round, for each seed."""
    return np.array([record.metrics[metric][-1] for record in records], np.float64)


def _reached(records: Sequence[Record], target: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns the first round with the target accuracy, one after the last if never, and MiB until it, [seeds] each."""
    first = [int(np.argmax(np.append(record.test, 1.0) >= target)) for record in records]
    sent = [np.append(record.sent.sum(axis=1), np.inf)[at] / MIB for record, at in zip(records, first, strict=True)]
    return np.array(first, np.float64), np.array(sent)


def _at_bytes(records: Sequence[Record], budgets: Sequence[float]) -> list[float]:
    """Returns the accuracy after the last round within each seed's budget of bytes."""
    within_budget = [
        record.test[record.sent.sum(axis=1) <= budget][-1] for record, budget in zip(records, budgets, strict=True)
    ]
    return [float(value) for value in within_budget]


def _row(runs: Runs, settings: TopologySettings, method: str, graph: str) -> lab.Row:
    """Returns what is reported of a method on a graph; NTK-FL stands beside the methods on every graph."""
    records, other = runs[_name(method, graph)], runs[_name(GOSSIP, graph)]
    accuracy, (rounds, mib) = _last(records), _reached(records, settings.target)
    lead = None if method == GOSSIP else lab.interval(accuracy - _last(other))
    row: lab.Row = {"graph": graph, "method": LABELS[method], "accuracy": accuracy.mean(), "lead": lead}
    row["clients"] = _last(records, CLIENTS).mean()
    row["reached"] = int(np.sum(rounds <= settings.num_rounds))
    row["rounds"], row["mib"] = (None, None) if row["reached"] < len(records) else (rounds.mean(), mib.mean())
    row["mib_a_round"] = np.mean([record.sent[1].sum() - record.sent[0].sum() for record in records]) / MIB
    row["at_bytes"] = float(np.mean(_at_bytes(records, [float(record.sent[-1].sum()) for record in other])))
    return {**row, "seeds": accuracy.tolist()}


def _claims(runs: Runs, settings: TopologySettings) -> Iterator[lab.Claim]:
    """Judges NTK-DFL beside gossip averaging, its clients' own models and NTK-FL, on every graph."""
    rounds = settings.num_rounds
    for graph in settings.graphs:
        ours, gossip = (runs[_name(method, graph)] for method in (NTK, GOSSIP))
        lead = lab.interval(_last(ours) - _last(gossip))
        yield lead.claim_above(f"{graph}: NTK-DFL is above gossip averaging after {rounds} rounds", "by {:+.4f}")
        sooner = lab.interval(_reached(gossip, settings.target)[0] / _reached(ours, settings.target)[0])
        yield sooner.claim_above(
            f"{graph}: NTK-DFL reaches {settings.target:.0%} in fewer rounds than gossip averaging (the paper: 4.6 times)",
            "{:.2f} times, where never counts as " + str(rounds + 1),
            1.0,
        )
        gain = lab.interval(_last(ours) - _last(ours, CLIENTS))
        yield gain.claim_above(
            f"{graph}: the mean of the weights is at least 0.1 above the clients' own models", "{:+.4f}", 0.1
        )
        behind = lab.interval(_last(ours) - _last(runs[SERVER]))
        yield behind.claim_above(f"ours: {graph}: NTK-DFL is within 0.02 of NTK-FL", "{:+.4f} from it", -0.02)
        at_bytes = _at_bytes(ours, [float(record.sent[-1].sum()) for record in gossip])
        fair = lab.interval(np.array(at_bytes) - _last(gossip))
        yield fair.claim_above(f"ours: {graph}: NTK-DFL is above gossip averaging after as many bytes", "by {:+.4f}")


COLUMNS = (
    "graph: {graph} | method: {method} | accuracy: {accuracy:.4f} | minus gossip, 95 % interval: {lead:+.4f} | "
    "clients' own models: {clients:.4f} | seeds at the target: {reached:d} | rounds to it: {rounds:.1f} | "
    "MiB to it: {mib:.2f} | MiB a round: {mib_a_round:.2f} | accuracy after gossip's bytes: {at_bytes:.4f}"
)


def run(study: Study) -> lab.Outcome:
    """Tunes and runs every method on every graph with every seed."""
    settings, bench = study.settings, bench_of(study)
    harness.plan(bench)
    tuned = harness.tune_all(bench)
    runs = harness.repeat_all(bench, tuned)
    rows = [_row(runs, settings, method, graph) for graph in settings.graphs for method in LABELS]
    title = f"test accuracy on {study.dataset} after {settings.num_rounds} rounds, mean of {len(study.seeds)} seeds"
    panels = {
        graph: harness.by_round({LABELS[method]: runs[_name(method, graph)] for method in LABELS})
        for graph in settings.graphs
    }
    curves(panels, range(settings.num_rounds + 1), title, study.figures.path("by_round"))
    at_edge = harness.edges({name: choice for name, choice in tuned.items()})
    loss = f"NTK-FL and NTK-DFL under the {settings.loss.replace('_', ' ')}, gossip averaging under the cross entropy"
    details = {"tuned": {name: choice.config for name, choice in tuned.items()}}
    sheets, claims = (lab.table(title, rows, COLUMNS),), tuple(_claims(runs, settings))
    failed = [
        f"{name}, seed {seed}: the evolution failed"
        for name, records in runs.items()
        for seed, record in zip(study.seeds, records, strict=True)
        if np.any(record.status != 0)
    ]
    return lab.Outcome(sheets, rows, claims, details, (*REMARKS, loss, *at_edge), tuple(failed))


def bench_of(study: Study) -> Bench:
    """Builds the bench of the study's runs."""
    settings = study.settings
    of_seed = partial(_divide, study.dataset, study.data_dir, settings=settings)
    return Bench(study, of_seed, partial(methods_of, settings), harness.decisive(settings, DECISIVE), measure)


def _check(study: Study) -> None:
    """Raises ``ValueError`` for a graph that cannot be drawn, and for settings that a recipe refuses."""
    settings: TopologySettings = study.settings
    if settings.tuning_seed in study.seeds:
        raise ValueError(f"tuning_seed: got {settings.tuning_seed}, which is among the seeds {study.seeds}")
    trial = _divide(study.dataset, study.data_dir, study.seeds[0], settings)
    harness.build_all(methods_of(settings, trial))


DEFAULT = TopologySettings()
SMALL = with_changes(
    DEFAULT,
    "num_clients=9 num_rounds=6 tuning_rounds=3 width=50 local_steps=20 learning_rates=0.1,0.3,1.0",
    "tangent_rates=0.1,0.3 times=100,400,1400 num_train=270 num_validation=100",
)
SCALES = {"digits": by_scale(SMALL, DEFAULT)}
ENTRIES = (experiment(__name__, run, SCALES, ("thompson2025",), check=_check, least_seeds=2),)
