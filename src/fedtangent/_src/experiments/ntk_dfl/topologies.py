"""NTK-DFL beside gossip averaging on four graphs, and beside NTK-FL with its server (Thompson et al., 2025).

All methods start from the same network and have the same clients. As in the paper, the accuracy is that of the network
whose weights are the mean of the clients' weights. The mean accuracy of the clients' own models is reported too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import fedtangent as ft
from fedtangent._src.experiments import lab
from fedtangent._src.experiments.lab import harness, trials
from fedtangent._src.experiments.lab.harness import Bench, EvaluationSets, Method, Record, Steps
from fedtangent._src.experiments.lab.runner import Study, by_scale, experiment, with_changes, within
from fedtangent._src.experiments.lab.trials import Trial
from fedtangent._src.federated.graph import Graph, named_graph
from fedtangent._src.output.run_plots import curves
from fedtangent._src.types import Algorithm, Array, PyTree, Recipe, Schedule

SERVER, NTK, GOSSIP = "ntk_fl", "ntk_dfl", "gossip"
LABELS = {SERVER: "NTK-FL", NTK: "NTK-DFL", GOSSIP: "gossip averaging"}
CLIENTS = "test.accuracy_of_clients"
MIB = 2**20
DECISIVE = "graphs graph_seed width last_w_std batch_size loss times"
COLUMNS = (
    "graph: {graph} | method: {method} | accuracy: {accuracy:.4f} | minus gossip, 95 % interval: {lead:+.4f} | "
    "clients' own models: {of_clients:.4f} | seeds at the target: {reached:d} | rounds to it: {rounds:.1f} | "
    "MiB to it: {mib:.2f} | accuracy after gossip's bytes: {within_bytes:.4f}"
)
REMARKS = (
    "graphs stay the same in all rounds; the paper draws a new one in every round",
    "a target that is never reached counts as reached one round after the last",
)


@dataclass(frozen=True)
class TopologySettings:
    """Settings of the clients, graphs and network, and the methods' hyper-parameters.

    Attributes:
        graphs: Names of the graphs of clients.
        graph_seed: Seed of a random graph, the same for all seeds of the study.
        num_clients: Number of clients.
        alpha: Parameter of the Dirichlet distribution that divides the classes among clients; smaller is more uneven.
        num_rounds: Number of rounds.
        target: Test accuracy to reach.
        width: Width of the network's hidden layer.
        last_w_std: Initial standard deviation of the last layer's weights, times sqrt(width).
        batch_size: Minibatch of gossip averaging.
        local_steps: Numbers of local steps of gossip averaging that are tried.
        learning_rates: Learning rates of gossip averaging that are tried.
        tangent_rates: Learning rates of NTK-FL and NTK-DFL that are tried.
        times: Numbers of gradient steps from which NTK-FL and NTK-DFL choose in each round (``Evolution``).
        loss: Loss of NTK-FL and NTK-DFL; gossip averaging has the cross entropy.
        tuning_rounds: Rounds of a run that tries hyper-parameters.
        tuning_seed: Seed of these runs.
        num_train: Number of training examples of all clients.
        num_validation: Number of examples on which hyper-parameters are chosen.
        num_test: Number of test examples; 0 for all.
    """

    graphs: tuple[str, ...] = ("ring", "torus", "erdos_renyi:0.3", "complete")
    graph_seed: int = within(0, least=0)
    num_clients: int = 16
    alpha: float = within(0.1, above=0)
    num_rounds: int = 15
    target: float = within(0.8, above=0, below=1)
    width: int = 100
    last_w_std: float = within(0.1, at_least=0)
    batch_size: int = 25
    local_steps: tuple[int, ...] = within((5, 20), increasing=True)
    learning_rates: tuple[float, ...] = within((0.03, 0.1, 0.3, 1.0), above=0)
    tangent_rates: tuple[float, ...] = within((0.03, 0.1, 0.3), above=0)
    times: tuple[int, ...] = within((100, 200, 400, 800, 1400, 2000), increasing=True)
    loss: str = within("squared_error", of=("squared_error", "cross_entropy"))
    tuning_rounds: int = 5
    tuning_seed: int = within(1000, least=0)
    num_train: int = 800
    num_validation: int = 200
    num_test: int = within(0, least=0)


def methods_of(settings: TopologySettings, trial: Trial) -> dict[str, Method]:
    """Builds NTK-FL, and NTK-DFL and gossip averaging on every graph, on one seed's data; returns them by name.

    Args:
        settings: The settings.
        trial: Data and clients of the seed.
    """
    count, size = settings.num_clients, int(np.prod(trial.data.x.shape[1:]))
    model = ft.models.mlp(
        *(size, trial.num_classes, (settings.width,)),
        parameterization="standard",
        b_std=0.0,
        last_w_std=settings.last_w_std,
    )
    evolution = ft.Evolution(settings.times, unstable="clip", loss=settings.loss)
    targets, sizes = trials.one_hot(trial), np.diff(np.asarray(trial.data.offsets))

    def evolving(recipe: Recipe, label: str, schedule: Schedule, pooled: np.ndarray) -> Method:
        # room for the largest pool, rounded up, so that seeds whose pools are of similar size share a program
        pool = -(-int((pooled @ sizes).max()) // 8) * 8

        def build(steps: Steps, rate: float | Array) -> Algorithm:
            return recipe(model, schedule, rate, evolution=evolution, pooling=ft.Pooling(pool_size=pool))

        return Method(label, settings.tangent_rates, (0,), build, targets, trial.splits, pool)

    def gossiping(graph: Graph) -> Method:
        def build(steps: Steps, rate: float | Array) -> Algorithm:
            schedule, work = ft.schedules.own_models(count), ft.Work(steps, batch_size=settings.batch_size)
            return ft.gossip(model, schedule, rate, work, ft.Mixing(graph), "cross_entropy")

        grids = settings.learning_rates, settings.local_steps
        return Method(LABELS[GOSSIP], *grids, build, trial.data, trial.splits)

    methods = {SERVER: evolving(ft.ntk_fl, LABELS[SERVER], ft.schedules.all_clients(count), np.ones((1, count)))}
    for text in settings.graphs:
        graph = named_graph(text, count, settings.graph_seed)
        near = graph.adjacency | np.eye(count, dtype=bool)
        methods[_name(NTK, text)] = evolving(ft.ntk_dfl, LABELS[NTK], ft.schedules.neighbourhoods(graph), near)
        methods[_name(GOSSIP, text)] = gossiping(graph)
    return methods


def _name(method: str, graph: str) -> str:
    return method if method == SERVER else f"{method}-{graph.replace(':', '')}"


def measure(algorithm: Algorithm, state: PyTree, splits: EvaluationSets) -> dict[str, Array]:
    """Computes on each split the accuracy of the network of mean weights, and the mean accuracy of the clients' models.

    Keys of the result are such as "test.accuracy" and "test.accuracy_of_clients". A model that has an output which is
    not finite counts as accuracy 0.

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


