"""Every option of the flow against the algorithm carried out on a linear model, and against the option left out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedtangent._src.kernels.gram import KernelBlocks, SingularKernelError
from fedtangent._src.theory.fed_ensemble.limit import gp_limit
from fedtangent._src.theory.flow import Rule, federated_flow
from fedtangent._src.types import Cohort

from ..nightly import nightly
from . import reference_rules

SIZES = [3, 1, 5, 2, 7, 6]
STEPS = np.array([4, 2, 5, 3, 1, 4])
ROUNDS = [0, 1, 4, 10]
TOLERANCE = 1e-9  # the same arithmetic in another order, float64
WRONG = 1e-4  # the least distance of a flow with the option left out: its effect within ten rounds


def order_of(run) -> list[list[np.ndarray]]:
    """Minibatches of up to two rows in a fixed order, round and round."""
    found = []
    for rows, steps in zip(run.clients, run.steps, strict=True):
        cut = [rows[s : s + 2] for s in range(0, len(rows), 2)]
        found.append([cut[t % len(cut)] for t in range(steps)])
    return found


def tail(run) -> np.ndarray:
    """Server rates that fall."""
    return 0.9 * 0.9 ** np.arange(len(run.client))


def rising(run) -> np.ndarray:
    """Modified Local-GD's alpha, ``1 - 1 / (k + 1)`` from k = 1 on (eq. 16)."""
    return 1 - 1 / (np.arange(1, len(run.client) + 1) + 1)


def ages(run) -> np.ndarray:
    """Delays of 0 to 2 rounds, one for each slot."""
    return np.random.default_rng(5).integers(0, 3, run.client.shape)


