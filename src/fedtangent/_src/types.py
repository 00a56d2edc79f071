"""Shared types, and the legend of axes that every module follows.

Arrays have their kind and their axes in their types: ``Float[Array, "n C"]`` is a floating array with n rows and C
columns, ``Int[Array, ""]`` a whole number, and ``...`` stands for any number of axes (jaxtyping). The tests check them
in every call. Axes, always in this order when several are present::

    K  models of the ensemble        S  slots of a round's cohort
    N  clients                       n  examples (m: entries of a partition)
    B  examples of a minibatch       C  outputs of the network
    R  rounds                        P  parameters
    D  candidates of a poll

``T`` (tau in the papers) counts local steps. A client's message is ``server - client`` (a pseudo-gradient), so
that any optax transformation can be the server's optimiser.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar, runtime_checkable

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Bool, Float, Int, Int32, Num, Shaped

from fedtangent._src import programs

programs.keep()  # here, because every module that compiles a program imports this one

Array = jax.Array
AnyArray = jax.Array | np.ndarray
EitherArray = TypeVar("EitherArray", bound=AnyArray)  # a function's argument and result are of one kind
PyTree = Any
Key = jax.Array
OfParameters: TypeAlias = Callable[[PyTree], PyTree]
"""A function of the parameters of one model, which returns a tree."""
Settle: TypeAlias = Callable[[PyTree, PyTree, PyTree], PyTree]
"""A function of a client's state before and after its update and of the message as the server received it.

It returns the client's corrected state.
"""
Uplink: TypeAlias = Callable[[PyTree, PyTree], tuple[int, int]]
"""A function of the shapes of a message and of the server's broadcast.

It returns the bytes of a message, and the additional bytes for each example of its client.
"""


@runtime_checkable
class SupportsArray(Protocol):
    """An object that NumPy converts to an array, such as a column of a pandas table."""

    def __array__(self) -> np.ndarray:
        """Returns the array."""


ArrayLike = jax.typing.ArrayLike | SupportsArray | Sequence[Any]
"""Numbers in any form that ``numpy.asarray`` reads: an array, a number, or a nested sequence of them."""


def described(parts: Mapping[str, object]) -> str:
    """Returns a text with the dtypes and shapes of named arrays, such as ``x float32 (60, 3), ..``.

    Args:
        parts: Arrays by name; values that are no arrays are shown by their ``repr``.
    """
    return ", ".join(
        f"{name} {part.dtype} {tuple(part.shape)}"
        if hasattr(part, "dtype") and hasattr(part, "shape")
        else f"{name} {part!r}"
        for name, part in parts.items()
    )


class Partition(NamedTuple):
    """The division of the examples among clients.

    Client ``i`` holds the examples with the numbers ``indices[offsets[i]:offsets[i + 1]]``.
    """

    indices: Int32[np.ndarray, "m"]  # client after client
    offsets: Int32[np.ndarray, "N+1"]

    @property
    def num_clients(self) -> int:
        """Number of clients N."""
        return len(self.offsets) - 1

    @property
    def sizes(self) -> Int[np.ndarray, "N"]:
        """Number of examples of each client, [N] int32."""
        return np.diff(self.offsets)

    def __repr__(self) -> str:
        """Returns a line with the numbers of examples and clients, and the smallest and largest client."""
        if not isinstance(self.offsets, np.ndarray) or len(self.offsets) < 2:
            return f"Partition({described(self._asdict())})"
        count, least, most = len(self.indices), self.sizes.min(), self.sizes.max()
        return f"Partition({count} examples on {self.num_clients} clients of {least} to {most})"

    def client(self, i: int | np.integer) -> Int[np.ndarray, "n_i"]:
        """Returns the indices of client ``i``'s examples, [n_i] int32."""
        return self.indices[self.offsets[i] : self.offsets[i + 1]]


