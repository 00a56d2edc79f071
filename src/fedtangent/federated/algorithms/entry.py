"""Entries of algorithms, the options that algorithms share, and how options become a recipe's arguments.

A recipe is the function that composes an algorithm, such as ``fed_avg(model, schedule, client_learning_rate=..)``.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import numpy as np
import optax

from fedtangent import checks
from fedtangent.checks import choice
from fedtangent.entries import Entry, catalogue, option, own_options
from fedtangent.federated import faults
from fedtangent.federated.local import Work
from fedtangent.federated.rates import Rate, staircase_decay
from fedtangent.federated.wire.channel import named_channel
from fedtangent.federated.wire.sparsify import check_sparsity
from fedtangent.types import Algorithm, Array, Channel, Model, Partition, Schedule

DEFAULT_EPOCHS = 5  # local epochs, where neither steps nor epochs are given
LAW_CLIENTS = 8  # clients of the runs that the laws are tested on
MOMENTUM = 0.9
OPTIMIZERS: dict[str, Callable[..., optax.GradientTransformation] | None] = {
    "sgd": None,
    "momentum": lambda rate: optax.sgd(rate, momentum=MOMENTUM),
    "adam": optax.adam,
}


class Given(NamedTuple):
    """What an algorithm is built from, besides its options."""

    model: Model
    schedule: Schedule
    seed: int = 0  # the run's, for random draws while the algorithm is built
    server_data: Array | None = None  # x [m, ...] without labels, held by the server
    shared: np.ndarray | None = None  # indices of the examples that every client was given
    validation: tuple[Array, Array] | None = None  # the server's: x [m, ...], targets [m, C] or labels [m]
    clients: Partition | None = None
    expected_clients: float | None = None  # clients of a round on average, where the schedule draws their number


class Ran(NamedTuple):
    """A finished run, as an entry's ``remark`` gets it."""

    schedule: Schedule
    schedule_name: str
    clients_per_round: int
    only_first: bool  # whether a round was closed before all had answered
    num_rounds: int


TRAINED: Mapping[str, Any] = {"client_learning_rate": 0.2, "work": Work(epochs=2, batch_size=3)}


@dataclasses.dataclass(frozen=True)
class Laws:
    """What the tests of the laws need to build an algorithm, and which laws it need not keep."""

    arguments: Mapping[str, Any] = dataclasses.field(default_factory=lambda: TRAINED)
    """Of the recipe, besides model and schedule."""
    exact: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Changes to them under which clients with the same three examples send the same; by default they do anyway."""
    cohorts: str = "many"
    """Clients of a model in a round: "many"; "one"; "own", where it is always the same one."""
    doubled: str = "weight"
    """What makes one client two: twice the "weight", or the "examples" twice (of servers that pool, unweighted)."""
    compared: str = "server"
    """Field of the state that an absent client must not touch."""
    nothing_on: tuple[str, ...] = ()
    """Ledgers that stay empty, because nothing travels that way."""
    exempt: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Laws that do not apply, and why."""


@dataclasses.dataclass(frozen=True)
class AlgorithmEntry(Entry):
    """An algorithm: ``build`` takes an instance of ``options`` and a ``Given``."""

    recipe: Callable[..., Algorithm] = cast("Any", None)  # noqa: RUF009
    """The function that the package exports."""
    parts: str = ""
    """Client; aggregate; server, in a few words."""
    schedule: str = "uniform"
    """Name of its own schedule."""
    personal: bool = False
    """Whether each client predicts for itself, with what it kept."""
    inside: bool = False
    """Whether it may stand inside another algorithm (``base``); its options are then its recipe's arguments."""
    needs: tuple[str, ...] = ()
    """Fields of ``Given`` that it uses besides model, schedule and seed."""
    sends: str = "updates"
    """What its clients send: "updates", "examples", "Jacobians" or "nothing"."""
    rule: Callable[[Any], Mapping[str, Any]] | str = ""
    """How theory follows it: a function from its options to fields of ``theory.Rule`` (rates, steps and batches aside),
    and "weighting" where its means are not by examples. Or text: why theory has no rule for it, and what is nearest."""
    laws: Laws = Laws()
    remark: Callable[[Any, Ran], str] | None = None
    """A line of text printed with a run's results, from the options and the finished run."""

    @property
    def has_base(self) -> bool:
        """Whether another algorithm stands inside it."""
        return issubclass(self.options, Around)