class Ends(NamedTuple):
    """Final accuracies, rounds and MiB to a target, accuracy at equal bytes, of a method on a graph, [seeds] each."""

    accuracy: np.ndarray  # of the network of mean weights, after the last round
    of_clients: np.ndarray  # mean accuracy of the clients' own models, after the last round
    rounds: np.ndarray  # to the target; one more than all rounds if never
    mib: np.ndarray  # MiB sent until then, infinite if never
    within_bytes: np.ndarray  # accuracy after as many bytes as gossip averaging sent in all its rounds


def ends(records: Sequence[Record], others: Sequence[Record], target: float) -> Ends:
    """Computes a method's results on one graph: final accuracies, cost of reaching the target, accuracy at equal bytes.

    Args:
        records: Runs of this method, one for each seed.
        others: Runs of gossip averaging on the same graph, for the same seeds; the bytes that it sends in all its
            rounds are the budget of ``within_bytes``.
        target: Test accuracy to reach.
    """
    rows = []
    for record, other in zip(records, others, strict=True):
        sent, last = record.sent.sum(axis=1), other.sent[-1].sum()
        first = harness.first_at(record, target)
        mib = np.append(sent / MIB, np.inf)[first]
        rows.append((record.test[-1], record.metrics[CLIENTS][-1], first, mib, record.test[sent <= last][-1]))
    return Ends(*np.array(rows, np.float64).T)


def _row(method: str, graph: str, results: Ends, gossip: Ends, settings: TopologySettings) -> lab.Row:
    """Builds the row of one method and graph, with means over seeds.

    The row also has the method's accuracy minus the accuracy of gossip averaging on the same graph (``gossip``). Rounds
    and MiB to the target are None if a seed never reaches it.
    """
    reached = int(np.sum(results.rounds <= settings.num_rounds))
    row: lab.Row = {name: float(values.mean()) for name, values in results._asdict().items()}
    row |= {"rounds": None, "mib": None} if reached < len(results.rounds) else {}
    lead = None if method == GOSSIP else lab.interval(results.accuracy - gossip.accuracy)
    return {"graph": graph, "method": LABELS[method], **row, "reached": reached, "lead": lead}