class FederatedData(NamedTuple):
    """All training examples, each stored once, and the partition that says which client holds which example.

    Attributes:
        x: Inputs [n, ...]; like the other fields, an array on the device.
        y: Targets: floating numbers [n, C], or integer class labels [n].
        indices: Rows of ``x``, client after client; a row may belong to several clients.
        offsets: Client ``i`` holds the rows ``indices[offsets[i]:offsets[i + 1]]``.
    """

    x: Shaped[Array, "n ..."]
    y: Shaped[Array, "n ..."]
    indices: Int32[Array, "m"]
    offsets: Int32[Array, "N+1"]

    @property
    def num_clients(self) -> int:
        """Number of clients N."""
        return self.offsets.shape[0] - 1

    def __repr__(self) -> str:
        """Returns a line with the dtypes and shapes of the four arrays."""
        return f"FederatedData({described(self._asdict())})"


class Client(NamedTuple):
    """A client with its examples, the argument of ``LocalUpdate``.

    Attributes:
        id: Id of the client.
        size: Number of its examples; 0 marks an empty slot (place of the cohort), in which no client trains.
        rows: ``rows[j]`` for ``j < size`` is the row in ``data.x`` of the client's example j; the rest is padding.
        data: Training examples of all clients.
        round: Number of the round, from 0.
    """

    id: Int32[Array, ""]
    size: Int32[Array, ""]
    rows: Int32[Array, "max_size"]
    data: FederatedData
    round: Int32[Array, ""]


class Cohort(NamedTuple):
    """The clients of one round, with their models and weights, in S slots.

    A slot s is one place in the round: client ``client[s]`` trains model ``model[s]``. ``weight[s]`` is the message's
    relative weight in the average for the model. A slot of weight 0 is empty.
    """

    client: Int32[Array, "S"]
    model: Int32[Array, "S"]
    weight: Float[Array, "S"]  # 0 marks an empty slot; otherwise relative weight in its model's average


class Slots(NamedTuple):
    """Slots of a round: all S slots (B = S), or the B slots whose messages the aggregate adds together.

    A slot is one place in a round's cohort, where one client trains one model.

    Attributes:
        client: Client of each slot.
        model: Model of each slot.
        weight: Relative weight in the model's average; 0 marks an empty slot.
        place: Rank, from 0, among the filled slots of the same model, in the order of the cohort.
        size: Number of examples of the client, 0 for an empty slot.
        block: Inputs and targets of the clients if the engine fetched them for the whole round, else None.
    """

    client: Int32[Array, "B"]
    model: Int32[Array, "B"]
    weight: Float[Array, "B"]
    place: Int32[Array, "B"]
    size: Int32[Array, "B"]
    block: tuple[Shaped[Array, "B max_size ..."], Shaped[Array, "B max_size ..."]] | None = None


@runtime_checkable
class Kernel(Protocol):
    """A function that computes the prior covariance and the tangent kernel of a network, usually at infinite width."""

    def __call__(
        self,
        x1: ArrayLike,
        x2: ArrayLike | None = None,
        get: str | tuple[str, ...] = ("nngp", "ntk"),
    ) -> Any:
        """Returns kernel blocks [n1, n2], which are the same for every output.

        Args:
            x1: Inputs [n1, ...].
            x2: Inputs [n2, ...]; None for ``x1``.
            get: "nngp", the covariance of the outputs at initialisation, or "ntk", the tangent kernel: that block is
                returned. With a tuple of these names, a record with a field for each is returned.
        """


@runtime_checkable
class Descend(Protocol):
    """A function that takes several full-batch gradient steps at once."""

    def __call__(
        self,
        params: PyTree,
        x: Shaped[Array, "n ..."],
        loss: Callable[[Float[Array, "n C"]], Float[Array, ""]],
        rate: float | Float[Array, ""],
        steps: Int[Array, ""],
        most: int | Int[Array, ""],
        /,
    ) -> tuple[PyTree, Float[Array, ""]]:
        """Returns the parameters after the steps, and the sum of the losses before each step.

        Args:
            params: Parameters before the first step.
            x: Inputs [n, ...].
            loss: Function from outputs [n, C] to the loss, a scalar [].
            rate: Step size; it may be traced.
            steps: Number of steps; it may be traced.
            most: Upper bound of the number of steps.
        """


