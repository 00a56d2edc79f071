"""Shared types, and the legend of axes that every module follows.

Axes, always in this order when several are present::

    K  models of the ensemble        S  slots of a round's cohort
    N  clients                       n  examples (m: entries of a partition)
    B  examples of a minibatch       C  outputs of the network
    R  rounds                        P  parameters

``T`` (the papers' tau) counts local steps. A client's message is ``server - client`` (a pseudo-gradient), so
that any optax transformation can be the server's optimiser.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jax.sharding import Mesh

Array = jax.Array
PyTree = Any
Key = jax.Array


def described(parts: Mapping[str, Any]) -> str:
    """Dtype and shape of each array by name, as text: ``x float32 (60, 3), ..``; for other values their ``repr``."""
    return ", ".join(
        f"{name} {part.dtype} {tuple(part.shape)}" if hasattr(part, "dtype") else f"{name} {part!r}"
        for name, part in parts.items()
    )


class Partition(NamedTuple):
    """Which examples each client holds: client ``i`` owns ``indices[offsets[i]:offsets[i + 1]]``."""

    indices: np.ndarray  # [m] int32, client after client
    offsets: np.ndarray  # [N + 1] int32

    @property
    def num_clients(self) -> int:
        """Number of clients N."""
        return len(self.offsets) - 1

    @property
    def sizes(self) -> np.ndarray:
        """Number of examples of each client, [N] int32."""
        return np.diff(self.offsets)

    def __repr__(self) -> str:
        """How many examples the clients hold."""
        if not isinstance(self.offsets, np.ndarray) or len(self.offsets) < 2:
            return f"Partition({described(self._asdict())})"
        count, least, most = len(self.indices), self.sizes.min(), self.sizes.max()
        return f"Partition({count} examples on {self.num_clients} clients of {least} to {most})"

    def client(self, i: int) -> np.ndarray:
        """Indices of client ``i``'s examples, [n_i] int32."""
        return self.indices[self.offsets[i] : self.offsets[i + 1]]


class FederatedData(NamedTuple):
    """Every example once, and the partition that says who holds it. All four are arrays on the device."""

    x: Array  # [n, ...]
    y: Array  # [n, ...]  targets: [n, C] floating for regression, [n] integer for classification
    indices: Array  # [m] int32, client after client; an example may belong to several clients
    offsets: Array  # [N + 1] int32

    @property
    def num_clients(self) -> int:
        """Number of clients N."""
        return self.offsets.shape[0] - 1

    def __repr__(self) -> str:
        """The types and shapes of its arrays."""
        return f"FederatedData({described(self._asdict())})"


class Client(NamedTuple):
    """What a local update may look at: one client's examples, padded to the largest client of the data set.

    ``rows[j]`` is a row of ``data.x`` for ``j < size``; entries beyond ``size`` are padding.
    """

    id: Array  # [] int32
    size: Array  # [] int32, number of real examples (0 marks an empty slot: nothing to do)
    rows: Array  # [max_size] int32
    data: FederatedData
    round: Array  # [] int32, from 0


class Cohort(NamedTuple):
    """The slots of one round: slot ``s`` trains model ``model[s]`` on client ``client[s]``."""

    client: Array  # [S] int32
    model: Array  # [S] int32
    weight: Array  # [S] float, 0 marks an empty slot; otherwise relative weight in its model's average


class Slots(NamedTuple):
    """Slots of a cohort as the engine trains them and passes them to the aggregate, any number B at a time."""

    client: Array  # [B] int32
    model: Array  # [B] int32
    weight: Array  # [B] float
    place: Array  # [B] int32, rank among the filled slots of the model in the cohort's own order
    size: Array  # [B] int32, examples of the client, 0 for an empty slot
    block: tuple[Array, Array] | None = None
    # x [B, max_size, ...] and y [B, max_size, ...] of the clients, where the engine fetched them for the whole round


