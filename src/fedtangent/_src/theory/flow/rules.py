"""The work of clients and server in a round: the ``Rule`` that ``federated_flow`` follows, and its checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int, Int32

from fedtangent._src.checks import choice, flag, instance, number, real_array, shown
from fedtangent._src.losses import Loss, get_loss
from fedtangent._src.optimizers import Optimizer, check_linear
from fedtangent._src.pytrees import on_device
from fedtangent._src.theory.checks import is_concrete
from fedtangent._src.types import AnyArray, Array, ArrayLike, Partition

STALE = ("fed_async", "fed_buff")  # algorithms whose answers may be late
ALGORITHMS = ("fed_avg", "fed_dyn", "scaffold", "fed_nova", "modified_local_gd", *STALE)
DYNAMICS = ("gradient_descent", "gradient_flow")
STATIC = {"static": True}  # fields of a Rule that are no numbers
Batches = tuple[tuple[np.ndarray, ...], ...]  # per client, per step: places among the client's examples


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rule:
    """Work of clients and server in a round; with all defaults it is FedAvg by full-batch gradient descent.

    ``Rule(local_steps=5, learning_rate=0.1)`` is FedAvg, ``Rule(5, 0.1, mu=0.01)`` FedProx. Numbers may be traced.
    ``federated_flow`` checks them, because it knows the number of rounds and of clients.
    """

    local_steps: Any
    """Number T of a client's steps in a round: an integer, or one per client [N]."""
    learning_rate: Any
    """Step size of the clients: a number, or one per round [R]."""
    algorithm: str = field(default="fed_avg", metadata=STATIC)
    """Name of the algorithm: "fed_avg"; "fed_dyn" (Acar et al., 2021, algorithm 1, whose alpha is ``mu``); "scaffold"
    (Karimireddy et al., 2020, algorithm 1, option II); "fed_nova" (Wang et al., 2020, eq. 6 and 7); "modified_local_gd"
    (Local-GD paper, algorithm 3); "fed_async" (Xie et al., 2019, algorithm 1: the server moves towards late models) and
    "fed_buff" (Nguyen et al., 2022, algorithm 1: it adds late updates). The cohorts' weights are the weights of the
    clients' mean in all of them; the papers of FedDyn, SCAFFOLD and Modified Local-GD have uniform weights.
    """
    dynamics: str = field(default="gradient_descent", metadata=STATIC)
    """Dynamics of local training: "gradient_descent", or "gradient_flow" for the time ``local_steps * learning_rate``,
    which excludes ``batches``, ``client_optimizer`` and another ``loss`` than the squared error.
    """
    mu: ArrayLike = 0.0
    """Strength of the proximal term ``mu / 2 |w - w_server|^2`` of FedProx, FedNova and FedDyn; in the Local-GD paper
    it is the lambda of eq. (12). Not with "scaffold".
    """
    weight_decay: ArrayLike = 0.0
    """Weight decay of the local objective, ``weight_decay / 2 |w|^2``; with "fed_avg" only."""
    homogeneity: ArrayLike = 1.0
    """Ratio ``J(x) w_0 / f_0(x)``, which weight decay needs: 1 for a linear model, the number of layers for a network
    without biases whose activations are homogeneous, such as relu.
    """
    server_learning_rate: Any = 1.0
    """Step of the server, which scales its move to the clients' average: a number, or one per round [R]."""
    server_momentum: ArrayLike = 0.0
    """Momentum of the server, as in FedAvgM, in [0, 1); with "fed_avg" only."""
    nesterov: bool = field(default=False, metadata=STATIC)
    """Whether the server's momentum is Nesterov's."""
    step_weights: AnyArray | Sequence[float] | None = None
    """Factors of the local steps' sizes [T], T the largest of ``local_steps``; None: all 1. Not with "scaffold"."""
    batches: Any = None
    """Training rows of each local step's minibatch. None: all rows of the client in every step. An integer array
    [R, S, T, B], with -1 as padding: the batches that a run drew. Or for each client a sequence of batches, one for
    each local step, the same in every round.
    """
    loss: str | Loss = field(default="squared_error", metadata=STATIC)
    """Name of a loss in ``losses.LOSSES``, or a function with the same arguments. Under "squared_error",
    ``1/2 |f - y|^2`` summed over outputs, the flow predicts mean and covariance; under any other loss, such as
    "cross_entropy" (whose targets are probabilities of the classes), it predicts the run from a known initial function.
    """
    client_optimizer: Optimizer | None = field(default=None, metadata=STATIC)
    """Optimiser of the clients, an optax transformation that is linear in the gradients (or a function from the round
    to one); its state is reset in every round. ``learning_rate`` is the length of its first step along a gradient of 1,
    so another ``learning_rate`` scales all its steps. None: gradient descent. Not with "scaffold".
    """
    anchoring: ArrayLike = 1.0
    """Modified Local-GD's alpha: the share of the clients' mean in the next model, with the initial model as the rest;
    a number from 0 to 1, or one per round [R].
    """
    delays: Any = None
    """Delays of the answers of "fed_async" and "fed_buff", in rounds: a whole number, or one per slot [R, S]. An answer
    of delay d is to the model of d rounds ago, or to the initial one if there were fewer rounds. None: no delay.
    """
    delay_weights: ArrayLike | None = None
    """Factors of the answers of the delays 0 to D, the largest possible one [D + 1]; None: D = 0. In round r, counted
    from 0, a delay above r counts as r.
    """