@runtime_checkable
class Apply(Protocol):
    """A function that computes the outputs of a network."""

    def __call__(self, params: PyTree, x: AnyArray, /) -> Array:
        """Returns the outputs [n, C] of the network at some inputs.

        Args:
            params: Parameters of the network.
            x: Inputs [n, ...].
        """


class Model(NamedTuple):
    """A network (or linear model) as pure functions, with the analytic kernel of exactly that network.

    Attributes:
        name: Name of the network in tables and figures.
        init: ``key -> params``.
        apply: ``(params, x [n, ...]) -> outputs [n, C]``, or [n, T, C] for a network with outputs at T positions.
        kernel: Analytic kernel of the network; None if no formula is known.
        output_size: Number of outputs C.
        structure: Layout of the weights, from which ``kernels.empirical_ntk`` builds the kernel without a Jacobian
            where it can; it may have a method ``descend``. None if the layout is unknown.
        at_width: Builds the same network with hidden layers of another width, at least 1; None if it has no such width.
        is_linear: Whether the network is linear in its parameters, so that ``kernel`` is exact at any width.
        loss: Name of the loss that the network is usually trained with if targets are classes.
        vocabulary: Number of symbols if inputs are tokens (whole numbers), 0 if they are real numbers; None if unknown.
    """

    name: str
    init: Callable[[Key], PyTree]
    apply: Apply
    kernel: Kernel | None
    output_size: int
    structure: Any = None
    at_width: Callable[[int], Model] | None = None
    is_linear: bool = False
    loss: str = "squared_error"
    vocabulary: int | None = None

    def __repr__(self) -> str:
        """Returns the network's name and number of outputs."""
        return f"Model({self.name}, output_size={self.output_size})"

    @property
    def descend(self) -> Descend | None:
        """Function that takes several full-batch gradient steps at once; None for models without a faster way."""
        return getattr(self.structure, "descend", None)

    @property
    def shapes(self) -> PyTree:
        """The shapes and dtypes of the parameters, from ``init``, which is traced once and not computed."""
        shapes: PyTree = _first_params.eval_shape(self.init)
        return shapes


@partial(jax.jit, static_argnames="init")
def _first_params(init: Callable[[Key], PyTree]) -> PyTree:
    return init(jax.random.key(0))


@runtime_checkable
class Loss(Protocol):
    """A function that computes the loss of a batch."""

    def __call__(
        self, outputs: Float[Array, "B C"], targets: Num[Array, "B *C"], mask: Bool[Array, "B"], /
    ) -> Float[Array, ""]:
        """Returns the mean loss of the real examples, a scalar []; losses called ``*_sum`` return the sum.

        Args:
            outputs: Outputs of the network [B, C].
            targets: Numbers [B, C], or class labels [B].
            mask: Whether a row is a real example, [B] bool; padding does not count.
        """


@runtime_checkable
class LocalUpdate(Protocol):
    """A function that does the work of one client in a round, for one model."""

    def __call__(
        self, key: Key, broadcast: PyTree, client_state: PyTree, client: Client, /
    ) -> tuple[PyTree, PyTree, dict[str, Array]]:
        """Returns the message to the server, the client's new state, and numbers to record in the history, by name.

        Args:
            key: Key of this client in this round.
            broadcast: Tree that the server sent to the client.
            client_state: The client's state for this model; before its first update, the result of ``Local.init``.
            client: The client's id, its number of examples, their rows, and the round.
        """