class Kernel(Protocol):
    """The prior covariance and the tangent kernel of a network, in the limit of infinite width or exactly."""

    def __call__(self, x1: Array, x2: Array | None = None, get: str | tuple[str, ...] = ("nngp", "ntk")) -> Any:
        """Returns kernel blocks [n1, n2], the same for every output.

        Args:
            x1: Inputs [n1, ...].
            x2: Inputs [n2, ...]; None for those of ``x1``.
            get: "nngp", the covariance of the outputs at the start, or "ntk", the tangent kernel: then that block is
                returned. A tuple of names: then a record with a field for each.
        """


class AtWidth(Protocol):
    """Makes the same network in another width."""

    def __call__(self, width: int, /) -> Model:
        """Returns the network with as many hidden layers as before, each ``width`` units wide.

        Args:
            width: Units of every hidden layer, at least 1.
        """


class Descend(Protocol):
    """Takes several full-batch gradient steps at once."""

    def __call__(
        self,
        params: PyTree,
        x: Array,
        loss: Callable[[Array], Array],
        rate: float | Array,
        steps: Array,
        most: int | Array,
        /,
    ) -> tuple[PyTree, Array]:
        """Returns the parameters after the steps, and the sum of the losses before each of them.

        Args:
            params: Where the steps begin.
            x: Inputs [n, ...].
            loss: ``outputs [n, C] -> []``.
            rate: Step size; it may be traced.
            steps: Number of steps; it may be traced.
            most: A bound of the number of steps.
        """


class Model(NamedTuple):
    """A network (or linear model) as pure functions, with the analytic kernel of exactly that network.

    Attributes:
        name: Its name, as tables and figures show it.
        init: ``key -> params``.
        apply: ``(params, x [n, ...]) -> outputs [n, C]``.
        kernel: Its analytic kernel; None where there is none.
        output_size: Number of outputs C.
        structure: Where its weights sit, with which ``kernels.empirical`` builds the kernel without a Jacobian, and
            which may have a method ``descend``; or None.
        at_width: Makes the same network in another width; None where the kernel does not depend on a width.
        is_linear: Whether it is linear in its parameters, so that ``kernel`` is exact and not a limit.
        loss: Name of the loss that it is usually trained with where there are classes.
        reads_tokens: Whether an example is whole numbers that stand for symbols, or real numbers; None if not known.
    """

    name: str
    init: Callable[[Key], PyTree]
    apply: Callable[[PyTree, Array], Array]
    kernel: Kernel | None
    output_size: int
    structure: Any = None
    at_width: AtWidth | None = None
    is_linear: bool = False
    loss: str = "squared_error"
    reads_tokens: bool | None = None

    def __repr__(self) -> str:
        """Its name and its number of outputs."""
        return f"Model({self.name}, output_size={self.output_size})"

    @property
    def descend(self) -> Descend | None:
        """Takes several full-batch gradient steps at once, for models where that is cheaper; None: one by one."""
        return getattr(self.structure, "descend", None)


class Loss(Protocol):
    """Computes the loss of a batch."""

    def __call__(self, outputs: Array, targets: Array, mask: Array, /) -> Array:
        """Returns the loss of the real examples, a scalar [].

        Args:
            outputs: The network's outputs [B, C].
            targets: Numbers [B, C], or class labels [B].
            mask: Whether a row is a real example, [B] bool; padding does not count.
        """


class OfParameters(Protocol):
    """Computes a tree from parameters, such as a state that begins with them."""

    def __call__(self, params: PyTree, /) -> PyTree:
        """Returns the tree.

        Args:
            params: Parameters of one model.
        """


class LocalUpdate(Protocol):
    """Does the work of one client in a round, on one model."""

    def __call__(
        self, key: Key, broadcast: PyTree, client_state: PyTree, client: Client, /
    ) -> tuple[PyTree, PyTree, dict[str, Array]]:
        """Returns the message to the server, the client's new state, and numbers for the history.

        Args:
            key: Key of this client in this round.
            broadcast: The server's broadcast.
            client_state: The client's state for this model, at the start as ``Local.init`` made it.
            client: The client's id, its number of examples, their rows, and the round.
        """