DISCOUNT = np.array([1.0, 0.7, 0.4])
RULES: dict[str, dict[str, Any]] = {
    "mu": {"mu": 0.4},
    "weight decay": {"weight_decay": 0.2},
    "prox and weight decay": {"mu": 0.3, "weight_decay": 0.1},
    "server rates": {"server_learning_rate": tail},
    "momentum": {"server_momentum": 0.6, "server_learning_rate": 0.5},
    "nesterov": {"server_momentum": 0.6, "nesterov": True, "server_learning_rate": 0.5},
    "momentum and weight decay": {"server_momentum": 0.5, "weight_decay": 0.2, "server_learning_rate": 0.6},
    "fed_dyn": {"algorithm": "fed_dyn", "mu": 0.5},
    "fed_dyn, server rate": {"algorithm": "fed_dyn", "mu": 0.5, "server_learning_rate": 0.7},
    "scaffold": {"algorithm": "scaffold"},
    "scaffold, server rate": {"algorithm": "scaffold", "server_learning_rate": 0.7},
    "fed_nova": {"algorithm": "fed_nova"},
    "fed_nova and prox": {"algorithm": "fed_nova", "mu": 0.4, "server_learning_rate": 0.8},
    "modified_local_gd": {"algorithm": "modified_local_gd", "anchoring": rising},
    "modified_local_gd, prox": {
        **{"algorithm": "modified_local_gd", "anchoring": rising},
        **{"mu": 0.4, "server_learning_rate": 0.8},
    },
    "gradient flow": {"dynamics": "gradient_flow"},
    "gradient flow, prox, weight decay": {"dynamics": "gradient_flow", "mu": 0.3, "weight_decay": 0.2},
    "gradient flow, scaffold": {"dynamics": "gradient_flow", "algorithm": "scaffold"},
    "gradient flow, fed_dyn": {"dynamics": "gradient_flow", "algorithm": "fed_dyn", "mu": 0.5},
    "step weights": {"step_weights": np.array([0.3, 1.2, 0.7, 0.0, 1.5])},
    "step weights, weight decay": {"step_weights": np.array([0.3, 1.2, 0.7, 0.0, 1.5]), "weight_decay": 0.2},
    "nesterov, step weights, weight decay": {
        **{"server_momentum": 0.5, "nesterov": True, "server_learning_rate": 0.6},
        **{"step_weights": np.array([0.3, 1.2, 0.7, 0.0, 1.5]), "weight_decay": 0.2},
    },
    "step weights, fed_nova": {"step_weights": np.array([0.3, 1.2, 0.7, 0.0, 1.5]), "algorithm": "fed_nova"},
    "minibatches": {"batches": order_of},
    "minibatches, prox, weight decay": {"batches": order_of, "mu": 0.3, "weight_decay": 0.2},
    "minibatches, scaffold": {"batches": order_of, "algorithm": "scaffold"},
    "minibatches, modified_local_gd": {"batches": order_of, "algorithm": "modified_local_gd", "anchoring": rising},
    "minibatches, fed_dyn": {"batches": order_of, "algorithm": "fed_dyn", "mu": 0.5},
    "minibatches, step weights": {"batches": order_of, "step_weights": np.array([0.3, 1.2, 0.7, 0.0, 1.5])},
    "fed_buff": {"algorithm": "fed_buff", "delays": 2, "delay_weights": np.ones(3), "server_learning_rate": 0.4},
    "fed_async": {
        **{"algorithm": "fed_async", "delays": ages, "delay_weights": DISCOUNT},
        **{"mu": 0.4, "server_learning_rate": 0.8},
    },
    "fed_buff, discounted": {"algorithm": "fed_buff", "delays": ages, "delay_weights": DISCOUNT},
    "minibatches, fed_async": {
        **{"batches": order_of, "algorithm": "fed_async"},
        **{"delays": ages, "delay_weights": DISCOUNT},
    },
}
LEFT_OUT = {  # the option whose absence must show, or several of them, one at a time
    "server rates": "server_learning_rate",
    "momentum": "server_momentum",
    "nesterov": "nesterov",
    "fed_dyn, server rate": "server_learning_rate",
    "scaffold, server rate": "server_learning_rate",
    "fed_nova and prox": "mu",
    "modified_local_gd": "anchoring",
    "modified_local_gd, prox": "anchoring",
    "minibatches, modified_local_gd": "anchoring",
    "gradient flow, scaffold": "algorithm",
    "nesterov, step weights, weight decay": ("server_momentum", "nesterov", "step_weights", "weight_decay"),
    "step weights, fed_nova": "algorithm",
    "minibatches, scaffold": "algorithm",
    "minibatches, step weights": "step_weights",
    "fed_buff": "delays",
    "fed_async": "delays",
    "fed_buff, discounted": "delay_weights",
    "minibatches, fed_async": "delays",
}


def sampled(maker) -> tuple:
    """Uniform sampling: four of six clients a round, with unequal weights."""
    client = np.array([maker.rng.choice(6, 4, replace=False) for _ in range(10)])
    return client, np.zeros_like(client), maker.rng.uniform(0.5, 2.0, client.shape)


def walk(maker) -> tuple:
    """Two models that walk on a ring of six clients."""
    places = np.stack(
        [np.cumsum(maker.rng.choice([-1, 1], 10)) % 6, (3 + np.cumsum(maker.rng.choice([-1, 1], 10))) % 6]
    )
    return places.T, np.tile([0, 1], (10, 1)), np.ones((10, 2))


SCHEDULES = {
    "permutations": lambda maker: (maker.permutations(SIZES, 10, 2), 2),
    "sampled": lambda maker: (sampled(maker), 1),
    "walk": lambda maker: (walk(maker), 2),
    "everyone": lambda maker: (maker.everyone(SIZES, 10), 1),
}


def made(maker, schedule: str, name: str):
    cohorts, num_models = SCHEDULES[schedule](maker)
    run = maker.run(SIZES, cohorts, num_models, steps=STEPS, rates=0.6 * 0.97 ** np.arange(10))
    rule = {key: value(run) if callable(value) else value for key, value in RULES[name].items()}
    return run, rule


def distance(value, reference) -> float:
    value, reference = np.asarray(value), np.asarray(reference)
    assert value.shape == reference.shape
    return float(np.max(np.abs(value - reference)) / np.max(np.abs(reference)))