@runtime_checkable
class ServerUpdate(Protocol):
    """A function that updates the server's state of one model."""

    def __call__(self, server_state: PyTree, aggregated: PyTree, info: RoundInfo, /) -> tuple[PyTree, dict[str, Array]]:
        """Returns the server's new state, and numbers to record in the history, by name.

        Args:
            server_state: State of the server.
            aggregated: Aggregate of the messages, such as their weighted mean.
            info: Round, total weight and number of the clients, and a key.
        """


@runtime_checkable
class MapModels(Protocol):
    """A function that maps another function over a leading axis of models, as ``jax.vmap`` does."""

    def __call__(self, function: Any, /) -> Any:
        """Returns the mapped function, whose arguments and results have a leading axis K.

        Args:
            function: A function of the arguments of one model.
        """


def _as_parameters(params: PyTree, /) -> PyTree:
    return params


def _as_trained(before: PyTree, after: PyTree, sent: PyTree, /) -> PyTree:
    return after


def _no_memory(message: PyTree, /) -> PyTree:
    return ()


def _no_report(key: Key, message: PyTree, memory: PyTree, /) -> dict[str, Array]:
    return {}


class Local(NamedTuple):
    """The client's side of an algorithm: pure functions, written for one client and one model.

    Attributes:
        init: Makes a client's first state from the parameters of a model.
        update: Does the client's work in a round.
        message: Makes a tree with the shapes of a message from parameters; by default the parameters themselves.
        settle: Corrects the client's state after its message has travelled; by default the state stays as ``update``
            left it.
    """

    init: OfParameters
    update: LocalUpdate
    message: OfParameters = _as_parameters
    settle: Settle = _as_trained


class Server(NamedTuple):
    """The server's side of an algorithm: pure functions, written for one model.

    Attributes:
        init: Makes the server's state from parameters.
        broadcast: Makes the tree that clients receive from the server's state.
        params: Returns the model's parameters, for predictions, from the server's state.
        update: Updates the server's state with the aggregate of the messages.
        unheard: Updates the server's state of a model for which no message arrived in a round; None to keep the state.
        map_models: Maps the update over the K models: all at once, or ``sequentially`` for servers that need much
            memory.
    """

    init: OfParameters
    broadcast: OfParameters
    params: OfParameters
    update: ServerUpdate
    unheard: Callable[[PyTree, RoundInfo], PyTree] | None = None
    map_models: MapModels = jax.vmap


class RoundInfo(NamedTuple):
    """Facts about a round that the server gets when it updates one model.

    Attributes:
        round: Number of the round, from 0.
        weight: Total weight of the clients that trained the model.
        num_clients: Number of clients whose messages count.
        key: Key for the server's random numbers.
    """

    round: Int32[Array, ""]
    weight: Float[Array, ""]
    num_clients: Int32[Array, ""]
    key: Key


OK, DIVERGED, NO_EXAMPLES, REFUSED = range(4)
"""Codes of ``info["status"]``: how a round of one model ended at the server. Without ``OK`` the model stays unchanged.

``DIVERGED``: every loss was infinite. ``NO_EXAMPLES``: no client took part. ``REFUSED``: the learning rate is unstable.
"""


@runtime_checkable
class Sample(Protocol):
    """A function that draws the cohort of a round."""

    def __call__(self, key: Key, schedule_state: PyTree, round_: Int32[Array, ""], /) -> tuple[Cohort, PyTree]:
        """Returns the cohort of a round (clients, models and weights), and the schedule's new state.

        Args:
            key: Key of the schedule, the same in every round; the function folds the round into it.
            schedule_state: State before the round.
            round_: Number of the round, [] int32, from 0.
        """


class Polled(NamedTuple):
    """The answers of D clients that the server asked about its models before it chose the cohort of a round.

    Attributes:
        client: Clients that were asked, the candidates.
        weight: Weight of each candidate in a mean over all clients: its number of examples, or 1 if the algorithm
            weighs clients uniformly; 0 for a client without examples.
        value: Loss, or norm of the gradient, of each of the K models at all examples of a candidate; infinite where it
            is not a finite number.
    """

    client: Int32[Array, "D"]
    weight: Float[Array, "D"]
    value: Float[Array, "K D"]