def _claims(of_graph: Mapping[str, Ends], graph: str, settings: TopologySettings) -> Iterator[lab.Claim]:
    """Judges NTK-DFL on one graph against gossip averaging, against its clients' own models and against NTK-FL.

    Compared are accuracies after the last round; with gossip averaging also the rounds to the target accuracy, and the
    accuracy at equal bytes.
    """
    decentral, gossip, server = (of_graph[method] for method in (NTK, GOSSIP, SERVER))
    above, times = "NTK-DFL is above gossip averaging after", "NTK-DFL needs fewer rounds than gossip averaging to"
    lead = lab.interval(decentral.accuracy - gossip.accuracy)
    yield lead.claim_above(f"{graph}: {above} {settings.num_rounds} rounds", "by {:+.4f}")
    sooner = lab.ratio_interval(gossip.rounds, decentral.rounds)
    yield sooner.claim_above(f"{graph}: {times} {settings.target:.0%} (the paper: 4.6 times)", "{:.2f} times", 1.0)
    gain = lab.interval(decentral.accuracy - decentral.of_clients)
    yield gain.claim_above(f"{graph}: the mean of the weights is 0.1 above the clients' own models", "{:+.4f}", 0.1)
    behind = lab.interval(decentral.accuracy - server.accuracy)
    yield behind.claim_above(f"ours: {graph}: NTK-DFL is within 0.02 of NTK-FL", "{:+.4f} from it", -0.02)
    fair = lab.interval(decentral.within_bytes - gossip.accuracy)
    yield fair.claim_above(f"ours: {graph}: {above} as many bytes", "by {:+.4f}")


def run(study: Study) -> lab.Outcome:
    """Tunes every method on every graph, trains with every seed, and compares accuracies, rounds and bytes."""
    settings, bench = study.settings, bench_of(study)
    harness.plan(bench)
    tuned = harness.tune_all(bench)
    runs = harness.repeat_all(bench, tuned)
    rows, claims, panels = list[lab.Row](), list[lab.Claim](), dict[str, dict[str, np.ndarray]]()
    for graph in settings.graphs:
        records = {method: runs[_name(method, graph)] for method in LABELS}
        of_graph = {method: ends(of, records[GOSSIP], settings.target) for method, of in records.items()}
        rows += [_row(method, graph, results, of_graph[GOSSIP], settings) for method, results in of_graph.items()]
        claims += _claims(of_graph, graph, settings)
        panels[graph] = harness.by_round({LABELS[method]: of for method, of in records.items()})
    title = f"test accuracy on {study.dataset} after {settings.num_rounds} rounds, mean of {len(study.seeds)} seeds"
    curves(panels, range(settings.num_rounds + 1), title, study.figures.path("by_round"))
    losses = f"NTK-FL and NTK-DFL under the {settings.loss.replace('_', ' ')}, gossip averaging under the cross entropy"
    details = {"tuned": {name: choice.config for name, choice in tuned.items()}}
    failed = tuple(f"{name}: an evolution failed" for name, of in runs.items() if any(r.status.any() for r in of))
    remarks = (*REMARKS, losses, *harness.edges(tuned))
    return lab.Outcome((lab.table(title, rows, COLUMNS),), rows, tuple(claims), details, remarks, failed)


def bench_of(study: Study) -> Bench:
    """Builds the ``Bench`` that tunes and trains all methods of the study: data, methods on all graphs, and metrics."""
    settings = study.settings
    of_seed = partial(trials.label_skewed, study)
    return Bench(study, of_seed, partial(methods_of, settings), harness.decisive(settings, DECISIVE), measure)


def _check(study: Study) -> None:
    """Raises ``ValueError`` for a tuning seed among the seeds, or settings with which a method cannot be built."""
    settings: TopologySettings = study.settings
    harness.check_tuning_seed(study)
    harness.build_all(methods_of(settings, trials.label_skewed(study, study.seeds[0])))


DEFAULT = TopologySettings()
SMALL = with_changes(
    DEFAULT,
    "num_clients=9 num_rounds=6 tuning_rounds=3 width=50 local_steps=20 learning_rates=0.1,0.3,1.0",
    "times=100,400,1400 num_train=270 num_validation=100",
)
SCALES = {"digits": by_scale(SMALL, DEFAULT)}
ENTRIES = (experiment(__name__, run, SCALES, ("thompson2025",), check=_check, least_seeds=2),)