class Kind(NamedTuple):
    """Static, hashable part of a rule; every different value is another compiled program.

    ``decays`` and ``weighs_steps`` say whether there are weight decay and weights of local steps; ``stepwise``, whether
    local steps are computed one by one. ``rows_per_example`` counts kernel rows of an example; ``most_steps`` and
    ``most_delay`` are the largest number of local steps and the largest delay.
    """

    algorithm: str = "fed_avg"  # one of ALGORITHMS
    dynamics: str = "gradient_descent"  # one of DYNAMICS
    has_server_momentum: bool = False  # the server keeps a momentum buffer
    nesterov: bool = False
    decays: bool = False  # the local objective has weight decay
    weighs_steps: bool = False  # local steps have weights (``step_weights``)
    stepwise: bool = False  # local steps one by one: minibatches, another loss or optimiser, a large kernel
    loss: str | Loss = "squared_error"  # a name in losses.LOSSES or a function
    client_optimizer: Optimizer | None = None  # None: gradient descent
    rows_per_example: int = 1  # kernel rows of an example
    most_steps: int = 1  # the largest number of local steps
    most_delay: int = 0  # the largest possible delay D of an answer

    @property
    def is_linear(self) -> bool:
        """Whether a run is linear in its initial function, so that mean and covariance have a closed form."""
        return self.loss == "squared_error"

    @property
    def corrects(self) -> bool:
        """Whether clients carry a correction of their local objective from round to round."""
        return self.algorithm in ("fed_dyn", "scaffold")

    @property
    def tilts(self) -> bool:
        """Whether the local objective has a linear term in addition to the client's loss."""
        return self.decays or self.corrects


class Numbers(NamedTuple):
    """Numbers of a rule, float64; each may be traced. They have the names and meanings of options of ``Rule``.

    Weights that the rule leaves out are 1 here.
    """

    mu: Float[Array, ""]
    weight_decay: Float[Array, ""]
    homogeneity: Float[Array, ""]  # J(x) w_0 = homogeneity * f_0(x)
    server_momentum: Float[Array, ""]
    step_weights: Float[Array, "most_steps"]
    delay_weights: Float[Array, "ages"]

    @property
    def nu(self) -> Float[Array, ""]:
        """Strength of the pull on the weights in every direction, ``mu + weight_decay``."""
        return self.mu + self.weight_decay