def without(rule: dict, option: str) -> dict:
    left = {key: value for key, value in rule.items() if key != option}
    if option == "algorithm":
        left.pop("mu", None)
    if option == "server_momentum":
        left.pop("nesterov", None)
    return left


DAILY = ("nesterov, step weights, weight decay", "fed_nova and prox", "gradient flow, prox, weight decay")
DAILY += ("minibatches, scaffold", "modified_local_gd, prox", "fed_async", "fed_dyn")


@pytest.mark.parametrize("name", nightly(RULES, DAILY))
def test_every_option_is_the_algorithm_itself(maker, name):
    """By day of options that are met together where a rule may have them."""
    is_the_algorithm(maker, "permutations", name)


@pytest.mark.slow
@pytest.mark.theory
@pytest.mark.parametrize("name", RULES)
def test_every_option_with_sampled_clients(maker, name):
    is_the_algorithm(maker, "sampled", name)


def is_the_algorithm(maker, schedule, name):
    run, rule = made(maker, schedule, name)
    w0 = np.random.default_rng(3).standard_normal((run.num_models, run.train.shape[1], 2))
    paths = [reference_rules.train(run, rule, k, w0[k]) for k in range(run.num_models)]
    expected = np.array([[run.test @ p[r] for p in paths] for r in ROUNDS])
    flow = run.flow(**rule)
    assert distance(flow.predict(run.train @ w0, run.test @ w0, ROUNDS), expected) < TOLERANCE
    root = [run.test @ reference_rules.weight_map(run, rule, k) * np.sqrt(run.prior) for k in range(run.num_models)]
    assert distance(flow.cov(10), np.array([r @ r.T for r in root])) < TOLERANCE
    mean = [run.test @ reference_rules.train(run, rule, k, 0 * w0[k])[10] for k in range(run.num_models)]
    assert distance(flow.mean(ROUNDS)[-1], np.array(mean)) < TOLERANCE
    options = LEFT_OUT.get(name, next(iter(rule)))
    for option in (options,) if isinstance(options, str) else options:
        plain = without(rule, option)
        wrong = [run.test @ reference_rules.train(run, plain, k, w0[k])[ROUNDS[-1]] for k in range(run.num_models)]
        assert distance(wrong, expected[-1]) > WRONG, option


@pytest.mark.slow
@pytest.mark.theory
@pytest.mark.parametrize("name", ["scaffold", "fed_dyn", "momentum and weight decay"])
@pytest.mark.parametrize("schedule", ["walk", "everyone"])
def test_other_schedules(maker, schedule, name):
    run, rule = made(maker, schedule, name)
    w0 = np.random.default_rng(3).standard_normal((run.num_models, run.train.shape[1], 2))
    expected = [run.test @ reference_rules.train(run, rule, k, w0[k])[10] for k in range(run.num_models)]
    assert distance(run.flow(**rule).predict(run.train @ w0, run.test @ w0, 10), expected) < TOLERANCE


def test_models_that_start_as_one(maker):
    run, rule = made(maker, "permutations", "weight decay")
    maps = [run.test @ reference_rules.weight_map(run, rule, k) for k in range(2)]
    flow = run.flow(**rule)
    expected = maps[0] * run.prior @ maps[1].T
    assert distance(flow.cross_cov(10, 0, 1), expected) < TOLERANCE
    mean = (maps[0] + maps[1]) / 2
    assert distance(flow.ensemble_cov(10, common_start=True), mean * run.prior @ mean.T) < TOLERANCE
    assert distance(flow.ensemble_cov(10), mean * run.prior @ mean.T) > 0.05
    assert distance(flow.cross_cov(10, 0, 0), expected) > WRONG


@pytest.mark.slow
def test_outputs_that_are_coupled(maker):
    """Minibatches and SCAFFOLD with a kernel [n C, n C]: one of two independent outputs is the shared one."""
    for name in ("minibatches, scaffold",):
        run, rule = made(maker, "permutations", name)
        full = KernelBlocks(*(np.kron(block, np.eye(2)) for block in run.blocks))
        wide = federated_flow(full, *run.problem[1:], run.rule(**rule), num_models=2, outputs="full")
        w0 = np.random.default_rng(3).standard_normal((2, run.train.shape[1], 2))
        f0 = run.train @ w0, run.test @ w0
        assert distance(wide.predict(*f0, ROUNDS), run.flow(**rule).predict(*f0, ROUNDS)) < TOLERANCE