class Poll(NamedTuple):
    """A poll: the server asks some clients, the candidates, about its models, and chooses each cohort by their answers.

    The server sends all K models to the candidates, and each of them measures the models at all of its examples. The
    bytes of the round include these models, and 4 bytes for every number that a candidate answers. A candidate that
    then trains has the models already: only the rest of a broadcast, beyond the parameters, is counted for it.

    Attributes:
        num_candidates: Clients D that are asked in a round.
        candidates: ``(key, round, sizes) -> clients``: draws the candidates, [D] int32, from a key that is the same in
            every round, the number of the round, and the clients' numbers of examples [N].
        choose: ``(key, state, round, polled) -> (cohort, state)``: chooses the cohort among the candidates, from a key
            that is the same in every round, the schedule's state, the number of the round, and the answers.
        measure: Quantity that a candidate measures for each model: "loss", or "gradient_norm", the norm of the
            gradient.
        num_answers: Numbers that a candidate sends, such as K losses, or 1 for the model that it chose.
        inverse_weights: Whether the weights of the cohort are inverse probabilities of being chosen. Messages are then
            divided by the weight of all N clients, and their sum estimates the mean over all clients without bias.
    """

    num_candidates: int
    candidates: Callable[[Key, Int32[Array, ""], Int32[Array, "N"]], Int32[Array, "D"]]
    choose: Callable[[Key, PyTree, Int32[Array, ""], Polled], tuple[Cohort, PyTree]]
    measure: str = "loss"
    num_answers: int = 1
    inverse_weights: bool = False


class Schedule(NamedTuple):
    """A rule that says which client trains which model in which round.

    Attributes:
        num_models: Models K.
        num_clients: Clients N.
        num_slots: Slots S of a round's cohort; in each slot one client trains one model.
        init: Draws the first state from a key.
        sample: Draws a round's cohort.
        contacted: Counts, from the state after the cohort was drawn, the clients that received a model, including
            clients whose answer does not count; None to count the filled slots.
        poll: Question to clients by whose answers cohorts are chosen, in place of ``sample``; None if cohorts do not
            depend on the models.
        slots_per_model: The most slots of one model in a round; None if only S and N bound it.
    """

    num_models: int
    num_clients: int
    num_slots: int
    init: Callable[[Key], PyTree]
    sample: Sample
    contacted: Callable[[PyTree], Int32[Array, ""]] | None = None
    poll: Poll | None = None
    slots_per_model: int | None = None

    @property
    def largest_cohort(self) -> int:
        """The largest possible number of clients that train one model in a round."""
        return self.slots_per_model or min(self.num_slots, self.num_clients)

    def __repr__(self) -> str:
        """Returns the schedule's numbers of models, clients and slots."""
        return f"Schedule(num_models={self.num_models}, num_clients={self.num_clients}, num_slots={self.num_slots})"


class Aggregate(NamedTuple):
    """A reduction of a round's messages from clients to one value for each model, such as their weighted mean.

    Messages are added B at a time to an accumulator. So an engine that trains one client at a time keeps one message in
    memory.

    Attributes:
        init: Makes an empty accumulator from the shapes of one message and the number of models K.
        add: ``(accumulator, slots, messages) -> accumulator``: adds B messages, with their models and weights.
        finish: Turns the accumulator of all messages into the aggregate of each model, with a leading axis K.
        merge: ``(accumulator, axis) -> accumulator``: merges the accumulators of the devices along an axis of the mesh,
            on each of them.
    """

    init: Callable[[PyTree, int], PyTree]
    add: Callable[[PyTree, Slots, PyTree], PyTree]
    finish: Callable[[PyTree], PyTree]
    merge: Callable[[PyTree, str], PyTree]


