"""Recipes: the functions that build algorithms, and the command-line options that become their arguments.

A recipe is a function such as ``fed_avg(model, schedule, client_learning_rate=..)`` marked with ``recipe``. Its options
on the command line are its parameters; their names, types, defaults and help come from its signature and docstring.
Some parameters take several options: a ``Work`` takes the fields of ``WorkOptions`` and a ``Channel`` the fields of
``ChannelOptions`` (see ``WRITTEN``); another frozen record takes one option for each of its fields.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import numpy as np
import optax
from jaxtyping import Num, Shaped

from fedtangent._src import checks
from fedtangent._src.checks import choice
from fedtangent._src.docstrings import completed
from fedtangent._src.entries import (
    Entry,
    NoOptions,
    catalogue,
    option,
    options_of_record,
    prefixed,
    signature_options,
    written_fields,
)
from fedtangent._src.federated import faults
from fedtangent._src.federated.algorithms.common import ARGUMENTS, DEFAULT_WORK, RAISES, RETURNS, Averaging
from fedtangent._src.federated.local import Work
from fedtangent._src.federated.wire.channel import named_channel
from fedtangent._src.federated.wire.sparsify import check_sparsity
from fedtangent._src.federated.wire.subsample import largest_sample
from fedtangent._src.optimizers import Rate, at_rate, staircase_decay
from fedtangent._src.types import Accept, Algorithm, AnyArray, Array, Channel, Model, Partition, Recipe, Schedule

MOMENTUM = 0.9
OPTIMIZERS = {"momentum": functools.partial(optax.sgd, momentum=MOMENTUM), "adam": optax.adam}
SECURE_BITS = 32  # bits of a masked number on the command line


class Supplied(NamedTuple):
    """The arguments that a run supplies to a recipe, besides the options that the user chooses.

    Attributes:
        model: The network.
        schedule: Which client trains which model in which round.
        seed: Seed of the run, for random draws while the algorithm is built.
        server_data: Inputs [m, ...] without labels at the server.
        shared: Indices of the examples that every client received.
        validation: The server's validation examples: x [m, ...] and targets [m, C] or labels [m].
        clients: The examples of each client.
        expected_clients: Average number of clients in a round, if the schedule draws this number.
    """

    model: Model
    schedule: Schedule
    seed: int = 0
    server_data: Shaped[AnyArray, "m ..."] | None = None
    shared: np.ndarray | None = None
    validation: tuple[Shaped[AnyArray, "m ..."], Num[AnyArray, "m ..."]] | None = None
    clients: Partition | None = None
    expected_clients: float | None = None


@runtime_checkable
class Record(Protocol):
    """A frozen dataclass of options, such as ``Averaging``."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    def __hash__(self) -> int:
        """Returns the hash of the options."""


class FinishedRun(NamedTuple):
    """The facts about a finished run that a recipe's ``remark`` needs to write its line of text.

    Attributes:
        schedule: The run's schedule.
        schedule_name: Name of the schedule.
        clients_per_round: Number of clients in a round; the expected number if the schedule draws it.
        only_first: Whether rounds were closed before all clients had answered.
        num_rounds: Number of rounds R.
    """

    schedule: Schedule
    schedule_name: str
    clients_per_round: int
    only_first: bool
    num_rounds: int


# ---- parameters that a command line writes by several options ----------------------------------------------------


@dataclasses.dataclass(frozen=True)
class RateOptions:
    """Options of the clients' learning rate, or of the rate of NTK-FL's server."""

    client_learning_rate: float = 1.0
    """Step size of local training (NTK-FL: of the server)."""
    decay: float = 1.0
    """Factor of the step size every --decay-every rounds (papers: 0.99)."""
    decay_every: int = option(10, used_with="decay")
    """Rounds between decays."""

    def value(self) -> Rate:
        """Returns the learning rate: a number, or a learning-rate schedule if it decays.

        Raises ``ValueError`` for a rate, a decay or a number of rounds out of range.
        """
        checks.number("client_learning_rate", self.client_learning_rate, above=0)
        checks.number("decay", self.decay, above=0, at_most=1)
        checks.whole("decay_every", self.decay_every)
        rate = self.client_learning_rate
        return rate if self.decay == 1 else staircase_decay(rate, self.decay, self.decay_every)