class Settle(Protocol):
    """Corrects a client's state after its message has travelled."""

    def __call__(self, before: PyTree, after: PyTree, sent: PyTree, /) -> PyTree:
        """Returns the client's state.

        Args:
            before: The client's state before its update.
            after: Its state after the update.
            sent: Its message as the server received it.
        """


class ServerUpdate(Protocol):
    """Moves the server of one model."""

    def __call__(self, server_state: PyTree, aggregated: PyTree, info: RoundInfo, /) -> tuple[PyTree, dict[str, Array]]:
        """Returns the server's new state, and numbers for the history.

        Args:
            server_state: State of the server.
            aggregated: The aggregate of the messages, such as their weighted mean.
            info: Round, weights and number of the clients, and a key.
        """


class Unheard(Protocol):
    """Moves the server of a model that no message reached."""

    def __call__(self, server_state: PyTree, info: RoundInfo, /) -> PyTree:
        """Returns the server's new state.

        Args:
            server_state: State of the server.
            info: The round.
        """


class MapModels(Protocol):
    """Maps a function over a leading axis of models, as ``jax.vmap`` does."""

    def __call__(self, function: Any, /) -> Any:
        """Returns the mapped function.

        Args:
            function: A function of the arguments of one model.
        """


def _as_parameters(params: PyTree, /) -> PyTree:
    return params


def _as_trained(before: PyTree, after: PyTree, sent: PyTree, /) -> PyTree:
    return after


def _no_memory(message: PyTree, /) -> PyTree:
    return ()


class Local(NamedTuple):
    """A client's part of an algorithm, written for one client and one model.

    Attributes:
        init: From parameters to the state that a client keeps for each model.
        update: The client's work in a round.
        message: From parameters to a tree with the shapes of a message; by default parameters.
        settle: Corrects the client's state after its message has travelled; by default nothing.
    """

    init: OfParameters
    update: LocalUpdate
    message: OfParameters = _as_parameters
    settle: Settle = _as_trained


class Server(NamedTuple):
    """The server's part of an algorithm, written for one model.

    Attributes:
        init: From parameters to the server's state.
        broadcast: From the server's state to the tree that a client receives.
        params: From the server's state to the model's parameters, for prediction.
        update: Moves the server along the aggregate of the messages.
        unheard: Moves the server of a model that no message reached; None: it does not move.
        map_models: How the update is mapped over the K models: all at once, or ``sequentially`` for heavy servers.
    """

    init: OfParameters
    broadcast: OfParameters
    params: OfParameters
    update: ServerUpdate
    unheard: Unheard | None = None
    map_models: MapModels = jax.vmap


class RoundInfo(NamedTuple):
    """What the server knows of a round, per model."""

    round: Array  # [] int32, from 0
    weight: Array  # [] float, total weight of the model's slots
    num_clients: Array  # [] int32, clients whose messages count
    key: Key  # for what the server draws


OK, DIVERGED, NO_EXAMPLES, REFUSED = range(4)
"""How a model's round ended at the server, ``info["status"]``; but for ``OK`` the model is what it was before.

``DIVERGED``: every loss was infinite. ``NO_EXAMPLES``: no client took part. ``REFUSED``: its learning rate is unstable.
"""


class ScheduleInit(Protocol):
    """Draws the first state of a schedule."""

    def __call__(self, key: Key, /) -> PyTree:
        """Returns the schedule's first state.

        Args:
            key: Key of the schedule.
        """


class Sample(Protocol):
    """Draws the cohort of a round."""

    def __call__(self, key: Key, schedule_state: PyTree, round_: Array, /) -> tuple[Cohort, PyTree]:
        """Returns the cohort, and the schedule's new state.

        Args:
            key: Key of the schedule, the same in every round; fold the round in.
            schedule_state: State before the round.
            round_: Number of the round, [] int32, from 0.
        """


class Contacted(Protocol):
    """Counts the clients that got a model, also those whose answer does not count."""

    def __call__(self, schedule_state: PyTree, /) -> Array:
        """Returns the number of clients, [] int32.

        Args:
            schedule_state: State after the round's cohort was drawn.
        """