class Cost(NamedTuple):
    """The bytes that clients and server send.

    In a round a client with ``n_i`` examples sends ``uplink + uplink_per_example * n_i`` bytes, and each client that
    the server contacts receives ``downlink``. ``uplink_once`` and ``downlink_once`` are the total bytes sent to and by
    the server before the first round, for instance for examples that the server holds or shares. Each client that the
    server polls (``Poll``) receives ``downlink_per_poll`` bytes and sends ``uplink_per_poll``.
    """

    uplink: int
    uplink_per_example: int
    downlink: int
    uplink_once: int = 0
    downlink_once: int = 0
    uplink_per_poll: int = 0
    downlink_per_poll: int = 0


@runtime_checkable
class Send(Protocol):
    """A function that sends a client's message to the server over a channel."""

    def __call__(self, key: Key, message: PyTree, memory: PyTree, /) -> tuple[PyTree, PyTree]:
        """Returns the message as the server receives it, and the client's new memory of the channel.

        Args:
            key: Key of this client in this round.
            message: The client's message.
            memory: The client's memory of earlier messages.
        """


class Channel(NamedTuple):
    """The transport of a message from a client to the server, and its cost.

    Attributes:
        send: Turns the client's message into the message that the server receives.
        uplink: Counts the bytes of a message, and the additional bytes for each example of its client.
        init: Makes the memory that a client keeps for each model from a tree with the shapes of a message. With error
            feedback, the memory is added to the next message. By default the memory is empty.
        report: Returns numbers for the history by name, such as ``clipped``, from the arguments of ``send``.
    """

    send: Send
    uplink: Uplink
    init: OfParameters = _no_memory
    report: Callable[[Key, PyTree, PyTree], dict[str, Array]] = _no_report


@runtime_checkable
class Accept(Protocol):
    """A function that decides whether the server counts a message."""

    def __call__(self, message: PyTree, /) -> Bool[Array, ""]:
        """Returns whether the server counts the message, [] bool.

        Args:
            message: One message as the server receives it.
        """


class Prediction(NamedTuple):
    """The prediction of an ensemble of K models at n points: the ensemble's mean, and each model's outputs."""

    mean: Float[Array, "n C"]
    members: Float[Array, "K n C"]


@runtime_checkable
class MapClients(Protocol):
    """A function that applies the training of one client to all slots of a round, on one or more devices."""

    def __call__(
        self,
        train: Callable[[PyTree, Slots], tuple[Slots, PyTree, PyTree]],
        shared: PyTree,
        aggregate: Aggregate,
        accumulator: PyTree,
        slots: Slots,
        /,
    ) -> tuple[PyTree, PyTree]:
        """Returns the accumulator with all messages added, and the infos of every slot [S].

        Infos are numbers that training reports for the history, such as the loss.

        Args:
            train: ``(shared, slot) -> (slot, message, info)``, the training of one slot.
            shared: Tree that every slot reads, such as the data.
            aggregate: Reduction that adds up the messages.
            accumulator: An empty accumulator.
            slots: The round's slots, [S] each: a slot is one client that trains one model.
        """


class Engine(NamedTuple):
    """The way in which the simulator maps a round's clients onto devices.

    Compiled programs take it as a static argument, so that another engine compiles them again.

    Attributes:
        map_clients: Trains all clients of a round and adds up their messages.
        max_client_size: Number of examples of the largest client.
        mesh: Devices that hold data and state; None for the default device.
    """

    map_clients: MapClients
    max_client_size: int
    mesh: Mesh | None = None