ENDS = {
    **{n: RULES[n] for n in ("mu", "weight decay", "momentum", "momentum and weight decay", "fed_dyn", "scaffold")},
    **{n: RULES[n] for n in ("fed_nova", "gradient flow", "minibatches", "minibatches, scaffold", "fed_buff")},
}


@pytest.mark.parametrize("labels", nightly(["one truth", "contradicting"], ["contradicting"]))
@pytest.mark.parametrize("name", nightly(ENDS, ("fed_dyn", "weight decay")))
def test_the_fixed_point_is_where_long_runs_end(maker, name, labels):
    run = long_run(maker, labels == "contradicting")
    rule = {key: value(run) if callable(value) else value for key, value in ENDS[name].items()}
    flow = run.flow(**rule)
    rate = flow.contraction()
    assert rate < 1
    passes = int(np.ceil(np.log(1e-11) / np.log(rate)))
    w0 = np.random.default_rng(3).standard_normal((run.train.shape[1], 2))
    long = replace(
        run,
        **{part: np.tile(getattr(run, part), (passes, 1)) for part in ("client", "model", "weight")},
        rates=np.tile(run.rates, passes),
    )
    end = flow.fixed_point()
    reached = run.test @ reference_rules.train(long, rule, 0, 0 * w0)[-1]
    assert distance(end.mean, reached) < 1e-7
    root = run.test @ reference_rules.weight_map(long, rule, 0) * np.sqrt(run.prior)
    assert np.max(np.abs(end.cov - root @ root.T)) < 1e-7 * np.max(np.abs(run.blocks.nngp_test))
    biased = labels == "contradicting" and not corrects(name)
    bias = np.max(np.abs(flow.bias())) / np.max(np.abs(reached))
    if biased or "decay" in name:
        assert bias > 1e-3
    else:
        assert bias < 1e-7


def test_the_fixed_point_of_one_anchoring_is_where_long_runs_end(maker):
    """With alpha 0.8 in every round the start is never forgotten: of the mean, drawn back to the zero function."""
    run = long_run(maker, False)
    rule = {"algorithm": "modified_local_gd", "anchoring": 0.8}
    flow = run.flow(**rule)
    assert flow.contraction() < run.flow().contraction() < 1
    passes = int(np.ceil(np.log(1e-11) / np.log(flow.contraction())))
    parts = {part: np.tile(getattr(run, part), (passes, 1)) for part in ("client", "model", "weight")}
    long = replace(run, **parts, rates=np.tile(run.rates, passes))
    at_hand = rule | {"anchoring": np.full(passes, 0.8)}
    reached = run.test @ reference_rules.train(long, at_hand, 0, np.zeros((run.train.shape[1], 2)))[-1]
    assert distance(flow.fixed_point().mean, reached) < 1e-7
    root = run.test @ reference_rules.weight_map(long, at_hand, 0) * np.sqrt(run.prior)
    assert np.max(np.abs(flow.fixed_point().cov - root @ root.T)) < 1e-7 * np.max(np.abs(run.blocks.nngp_test))
    assert distance(run.flow().fixed_point().mean, reached) > 0.01


def corrects(name: str) -> bool:
    """FedDyn and SCAFFOLD end at the pooled minimiser whatever the labels (full batches, everybody in every round)."""
    return name in ("fed_dyn", "scaffold")