@dataclasses.dataclass(frozen=True)
class OptimizerOptions:
    """The option that names the clients' optimiser."""

    client_optimizer: str = "sgd"
    """sgd, momentum (0.9) or adam; its state does not outlive a round."""


@dataclasses.dataclass(frozen=True)
class WorkOptions:
    """Options of the amount of a client's local training in a round."""

    local_steps: int | None = None
    """Local steps T (give this or --local-epochs)."""
    local_epochs: int | None = None
    """Local epochs (default: 5, unless --local-steps is given)."""
    batch_size: int = DEFAULT_WORK.batch_size or 0
    """Minibatch size; 0 for full batches."""

    def value(self) -> Work:
        """Returns the ``Work`` that the options describe.

        Raises ``ValueError`` for both steps and epochs, or a number out of range.
        """
        if self.local_steps is not None and self.local_epochs is not None:
            raise ValueError(
                f"local_steps: got {self.local_steps} and local_epochs {self.local_epochs}, must be only one of the two"
            )
        for name in ("local_steps", "local_epochs"):
            if getattr(self, name) is not None:
                checks.whole(name, getattr(self, name))
        checks.whole("batch_size", self.batch_size, 0)
        epochs = DEFAULT_WORK.epochs if self.local_steps is None and self.local_epochs is None else self.local_epochs
        return Work(self.local_steps, epochs, self.batch_size if self.batch_size > 0 else None)


@dataclasses.dataclass(frozen=True)
class ChannelOptions:
    """Options of the channel by which clients send their updates."""

    channel: str = "lossless"
    """How updates travel: lossless, top_k:<share>, random_k:<share>, qsgd:<bits>, quantise:<bits>, clip:<norm>."""
    error_feedback: bool = False
    """Clients add what the channel left out to their next update."""
    sparsity: float = 0.0
    """Share of an update's numbers, the smallest, that is set to zero."""

    def value(self) -> Channel | None:
        """Returns the channel, or None for a lossless one.

        Raises ``ValueError`` if both a sparsity and a channel are set, if one of them is unknown or out of range, or
        for error feedback of a lossless channel.
        """
        check_sparsity(self.sparsity)
        if self.sparsity > 0 and self.channel != "lossless":
            raise ValueError(f"sparsity: got {self.sparsity} and channel {self.channel!r}, must be only one of the two")
        text = self.channel if self.sparsity == 0 else f"top_k:{1 - self.sparsity:.15f}"
        return named_channel(text, self.error_feedback)


@dataclasses.dataclass(frozen=True)
class AcceptOptions:
    """Options by which the server rejects messages."""

    max_update_norm: float | None = None
    """Reject updates of larger norm, or not finite (inf: only the latter)."""

    def value(self) -> Accept | None:
        """Returns the test by which the server accepts a message, or None to accept all.

        Raises ``ValueError`` for a ``max_update_norm`` of 0 or less.
        """
        if self.max_update_norm is None:
            return None
        if not self.max_update_norm > 0:
            raise ValueError(
                f"max_update_norm: got {self.max_update_norm}, must be above 0 (inf accepts every finite update)"
            )
        return faults.finite(self.max_update_norm)


@dataclasses.dataclass(frozen=True)
class SecureOptions:
    """The option of whether clients send masked numbers, by secure aggregation."""

    secure_aggregation: bool = False
    """Clients send masked numbers; the server learns the sum only."""

    def value(self) -> int | None:
        """Returns the number of bits of a masked number; None without secure aggregation."""
        return SECURE_BITS if self.secure_aggregation else None


@dataclasses.dataclass(frozen=True)
class ServerExamples:
    """The option of how many training examples FedBE's server holds, without labels."""

    server_examples: int = 100
    """Training examples, without labels, that only the server holds."""