class Schedule(NamedTuple):
    """Which client trains which model in which round.

    Attributes:
        num_models: Models K.
        num_clients: Clients N.
        num_slots: Slots S of a round's cohort.
        init: Draws the first state.
        sample: Draws a round's cohort.
        contacted: Counts the clients that got a model in a round; None: those with a filled slot.
    """

    num_models: int
    num_clients: int
    num_slots: int
    init: ScheduleInit
    sample: Sample
    contacted: Contacted | None = None

    def __repr__(self) -> str:
        """Its numbers."""
        return f"Schedule(num_models={self.num_models}, num_clients={self.num_clients}, num_slots={self.num_slots})"


class AggregateInit(Protocol):
    """Makes the accumulator of a round."""

    def __call__(self, message: PyTree, num_models: int, /) -> PyTree:
        """Returns an empty accumulator.

        Args:
            message: Shapes of one message.
            num_models: Models K.
        """


class AggregateAdd(Protocol):
    """Adds a batch of messages to the accumulator."""

    def __call__(self, accumulator: PyTree, slots: Slots, messages: PyTree, /) -> PyTree:
        """Returns the accumulator with the messages added.

        Args:
            accumulator: What has been added up so far.
            slots: Models and weights of the messages, [B] each.
            messages: Messages with a leading axis B.
        """


class AggregateFinish(Protocol):
    """Ends an aggregation."""

    def __call__(self, accumulator: PyTree, /) -> PyTree:
        """Returns the aggregate of each model, with a leading axis K.

        Args:
            accumulator: All messages of the round.
        """


class AggregateMerge(Protocol):
    """Merges the accumulators of several devices."""

    def __call__(self, accumulator: PyTree, axis: str, /) -> PyTree:
        """Returns the accumulator of all devices, on each of them.

        Args:
            accumulator: The accumulator of one device.
            axis: Name of the mesh's axis.
        """


class Aggregate(NamedTuple):
    """A reduction of the slots' messages to one value per model, such as their weighted mean.

    It is a fold: messages are added in batches of any size B. So a mapping that trains one client at a time never
    holds more than one message.

    Attributes:
        init: Makes an empty accumulator.
        add: Adds a batch of messages.
        finish: Returns the aggregate of each model.
        merge: Merges the accumulators of several devices.
    """

    init: AggregateInit
    add: AggregateAdd
    finish: AggregateFinish
    merge: AggregateMerge


class Cost(NamedTuple):
    """Bytes on the wire: a slot with ``n_i`` examples sends ``uplink + uplink_per_example * n_i`` in a round.

    ``downlink`` is what each contacted client receives. ``uplink_once`` and ``downlink_once`` are totals before the
    first round: data that the server holds, or shares.
    """

    uplink: int
    uplink_per_example: int
    downlink: int
    uplink_once: int = 0
    downlink_once: int = 0


class Send(Protocol):
    """Sends a message over a channel."""

    def __call__(self, key: Key, message: PyTree, memory: PyTree, /) -> tuple[PyTree, PyTree]:
        """Returns the message as the server receives it, and the client's memory of the channel.

        Args:
            key: Key of this client in this round.
            message: The client's message.
            memory: The client's memory of earlier messages.
        """


class Uplink(Protocol):
    """Counts the bytes of a message."""

    def __call__(self, message: PyTree, broadcast: PyTree, /) -> tuple[int, int]:
        """Returns the bytes of a message, and the bytes for each example of its client besides.

        Args:
            message: Shapes of a message.
            broadcast: Shapes of the server's broadcast.
        """


class Channel(NamedTuple):
    """The way of a message to the server, and its cost.

    Attributes:
        send: From the client's message to the message as the server receives it.
        uplink: Bytes of a message.
        init: From a tree shaped as a message to the memory that a client keeps for each model, such as what error
            feedback adds to the next message; by default nothing.
    """

    send: Send
    uplink: Uplink
    init: OfParameters = _no_memory