def long_run(maker, contradicting: bool):
    """Everybody in every round, with fewer features than rows where labels are to contradict each other."""
    sizes = [4, 4, 4]
    cohorts = maker.everyone(sizes, 1)
    run = maker.run(sizes, cohorts, 1, n=24, steps=np.array([3, 2, 4]), rates=np.full(1, 0.6))
    size = 6 if contradicting else 40
    features = maker.rng.standard_normal((29, size)) / np.sqrt(size) * (1.0 if contradicting else 2.0)
    prior = maker.rng.uniform(0.2, 3.0, size)
    run = replace(run, train=features[:24], test=features[24:], prior=prior)
    used = np.concatenate(run.clients)
    place = {int(row): i for i, row in enumerate(used)}
    clients = tuple(np.array([place[int(row)] for row in rows]) for rows in run.clients)
    return replace(run, train=run.train[used], y=run.y[used], clients=clients)


def test_theorem_2_with_weight_decay_is_ridge(maker):
    """One step a round with everybody: the fixed point is the ridge solution, in closed form."""
    run = replace(long_run(maker, False), steps=np.ones(3, int))
    decay = 0.2
    flow = run.flow(weight_decay=decay)
    n = len(run.y)
    ridge = run.train.T @ np.linalg.solve(run.train @ run.train.T / n + decay * np.eye(n), run.y) / n
    assert distance(flow.fixed_point().mean, run.test @ ridge) < 1e-9
    assert np.max(np.abs(flow.fixed_point().cov)) < 1e-9  # nothing of the initial function is left
    bias = run.test @ ridge - gp_limit(run.blocks, run.y).mean
    assert distance(flow.bias(), bias) < 1e-7 and np.max(np.abs(bias)) > 1e-2