@dataclasses.dataclass(frozen=True)
class ValidationOptions:
    """Options of the examples by which NTK-FL's server chooses the number of steps."""

    ntk_choose: str = "training"
    """Choose the number of steps by the loss on the round's training examples, or (validation) on --server-examples."""
    server_examples: int = option(100, used_with="ntk_choose")
    """Training examples that the server holds for validation, and no client."""


@dataclasses.dataclass(frozen=True)
class SharedOptions:
    """The option of data sharing: the size of the set of examples that every client receives."""

    shared_fraction: float = 0.1
    """Share of all examples that every client holds."""


@dataclasses.dataclass(frozen=True)
class LossOptions:
    """The option that names the loss by which clients train."""

    loss: str = "squared_error"
    """squared_error (classes as centred one-hot targets), cross_entropy, exponential or logistic (one output); add
    _sum for sums, not means."""


@dataclasses.dataclass(frozen=True)
class BaseOptions:
    """The option that names the inner algorithm of one that wraps another, such as Fed-ensemble."""

    base: str = "fed_avg"
    """The algorithm inside; its options are options of the run too."""


# parameter of a recipe -> the options that write it; without a method ``value`` the one option is the value
WRITTEN: Mapping[str, type[Any]] = {
    "client_learning_rate": RateOptions,
    "learning_rate": RateOptions,
    "client_optimizer": OptimizerOptions,
    "optimizer": OptimizerOptions,
    "work": WorkOptions,
    "channel": ChannelOptions,
    "accept": AcceptOptions,
    "secure_aggregation": SecureOptions,
    "server_data": ServerExamples,
    "validation": ValidationOptions,
    "shared": SharedOptions,
    "loss": LossOptions,
}
OF_RUN = ("server_data", "validation", "shared", "expected_clients", "seed", "pool_size")  # a run supplies them
RATES = ("client_learning_rate", "learning_rate")  # parameters of a recipe that are the rate of its local training
PREFIXES = {"evolution": "ntk_"}  # prefix of a record's options, by the name of the parameter


