"""What the clients and the server do with a residual: the options of ``federated_flow``, checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from fedtangent.theory import checks
from fedtangent.theory.precision import is_concrete
from fedtangent.types import Array, Partition

ALGORITHMS = ("fed_avg", "fed_dyn", "scaffold", "fed_nova")
DYNAMICS = ("gradient_descent", "gradient_flow")


class Kind(NamedTuple):
    """What shapes the program: static and hashable."""

    algorithm: str = "fed_avg"  # one of ALGORITHMS
    dynamics: str = "gradient_descent"  # one of DYNAMICS
    momentum: bool = False  # the server keeps a momentum buffer
    nesterov: bool = False
    decays: bool = False  # the local objective has weight decay
    weighs_steps: bool = False  # local steps have weights of their own
    minibatches: bool = False  # local steps see a part of the client's examples
    most_steps: int = 1  # the largest number of local steps

    @property
    def tilts(self) -> bool:
        """Whether the local objective has a linear term, so that a client feels more than its own residual."""
        return self.decays or self.algorithm in ("fed_dyn", "scaffold")


class Numbers(NamedTuple):
    """The numbers of a rule, float64; each may be traced."""

    prox: Array  # [] mu (FedDyn: alpha)
    weight_decay: Array  # []
    homogeneity: Array  # [] J(x) w_0 = homogeneity * f_0(x)
    momentum: Array  # []
    step_weights: Array  # [most_steps]


class Rule(NamedTuple):
    """How clients and server move, with the batches of each client's local steps where they are not its whole data."""

    kind: Kind
    numbers: Numbers
    batches: tuple[tuple[np.ndarray, ...], ...] | None = None  # per client, per step: places in its own examples


def build_rule(
    local_steps: np.ndarray,
    partition: Partition,
    *,
    algorithm: str,
    dynamics: str,
    prox: Any,
    alpha: Any,
    weight_decay: Any,
    homogeneity: Any,
    server_momentum: Any,
    nesterov: bool,
    step_weights: Any,
    batches: Sequence[Sequence[Any]] | None,
) -> Rule:
    """The rule of these options; raises ``ValueError`` for values out of range and options that exclude each other."""
    checks.check_choice("algorithm", algorithm, ALGORITHMS)
    checks.check_choice("dynamics", dynamics, DYNAMICS)
    for name, value in (("prox", prox), ("weight_decay", weight_decay)):
        checks.check_at_least_zero(name, value)
    checks.check_real_number("homogeneity", homogeneity)
    checks.check_at_least_zero("server_momentum", server_momentum)
    if is_concrete(server_momentum) and float(server_momentum) >= 1:
        raise ValueError(f"server_momentum must be below 1, got {server_momentum}")
    if (alpha is not None) != (algorithm == "fed_dyn"):
        raise ValueError(f'alpha is needed by algorithm "fed_dyn" and used by no other, got {alpha!r} for {algorithm}')
    if alpha is not None:
        checks.check_rate("alpha", alpha, [()])
    decays, momentum = _is_on(weight_decay), _is_on(server_momentum)
    _check_company(algorithm, prox, decays, momentum, step_weights is not None)
    if nesterov and not momentum:
        raise ValueError("nesterov needs a server_momentum above 0")
    if not isinstance(nesterov, (bool, np.bool_)):
        raise ValueError(f"nesterov must be True or False, got {nesterov!r}")
    found = None if batches is None else _places(batches, local_steps, partition)
    tilted = decays or algorithm in ("fed_dyn", "scaffold")
    by_steps = step_weights is not None or found is not None or (tilted and dynamics == "gradient_descent")
    most = int(local_steps.max()) if by_steps else 1  # else a closed form serves, however many steps there are
    if found is not None and dynamics == "gradient_flow":
        raise ValueError('batches are steps of gradient descent, got dynamics "gradient_flow"')
    kind = Kind(
        algorithm, dynamics, momentum, bool(nesterov), decays, step_weights is not None, found is not None, most
    )  # fmt: skip
    mu = prox if alpha is None else alpha
    fixed = [jnp.asarray(value, jnp.float64) for value in (mu, weight_decay, homogeneity, server_momentum)]
    weights = jnp.asarray(_weights(step_weights, most), jnp.float64)
    numbers = Numbers(fixed[0], fixed[1], fixed[2], fixed[3], weights)
    return Rule(kind, numbers, found)


