"""Building of a run from its description: the data, their division among clients, and the algorithm."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from fedtangent._src import checks, data
from fedtangent._src.data import sharing
from fedtangent._src.data.dataset import TOKENS, projected
from fedtangent._src.data.examples import Examples, inputs_on_device, run_examples
from fedtangent._src.engine.description import Chosen, CommonOptions, Description
from fedtangent._src.entries import choose, option_names
from fedtangent._src.federated import faults
from fedtangent._src.federated.algorithms.entry import FinishedRun, Supplied
from fedtangent._src.federated.wire.key_server import generate_keys, hand_out, open_key_file, with_key_exchange
from fedtangent._src.models.dense import mlp
from fedtangent._src.models.entry import check_kind
from fedtangent._src.models.rows import check_reads
from fedtangent._src.types import Algorithm, FederatedData, Model, Partition, Schedule

KEY_FILE = "FEDTANGENT_KEY_FILE"
CHOOSE = ("training", "validation")  # the examples that NTK-FL chooses the time of the evolution by


class Built(NamedTuple):
    """A described run with its data and algorithm, checked and ready to be simulated.

    Attributes:
        description: The user's choices and options.
        algorithm, model: The algorithm, and the network that its clients train.
        examples: Training and test examples, with their partition.
        of_clients: Examples that each client keeps to test its predictions; None if the option ``client_test`` is 0.
    """

    description: Description
    algorithm: Algorithm
    model: Model
    examples: Examples
    of_clients: FederatedData | None

    @property
    def data(self) -> FederatedData:
        """Training examples of all clients, on the device."""
        return self.examples.data

    @property
    def loss(self) -> str:
        """Name of the loss that is minimised."""
        return str(self.examples.loss)

    def remark(self, num_rounds: int) -> str:
        """Returns a line of text that the algorithm adds to the results of a run; "" if it has none or R is 0.

        Args:
            num_rounds: Rounds R that the run has done.
        """
        described, how, run = self.description.schedule, self.description.algorithm, self.description.run
        schedule = self.algorithm.schedule
        if how.entry.remark is None or num_rounds == 0:  # a run may diverge in its first round
            return ""
        cohort = _cohort_size(described.options, schedule.num_clients)
        ran = FinishedRun(schedule, described.entry.name, cohort, run.keep_first is not None, num_rounds)
        return str(how.entry.remark(how.options, ran))


def _cohort_size(options: Any, num_clients: int) -> int:
    """Returns the number of clients in a round: ``clients_per_round`` of a schedule's ``options``, else all clients."""
    number = getattr(options, "clients_per_round", None)
    return num_clients if number is None else int(number)


def build(described: Description) -> Built:
    """Loads the data, divides them among clients, and builds the algorithm of a run.

    It may write two things: the key file of a projection, if it does not exist yet, and the cache of a data set that it
    downloads.

    Args:
        described: Description of the run, from ``describe``.

    Raises:
        ValueError: A bad option (the message begins with its name), or data files that are missing or damaged.
    """
    run, how = described.run, described.algorithm
    checks.seed(run.seed)
    checks.whole("num_rounds", run.num_rounds)
    checks.folder("data_dir", run.data_dir)
    _check(described)
    loaded = _built(described.dataset, run.data_dir, run.seed)
    clients, own_test = _apart(run, _built(described.partition, loaded, run.seed))
    loaded = _projected(run, loaded, clients.num_clients)
    clients, at_server = _at_server(described, loaded, clients)
    model = _built(described.model, loaded.input_shape, loaded.num_outputs)
    examples = run_examples(loaded, clients, how.options.loss, model)
    check_reads(model, examples.test and examples.test.x)
    schedule = _faulty(run, _built(described.schedule, clients.num_clients, run.seed), clients.sizes)
    if "validation" in at_server:
        rows = at_server["validation"]
        at_server["validation"] = (examples.data.x[rows], examples.data.y[rows])
    cohort = _cohort_size(described.schedule.options, clients.num_clients)
    expected = cohort if described.schedule.entry.name == "poisson" else None
    supplied = Supplied(model, schedule, run.seed, clients=clients, expected_clients=expected, **at_server)
    algorithm: Algorithm = _built(how, supplied)
    if run.projection is not None:
        algorithm = with_key_exchange(algorithm, clients.num_clients)
    of_clients = None if own_test is None else examples.held_by(own_test)
    return Built(described, algorithm, model, examples, of_clients)