# ---- entries ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class AlgorithmEntry(Entry):
    """The catalogue's entry of an algorithm, from which command line and documentation are made.

    ``build`` makes the algorithm from an instance of ``options`` and a ``Supplied``.
    """

    recipe: Recipe | None = None
    """Function that builds the algorithm."""
    parts: str = ""
    """Client; aggregate; server, in a few words."""
    schedule: str = "uniform"
    """Name of the default schedule."""
    personal: bool = False
    """Whether each client predicts for itself, with the state that it kept."""
    inside: bool = False
    """Whether the algorithm may be the ``base`` of another one."""
    sends: str = "updates"
    """Kind of the clients' messages: "updates", "examples", "Jacobians" or "nothing"."""
    remark: Callable[[Any, FinishedRun], str] | None = None
    """Function from the options and the finished run to a line of text printed with the results; None for no remark."""

    @property
    def has_base(self) -> bool:
        """Whether the recipe has a parameter ``base``: the recipe of an algorithm inside this one."""
        return self.recipe is not None and "base" in inspect.signature(self.recipe).parameters

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the recipe's parameters, and its records' fields, that a run supplies, such as ``server_data``."""
        if self.recipe is None:
            return ()
        parameters, unused = (
            inspect.signature(self.recipe).parameters.values(),
            vars(self.recipe)["about"]["layout"].unused,
        )
        records = [p.default for p in parameters if dataclasses.is_dataclass(p.default)]
        names = {p.name for p in parameters} | {f.name for record in records for f in dataclasses.fields(record)}
        return tuple(name for name in OF_RUN if name in names - set(unused))


def recipe(
    function: Recipe | None = None,
    *,
    unused: Sequence[str] = (),
    python_only: Sequence[str] = (),
    options: type[Any] = NoOptions,
    **about: Any,
) -> Any:
    """Marks a function ``(model, schedule, ..) -> Algorithm`` as a recipe, so that its algorithm fits any model.

    The algorithm can then be built again for another model (``algorithm.on``), as ``compare`` does to train other
    widths. Mark a function of yours with ``@fedtangent.recipe``; the arguments below are for built-in recipes.

    Args:
        function: The function; its first two parameters are the model and the schedule.
        unused: Fields of records, such as ``Averaging``, that have no meaning for the algorithm. A call that sets such
            a field of ``Averaging`` raises ``ValueError``.
        python_only: Parameters, or fields of records, that are no options of the command line.
        options: A frozen dataclass, with a ``check()``, of further options of the command line.
        about: Fields of ``AlgorithmEntry``, such as ``papers``.

    Returns:
        A function with the same arguments, whose algorithm can be built again.

    Raises:
        ValueError: When the function is called: an unused option, or a result that is no ``Algorithm``.

    Example:
        >>> import fedtangent as ft
        >>> @ft.recipe
        ... def half_way(model, schedule, client_learning_rate):
        ...     averaging = ft.Averaging(server_learning_rate=0.5)
        ...     return ft.fed_avg(model, schedule, client_learning_rate, averaging=averaging)
    """
    if function is None:
        return functools.partial(recipe, unused=unused, python_only=python_only, options=options, **about)
    name, signature = getattr(function, "__name__", "recipe"), inspect.signature(function)

    @functools.wraps(function)
    def marked(model: Model, schedule: Schedule, *arguments: object, **options: object) -> Algorithm:
        if unused:
            bound = signature.bind(model, schedule, *arguments, **options)
            _refuse_unused(name, unused, bound.arguments.get("averaging"))
        algorithm = function(model, schedule, *arguments, **options)
        if not isinstance(algorithm, Algorithm):
            raise ValueError(f"{name}: returned a {type(algorithm).__name__}, must return an Algorithm")

        def rebuild(other: Model, rate_factor: float | Array | None) -> Algorithm:
            if rate_factor is None:
                return marked(other, schedule, *arguments, **options)
            called = signature.bind(other, schedule, *arguments, **options)
            called.apply_defaults()
            rate = next((r for r in RATES if called.arguments.get(r) is not None), None)
            if rate is None:
                raise ValueError(f"{RATES[0]}: got none in {name}, must be given as a number or a schedule")
            called.arguments[rate] = _times(rate_factor, called.arguments[rate])
            return marked(*called.args, **called.kwargs)

        return algorithm._replace(composition=algorithm.composition._replace(rebuild=rebuild))

    if about and function.__doc__:
        marked.__doc__ = completed(function, ARGUMENTS, RETURNS, RAISES)
    marked.about = {**about, "layout": _Layout(tuple(unused), tuple(python_only), options)}  # type: ignore[attr-defined]
    return marked


def _times(factor: float | Array, rate: Rate) -> Rate:
    """Returns ``factor`` times a learning rate, which is a number or a function of the round."""
    return (lambda step: factor * rate(step)) if callable(rate) else factor * rate


def _refuse_unused(name: str, unused: Sequence[str], averaging: Averaging | None) -> None:
    """Raises ``ValueError`` if ``averaging`` sets one of the fields in ``unused``, which algorithm ``name`` ignores."""
    for field in dataclasses.fields(averaging) if averaging is not None else ():
        value = getattr(averaging, field.name)
        if field.name in unused and value != field.default:
            raise ValueError(f"{field.name}: got {value!r:.60}, but {name} does not use it: leave it out")


@dataclasses.dataclass(frozen=True)
class _Layout:
    """The rule by which a recipe's parameters become options of the command line.

    Attributes:
        unused: Fields of records that have no meaning for the algorithm.
        python_only: Parameters, or fields of records, that are no options of the command line.
        extra: A frozen dataclass of further options that are no parameters of the recipe.
    """

    unused: tuple[str, ...] = ()
    python_only: tuple[str, ...] = ()
    extra: type[Any] = NoOptions

    def groups(self, function: Recipe) -> list[type[Any]]:
        """Returns the dataclasses whose fields are command-line options of the recipe.

        Parameters that become an option of the same name are not among them: ``plain`` returns their names.
        """
        takes_base = "base" in _parameters_of(function)
        groups: list[type[Any]] = [BaseOptions] if takes_base else []
        for name, record in self._parameters(function):
            if record is None:
                groups += [WRITTEN[name]] if name in WRITTEN else []
                continue
            groups += [WRITTEN[field] for field in self._fields(function, record) if field in WRITTEN]
            groups.append(_plain_options(record, self._plain(function, record), PREFIXES.get(name, "")))
        return [*groups, self.extra]

    def plain(self, function: Recipe) -> list[str]:
        """Returns the names of the recipe's parameters that become command-line options of the same name.

        These are parameters that are neither records nor in ``WRITTEN`` or ``OF_RUN``.
        """
        names = [name for name, record in self._parameters(function) if record is None and name not in WRITTEN]
        return [name for name in names if name not in OF_RUN]

    def arguments(self, function: Recipe, chosen: object, supplied: Supplied) -> dict[str, object]:
        """Returns a recipe's arguments by name, except the model, the schedule and ``base``.

        Parameters for Python users only are left out, too.

        Args:
            function: The recipe.
            chosen: The command-line options that the user chose, as attributes.
            supplied: The arguments that the run supplies, such as its seed.
        """
        arguments: dict[str, object] = {}
        for name, record in self._parameters(function):
            if record is not None:
                fields = {field: _value(field, chosen, supplied) for field in self._fields(function, record)}
                prefix, plain = PREFIXES.get(name, ""), self._plain(function, record)
                fields |= {field: getattr(chosen, prefix + field) for field in plain}
                both = {f.name for f in dataclasses.fields(record)} & _parameters_of(function).keys() & WRITTEN.keys()
                fields |= {field: _value(field, chosen, supplied) for field in both}  # such as the loss
                arguments[name] = dataclasses.replace(record, **fields)
            elif name in WRITTEN or name in OF_RUN:
                arguments[name] = _value(name, chosen, supplied)
            elif hasattr(chosen, name):
                arguments[name] = getattr(chosen, name)
        for name in arguments.keys() & {"client_optimizer", "optimizer"}:
            _take_optimizer(name, arguments)
        return arguments

    def by_option(self, function: Recipe, message: str) -> str:
        """Returns an error message with names of command-line options in place of names of a record's fields."""
        for name, record in self._parameters(function):
            if record is not None and name in PREFIXES:
                message = prefixed(message, self._plain(function, record), PREFIXES[name])
        return message

    def _parameters(self, function: Recipe) -> list[tuple[str, Record | None]]:
        """Returns those parameters of a recipe that become command-line options: names with default values.

        A default that is no record of options is returned as None. The model, the schedule, ``base``, ``**options`` and
        the parameters for Python users only are left out.
        """
        parameters = [p for p in _parameters_of(function).values() if p.name not in ("model", "schedule")]
        return [
            (p.name, p.default if isinstance(p.default, Record) else None)
            for p in parameters
            if p.kind is not p.VAR_KEYWORD and p.name not in (*self.python_only, "base")
        ]

    def _fields(self, function: Recipe, record: Record) -> list[str]:
        """Returns the names of a record's fields whose options ``WRITTEN`` lists, or that the run supplies.

        Unused fields, and fields whose names are parameters of the recipe too, are left out.
        """
        parameters = _parameters_of(function)
        names = [f.name for f in dataclasses.fields(record) if f.name not in self.unused and f.name not in parameters]
        return [name for name in names if name in WRITTEN or name in OF_RUN]

    def _plain(self, function: Recipe, record: Record) -> tuple[str, ...]:
        """Returns the names of a record's fields that become options of the same name, perhaps after a prefix.

        Left out are fields in ``WRITTEN`` or ``OF_RUN``, for Python users only, without a meaning for the algorithm, or
        of a type that cannot be written, and fields whose names are parameters of the recipe.
        """
        others = {*self.unused, *self.python_only, *_parameters_of(function), *WRITTEN, *OF_RUN}
        return tuple(name for name in written_fields(type(record)) if name not in others)