def check_normalisers(rule: Rule, local_steps: np.ndarray, rates: Any, trains: np.ndarray) -> None:
    """FedNova divides by how far a constant force moves a client: that must be a positive way."""
    kind, numbers = rule.kind, rule.numbers
    if kind.algorithm != "fed_nova" or not is_concrete(numbers, rates):
        return
    weights, prox = np.asarray(numbers.step_weights), float(numbers.prox)
    if kind.dynamics == "gradient_descent" and prox * float(np.max(rates)) * float(weights.max()) >= 1:
        raise ValueError(f"prox times the largest step must be below 1 for fed_nova, got prox {prox:g}, step "
                         f"{float(np.max(rates)) * float(weights.max()):g}")  # fmt: skip
    for i in np.flatnonzero(trains):
        if kind.weighs_steps and weights[: local_steps[i]].sum() == 0:
            raise ValueError(f"step_weights must not all be 0 for a client's own steps (fed_nova), got "
                             f"{weights.tolist()} for client {i} with {local_steps[i]}")  # fmt: skip


def _is_on(value: Any) -> bool:
    """Whether a number is not known to be 0."""
    return not is_concrete(value) or float(value) != 0


def _check_company(algorithm: str, prox: Any, decays: bool, momentum: bool, weighs: bool) -> None:
    """Corrections are defined for the plain local objective and the plain server."""
    if algorithm in ("fed_dyn", "scaffold") and (decays or _is_on(prox)):
        name = "weight_decay" if decays else "prox"
        others = "fed_avg" if decays else "fed_avg and fed_nova"
        raise ValueError(f"{name} goes with {others}, not with algorithm {algorithm!r}")
    if algorithm == "fed_nova" and decays:
        raise ValueError("weight_decay goes with fed_avg: fed_nova's normaliser is that of an undecayed step")
    if algorithm != "fed_avg" and momentum:
        raise ValueError(f"server_momentum goes with fed_avg, not with algorithm {algorithm!r}")
    if algorithm == "scaffold" and weighs:
        raise ValueError("step_weights do not go with scaffold, whose control variates assume equal steps")


def _weights(step_weights: Any, most: int) -> Any:
    if step_weights is None:
        return np.ones(most)
    if is_concrete(step_weights):
        step_weights = checks.check_real("step_weights", step_weights)
    if np.ndim(step_weights) != 1 or len(step_weights) < most:
        raise ValueError(f"step_weights must be one per local step, [{most}], got shape {np.shape(step_weights)}")
    step_weights = step_weights[:most]
    if is_concrete(step_weights):
        values = np.asarray(step_weights)
        if not np.all(np.isfinite(values)) or np.any(values < 0) or values.sum() == 0:
            raise ValueError(f"step_weights must be finite, >= 0 and not all 0, got {step_weights}")
    return step_weights


def _places(
    batches: Sequence[Sequence[Any]], local_steps: np.ndarray, partition: Partition
) -> tuple[tuple[np.ndarray, ...], ...]:
    """Each batch as places in its client's own examples."""
    lists = isinstance(batches, Sequence) and all(isinstance(s, (Sequence, np.ndarray)) for s in batches)
    if not lists or len(batches) != partition.num_clients:
        got = len(batches) if lists else f"{batches!r:.60}"
        raise ValueError(f"batches must be one list per client, {partition.num_clients}, got {got}")
    found: list[tuple[np.ndarray, ...]] = []
    for i, steps in enumerate(batches):
        if partition.sizes[i] == 0:
            found.append(())
            continue
        if len(steps) != local_steps[i]:
            raise ValueError(f"batches of client {i} must be one per local step, {local_steps[i]}, got {len(steps)}")
        own = {int(row): place for place, row in enumerate(partition.client(i))}
        places = []
        for t, batch in enumerate(steps):
            rows = checks.check_rows(f"batches[{i}][{t}]", batch)
            if len(rows) == 0 or not np.issubdtype(rows.dtype, np.integer) or any(int(row) not in own for row in rows):
                raise ValueError(
                    f"batches[{i}][{t}] must be training rows of client {i}, at least one, got {rows.tolist()}"
                )
            places.append(np.array([own[int(row)] for row in rows]))
        found.append(tuple(places))
    return tuple(found)