class Accept(Protocol):
    """Decides whether the server counts a message."""

    def __call__(self, message: PyTree, /) -> Array:
        """Returns whether it counts, [] bool.

        Args:
            message: One message as the server receives it.
        """


class Prediction(NamedTuple):
    """An ensemble's prediction."""

    mean: Array  # [n, C]
    members: Array  # [K, n, C]


class MapClients(Protocol):
    """Maps the training of one client over the slots of a round."""

    def __call__(
        self, train: Any, held: PyTree, aggregate: Aggregate, accumulator: PyTree, slots: Slots, /
    ) -> tuple[PyTree, PyTree]:
        """Returns the accumulator with all messages, and the infos of every slot [S].

        Args:
            train: ``(held, slot) -> (slot, message, info)`` of one slot.
            held: What every slot reads, such as the data.
            aggregate: How messages are added up.
            accumulator: An empty accumulator.
            slots: The round's slots, [S] each.
        """


class Engine(NamedTuple):
    """How the simulator maps a round's clients onto devices: static and hashable, an argument of compiled programs."""

    map_clients: MapClients
    max_client_size: int
    mesh: Mesh | None = None  # the devices that hold data and state, None: the default one


class Training(NamedTuple):
    """Model, loss, optimiser and local steps of an algorithm's clients, as theory needs them.

    Attributes:
        model: The network.
        learning_rate: Step size of local gradient descent, a number or a schedule of the round; None with an
            ``optimizer``.
        optimizer: An optax optimiser, or a function from the round to one; None for gradient descent at
            ``learning_rate``.
        work: Local steps and minibatches of a round.
        loss: Name of a loss of ``losses.LOSSES``, or a function as those there.
    """

    model: Model
    learning_rate: Any
    optimizer: Any
    work: Any
    loss: Any


NO_RULE = "its recipe states no rule; nearest are fed_avg and fed_prox, which have one"


class Composition(NamedTuple):
    """How an algorithm was made, for those who make it anew for another model or follow it by theory.

    Attributes:
        training: The clients' local training; None for algorithms whose clients do not train.
        weighting: "examples" where a client counts by its number of examples, "uniform" where all count alike.
        rule: Fields of ``theory.Rule`` for the closed form; or a sentence that says why theory has none, and names
            the nearest algorithm that has one; or a function without arguments that returns one of the two.
        rebuild: Makes the same algorithm for another model; None where the recipe was not marked with ``recipe``.
    """

    training: Training | None = None
    weighting: str = "examples"
    rule: Mapping[str, Any] | str | Callable[[], Mapping[str, Any] | str] = NO_RULE
    rebuild: Callable[[Model], Algorithm] | None = None


class Recipe(Protocol):
    """A function that builds an algorithm."""

    def __call__(self, model: Model, schedule: Schedule, /, *arguments: Any, **options: Any) -> Algorithm:
        """Builds the algorithm for a model under a schedule.

        Args:
            model: Network that the clients train.
            schedule: Which client trains which model in which round.
            arguments: The recipe's own, in order.
            options: The recipe's own, by name.
        """


class AlgorithmInit(Protocol):
    """Makes the state that a run begins with."""

    def __call__(self, key: Key | int, num_clients: int, start: Key | PyTree | None = None) -> PyTree:
        """Returns the first state.

        Args:
            key: Seed or key of the run.
            num_clients: Clients N.
            start: A typed key that initialises the models, or their parameters, of one model or of each; None: the
                run's own initialisation.
        """


class Step(Protocol):
    """Computes a round."""

    def __call__(self, state: PyTree, data: FederatedData, engine: Engine, /) -> tuple[PyTree, dict[str, Array]]:
        """Returns the state after the round, and its infos, which are never carried to the next round.

        Args:
            state: State before the round.
            data: Training examples of all clients.
            engine: How clients are mapped onto devices.
        """


class Predict(Protocol):
    """Predicts with the global models."""

    def __call__(self, state: PyTree, x: Array, /) -> Prediction:
        """Returns the prediction of the ensemble.

        Args:
            state: State of the run.
            x: Inputs [n, ...].
        """