SMALL_EXAMPLES = {"image": (16, 16, 1), "tokens": (8,), "vector": (1,)}  # shape of an example of each kind


def small_model(described: Description) -> Model:
    """Builds the model of a described run for small inputs and two classes, without loading data."""
    model: Model = _built(described.model, SMALL_EXAMPLES[described.dataset.entry.kind], 2)
    return model


def preview(described: Description) -> Algorithm:
    """Builds a run's algorithm for a small network and eight clients, without data.

    It serves to read the algorithm's rule, by which theory follows it. The schedule is the algorithm's default one, not
    the run's.
    """
    entry = described.algorithm.entry
    schedule = choose("schedules", entry.schedule)
    examples = jnp.zeros((getattr(described.algorithm.options, "server_examples", 1), 2))
    clients = schedule.build(schedule.options(), 8, 0)
    return _built(
        described.algorithm, Supplied(mlp(2, 2, (2,)), clients, server_data=examples, shared=np.zeros(1, int))
    )


def _built(chosen: Chosen, *arguments: Any) -> Any:
    return chosen.entry.build(chosen.options, *arguments)


def _check(described: Description) -> None:
    """Raises ``ValueError`` for choices and options of a run that do not go together; loads no data."""
    run, how, schedule = described.run, described.algorithm, described.schedule
    checks.number("client_test", run.client_test, at_least=0, below=1)
    checks.number("dropout", run.dropout, at_least=0, below=1)
    several = "num_models" in option_names(choose("schedules", how.entry.schedule))
    if several and "num_models" not in option_names(schedule.entry):
        raise ValueError(
            f"schedule: got {schedule.entry.name!r}, which trains one model, but {how.entry.name} has several: "
            f"choose another schedule, such as {how.entry.schedule}"
        )
    bound = getattr(how.options, "max_update_norm", None)
    if how.entry.sends not in ("updates", "nothing") and bound is not None and bound < math.inf:
        raise ValueError(f"max_update_norm: got {bound}, must be inf: {how.entry.name} sends no updates")
    if run.projection is not None:
        checks.whole("projection", run.projection)
        if described.dataset.entry.kind == TOKENS:
            got = described.dataset.entry.name
            raise ValueError(f"dataset: got {got!r}, must be images or vectors with projection, not texts")
        key_path(run)
        if "vector" not in described.model.entry.kinds:
            got = described.model.entry.name
            raise ValueError(f"model: got {got!r}, must be for vectors, such as mlp, because projection makes vectors")
    else:
        check_kind(described.model.entry, described.dataset.entry.kind)


def _apart(run: CommonOptions, clients: Partition) -> tuple[Partition, Partition | None]:
    """Splits the examples of every client: returns the partition to train on, and the one to test on.

    The option ``client_test`` in ``run`` is the share of the examples to test on; for share 0 there is no second
    partition (None).
    """
    if run.client_test == 0:
        return clients, None
    return sharing.held_out(clients, run.client_test, run.seed)