def read_rule(rule: Rule, local_steps: Int[np.ndarray, "N"], stepwise: bool = False) -> tuple[Kind, Numbers]:
    """Checks a rule and splits it into its static part and its numbers.

    It raises ``ValueError`` for a number out of range, and for options that exclude each other.

    Args:
        rule: Rule to read.
        local_steps: Steps of each client [N].
        stepwise: Whether local steps are taken one by one even if the rule has a closed form.
    """
    _check_values(rule)
    kind = Kind(
        algorithm=rule.algorithm,
        dynamics=rule.dynamics,
        has_server_momentum=_is_on(rule.server_momentum),
        nesterov=bool(rule.nesterov),
        decays=_is_on(rule.weight_decay),
        weighs_steps=rule.step_weights is not None,
        stepwise=stepwise
        or rule.batches is not None
        or rule.client_optimizer is not None
        or rule.loss != "squared_error",
        loss=rule.loss,
        client_optimizer=rule.client_optimizer,
    )
    _check_company(rule, kind)
    by_steps = kind.weighs_steps or kind.stepwise or (kind.tilts and rule.dynamics == "gradient_descent")
    if by_steps:  # else a closed form serves, however many steps there are
        kind = kind._replace(most_steps=int(local_steps.max()))
    weights = _step_weights(rule, kind.most_steps)
    of_ages: Any = np.ones(1) if rule.delay_weights is None else rule.delay_weights
    if is_concrete(of_ages):
        of_ages = real_array("delay_weights", of_ages)
        if of_ages.ndim != 1 or of_ages.size == 0 or not np.all(np.isfinite(of_ages) & (of_ages >= 0)):
            raise ValueError(f"delay_weights: got {rule.delay_weights!r:.60}, must be [D + 1], finite and at least 0")
    kind = kind._replace(most_delay=len(of_ages) - 1)
    values = rule.mu, rule.weight_decay, rule.homogeneity, rule.server_momentum, weights, of_ages
    return kind, Numbers(
        *(on_device(np.asarray(v, np.float64)) if is_concrete(v) else jnp.asarray(v, jnp.float64) for v in values)
    )


def check_fed_avg(rule: Rule) -> None:
    """Raises ``ValueError`` unless the rule is FedAvg: only ``local_steps`` and ``learning_rate`` may be chosen."""
    instance("rule", rule, Rule)
    for option in fields(Rule)[2:]:
        value, default = getattr(rule, option.name), option.default
        if value is not default and (default is None or np.ndim(value) or value != default):
            raise ValueError(f"{option.name}: got {value!r:.60}, must be {default!r}: the theorem is about FedAvg")


def check_normalisers(
    rule: Rule, kind: Kind, numbers: Numbers, local_steps: Int[np.ndarray, "N"], trains: Bool[np.ndarray, "N"]
) -> None:
    """Raises ``ValueError`` if FedNova's normaliser of a client could be 0.

    The normaliser is kappa, how far a constant gradient of size 1 moves the client. It could be 0 if mu times the
    largest step is 1 or more (gradient descent), or if the weights of a client's steps are all 0. Other algorithms and
    traced numbers pass.

    Args:
        rule: Rule to check.
        kind: Static part of the rule.
        numbers: Numbers of the rule.
        local_steps: Steps of each client [N].
        trains: Whether each client trains in any round, [N] bool.
    """
    if kind.algorithm != "fed_nova" or not is_concrete(numbers, rule.learning_rate):
        return
    weights, mu = np.asarray(numbers.step_weights), float(numbers.mu)
    largest = float(np.max(rule.learning_rate)) * float(weights.max())
    if kind.dynamics == "gradient_descent" and mu * largest >= 1:
        raise ValueError(f"mu: got {mu:g}, must be below 1 / (the largest step) = {1 / largest:g} for fed_nova")
    for i in np.flatnonzero(trains):
        if kind.weighs_steps and weights[: local_steps[i]].sum() == 0:
            raise ValueError(
                f"step_weights: got {weights.tolist()}, must not all be 0 for client {i} with {local_steps[i]} steps"
            )


def batch_places(
    rule: Rule,
    local_steps: Int[np.ndarray, "N"],
    partition: Partition,
    client: Int[np.ndarray, "R S"],
    present: Bool[np.ndarray, "R S"],
) -> Int[np.ndarray, "R S T B"] | None:
    """Returns every slot's batches as positions among its client's examples, [R, S, T, B] with -1 as padding.

    There are R rounds of S slots (places for a client), T local steps at most, and B examples in a batch at most.
    Returns None if every step takes all of the client's examples. Raises ``ValueError`` for an empty batch, a wrong
    shape, or a row of another client.

    Args:
        rule: Rule with the batches.
        local_steps: Steps of each client [N].
        partition: Training rows of each client.
        client: Client of every slot [R, S].
        present: Whether the slot is filled, [R, S] bool.
    """
    if rule.batches is None:
        return None
    if isinstance(rule.batches, (np.ndarray, jax.Array)):
        return _drawn_places(np.asarray(rule.batches), local_steps, partition, client, present)
    of_clients = _listed_places(rule.batches, local_steps, partition)
    most = max((len(places) for steps in of_clients for places in steps), default=1)
    table = np.full((partition.num_clients, int(local_steps.max()), most), -1, np.int32)
    for i, steps in enumerate(of_clients):
        for t, places in enumerate(steps):
            table[i, t, : len(places)] = places
    return table[client]