def _parameters_of(function: Recipe) -> Mapping[str, inspect.Parameter]:
    """Returns the parameters of a recipe by name.

    A recipe with ``**options`` and no ``base`` is taken to pass these on to ``fed_avg``, whose parameters are returned
    too, except ``client_optimizer`` if the recipe has a ``client_learning_rate``.
    """
    parameters = dict(inspect.signature(function).parameters)
    collects = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if not collects or "base" in parameters:
        return parameters
    more = dict(inspect.signature(catalogue("algorithms")["fed_avg"].recipe).parameters)
    if "client_learning_rate" in parameters:  # by name: the recipe makes its own use of the rate
        del more["client_optimizer"]
    return {**{name: p for name, p in parameters.items() if p.kind is not p.VAR_KEYWORD}, **more, **parameters}


@functools.cache
def _plain_options(record: Record, names: tuple[str, ...], prefix: str) -> type[Any]:
    """Returns a dataclass of options for the fields ``names`` of a record, with its values as defaults.

    ``prefix`` comes before the names of the options.
    """
    return options_of_record(f"{type(record).__name__}Options", record, names, prefix)


def _value(name: str, chosen: object, supplied: Supplied) -> object:
    """Returns the value of a recipe's parameter, or of a record's field, that is in ``WRITTEN`` or ``OF_RUN``.

    A name in ``OF_RUN`` is supplied by the run: its value is a field of ``supplied``, except ``pool_size``, which is
    computed. Any other value is made from the parameter's options in ``WRITTEN``, for example a learning rate from the
    step size, its decay and the rounds between decays.

    Args:
        name: Name of the parameter or field.
        chosen: The algorithm's command-line options, as attributes.
        supplied: The arguments that the run supplies.
    """
    if name == "pool_size":
        return _pool_size(chosen, supplied)
    if name in OF_RUN:
        return getattr(supplied, name)
    group = WRITTEN[name]
    values = {field.name: getattr(chosen, field.name) for field in dataclasses.fields(group)}
    return group(**values).value() if hasattr(group, "value") else next(iter(values.values()))


