"""The flow under any loss and minibatches: a linear model trained by a plain NumPy loop, written from the papers."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import optax
import pytest

from fedtangent._src.kernels.gram import KernelBlocks
from fedtangent._src.losses import LOSSES
from fedtangent._src.theory.flow import Flow, Rule, federated_flow
from fedtangent._src.types import Cohort, Partition

from ..nightly import nightly

N, M, C, P = 12, 3, 3, 40
SIZES, STEPS, RATE, BATCH = np.array([2, 5, 1, 4]), np.array([3, 4, 2, 5]), 0.7, 2
ROUNDS, SLOTS, MODELS = 4, 3, 2
RNG = np.random.default_rng(0)
JACOBIAN = RNG.standard_normal((N + M, C, P)) / np.sqrt(P)  # of a model that is linear in its parameters
SHARED = np.einsum("nd,cb->ncbd", RNG.standard_normal((N + M, P)) / np.sqrt(P), np.eye(C)).reshape(N + M, C, C * P)
Y = np.eye(C)[RNG.integers(0, C, N)] * 0.9 + 0.1 / C
SIGNS = np.where(np.random.default_rng(3).uniform(size=(N, C)) < 0.5, -1.0, 1.0)
CLIENT = np.stack([RNG.permutation(4)[:SLOTS] for _ in range(ROUNDS)])
MODEL = RNG.integers(0, MODELS, (ROUNDS, SLOTS))
OFFSETS = np.concatenate([[0], np.cumsum(SIZES)]).astype(np.int32)
INDICES = RNG.permutation(N).astype(np.int32)
ROWS = [INDICES[a:b] for a, b in itertools.pairwise(OFFSETS)]


def drawn(rng: np.random.Generator) -> np.ndarray:
    """Batches of one or two rows of each slot's client, [R, S, T, B], -1 for none."""
    found = np.full((ROUNDS, SLOTS, STEPS.max(), BATCH), -1)
    for at in np.ndindex(ROUNDS, SLOTS, STEPS.max()):
        own = ROWS[CLIENT[at[:2]]]
        size = min(rng.integers(1, BATCH + 1), len(own))
        found[at][:size] = rng.permutation(own)[:size]
    return found


BATCHES = drawn(np.random.default_rng(1))
MOMENTUM, NESTEROV = optax.sgd(1.0, momentum=0.6), optax.sgd(0.3, momentum=0.6, nesterov=True)
SHRINKING = optax.chain(optax.trace(0.6), optax.scale_by_schedule(lambda t: -(0.5**t)))
LINEAR = {MOMENTUM: (0.6, False, 1.0), NESTEROV: (0.6, True, 1.0), SHRINKING: (0.6, False, 0.5)}  # momentum, .., shrink
WARM_UP = RATE * np.array([1.0, 0.0, 1.0, 0.5])
RULES: dict[str, dict[str, Any]] = {
    "fed_avg": {},
    "momentum": {"client_optimizer": MOMENTUM},
    "nesterov": {"client_optimizer": NESTEROV},
    "steps that shrink": {"client_optimizer": SHRINKING},
    "prox": {"mu": 0.3, "client_optimizer": MOMENTUM},
    "prox and weight decay beside both momenta": {  # with a round in which a model has no client
        **{"mu": 0.3, "weight_decay": 0.2, "client_optimizer": MOMENTUM},
        **{"server_momentum": 0.5, "server_learning_rate": 1.3},
    },
    "server momentum": {"server_momentum": 0.5, "server_learning_rate": 1.3},
    "steps of other sizes": {"step_weights": (1.0, 0.5, 0.25, 0.25, 0.1)},
    "fed_nova": {"algorithm": "fed_nova"},
    "steps of other sizes that shrink": {
        "client_optimizer": SHRINKING,
        "step_weights": (1.0, 0.5, 0.25, 0.25, 0.1),
    },
    "fed_nova, nesterov, a round of rate 0": {
        **{"algorithm": "fed_nova", "client_optimizer": NESTEROV},
        **{"learning_rate": WARM_UP},
    },
    "fed_nova, nesterov": {"algorithm": "fed_nova", "client_optimizer": NESTEROV},
    "fed_nova, a round of rate 0": {"algorithm": "fed_nova", "learning_rate": WARM_UP},
    "scaffold, a round of rate 0": {"algorithm": "scaffold", "learning_rate": WARM_UP},
    "fed_dyn": {"algorithm": "fed_dyn", "mu": 0.3},
    "fed_dyn, momentum": {"algorithm": "fed_dyn", "mu": 0.3, "client_optimizer": MOMENTUM},
    "scaffold": {"algorithm": "scaffold"},
    "weight decay": {"weight_decay": 0.2},
    "weight decay, momentum": {"weight_decay": 0.2, "client_optimizer": MOMENTUM},
    "modified_local_gd": {"algorithm": "modified_local_gd", "anchoring": 1 - 1 / np.arange(2.0, ROUNDS + 2)},
    "modified_local_gd, prox": {
        **{"algorithm": "modified_local_gd", "anchoring": np.array([0.5, 0.0, 0.8, 1.0])},
        **{"mu": 0.3, "client_optimizer": MOMENTUM, "server_learning_rate": 0.9},
    },
}