def _drawn_places(
    rows: Int[np.ndarray, "R S T B"],
    local_steps: Int[np.ndarray, "N"],
    partition: Partition,
    client: Int[np.ndarray, "R S"],
    present: Bool[np.ndarray, "R S"],
) -> Int[np.ndarray, "R S T B"]:
    """Converts batches of training rows [R, S, T, B] to positions among the examples of each slot's client.

    The axes are as for ``batch_places``: R rounds of S slots (places for a client), T steps of at most B examples.
    """
    must = (*client.shape, int(local_steps.max()))
    if rows.ndim != 4 or rows.shape[:3] != must or not np.issubdtype(rows.dtype, np.integer):
        got = f"{rows.dtype} of shape {rows.shape}"
        raise ValueError(f"batches: got {got}, must be whole numbers [{must[0]}, {must[1]}, {must[2]}, B]")
    places = np.full(rows.shape, -1, np.int32)
    lookup = np.full(int(np.max(partition.indices, initial=-1)) + 2, -1, np.int64)
    for i in range(partition.num_clients):
        examples, mine = partition.client(i), present & (client == i)
        lookup[:] = -1
        lookup[examples] = np.arange(len(examples))
        batches = rows[mine]
        inside = (batches >= -1) & (batches < len(lookup) - 1)
        places[mine] = lookup[np.where(inside, batches, -1)]
        foreign = ~inside | ((places[mine] < 0) & (batches >= 0))
        if np.any(foreign):
            bad = batches[foreign][0]
            raise ValueError(f"batches: got row {bad} in a batch of client {i}, must be rows of that client, or -1")
        is_step = np.arange(rows.shape[2]) < local_steps[i]
        if np.any(is_step & ~np.any(batches >= 0, axis=-1)):
            raise ValueError(
                f"batches: got an empty batch of client {i}, must have at least one row in each local step"
            )
    return places


def _listed_places(batches: Any, local_steps: Int[np.ndarray, "N"], partition: Partition) -> Batches:
    """Converts each client's list of batches, the same in every round, to positions among the client's examples."""
    lists = isinstance(batches, Sequence) and all(isinstance(steps, (Sequence, np.ndarray)) for steps in batches)
    if not lists or len(batches) != partition.num_clients:
        got = f"{len(batches)} lists" if lists else f"{batches!r:.60}"
        raise ValueError(f"batches: got {got}, must be one list per client, {partition.num_clients}")
    return tuple(
        _places_of(i, steps, partition.client(i), int(local_steps[i])) if partition.sizes[i] else ()
        for i, steps in enumerate(batches)
    )


def _places_of(
    client: int, steps: Sequence[Any], examples: Int[np.ndarray, "n_i"], num_steps: int
) -> tuple[np.ndarray, ...]:
    if len(steps) != num_steps:
        raise ValueError(f"batches: got {len(steps)} of client {client}, must be one per local step, {num_steps}")
    place_of, places = {int(row): place for place, row in enumerate(examples)}, []
    for t, batch in enumerate(steps):
        try:
            rows = np.asarray(batch).reshape(-1)
        except ValueError:  # rows of different lengths
            rows = np.zeros(0)
        if not np.issubdtype(rows.dtype, np.integer) or len(rows) == 0 or any(int(row) not in place_of for row in rows):
            got = " ".join(repr(batch).split())
            raise ValueError(f"batches[{client}][{t}]: got {got:.60}, must be rows of client {client}, one or more")
        places.append(np.array([place_of[int(row)] for row in rows]))
    return tuple(places)


def _check_values(rule: Rule) -> None:
    choice("algorithm", rule.algorithm, ALGORITHMS)
    choice("dynamics", rule.dynamics, DYNAMICS)
    for name in ("mu", "weight_decay"):
        number(name, getattr(rule, name), at_least=0)
    get_loss(rule.loss)
    number("server_momentum", rule.server_momentum, at_least=0, below=1)
    if rule.client_optimizer is not None:
        check_linear("client_optimizer", rule.client_optimizer)
    number("homogeneity", rule.homogeneity)
    flag("nesterov", rule.nesterov)
    if rule.algorithm == "fed_dyn" and not _is_on(rule.mu):
        raise ValueError(f"mu: got {rule.mu}, must be above 0 for algorithm 'fed_dyn'")