def arguments_of(function: Recipe, flat: Mapping[str, object]) -> dict[str, Any]:
    """Returns a recipe's arguments, with values of single fields (as the command line has them) gathered into records.

    For ``fed_prox``, ``{"weighting": "uniform", "mu": 0.1}`` becomes ``mu=0.1`` and
    ``averaging=Averaging(weighting="uniform")``.

    Args:
        function: The recipe.
        flat: Values by the names of parameters, or of fields of records.
    """
    arguments = dict(flat)
    for parameter in _parameters_of(function).values():
        record = arguments.get(parameter.name, parameter.default)
        if dataclasses.is_dataclass(record):
            names = {field.name for field in dataclasses.fields(record)} - {parameter.name}
            fields = {name: arguments.pop(name) for name in names & arguments.keys()}
            if fields:
                arguments[parameter.name] = dataclasses.replace(record, **fields)  # type: ignore[type-var]
    return arguments


def entry_of(function: Recipe, name: str | None = None) -> AlgorithmEntry:
    """Builds the catalogue entry of a function that is marked with ``recipe``.

    Args:
        function: The recipe.
        name: Name of a user's recipe, ``package.module:function``; None for a built-in one.

    Raises:
        ValueError: A user's recipe has a parameter without a default that cannot be written on a command line.
    """
    about = dict(vars(function)["about"])
    layout: _Layout = about.pop("layout")
    title, extra = str(name or getattr(function, "__name__", "recipe")), layout.extra
    groups = tuple(reversed(layout.groups(function)))  # so that the options of the first group come first
    options = signature_options(title, function, layout.plain(function), groups, strict=name is not None)
    summary = (inspect.getdoc(function) or "an algorithm of your own").splitlines()[0]
    summary = summary.removeprefix("Builds ").rstrip(".")

    def build(chosen: object, supplied: Supplied) -> Algorithm:
        if getattr(chosen, "max_update_norm", None) is not None and getattr(chosen, "secure_aggregation", False):
            raise ValueError("max_update_norm: needs single messages, which secure_aggregation hides: leave one out")
        if extra is not NoOptions:
            extra(**{field.name: getattr(chosen, field.name) for field in dataclasses.fields(extra)}).check()
        try:
            return built(chosen, supplied)
        except ValueError as error:  # it names a field of a record, whose option has another name
            raise ValueError(layout.by_option(function, str(error))) from error

    def built(chosen: object, supplied: Supplied) -> Algorithm:
        arguments = layout.arguments(function, chosen, supplied)
        if "base" in _parameters_of(function):
            inner = inside(vars(chosen)["base"]).recipe
            arguments |= {"base": inner, **vars(inner)["about"]["layout"].arguments(inner, chosen, supplied)}
        algorithm: Algorithm = function(supplied.model, supplied.schedule, **arguments)
        return algorithm

    return AlgorithmEntry(title, summary, build, options, recipe=function, **about)