def _at_server(described: Description, loaded: data.Dataset, clients: Partition) -> tuple[Partition, dict[str, Any]]:
    """Takes the examples that the algorithm needs at the server, if any, from the clients' partition ``clients``.

    ``loaded`` is the data set. Returns the new partition, and the examples by the name under which the algorithm takes
    them: "server_data" (inputs), "validation" (indices) or "shared" (indices). Shared examples are not taken away:
    every client with examples gets all of them. Raises ``ValueError`` for a bad option, and for shared examples of a
    data set without classes.
    """
    run, how = described.run, described.algorithm
    if "server_data" in how.entry.needs:
        rows = _drawn(how.options.server_examples, run.seed, clients)
        server_data = jnp.asarray(inputs_on_device(loaded.x_train[rows]))
        return sharing.without(clients, rows, "server_examples"), {"server_data": server_data}
    if "shared" in how.entry.needs:
        share = checks.number("shared_fraction", how.options.shared_fraction, above=0, below=1)
        if loaded.num_classes == 0:
            raise ValueError(f"dataset: got {loaded.name!r}, must be a classification data set")
        number = max(1, round(share * len(loaded.x_train)))
        shared = sharing.class_balanced(loaded.y_train, number, run.seed, "shared_fraction")
        return sharing.with_shared(clients, shared), {"shared": shared}
    if "validation" in how.entry.needs and checks.choice("ntk_choose", how.options.ntk_choose, CHOOSE) == "validation":
        rows = _drawn(how.options.server_examples, run.seed, clients)
        return sharing.without(clients, rows, "server_examples"), {"validation": rows}
    return clients, {}


def _drawn(number: int, seed: int, clients: Partition) -> np.ndarray:
    """Draws the training examples that go to the server: the indices of ``number`` examples that clients hold.

    Raises ``ValueError`` unless ``number`` is at least 1 and leaves the clients an example.
    """
    rows = np.random.default_rng(seed).permutation(np.unique(clients.indices))
    return rows[: checks.whole("server_examples", number, 1, len(rows) - 1)]


def _faulty(run: CommonOptions, schedule: Schedule, sizes: np.ndarray) -> Schedule:
    """Returns ``schedule`` with the faults that the options in ``run`` ask for: clients that drop out or answer late.

    ``sizes`` [N] are the clients' numbers of examples; the mean time to an answer is in proportion to them.
    """
    if run.dropout != 0:
        schedule = faults.dropout(schedule, run.dropout)
    if run.keep_first is None:
        return schedule
    checks.whole("keep_first", run.keep_first, 1, schedule.num_slots)
    checks.choice("completion_time", run.completion_time, faults.DISTRIBUTIONS)
    checks.number("completion_spread", run.completion_spread, above=0)
    times = np.maximum(sizes, 1) / max(np.mean(sizes), 1)
    return faults.stragglers(schedule, run.keep_first, times, run.completion_time, run.completion_spread)


def key_path(run: CommonOptions) -> Path:
    """Returns the path of the file with the projection's seed; raises ``ValueError`` if the user named none."""
    path = run.key_file or os.environ.get(KEY_FILE)
    if not path:
        raise ValueError(f"key_file: got none, must be a file for the projection's secret seed (or set ${KEY_FILE})")
    return Path(path)


def seed_digest(run: CommonOptions) -> str | None:
    """Returns a digest of the secret seed by which inputs are projected; None for a run without a projection.

    Writes the key file if it does not exist yet.
    """
    return None if run.projection is None else open_key_file(key_path(run)).digest


def _projected(run: CommonOptions, loaded: data.Dataset, num_clients: int) -> data.Dataset:
    """Returns ``loaded`` with inputs projected by a random matrix; without the option ``projection``, unchanged.

    The matrix is drawn from a secret seed, which the key server first sends to each of the ``num_clients`` clients.
    """
    if run.projection is None:
        return loaded
    checks.whole("projection", run.projection, 1, loaded.x_train[0].size)  # of an example's numbers
    key_file = open_key_file(key_path(run))
    opened = hand_out(key_file.seed, (generate_keys() for _ in range(num_clients)))
    if any(seed != key_file.seed for seed in opened):
        raise AssertionError("a client was handed another seed")
    return projected(loaded, run.projection, opened[0].reveal())