@dataclasses.dataclass(frozen=True)
class Descent:
    """Options of every algorithm that follows a gradient."""

    client_learning_rate: float = 1.0
    """Step size of the clients, or of the server's evolution of a kernel."""
    decay: float = 1.0
    """The clients' step size is multiplied by this every --decay-every rounds (the papers: 0.99)."""
    decay_every: int = option(10, used_with="decay")
    """Rounds between decays."""
    loss: str = "squared_error"
    """squared_error (classes as centred one-hot targets), cross_entropy, exponential or logistic (classes as -1 and 1,
    one output against the rest); a mean over examples, with _sum behind its name their sum."""
    max_update_norm: float | None = None
    """Reject updates that are larger, or not finite (inf: only those)."""


@dataclasses.dataclass(frozen=True)
class Stepping(Descent):
    """Options of algorithms whose clients step with an optimiser."""

    client_optimizer: str = "sgd"
    """sgd, momentum (0.9) or adam; its state does not outlive a round."""


@dataclasses.dataclass(frozen=True)
class Training(Stepping):
    """Options of local training."""

    local_steps: int | None = None
    """Local steps T (give this or --local-epochs)."""
    local_epochs: int | None = None
    """Local epochs (default: 5, unless --local-steps is given)."""
    batch_size: int = 16
    """Minibatch size; 0 for full batches."""


@dataclasses.dataclass(frozen=True)
class Hiding:
    """Options that let the server see less of each client."""

    beta: float = 1.0
    """Share of its examples that a client uses in a round."""
    shuffle: bool = False
    """A shuffling server permutes what clients send, so that the server does not know who sent what."""


@dataclasses.dataclass(frozen=True)
class Mean(Hiding):
    """Options of a mean over clients."""

    weighting: str | None = None
    """Weigh clients by examples or uniformly: examples, uniform (default: examples, or the algorithm's own)."""


@dataclasses.dataclass(frozen=True)
class ServerStep:
    """Options of a server that steps."""

    server_learning_rate: float | None = None
    """Step size of the server (default: 1, or the algorithm's own)."""


@dataclasses.dataclass(frozen=True)
class Sending:
    """Options of how updates travel."""

    channel: str = "lossless"
    """How updates travel: lossless, top_k:<share>, random_k:<share>, qsgd:<bits>, quantise:<bits>."""
    error_feedback: bool = False
    """A client adds to its next update what the channel left out."""
    sparsity: float = 0.0
    """Share of an update's numbers that is set to zero, the smallest."""
    secure_aggregation: bool = False
    """Clients send masked numbers; the server learns the sum only."""


@dataclasses.dataclass(frozen=True)
class Averaging(Sending, ServerStep, Mean, Training):
    """Options of local training with an average at the server."""


@dataclasses.dataclass(frozen=True)
class Around(Averaging):
    """Options of an algorithm that wraps another one."""

    base: str = "fed_avg"
    """The algorithm inside, whose own options are given beside."""


SHARED = frozenset(field.name for field in dataclasses.fields(Around))


OWN_GROUPS: tuple[tuple[type[Any], tuple[str, ...]], ...] = (
    # groups of options -> the recipe's arguments that they are turned into
    (Sending, ("channel", "secure_aggregation")),
    (ServerStep, ("server_learning_rate",)),
    (Mean, ("weighting",)),
    (Hiding, ("beta", "shuffle")),
    (Training, ("work",)),
    (Stepping, ("client_optimizer",)),
    (Descent, ("client_learning_rate", "loss", "accept")),
)