class Traffic(Protocol):
    """Counts the bytes of a round."""

    def __call__(self, data: FederatedData, engine: Engine, /) -> Cost:
        """Returns the bytes of a message and of a broadcast.

        Args:
            data: Training examples of all clients.
            engine: How clients are mapped onto devices.
        """


class PersonalPrediction(Protocol):
    """Predicts with what one client kept."""

    def __call__(
        self, state: PyTree, data: FederatedData, max_client_size: int, client: Array, x: Array, /
    ) -> Prediction:
        """Returns the client's own prediction.

        Args:
            state: State of the run.
            data: Training examples of all clients.
            max_client_size: Number of examples of the largest client.
            client: The client's id, [] int32.
            x: Inputs [m, ...].
        """


class Algorithm(NamedTuple):
    """A federated algorithm: what ``simulate`` runs.

    Attributes:
        name: Its name, as tables and figures show it.
        init: Makes the state that a run begins with.
        step: Computes a round.
        predict: Predicts with the global models.
        cost: Bytes of a message and of a broadcast.
        schedule: Which client trains which model in which round.
        personal: What a client predicts; None where every client predicts with the global models.
        params: From a state to the parameters [K, ...] of the networks that it predicts with; None where it predicts
            otherwise.
        composition: How it was made.
    """

    name: str
    init: AlgorithmInit
    step: Step
    predict: Predict
    cost: Traffic
    schedule: Schedule
    personal: PersonalPrediction | None = None
    params: OfParameters | None = None
    composition: Composition = Composition()

    def __repr__(self) -> str:
        """Its name and its schedule."""
        return f"Algorithm({self.name}, {self.schedule!r})"

    def __hash__(self) -> int:
        """The hash of the functions that run it: how it was made does not decide which programs are compiled."""
        return hash(tuple(self)[:-1])

    def __eq__(self, other: object) -> bool:
        """Whether both run the same functions."""
        return isinstance(other, Algorithm) and tuple(self)[:-1] == tuple(other)[:-1]

    @property
    def model(self) -> Model:
        """The network that its clients train; raises ``ValueError`` where they train none."""
        if self.composition.training is None:
            raise ValueError(f"algorithm: got {self.name}, whose clients train no model, must be one whose clients do")
        return self.composition.training.model

    @property
    def rule(self) -> Mapping[str, Any] | str:
        """Fields of ``theory.Rule`` for the closed form, or a sentence why theory has none."""
        rule = self.composition.rule
        return rule() if callable(rule) else rule

    def on(self, model: Model) -> Algorithm:
        """Returns the same algorithm for another model.

        Args:
            model: The other network; it must fit the same data.

        Raises:
            ValueError: The algorithm's recipe is not marked with ``fedtangent.recipe``, so that nothing knows how to
                call it again.
        """
        if self.composition.rebuild is None:
            raise ValueError(
                f"algorithm: got {self.name}, which cannot be made for another model; mark the function that builds it "
                "with @fedtangent.recipe"
            )
        return self.composition.rebuild(model)


def wrapped(algorithm: Algorithm, name: str, ledger: Callable[[Cost, FederatedData], Cost] | None = None) -> Algorithm:
    """Returns ``algorithm`` under another ``name``, with its cost changed by ``ledger`` (None: unchanged)."""

    def cost(data: FederatedData, engine: Engine) -> Cost:
        inner = algorithm.cost(data, engine)
        return inner if ledger is None else ledger(inner, data)

    made = algorithm.composition
    if made.rebuild is not None:
        made = made._replace(rebuild=lambda model: wrapped(algorithm.on(model), name, ledger))
    return algorithm._replace(name=name, cost=cost, composition=made)


class Gaussian(NamedTuple):
    """A Gaussian process at m points: outputs are independent and share the covariance."""

    mean: Array  # [m, C]
    cov: Array  # [m, m]
    jitter: float = 0.0  # what was added to the diagonal of Theta to factorise it
