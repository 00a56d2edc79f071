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


def _as_parameters(params: PyTree) -> PyTree:
    return params


def _as_trained(before: PyTree, after: PyTree, sent: PyTree) -> PyTree:
    return after


def _no_memory(message: PyTree) -> PyTree:
    return ()


class Local(NamedTuple):
    """A client's part of an algorithm; ``update`` sees one client and one model."""

    init: Callable[[PyTree], PyTree]  # params -> client_state, kept per (model, client)
    update: Callable[..., tuple[PyTree, PyTree, dict[str, Array]]]
    # (key, broadcast, client_state, client: Client) -> (message, client_state, info)
    message: Callable[[PyTree], PyTree] = _as_parameters  # params -> a tree with the shapes of a message
    settle: Callable[[PyTree, PyTree, PyTree], PyTree] = _as_trained
    # (client_state before, after update, message as the server receives it) -> client_state


class Server(NamedTuple):
    """The server's part of an algorithm, for one model."""

    init: Callable[[PyTree], PyTree]  # params -> server_state
    broadcast: Callable[[PyTree], PyTree]  # server_state -> what a client receives
    params: Callable[[PyTree], PyTree]  # server_state -> the model's parameters, for prediction
    update: Callable[..., tuple[PyTree, dict[str, Array]]]
    # (server_state, aggregated, round_info) -> (server_state, info)
    unheard: Callable[[PyTree, RoundInfo], PyTree] | None = None
    # (server_state, info) -> the new state of a model that no message reached; None: its old state
    map_models: Callable[..., Callable[..., PyTree]] = jax.vmap
    # how the update is mapped over the K models: all at once, or ``sequentially`` for heavy servers


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


class Schedule(NamedTuple):
    """Which client trains which model in which round."""

    num_models: int
    num_clients: int
    num_slots: int  # S, static
    init: Callable[[Key], PyTree]  # key -> schedule_state
    sample: Callable[..., tuple[Cohort, PyTree]]  # (key, schedule_state, round) -> (Cohort, schedule_state)
    contacted: Callable[[PyTree], Array] | None = None
    # schedule_state after sample -> clients that got a model in that round, [] int32; None: those with a filled slot

    def __repr__(self) -> str:
        """Its numbers."""
        return f"Schedule(num_models={self.num_models}, num_clients={self.num_clients}, num_slots={self.num_slots})"


class Aggregate(NamedTuple):
    """A reduction of the slots' messages to one value per model, such as their weighted mean.

    It is a fold: messages are added in batches of any size B. So a mapping that trains one client at a time never
    holds more than one message.
    """

    init: Callable[[PyTree, int], PyTree]  # (shapes of one message, num_models) -> accumulator
    add: Callable[[PyTree, Slots, PyTree], PyTree]  # (accumulator, slots [B], messages [B, ...]) -> accumulator
    finish: Callable[[PyTree], PyTree]  # accumulator -> aggregated, leading axis K
    merge: Callable[[PyTree, str], PyTree]  # (accumulator of one device, mesh axis) -> of all devices, on each


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


class Channel(NamedTuple):
    """How a message travels and what it costs."""

    send: Callable[[Key, PyTree, PyTree], tuple[PyTree, PyTree]]
    # (key, message, memory) -> (the message as the server receives it, memory)
    uplink: Callable[[PyTree, PyTree], tuple[int, int]]
    # (shapes of a message, shapes of the broadcast) -> (bytes a message, bytes an example)
    init: Callable[[PyTree], PyTree] = _no_memory
    # a tree shaped as a message -> memory, kept per (model, client): what error feedback adds to the next message


Accept = Callable[[PyTree], Array]  # message as received -> [] bool: whether the server counts it


class Prediction(NamedTuple):
    """An ensemble's prediction."""

    mean: Array  # [n, C]
    members: Array  # [K, n, C]


class Engine(NamedTuple):
    """How the simulator maps a round's clients onto devices: static and hashable, an argument of compiled programs."""

    map_clients: Callable[..., tuple[PyTree, PyTree]]  # (train_slot, aggregate, accumulator, slots) -> (acc, outs [S])
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


class Algorithm(NamedTuple):
    """A federated algorithm: what ``simulate`` runs.

    Attributes:
        name: Its name, as tables and figures show it.
        init: ``(key, num_clients, start=None) -> state``; start is a key that initialises the models, or parameters.
        step: ``(state, data, engine) -> (state, info)``; info is never carried to the next round.
        predict: ``(state, x) -> Prediction``.
        cost: ``(data, engine) -> Cost``.
        schedule: Which client trains which model in which round.
        personal: ``(state, data, max_client_size, client id, x) -> Prediction``, what that client predicts; None where
            every client predicts with the global models.
        params: ``state -> parameters`` of the K networks that it predicts with, [K, ...]; None where it predicts
            otherwise.
        composition: How it was made.
    """

    name: str
    init: Callable[..., PyTree]
    step: Callable[..., tuple[PyTree, dict[str, Array]]]
    predict: Callable[[PyTree, Array], Prediction]
    cost: Callable[[FederatedData, Engine], Cost]
    schedule: Schedule
    personal: Callable[..., Prediction] | None = None
    params: Callable[[PyTree], PyTree] | None = None
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