def _is_on(value: Any) -> bool:
    """Returns whether a number is traced or differs from 0."""
    return not is_concrete(value) or float(value) != 0


def _check_company(rule: Rule, kind: Kind) -> None:
    """Raises ``ValueError`` for options that exclude each other, such as weight decay and any algorithm but FedAvg."""
    drawn_back = not is_concrete(rule.anchoring) or np.any(np.asarray(rule.anchoring) != 1)
    all_but_scaffold = ("fed_avg", "fed_nova", "fed_dyn", "modified_local_gd", *STALE)
    excluded = {
        "mu": (_is_on(rule.mu), all_but_scaffold),
        "weight_decay": (kind.decays, ("fed_avg",)),  # fed_nova's normaliser is that of an undecayed step
        "server_momentum": (kind.has_server_momentum, ("fed_avg",)),
        "step_weights": (kind.weighs_steps, all_but_scaffold),  # scaffold: equal steps
        "client_optimizer": (kind.client_optimizer is not None, all_but_scaffold),
        "anchoring": (bool(drawn_back), ("modified_local_gd",)),
        "delays": (rule.delays is not None, STALE),
        "delay_weights": (rule.delay_weights is not None, STALE),
    }
    for name, (is_used, goes_with) in excluded.items():
        if is_used and rule.algorithm not in goes_with:
            others = ", ".join(goes_with)
            raise ValueError(f"{name}: given for algorithm {rule.algorithm!r}, must be left out, except for {others}")
    if rule.nesterov and not kind.has_server_momentum:
        raise ValueError("nesterov: got True, must be False without a server_momentum above 0")
    if rule.dynamics == "gradient_flow":
        if rule.batches is not None:
            shape = np.shape(rule.batches) if isinstance(rule.batches, (np.ndarray, jax.Array)) else ()
            got = f"an array of shape {shape}" if shape else f"lists of {len(rule.batches)} clients"
            raise ValueError(f"batches: got {got}, must be None with dynamics 'gradient_flow'")
        for name, plain in (("loss", "squared_error"), ("client_optimizer", None)):
            if (value := getattr(rule, name)) is not plain and (not is_concrete(value) or value != plain):
                raise ValueError(f"{name}: got {value!r}, must be {plain!r} with dynamics 'gradient_flow'")


def _step_weights(rule: Rule, most: int) -> Any:
    """Returns weights of the first ``most`` local steps, by default 1; checks their number and range."""
    weights = rule.step_weights
    if weights is None:
        return np.ones(most)
    if is_concrete(weights):
        weights = real_array("step_weights", weights)
    if np.ndim(weights) != 1 or len(weights) < most:
        raise ValueError(f"step_weights: got shape {np.shape(weights)}, must be one per local step, [{most}]")
    weights = weights[:most]
    if is_concrete(weights):
        values = np.asarray(weights)
        if not np.all(np.isfinite(values)) or np.any(values < 0) or values.sum() == 0:
            raise ValueError(f"step_weights: got {shown(values.tolist())}, must be finite, at least 0 and not all 0")
    return weights


def delays_of(rule: Rule, kind: Kind, slots: tuple[int, int]) -> Int32[np.ndarray, "R S"] | None:
    """Returns the delay in rounds of every client's answer, [R, S]; None for algorithms whose answers are never late.

    It raises ``ValueError`` for delays that are not whole, are out of range, or have another shape.

    Args:
        rule: Rule with the delays.
        kind: Static part of the rule.
        slots: Number R of rounds, and number S of a round's slots (places for a client).
    """
    if kind.algorithm not in STALE:
        return None
    delays = real_array("delays", 0 if rule.delays is None else rule.delays)
    if delays.shape not in ((), slots) or not np.all((delays >= 0) & (delays <= kind.most_delay) & (delays % 1 == 0)):
        got = " ".join(repr(rule.delays).split())
        must = f"must be whole numbers from 0 to {kind.most_delay}, where delay_weights end"
        raise ValueError(f"delays: got {got:.60}, {must}: one for all slots, or one per slot {list(slots)}")
    return np.broadcast_to(delays, slots).astype(np.int32)