class Training(NamedTuple):
    """A description of the clients' local training, from which theory and ``Algorithm.on`` work.

    Attributes:
        model: The network.
        learning_rate: Step size of local gradient descent, a number or a schedule of the round; None with an
            ``optimizer``.
        optimizer: An optax optimiser, or a function from the round to one; None for gradient descent at
            ``learning_rate``.
        work: Local steps and minibatches of a round.
        loss: Name of a loss in ``losses.LOSSES``, or a function with the same arguments.
    """

    model: Model
    learning_rate: Any
    optimizer: Any
    work: Any
    loss: str | Loss


NO_RULE = (
    "its recipe states no rule (rule= of train_and_average); compare(.., start=jax.random.key(0)) puts it beside its "
    "linearisation"
)


class Composition(NamedTuple):
    """A record of how an algorithm was built; theory reads it, and ``Algorithm.on`` builds from it again.

    Attributes:
        training: The clients' local training; None for algorithms whose clients do not train.
        weighting: "examples" if a client counts by its number of examples, "uniform" if all clients count alike.
        rule: Fields of ``theory.Rule`` for the closed form; or a sentence that says why theory has no closed form and
            names the nearest algorithm that has one; or a function without arguments that returns one of the two.
        rebuild: Builds the same algorithm for another model, with the clients' learning rate times a factor (None:
            unchanged); None if its function is not marked with ``recipe``.
    """

    training: Training | None = None
    weighting: str = "examples"
    rule: Mapping[str, Any] | str | Callable[[], Mapping[str, Any] | str] = NO_RULE
    rebuild: Callable[[Model, float | Array | None], Algorithm] | None = None


@runtime_checkable
class Recipe(Protocol):
    """A function that builds an algorithm."""

    def __call__(self, model: Model, schedule: Schedule, /, *arguments: Any, **options: Any) -> Algorithm:
        """Builds the algorithm for a model under a schedule.

        Args:
            model: Network that the clients train.
            schedule: Which client trains which model in which round.
            arguments: Further arguments of the recipe, in order.
            options: Further arguments of the recipe, by name.
        """


@runtime_checkable
class AlgorithmInit(Protocol):
    """A function that makes the state of a run before its first round."""

    def __call__(self, key: Key | int, num_clients: int, start: Key | PyTree | None = None) -> PyTree:
        """Returns the state of the run before the first round: server, clients, schedule and keys.

        Args:
            key: Seed or key of the run.
            num_clients: Clients N.
            start: A typed key that initialises the models; or parameters, of one model (for all) or of each model; or
                None for the initialisation that ``key`` draws.
        """


@runtime_checkable
class Step(Protocol):
    """A function that computes one round of an algorithm."""

    def __call__(self, state: PyTree, data: FederatedData, engine: Engine, /) -> tuple[PyTree, dict[str, PyTree]]:
        """Returns the state after the round, and the round's infos: numbers for the history, such as clients' losses.

        Args:
            state: State before the round.
            data: Training examples of all clients.
            engine: Mapping of clients onto devices.
        """


@runtime_checkable
class PersonalPrediction(Protocol):
    """A function that predicts for one client, with the client's state or the global models."""

    def __call__(
        self,
        state: PyTree,
        data: FederatedData,
        max_client_size: int,
        client: Int32[Array, ""],
        x: Shaped[AnyArray, "m ..."],
        /,
    ) -> Prediction:
        """Returns the client's personal prediction at ``x``.

        Args:
            state: State of the run.
            data: Training examples of all clients.
            max_client_size: Number of examples of the largest client.
            client: Id of the client, [] int32.
            x: Inputs [m, ...].
        """