def entry_of_function(name: str, function: Recipe) -> AlgorithmEntry:
    """Builds the catalogue entry of a user's recipe.

    Args:
        name: Name of the recipe, ``package.module:function``.
        function: The recipe, marked with ``recipe`` or not.

    Raises:
        ValueError: The recipe has no parameter ``client_learning_rate`` or ``loss``, or has one without a default that
            cannot be written on a command line.
    """
    entry = entry_of(function if hasattr(function, "about") else recipe(function), name)
    if not {"client_learning_rate", "loss"} <= {field.name for field in dataclasses.fields(entry.options)}:
        raise ValueError(f"algorithm: got {name!r}, must take client_learning_rate and loss, or **options")
    return entry


def _take_optimizer(name: str, arguments: dict[str, Any]) -> None:
    """Replaces an optimiser's name and the learning rate in a recipe's ``arguments`` by an optax optimiser.

    ``name`` is "client_optimizer" or "optimizer". ``arguments[name]`` is the name of an optimiser, such as "adam",
    which the optimiser replaces. For "sgd" the rate stays, and ``arguments[name]`` is removed.
    """
    optimizer = choice("client_optimizer", arguments.pop(name), ("sgd", *OPTIMIZERS))
    if optimizer == "sgd":
        return
    make = OPTIMIZERS[optimizer]
    rate = arguments.pop("client_learning_rate" if name == "client_optimizer" else "learning_rate")
    arguments[name] = at_rate(make, rate)


def _pool_size(chosen: object, supplied: Supplied) -> int | None:
    """Returns the largest number of examples that the clients of one model can send the server in a round.

    Args:
        chosen: The algorithm's command-line options; its ``beta``, 1 if it has none, is the share of its examples that
            a client sends.
        supplied: Arguments of the run; without ``clients`` the result is None.
    """
    if supplied.clients is None:
        return None
    return largest_sample(supplied.clients, supplied.schedule.largest_cohort, getattr(chosen, "beta", 1.0))


def options_of(entry: AlgorithmEntry, base: str | None = None) -> type[Any]:
    """Returns the class of an algorithm's options; for an algorithm around another one it has the options of both.

    Args:
        entry: Entry of the algorithm.
        base: Name of the algorithm inside; None for ``fed_avg``.

    Raises:
        ValueError: A base that cannot be inside another algorithm.
    """
    return _joined((entry.options, inside(base or "fed_avg").options)) if entry.has_base else entry.options


@functools.cache
def _joined(classes: tuple[type[Any], ...]) -> type[Any]:
    """Returns a dataclass with the fields of all ``classes``; the same classes give the same dataclass (cached)."""
    joined = type("Around".join(cls.__name__ for cls in classes), classes, {})
    return dataclasses.dataclass(frozen=True)(joined)


def inside(base: str) -> AlgorithmEntry:
    """Returns the entry of an algorithm that may be the ``base`` of another; raises ``ValueError`` for other names."""
    bases: dict[str, AlgorithmEntry] = {name: entry for name, entry in catalogue("algorithms").items() if entry.inside}
    choice("base", base, bases)
    return bases[base]