def entry_of_function(name: str, function: Callable[..., Any]) -> AlgorithmEntry:
    """The entry of a user's recipe ``(model, schedule, *, client_learning_rate, ..)``, ``package.module:function``.

    A recipe takes the arguments that those of the package take (``work``, ``loss``, ``channel``, ..), by name or as
    ``**options``, and has their options; its other parameters are options of its own. It returns an ``Algorithm``.
    Raises ``ValueError`` as ``entries.own_options``, and for a recipe without a step size or a loss.
    """
    shared = [argument for _, arguments in OWN_GROUPS for argument in arguments]
    everything = inspect.Parameter.VAR_KEYWORD in _kinds(function)
    takes = set(shared) if everything else set(shared) & set(inspect.signature(function).parameters)
    if not {"client_learning_rate", "loss"} <= takes:
        raise ValueError(f"algorithm: got {name!r}, must take client_learning_rate and loss, or **options")
    bases = tuple(group for group, arguments in OWN_GROUPS if takes & set(arguments))
    options = own_options("algorithm", name, function, shared, bases)

    def build(o: Any, given: Given) -> Algorithm:
        arguments = {**shared_arguments(o), **own_arguments(options, o)}
        for argument in ("accept", "client_optimizer"):
            if argument not in takes and arguments.pop(argument, None) is not None:
                option = "max_update_norm" if argument == "accept" else argument
                raise ValueError(f"{option}: is not used with {name}, which does not take {argument}")
        unused = {argument for argument in arguments if argument in shared} - takes
        found = function(given.model, given.schedule, **{k: v for k, v in arguments.items() if k not in unused})
        if not isinstance(found, Algorithm):
            raise ValueError(f"algorithm: got {name!r}, which returned a {type(found).__name__}, must be an Algorithm")
        return found

    summary = (inspect.getdoc(function) or "an algorithm of your own").splitlines()[0]
    why = "it is a function of your own; compare one that is near to it and has a rule, such as fed_avg or fed_prox"
    return AlgorithmEntry(name, summary, build, options, recipe=function, rule=why)


def _kinds(function: Callable[..., Any]) -> set[Any]:
    """The kinds of a function's parameters; none where they cannot be read, which ``own_options`` tells."""
    try:
        return {parameter.kind for parameter in inspect.signature(function).parameters.values()}
    except (TypeError, ValueError):
        return set()


def options_of(entry: AlgorithmEntry, base: str | None = None) -> type[Any]:
    """The options class of an algorithm; for one around another, joined with that of its ``base`` (default fed_avg).

    Raises ``ValueError`` for a base that cannot stand inside another algorithm.
    """
    if not entry.has_base:
        return entry.options
    inner = _inside(base or "fed_avg")
    classes: Any = (entry.options, inner.options)
    return _joined(classes)


@functools.cache
def _joined(classes: Any) -> type[Any]:
    """A dataclass with the fields of both: made once, so that equal options are equal."""
    joined = type("Around".join(cls.__name__ for cls in classes), classes, {})
    return dataclasses.dataclass(frozen=True)(joined)


def _inside(base: str) -> AlgorithmEntry:
    inside: dict[str, AlgorithmEntry] = {name: entry for name, entry in catalogue("algorithms").items() if entry.inside}
    choice("base", base, inside)
    return inside[base]


def plain(o: Any) -> Mapping[str, Any]:
    """The rule of FedAvg."""
    return {}


def rule_of(entry: AlgorithmEntry, o: Any) -> Mapping[str, Any]:
    """Fields of ``theory.Rule``, from the ``rule`` of the algorithm's entry, or of that of the one inside it.

    Raises ``ValueError`` where theory has no rule.
    """
    own = _inside(o.base) if entry.has_base else entry
    if isinstance(own.rule, str):
        raise ValueError(f"algorithm: got {own.name!r}, of which theory has no rule: {own.rule}")
    return own.rule(o)


def rate_of(o: Descent) -> Rate:
    """The clients' rate, of the round if it decays."""
    checks.number("client_learning_rate", o.client_learning_rate, above=0)
    checks.number("decay", o.decay, above=0, at_most=1)
    checks.whole("decay_every", o.decay_every)
    rate = o.client_learning_rate
    return rate if o.decay == 1 else staircase_decay(rate, o.decay, o.decay_every)