class Algorithm(NamedTuple):
    """A federated algorithm, which ``simulate`` runs.

    Attributes:
        name: Name of the algorithm in tables and figures.
        init: Makes the first state of a run.
        step: Computes a round.
        predict: Predicts with the global models: ``(state, x [n, ...]) -> Prediction``.
        cost: Returns the bytes of a message and of a broadcast, for the clients' data and their mapping onto devices.
        schedule: Which client trains which model in which round.
        personal: Predicts for one client; None if every client predicts with the global models.
        params: Returns the parameters [K, ...] of the networks that predict, from a state; None if the algorithm
            predicts in another way.
        composition: Record of how the algorithm was built.
    """

    name: str
    init: AlgorithmInit
    step: Step
    predict: Callable[[PyTree, Shaped[AnyArray, "n ..."]], Prediction]
    cost: Callable[[FederatedData, Engine], Cost]
    schedule: Schedule
    personal: PersonalPrediction | None = None
    params: OfParameters | None = None
    composition: Composition = Composition()

    def __repr__(self) -> str:
        """Returns the algorithm's name and schedule."""
        return f"Algorithm({self.name}, {self.schedule!r})"

    def __hash__(self) -> int:
        """Returns the hash of all fields except ``composition``, on which no compiled program depends."""
        return hash(tuple(self)[:-1])

    def __eq__(self, other: object) -> bool:
        """Returns whether all fields except ``composition`` are equal, so that both run the same programs."""
        return isinstance(other, Algorithm) and tuple(self)[:-1] == tuple(other)[:-1]

    @property
    def model(self) -> Model:
        """The network that the clients train; raises ``ValueError`` for an algorithm whose clients train no network."""
        if self.composition.training is None:
            raise ValueError(f"algorithm: got {self.name}, whose clients train no model, must be one whose clients do")
        return self.composition.training.model

    @property
    def rule(self) -> Mapping[str, Any] | str:
        """Fields of ``theory.Rule``, which describe the algorithm to the closed form that theory computes.

        If theory has no closed form of the algorithm, this is a sentence that says why.
        """
        rule = self.composition.rule
        return rule() if callable(rule) else rule

    def on(self, model: Model, rate_factor: float | Array | None = None) -> Algorithm:
        """Returns the same algorithm for another model.

        Args:
            model: The other network; it must fit the same data.
            rate_factor: Number by which the clients' learning rate is multiplied; None: the same rate.

        Raises:
            ValueError: The function that built the algorithm is not marked with ``fedtangent.recipe``, so it cannot be
                called again; or it was called without a learning rate, and there is a ``rate_factor``.
        """
        if self.composition.rebuild is None:
            raise ValueError(
                f"algorithm: got {self.name}, which cannot be made for another model; mark the function that builds it "
                "with @fedtangent.recipe"
            )
        return self.composition.rebuild(model, rate_factor)


def wrapped(algorithm: Algorithm, name: str, ledger: Callable[[Cost, FederatedData], Cost] | None = None) -> Algorithm:
    """Returns ``algorithm`` under another name and, with a ``ledger``, with other numbers of bytes on the wire.

    Args:
        algorithm: The algorithm.
        name: The new name.
        ledger: Function from the algorithm's cost (bytes of a message and of a broadcast) and the clients' data to the
            new cost; None to keep the cost.
    """

    def cost(data: FederatedData, engine: Engine) -> Cost:
        inner = algorithm.cost(data, engine)
        return inner if ledger is None else ledger(inner, data)

    composition = algorithm.composition
    if composition.rebuild is not None:

        def rebuild(model: Model, rate_factor: float | Array | None) -> Algorithm:
            return wrapped(algorithm.on(model, rate_factor), name, ledger)

        composition = composition._replace(rebuild=rebuild)
    return algorithm._replace(name=name, cost=cost, composition=composition)


class Gaussian(NamedTuple):
    """Normal distributions of the C outputs at m points; unless ``cov`` is [m C, m C], outputs are independent.

    Attributes:
        mean: Mean of each output at each point, [m, C].
        cov: Covariance between the points, [m, m], which outputs share. ``theory.gp_limit`` returns [m C, m C] with
            ``outputs="full"``, and None for a ``LargeKernel``.
        jitter: Number that was added to the diagonal of the training points' kernel so that it could be factorised.
    """

    mean: Float[AnyArray, "m C"]
    cov: Float[AnyArray, "m m"]
    jitter: float = 0.0