STEPPED = ("mu", "momentum", "scaffold", "fed_dyn", "fed_nova", "minibatches", "weight decay", "fed_buff")


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPPED)
def test_the_largest_stable_step_parts_runs_that_grow_from_those_that_do_not(maker, name):
    """By day ``test_stable_rates.py`` compares the largest step to a scan of assembled rounds."""
    run = long_run(maker, False)
    rule = {key: value(run) if callable(value) else value for key, value in RULES[name].items()}
    bound = run.flow(**rule).largest_stable_learning_rate()
    w0 = np.random.default_rng(3).standard_normal((run.train.shape[1], 2))

    def size(factor: float) -> float:
        rounds = 400
        long = replace(
            run,
            **{part: np.tile(getattr(run, part), (rounds, 1)) for part in ("client", "model", "weight")},
            rates=np.full(rounds, factor * bound),
        )
        with np.errstate(all="ignore"):
            path = reference_rules.train(long, rule, 0, w0)
        return float(np.linalg.norm(path[-1]) / np.linalg.norm(path[rounds // 2]))

    assert size(0.97) < 1.01
    assert not size(1.03) < 1.5


@pytest.mark.slow
@pytest.mark.theory
def test_derivatives_of_every_number(maker):
    run, _ = made(maker, "everyone", "mu")

    def loss(numbers):
        cohorts = Cohort(run.client, run.model, numbers["weight"])
        rule = Rule(
            run.steps, numbers["rate"], mu=numbers["mu"], weight_decay=numbers["decay"], step_weights=numbers["steps"],
            server_momentum=numbers["momentum"],
        )  # fmt: skip
        flow = federated_flow(*run.problem[:3], cohorts, rule, num_models=1)
        return jnp.sum(flow.mean(10) ** 2) + jnp.sum(flow.cov(4, 0))

    at = {"rate": 0.5, "mu": 0.3, "decay": 0.1, "momentum": 0.4, "steps": np.linspace(0.5, 1.5, 5)}
    at = jax.tree.map(jnp.asarray, at | {"weight": run.weight})
    slope = jax.jit(jax.grad(loss))(at)
    for name, value in at.items():
        direction = np.random.default_rng(0).standard_normal(value.shape)
        ahead, behind = (loss(at | {name: value + sign * 1e-5 * direction}) for sign in (1, -1))
        found = float(jnp.sum(slope[name] * direction))
        # central differences: truncation and rounding are both about 1e-10 of values of order 1
        assert abs((ahead - behind) / 2e-5 - found) < 1e-6 * max(abs(found), 1e-2), name
        assert abs(found) > 1e-6, name


BAD = {
    "algorithm": ({"algorithm": "fed_prox"}, "algorithm: got 'fed_prox', allowed are fed_avg"),
    "dynamics": ({"dynamics": "flow"}, "dynamics: got 'flow', allowed are gradient_descent"),
    "mu": ({"mu": -1.0}, "mu: got -1.0, must be at least 0"),
    "decay": ({"weight_decay": np.nan}, "weight_decay: got nan, must be at least 0 and finite"),
    "mu missing": ({"algorithm": "fed_dyn"}, "mu: got 0.0, must be above 0 for algorithm 'fed_dyn'"),
    "momentum": ({"server_momentum": 1.0}, "server_momentum: got 1.0, must be at least 0 and below 1"),
    "nesterov": ({"nesterov": True}, "nesterov: got True, must be False without a server_momentum"),
    "nesterov as text": ({"nesterov": "no", "server_momentum": 0.5}, "nesterov: got 'no', must be True or False"),
    "momentum with scaffold": (
        {"algorithm": "scaffold", "server_momentum": 0.5},
        "server_momentum: given for algorithm 'scaffold', must be left out, except for fed_avg",
    ),
    "mu with scaffold": ({"algorithm": "scaffold", "mu": 0.5}, "mu: given .*, except for fed_avg, fed_nova"),
    "decay with fed_nova": ({"algorithm": "fed_nova", "weight_decay": 0.5}, "weight_decay: given for .*'fed_nova'"),
    "weights of steps": ({"step_weights": np.ones(3)}, r"step_weights: got shape \(3,\), must be one .*, \[5\]"),
    "negative weights": ({"step_weights": -np.ones(5)}, "step_weights: got .*, must be finite, at least 0"),
    "ragged weights": ({"step_weights": [[1.0], 2.0]}, "step_weights: .*, must be real numbers in one array"),
    "scaffold's steps": ({"algorithm": "scaffold", "step_weights": np.ones(5)}, "step_weights: given for .*scaffold"),
    "batches of fewer": ({"batches": [[[0]]]}, "batches: got 1 lists, must be one list per client, 6"),
    "batches of none": ({"batches": 3}, "batches: got 3, must be one list per client, 6"),
    "homogeneity": ({"homogeneity": np.ones(2)}, "homogeneity: got an array .*, must be one number"),
    "delays of others": (
        {"delays": 1},
        "delays: given for algorithm 'fed_avg', .* except for fed_async, fed_buff",
    ),
    "delays below 0": ({"algorithm": "fed_buff", "delays": -1}, "delays: got -1, must be whole numbers from 0 to 0"),
    "delays beyond": (
        {"algorithm": "fed_buff", "delays": 2, "delay_weights": [1.0, 0.5]},
        "delays: got 2, must be whole numbers from 0 to 1, where delay_weights end: one for all slots, or",
    ),
    "delays of slots": (
        {"algorithm": "fed_async", "delays": np.ones(3, int)},
        r"delays: got array\(\[1, 1, 1\]\), must be whole numbers .*, or one per slot \[10, 6\]",
    ),
    "delay_weights": (
        {"algorithm": "fed_async", "delay_weights": [-1.0]},
        r"delay_weights: got \[-1.0\], must be \[D \+ 1\], finite and at least 0",
    ),
    "decay of late models": ({"algorithm": "fed_buff", "weight_decay": 0.1}, "weight_decay: given for .*'fed_buff'"),
    "normaliser": ({"algorithm": "fed_nova", "mu": 40.0}, "mu: got 40, must be below 1 / .the largest step"),
    "normaliser of steps": (
        {"algorithm": "fed_nova", "step_weights": [0.0, 0, 1, 1, 1]},
        r"step_weights: .*, must not all be 0 for client 1 with 2 steps",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_rule_is_refused(maker, name):
    run, _ = made(maker, "everyone", "mu")
    rule, message = BAD[name]
    with pytest.raises(ValueError, match=message) as caught:
        run.flow(**rule)
    assert "\n" not in str(caught.value)


def test_batches_are_checked(maker):
    run, rule = made(maker, "everyone", "minibatches")
    batches = [list(steps) for steps in rule["batches"]]
    with pytest.raises(ValueError, match=r"batches: got 3 of client 0, must be one per local step, 4"):
        run.flow(batches=[batches[0][:3], *batches[1:]])
    stranger = run.clients[1][0]
    with pytest.raises(ValueError, match=rf"batches\[0\]\[1\]: got \[.*{stranger}.*\], must be rows of client 0"):
        run.flow(batches=[[batches[0][0], [stranger], *batches[0][2:]], *batches[1:]])
    with pytest.raises(ValueError, match=r"batches: got lists of \d+ clients, must be None with dynamics"):
        run.flow(**rule | {"dynamics": "gradient_flow"})


def test_a_client_twice_in_a_round_is_refused_where_clients_remember(maker):
    run, rule = made(maker, "everyone", "scaffold")
    client = run.client.copy()
    client[3, 1] = client[3, 0]
    with pytest.raises(
        ValueError, match="cohorts: got client 0 twice in round 3, must be once per model and round for scaffold"
    ):
        replace(run, client=client).flow(**rule)
    replace(run, client=client).flow()


def test_stability_counts_the_rule(maker):
    run = long_run(maker, False)
    plain = run.flow().stability().max_stable_learning_rate
    assert run.flow(mu=1.0).stability().max_stable_learning_rate < plain
    assert run.flow(step_weights=2 * np.ones(4)).stability().max_stable_learning_rate == pytest.approx(plain / 2)
    assert run.flow(dynamics="gradient_flow").stability().max_stable_learning_rate == np.inf
    assert run.flow(batches=order_of(run)).stability().max_stable_learning_rate < plain
    with pytest.raises(ValueError, match="rule: got scaffold, must be plain fed_avg"):
        run.flow(algorithm="scaffold").stability()


@pytest.mark.parametrize("name", nightly(["scaffold", "fed_dyn", "momentum"], ["fed_dyn"]))
def test_a_slot_of_traced_weight_zero_is_empty(maker, name):
    run, rule = made(maker, "everyone", name)
    weight = run.weight * (np.arange(6) != 2)
    weight[3] = 0  # and a round in which nobody trains
    one_round = replace(run, weight=weight)

    def mean(weight):
        cohorts = Cohort(run.client, run.model, weight)
        return federated_flow(*run.problem[:3], cohorts, run.rule(**rule), num_models=1).mean(10)

    assert distance(jax.jit(mean)(jnp.asarray(weight)), one_round.flow(**rule).mean(10)) < 1e-12
    assert distance(run.flow(**rule).mean(10), one_round.flow(**rule).mean(10)) > WRONG


@pytest.mark.parametrize("dynamics", nightly(["gradient_descent", "gradient_flow"], ["gradient_flow"]))
def test_the_derivative_by_mu_at_zero(maker, dynamics):
    run, _ = made(maker, "everyone", "mu")

    def value(mu):
        rule = {"algorithm": "fed_nova", "mu": mu, "dynamics": dynamics}
        return jnp.sum(run.flow(**rule).mean(10))

    with_slope = jax.jit(jax.value_and_grad(value))
    (there, at_zero), (ahead, _) = (map(float, with_slope(mu)) for mu in (0.0, 1e-5))
    assert at_zero == pytest.approx((ahead - there) / 1e-5, rel=1e-3)


def test_a_model_that_nobody_trains_stays(maker):
    run, _ = made(maker, "everyone", "weight decay")
    flow = run.flow(num_models=2, weight_decay=0.3)
    assert distance(flow.fixed_point(1).cov, run.blocks.nngp_test) < 1e-12
    assert flow.contraction(1) == 0
    assert distance(flow.bias(1), -gp_limit(run.blocks, run.y).mean) < 1e-7
    assert flow.contraction(0) < 1


def test_the_rate_of_weight_decay_is_part_of_the_spectrum(maker):
    """What is left of the initial function shrinks more slowly than the residual."""
    run = long_run(maker, False)
    flow = run.flow(weight_decay=0.001)
    long = replace(
        run,
        **{part: np.tile(getattr(run, part), (900, 1)) for part in ("client", "model", "weight")},
        rates=np.full(900, 0.6),
    )
    size = run.train.shape[1]
    path = reference_rules.train(long, {"weight_decay": 0.001}, 0, np.eye(size), np.zeros((len(run.train), size)))
    ends = [np.linalg.norm(run.test @ path[r] * np.sqrt(run.prior)) for r in (600, 900)]
    assert flow.contraction() == pytest.approx((ends[1] / ends[0]) ** (1 / 300), rel=1e-4)


def test_tiny_steps_are_told_or_right(maker):
    run = long_run(maker, False)
    bound = run.flow().largest_stable_learning_rate()
    tiny = replace(run, rates=np.full(1, 1e-13))
    assert tiny.flow().largest_stable_learning_rate() == pytest.approx(bound, rel=1e-3)
    with pytest.raises(SingularKernelError, match="not unique"):
        tiny.flow().fixed_point()


def test_millions_of_local_steps_cost_no_memory(maker):
    run, _ = made(maker, "everyone", "mu")
    flow = replace(run, steps=np.full(6, 10**9)).flow(mu=0.1)
    assert len(flow.numbers.step_weights) == 1 and np.all(np.isfinite(flow.mean(10)))


def test_minibatches_where_a_client_holds_nothing(maker):
    run, rule = made(maker, "everyone", "minibatches")
    empty = replace(run, clients=(*run.clients, np.zeros(0, int)), steps=np.append(run.steps, 3))
    found = empty.flow(batches=[*rule["batches"], []])
    np.testing.assert_allclose(found.mean(10), run.flow(**rule).mean(10), rtol=1e-12)


ODD = {
    "kernels": (lambda a: {"kernels": None}, "kernels: got None, must be a KernelBlocks"),
    "partition": (lambda a: {"partition": [1]}, r"partition: got \[1\], must be a Partition"),
    "cohorts": (lambda a: {"cohorts": (1, 2)}, "cohorts: got .*, must be a Cohort"),
    "rule": (lambda a: {"rule": 3}, "rule: got 3, must be a Rule"),
    "negative": (
        lambda a: {"kernels": a["kernels"]._replace(ntk_train=-a["kernels"].ntk_train)},
        "ntk_train: got a smallest eigenvalue of .*, must be positive semidef",
    ),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_arguments_are_refused_in_one_line(maker, name):
    run, _ = made(maker, "everyone", "mu")
    given = dict(zip(("kernels", "y_train", "partition", "cohorts"), run.problem, strict=True)) | {"rule": run.rule()}
    change, message = ODD[name]
    with pytest.raises(ValueError, match=message) as caught:
        federated_flow(**given | change(given))
    assert "\n" not in str(caught.value)


def test_odd_questions_are_refused_in_one_line(maker):
    run, rule = made(maker, "permutations", "weight decay")
    flow = run.flow(**rule)
    f0, f0_test = np.zeros((2, 24, 2)), np.zeros((2, 5, 2))
    with pytest.raises(ValueError, match="along_train: got one of along_train and along_test"):
        flow.predict(f0, f0_test, 1, along_train=f0)
    with pytest.raises(ValueError, match="along_train: got an array, must be None without weight_decay"):
        run.flow().predict_train(f0, 1, along_train=f0)
    with pytest.raises(ValueError, match=r"f0_train: got .*, must be a real number"):
        flow.predict_train(f0.astype(str), 1)
    with pytest.raises(ValueError, match="model: got None, must be a whole number from 0 to 1"):
        flow.operator(3, None)
    with pytest.raises(ValueError, match="tolerance: got 0, must be above 0"):
        flow.largest_stable_learning_rate(tolerance=0)
    with pytest.raises(ValueError, match="learning_rate: got 0"):
        run.flow(learning_rate=np.arange(run.flow().num_rounds)[::-1] / 100).largest_stable_learning_rate()
    with pytest.raises(ValueError, match="rule: got a traced value, must be known numbers"):
        jax.jit(lambda rate: run.flow(learning_rate=rate).contraction())(0.5)