def slope(loss: str, f: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Derivative of each example's loss by its outputs."""
    loss = loss.removesuffix("_sum")
    if loss == "squared_error":
        return f - y
    if loss == "exponential":
        return -y * np.exp(-y * f)
    if loss == "logistic":
        return -y / (1 + np.exp(y * f))
    p = np.exp(f - f.max(axis=1, keepdims=True))
    return p / p.sum(axis=1, keepdims=True) - y


def targets(loss: str) -> np.ndarray:
    return SIGNS if loss.removesuffix("_sum") in ("exponential", "logistic") else Y


def by_hand(jacobian: np.ndarray, start: np.ndarray, loss: str, batches: np.ndarray | None, **rule: Any) -> np.ndarray:
    """All models' parameters after every round, [R + 1, K, P], from ``start`` [K, P]."""
    algorithm, mu, decay = rule.get("algorithm", "fed_avg"), rule.get("mu", 0.0), rule.get("weight_decay", 0.0)
    momentum, looks_ahead, shrink = LINEAR.get(rule.get("client_optimizer"), (0.0, False, 1.0))
    rates = np.broadcast_to(rule.get("learning_rate", RATE), ROUNDS)
    w, buffer = start.copy(), np.zeros_like(start)
    own, common = np.zeros((MODELS, 4, start.shape[1])), np.zeros_like(start)  # h_i or c_i, h or c
    seen = [w.copy()]
    for r, rate in enumerate(rates):
        after, filled = w.copy(), []
        for k in range(MODELS):
            mine = [s for s in range(SLOTS) if MODEL[r, s] == k]
            if not mine:
                continue
            share = SIZES[CLIENT[r, mine]] / SIZES[CLIENT[r, mine]].sum()
            moves, taus, changes = [], [], []
            for s in mine:
                i, v, velocity, weight, length = CLIENT[r, s], w[k].copy(), np.zeros(start.shape[1]), 0.0, 0.0
                tilt = {"fed_dyn": -own[k, i], "scaffold": common[k] - own[k, i]}.get(algorithm, 0.0)
                for t in range(STEPS[i]):
                    rows = ROWS[i] if batches is None else batches[r, s, t][batches[r, s, t] >= 0]
                    j = jacobian[rows].reshape(-1, start.shape[1])
                    f = (j @ v).reshape(len(rows), -1)
                    number = 1 if loss.endswith("_sum") else len(rows)
                    g = j.T @ slope(loss, f, targets(loss)[rows]).reshape(-1) / number
                    g = g + tilt + mu * (v - w[k]) + decay * v
                    velocity, weight = momentum * velocity + g, momentum * weight + 1
                    step, unit = (g + momentum * velocity, 1 + momentum) if looks_ahead else (velocity, 1.0)
                    v = v - rate * rule.get("step_weights", np.ones(STEPS.max()))[t] * shrink**t * step / unit
                    length += shrink**t * ((1 + momentum * weight) if looks_ahead else weight) / unit
                moves.append(v - w[k])
                taus.append(length)
                if algorithm == "scaffold":
                    changes.append(-common[k] - moves[-1] / (STEPS[i] * rate) if rate > 0 else np.zeros_like(v))
                if algorithm == "fed_dyn":
                    changes.append(-mu * moves[-1])
            if algorithm == "fed_nova":
                change = (share @ taus) * sum(p * m / tau for p, m, tau in zip(share, moves, taus, strict=True))
            else:
                change = sum(p * m for p, m in zip(share, moves, strict=True))
            filled.append((k, mine, share, change, changes))
        for k, mine, share, change, changes in filled:
            part = len(mine) / 4
            if algorithm == "fed_dyn":
                common[k] -= mu * part * change
                after[k] = w[k] + change - common[k] / mu
            elif rule.get("server_momentum"):
                buffer[k] = rule["server_momentum"] * buffer[k] + change
                after[k] = w[k] + rule["server_learning_rate"] * buffer[k]
            elif algorithm == "modified_local_gd":
                alpha = rule["anchoring"][r]
                mean = w[k] + rule.get("server_learning_rate", 1.0) * change
                after[k] = (1 - alpha) * start[k] + alpha * mean
            else:
                after[k] = w[k] + change
            if algorithm == "scaffold":
                common[k] += part * sum(p * c for p, c in zip(share, changes, strict=True))
            for s, c in zip(mine, changes, strict=False):
                own[k, CLIENT[r, s]] += c
        w = after
        seen.append(w.copy())
    return np.stack(seen)


def flow_of(jacobian: np.ndarray, outputs: str, **rule: Any) -> Flow:
    flat = jacobian.reshape(-1, jacobian.shape[-1])
    kernel = flat @ flat.T
    if outputs == "shared":
        kernel = kernel[::C, ::C]
    n = N * (C if outputs == "full" else 1)
    blocks = KernelBlocks(kernel[:n, :n], kernel[n:, :n])
    held = Partition(INDICES, OFFSETS)
    cohorts = Cohort(CLIENT.astype(np.int32), MODEL.astype(np.int32), SIZES[CLIENT].astype(float))  # type: ignore[arg-type]
    y = targets(rule.get("loss", "squared_error")) if rule.get("loss") in LOSSES else Y
    return federated_flow(
        blocks, y, held, cohorts, Rule(STEPS, **{"learning_rate": RATE, **rule}), num_models=MODELS, outputs=outputs
    )


def apart(jacobian: np.ndarray, outputs: str, loss: str, batches: np.ndarray | None, rule: dict[str, Any],
          predicted: dict[str, Any] | None = None) -> float:  # fmt: skip
    """Largest distance of the flow's predictions from the loop's, at all points, rounds and models.

    Of a flow that is ``predicted`` to be wrong it is the distance at the test points alone.
    """
    start = np.random.default_rng(2).standard_normal((MODELS, jacobian.shape[-1]))
    seen = np.einsum("ncp,rkp->rknc", jacobian, by_hand(jacobian, start, loss, batches, **rule))
    told = {"loss": loss, "batches": batches, **rule, **(predicted or {})}
    flow = flow_of(jacobian, outputs, **told)
    rounds = range(ROUNDS + 1)
    test = np.abs(flow.predict(seen[0, :, :N], seen[0, :, N:], rounds) - seen[:, :, N:]).max()
    if predicted is not None:
        return float(test)
    train = flow.predict_train(seen[0, :, :N], rounds)
    return float(max(test, np.abs(train - seen[:, :, :N]).max()))


DAILY = (
    "prox and weight decay beside both momenta",
    "steps of other sizes that shrink",
    "fed_nova, nesterov, a round of rate 0",
    "scaffold, a round of rate 0",
)


CASES = [(name, loss) for loss in ("cross_entropy", "squared_error") for name in RULES]


@pytest.mark.parametrize(("name", "loss"), nightly(CASES, [(name, "cross_entropy") for name in DAILY]))
def test_every_rule_follows_the_loop(name: str, loss: str) -> None:
    """By day options together where a rule may have them; those of the squared error are in ``test_rules.py``."""
    assert apart(SHARED, "shared", loss, BATCHES, RULES[name]) < 1e-12


OTHERS = [name for name in LOSSES if name not in ("cross_entropy", "squared_error")]


@pytest.mark.parametrize(("loss", "full"), nightly(itertools.product(OTHERS, (True, False)), [("exponential", False)]))
def test_every_loss_follows_the_loop(loss: str, full: bool) -> None:
    """Negative control: the mean over examples where it is a sum, or the other way. By day of minibatches."""
    rule = {"mu": 0.3, "step_weights": np.full(STEPS.max(), 0.3)}
    other = loss.removesuffix("_sum") if loss.endswith("_sum") else f"{loss}_sum"
    batches = None if full else BATCHES
    assert apart(SHARED, "shared", loss, batches, rule) < 1e-12
    assert apart(SHARED, "shared", loss, batches, rule, {"loss": other}) > 1e-3


@pytest.mark.parametrize("loss", nightly(["exponential_sum", "logistic", "squared_error_sum"], ["logistic"]))
def test_losses_of_outputs_that_share_parameters(loss: str) -> None:
    assert apart(JACOBIAN, "full", loss, BATCHES, {"step_weights": np.full(STEPS.max(), 0.3)}) < 1e-12


@pytest.mark.parametrize("full", nightly([True, False], [True]), ids=["full batches", "minibatches"])
def test_outputs_that_share_parameters(full: bool) -> None:
    """By day of full batches; minibatches are those of the losses above."""
    batches = None if full else BATCHES
    assert apart(JACOBIAN, "full", "cross_entropy", batches, {"mu": 0.2}) < 1e-12
    assert apart(SHARED, "full", "cross_entropy", batches, {}) < 1e-12


WRONG: dict[str, dict[str, Any]] = {
    "the other loss": {"loss": "squared_error"},
    "another order": {"batches": np.flip(BATCHES, axis=2)},
    "full batches": {"batches": None},
    "momentum forgotten": {"client_optimizer": None},
    "pull forgotten": {"mu": 0.0},
}


@pytest.mark.parametrize("name", nightly(WRONG, ["another order", "pull forgotten"]))
def test_a_wrong_theory_is_far(name: str) -> None:
    rule = {"mu": 0.3, "client_optimizer": MOMENTUM}
    assert apart(SHARED, "shared", "cross_entropy", BATCHES, rule, WRONG[name]) > 1e-3


FORGOTTEN: dict[str, dict[str, Any]] = {
    "never": {"anchoring": 1.0},
    "fed_avg": {"algorithm": "fed_avg", "anchoring": 1.0},
    "an index before": {"anchoring": 1 - 1 / np.arange(1.0, ROUNDS + 1)},
}


@pytest.mark.parametrize(
    ("loss", "name"),
    nightly(
        itertools.product(("squared_error", "exponential_sum"), FORGOTTEN),
        [("squared_error", "never"), ("exponential_sum", "an index before")],
    ),
)
def test_a_forgotten_anchor_is_far(loss: str, name: str) -> None:
    """By day each loss once, forgotten altogether or by an index."""
    rule = {**RULES["modified_local_gd"], "step_weights": np.full(STEPS.max(), 0.3)}
    assert apart(SHARED, "shared", loss, None, rule) < 1e-12
    assert apart(SHARED, "shared", loss, None, rule, FORGOTTEN[name]) > 1e-3


def test_under_another_loss_there_is_no_law() -> None:
    flow = flow_of(SHARED, "shared", loss="cross_entropy")
    for ask in (flow.mean, flow.cov, flow.operator, lambda r: flow.fixed_point(), lambda r: flow.stability()):
        with pytest.raises(ValueError, match="loss: got 'cross_entropy', must be 'squared_error' for the"):
            ask(1)


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        ({"loss": "hinge"}, "loss: got 'hinge'"),
        ({"algorithm": "modified_local_gd", "anchoring": 1.5}, "anchoring: got 1.5, must be from 0 to 1"),
        ({"algorithm": "modified_local_gd", "anchoring": -0.1}, "anchoring: got -0.1, must be from 0 to 1"),
        ({"algorithm": "modified_local_gd", "anchoring": np.ones(3)}, r"anchoring: got shape \(3,\), must be a number"),
        (
            {"anchoring": 0.5},
            "anchoring: given for algorithm 'fed_avg', .* except for modified_local_gd",
        ),
        ({"algorithm": "modified_local_gd", "weight_decay": 0.1}, "weight_decay: given for algorithm 'modified"),
        ({"client_optimizer": optax.adam(0.1)}, "client_optimizer: got an optimiser that is not linear"),
        (
            {"client_optimizer": MOMENTUM, "algorithm": "scaffold"},
            "client_optimizer: given for algorithm 'scaffold'",
        ),
        ({"loss": "cross_entropy", "dynamics": "gradient_flow"}, "loss: got 'cross_entropy'"),
        ({"batches": BATCHES[:, :, :1]}, "batches: got int64 of shape"),
        ({"batches": np.full_like(BATCHES, -1)}, "batches: got an empty batch of client"),
        ({"batches": np.where(BATCHES < 0, -1, (BATCHES + 1) % N)}, "must be rows of that client"),
    ],
)
def test_bad_rules_are_refused(rule: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        flow_of(SHARED, "shared", **rule)


def test_targets_of_margins_are_signs() -> None:
    flow = flow_of(SHARED, "shared")
    blocks, held, cohorts = flow.kernels, flow.partition, Cohort(CLIENT, MODEL, SIZES[CLIENT])  # type: ignore[arg-type]
    rule = Rule(STEPS, RATE, loss="exponential")
    with pytest.raises(ValueError, match=r"y_train: got .*, must be -1 or 1 for the loss 'exponential'"):
        federated_flow(blocks, Y, held, cohorts, rule, num_models=MODELS)


@pytest.mark.parametrize("name", nightly(["momentum", "nesterov", "steps that shrink"], ["steps that shrink"]))
def test_the_influence_of_the_start_goes_through_an_optimiser(name: str) -> None:
    """What ``mean`` and ``cov`` are made of, beside runs from every function of a basis."""
    flow, basis = flow_of(SHARED, "shared", **RULES[name]), np.eye(N)
    b, zeros = np.asarray(flow.dependence(ROUNDS)[0]), np.zeros((MODELS, M, C))

    def ends(start: np.ndarray) -> np.ndarray:
        return np.asarray(flow.predict(start, zeros, [ROUNDS]))[0]

    still = ends(np.zeros((MODELS, N, C)))
    moved = [ends(np.broadcast_to(one[None, :, None], (MODELS, N, C))) - still for one in basis]
    assert np.abs(np.stack([m[:, :, 0] for m in moved], axis=-1) + b).max() < 1e-12
    assert np.abs(np.asarray(flow_of(SHARED, "shared").dependence(ROUNDS)[0]) - b).max() > 1e-2