def work_of(o: Training) -> Work:
    """The local work."""
    if o.local_steps is not None and o.local_epochs is not None:
        raise ValueError(
            f"local_steps: got {o.local_steps} beside local_epochs {o.local_epochs}, must be one of the two"
        )
    for name in ("local_steps", "local_epochs"):
        if getattr(o, name) is not None:
            checks.whole(name, getattr(o, name))
    checks.whole("batch_size", o.batch_size, 0)
    epochs = DEFAULT_EPOCHS if o.local_steps is None and o.local_epochs is None else o.local_epochs
    return Work(o.local_steps, epochs, o.batch_size if o.batch_size > 0 else None)


def channel_of(o: Sending) -> Channel | None:
    """How updates travel; None: as they are. Raises ``ValueError`` for a sparsity beside a channel."""
    check_sparsity(o.sparsity)
    if o.sparsity > 0 and o.channel != "lossless":
        raise ValueError(f"sparsity: sends by top_k, but channel is {o.channel!r}: give one of the two")
    return named_channel(o.channel if o.sparsity == 0 else f"top_k:{1 - o.sparsity:.15f}", o.error_feedback)


def shared_arguments(o: Any) -> dict[str, Any]:
    """A recipe's arguments from the shared options; without an option the recipe's own default stays."""
    given: dict[str, Any] = {}
    if isinstance(o, Descent):
        accept = None if o.max_update_norm is None else faults.finite(_bound(o))
        given |= {"client_learning_rate": rate_of(o), "loss": o.loss, "accept": accept}
    if isinstance(o, Stepping) and o.client_optimizer != "sgd":
        choice("client_optimizer", o.client_optimizer, OPTIMIZERS)
        given["client_optimizer"] = OPTIMIZERS[o.client_optimizer]
    if isinstance(o, Training):
        given["work"] = work_of(o)
    for name in ("server_learning_rate", "weighting"):
        if getattr(o, name, None) is not None:
            given[name] = getattr(o, name)
    if isinstance(o, Hiding):
        given |= {"beta": o.beta} if o.beta != 1 else {}
        given |= {"shuffle": True} if o.shuffle else {}
    if isinstance(o, Sending):
        given |= {"secure_aggregation": 32} if o.secure_aggregation else {}
        wire = channel_of(o)
        given |= {} if wire is None else {"channel": wire}
    return given


def _bound(o: Descent) -> float:
    """The largest norm of an accepted update; raises ``ValueError`` where the server cannot see single messages."""
    bound = o.max_update_norm
    if bound is None or not bound > 0:
        raise ValueError(f"max_update_norm: got {bound}, must be above 0 (inf: of any size)")
    if isinstance(o, Sending) and o.secure_aggregation:
        raise ValueError("max_update_norm: needs single messages, which secure_aggregation hides")
    return bound


def own_arguments(options: type[Any], o: Any) -> dict[str, Any]:
    """The values in ``o`` of those options that only this algorithm has, or their defaults: arguments by name."""
    own = {field.name: field.default for field in dataclasses.fields(options) if field.name not in SHARED}
    return {name: getattr(o, name, default) for name, default in own.items()}


def entry_of(
    recipe: Callable[..., Algorithm],
    summary: str,
    options: type[Any] = Averaging,
    renamed: Mapping[str, str] | None = None,
    **more: Any,
) -> AlgorithmEntry:
    """The entry of a recipe, under the recipe's name; ``more`` are further fields of ``AlgorithmEntry``.

    Unless ``more`` has a ``build``, options are passed to the recipe's arguments of the same names, or of the names in
    ``renamed`` (option -> argument). The recipe also gets the fields of ``Given`` that it ``needs`` and, if it wraps
    another algorithm, that one's recipe and options.
    """

    def build(o: Any, given: Given) -> Algorithm:
        own = {(renamed or {}).get(name, name): value for name, value in shared_arguments(o).items()}
        own |= {name: getattr(given, name) for name in more.get("needs", ())}
        inner = _inside(o.base) if issubclass(options, Around) else None
        own |= own_arguments(options, o) if inner is None else {"base": inner.recipe, **own_arguments(inner.options, o)}
        return recipe(given.model, given.schedule, **own)

    return AlgorithmEntry(recipe.__name__, summary, **{"build": build, **more}, options=options, recipe=recipe)
