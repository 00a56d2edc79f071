"""FedProx, FedDyn, SCAFFOLD, FedNova and Modified Local-GD against NumPy loops written from the papers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedtangent._src.engine.clients import engine_for
from fedtangent._src.federated import algorithms
from fedtangent._src.federated.faults import finite
from fedtangent._src.federated.local import Work
from fedtangent._src.federated.schedule import all_clients, per_client_permutations, uniform_sampling
from fedtangent._src.optimizers import check_linear, staircase_decay, unit_response
from fedtangent._src.types import Algorithm, Channel

from ..nightly import nightly
from . import reference_corrected as loops
from .replay import MODEL, SEED, TOLERANCE, VISIBLE, Case, alike, build, by_examples, replayed, simulated, stepped
from .toys import SIZES, arguments_of, distance, federated, fixed, go, leaves, owned_rows, two_layer, uneven_data

FOUR, PAIRS = uniform_sampling(6, 4), per_client_permutations(6, 2)
FULL, PASSES = Work(steps=3, batch_size=None), Work(epochs=2, batch_size=2)  # PASSES: clients make 2 to 6 steps
HEAVY = functools.partial(optax.sgd, momentum=0.5)
HALVED = {"rate": staircase_decay(0.2, 0.5, 1), "rate_at": lambda t: 0.2 * 0.5**t}


def float64(rate: float) -> Callable[[Any], Any]:
    """A schedule that keeps ``rate``, in float64 whatever the model's type."""
    return lambda round_: jnp.float64(rate)


CASES = {
    "prox": Case(
        algorithms.fed_prox,
        {"mu": 0.5},
        loops.fed_prox,
        {"mu": 0.5, "weight": by_examples},
        FOUR,
        2,
        PASSES,
        wrong=("sign", "no_prox"),
    ),
    "prox_ensemble_momentum": Case(
        algorithms.fed_prox,
        {"mu": 1.0, "weighting": "uniform", "client_optimizer": HEAVY, "server_learning_rate": float64(1.0)},
        loops.fed_prox,
        {"mu": 1.0, "weight": alike},
        PAIRS,
        4,
        FULL,
        loss="cross_entropy",
        momentum=0.5,
        wrong=("sign",),
        **HALVED,
    ),
    "dyn": Case(
        algorithms.fed_dyn,
        {"mu": 0.5},
        loops.fed_dyn,
        {"alpha": 0.5, "num_clients": 6},
        FOUR,
        4,
        PASSES,
        wrong=("tilt_sign", "forgetful", "participants", "no_h"),
    ),
    "dyn_ensemble": Case(
        algorithms.fed_dyn,
        {"mu": 0.3, "server_learning_rate": float64(1.0)},
        loops.fed_dyn,
        {"alpha": 0.3, "num_clients": 6},
        PAIRS,
        5,
        FULL,
        wrong=("tilt_sign", "forgetful", "participants", "no_h"),
        **HALVED,
    ),
    "dyn_by_examples": Case(
        algorithms.fed_dyn,
        {"mu": 0.5, "weighting": "examples", "server_learning_rate": 0.6},
        loops.fed_dyn,
        {"alpha": 0.5, "num_clients": 6, "weight": by_examples, "server_rate": 0.6},
        FOUR,
        3,
        FULL,
        wrong=("participants",),
    ),
    "scaffold": Case(
        algorithms.scaffold,
        {"server_learning_rate": float64(0.7)},
        loops.scaffold,
        {"num_clients": 6, "server_rate": 0.7},
        FOUR,
        4,
        PASSES,
        wrong=("sign", "steps", "rate", "forgetful", "fraction"),
        **HALVED,
    ),
    "scaffold_ensemble": Case(
        algorithms.scaffold,
        {},
        loops.scaffold,
        {"num_clients": 6, "server_rate": 1.0},
        PAIRS,
        4,
        PASSES,
        wrong=("sign", "steps", "forgetful", "fraction"),
    ),
    "nova": Case(
        algorithms.fed_nova,
        {"server_learning_rate": 0.9},
        loops.fed_nova,
        {"weight": by_examples, "server_rate": 0.9},
        FOUR,
        2,
        PASSES,
        wrong=("not_normalised", "plain_tau"),
        **HALVED,
    ),
    "nova_momentum_prox_ensemble": Case(
        algorithms.fed_nova,
        {"mu": 0.8, "client_optimizer": HEAVY, "weighting": "uniform", "server_learning_rate": float64(1.0)},
        loops.fed_nova,
        {"weight": alike, "mu": 0.8},
        PAIRS,
        3,
        PASSES,
        momentum=0.5,
        wrong=("steps", "not_normalised"),
        **HALVED,
    ),
    "nova_given_tau": Case(
        algorithms.fed_nova,
        {"client_optimizer": HEAVY, "tau_eff": 3.0},
        loops.fed_nova,
        {"weight": by_examples, "tau_eff": 3.0},
        FOUR,
        2,
        PASSES,
        momentum=0.5,
        wrong=("steps", "not_normalised"),
    ),
}


@functools.cache
def algorithm_of(name: str) -> Algorithm:
    return build(CASES[name])


@functools.cache
def ran(name: str) -> tuple[Any, Any]:
    return simulated(CASES[name], algorithm=algorithm_of(name))


DAILY = ("prox", "dyn_ensemble", "scaffold_ensemble", "nova_momentum_prox_ensemble", "nova_given_tau")
WRONG = [(name, wrong) for name, case in CASES.items() for wrong in case.wrong]


@pytest.mark.parametrize("name", nightly(CASES, DAILY))
def test_equals_the_loop(name: str) -> None:
    start, end = ran(name)
    assert distance(start, end) > 1e-2
    assert distance(end, replayed(CASES[name], start)) < TOLERANCE


@pytest.mark.parametrize(("name", "wrong"), nightly(WRONG, DAILY))
def test_a_loop_with_one_thing_wrong_differs(name: str, wrong: str) -> None:
    start, end = ran(name)
    assert distance(end, replayed(CASES[name], start, wrong)) > VISIBLE


def anchored(first_index: int, rounds: int = 3, **options: Any) -> Case:
    how = {"first_index": first_index}
    options = {"first_index": first_index, "server_learning_rate": float64(1.0), **options}
    return Case(algorithms.modified_local_gd, options, _anchored, how, FOUR, rounds, FULL, **HALVED)


@functools.cache
def anchored_at(first_index: int) -> Algorithm:
    return build(anchored(first_index))


@pytest.mark.parametrize("first_index", nightly([0, 1], [1]))
def test_modified_local_gd_equals_the_loop_at_its_index(first_index: int) -> None:
    algorithm = anchored_at(first_index)
    start, end = simulated(anchored(first_index), algorithm=algorithm)
    assert distance(end, replayed(anchored(first_index), start)) < TOLERANCE
    assert distance(end, replayed(anchored(1 - first_index), start)) > 1e-2
    if first_index == 0:  # as printed: it stays in its first round
        assert distance(*simulated(anchored(0, 1), algorithm=algorithm)) < 1e-15


def _anchored(*arguments: Any, **how: Any) -> Any:
    return loops.modified_local_gd(*arguments, **how)


@pytest.mark.slow
def test_modified_local_gd_without_an_anchor_is_fed_avg() -> None:
    """By day the loop at each index has both the anchor's share and the average's."""
    start, other = simulated(anchored(0, 1, alpha=lambda k: jnp.float64(1.0)))
    average = simulated(Case(algorithms.fed_avg, {"weighting": "uniform"}, _anchored, {}, FOUR, 1, FULL))[1]
    assert distance(other, average) < 1e-14
    assert distance(other, start) > 1e-2


@pytest.mark.slow
def test_without_a_pull_fed_prox_is_fed_avg_bit_for_bit() -> None:
    """By day the loop has the pull, and one without it is told apart."""
    prox = CASES["prox"]
    ends = [
        simulated(case)[1]
        for case in (prox._replace(recipe=algorithms.fed_avg, options={}), prox._replace(options={"mu": 0.0}))
    ]
    assert distance(*ends) == 0
    assert distance(ends[0], ran("prox")[1]) > VISIBLE


@pytest.mark.slow
def test_fed_nova_with_equal_steps_of_sgd_is_fed_avg() -> None:
    """With unequal steps it is not: that is the loop "not_normalised" above, which is what tells by day."""
    equal = CASES["nova"]._replace(work=FULL)
    assert distance(simulated(equal)[1], simulated(equal._replace(recipe=algorithms.fed_avg))[1]) < 1e-13


def test_fed_novas_effective_steps_are_the_mean_of_the_cohorts() -> None:
    infos = stepped(algorithm_of("nova"), uneven_data(), 2)[1]
    for info in infos:
        steps, sizes = info["steps"], np.asarray(SIZES)[info["cohort"].client]
        assert len(set(steps.tolist())) > 1
        assert info["tau_eff"][0] == pytest.approx((steps * sizes).sum() / sizes.sum(), rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "recipe"), [("c", algorithms.scaffold), ("h", algorithms.fed_dyn)])
def test_after_a_round_of_all_clients_the_servers_correction_is_the_clients_mean(
    name: str, recipe: Callable[..., Algorithm]
) -> None:
    """SCAFFOLD: c = mean of c_i. FedDyn: h of the server is the mean of the h_i. Not so with clients left out.

    By day the loops keep both, and those that count them otherwise are told apart.
    """
    options = {"mu": 0.5} if name == "h" else {}
    algorithm = recipe(MODEL, all_clients(6), client_learning_rate=0.2, work=PASSES, **options)
    state, _ = stepped(algorithm, uneven_data(), 3)
    server = state.server.control if name == "c" else state.server.correction
    mean = jax.tree.map(lambda own: own[0].mean(axis=0), state.client)
    assert distance(jax.tree.map(lambda leaf: leaf[0], server), mean) < 1e-12
    first = jax.tree.map(lambda own: own[0, 0], state.client)
    assert distance(first, mean) > VISIBLE


@pytest.mark.parametrize("name", nightly(["dyn_ensemble", "scaffold"], ["scaffold"]))
def test_a_rejected_or_absent_client_keeps_its_state(name: str) -> None:
    """Client 3 sends NaN and is rejected, client 5 is in the cohort with weight 0, client 4 is not in it."""
    slots = [(0, 0, 1.0), (3, 0, 1.0), (1, 0, 1.0), (5, 0, 0.0), (2, 0, 1.0)]
    data = uneven_data()
    broken = data._replace(x=data.x.at[owned_rows(data)[3]].set(jnp.nan))
    case = CASES[name]._replace(schedule=fixed(6, 1, slots))
    case = case._replace(options={**case.options, "accept": finite()})
    state, infos = stepped(build(case), broken, 2, "vmap")
    assert all((leaf[:, 3:] == 0).all() for leaf in leaves(state.client))
    assert all((np.abs(leaf[:, :3]) > 0).any() for leaf in leaves(state.client))
    assert [info["rejected"].tolist() for info in infos] == [[1], [1]]
    assert all(np.isfinite(leaf).all() for leaf in leaves(state.server))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dyn", "scaffold"])
def test_identical_clients_are_one_that_counts_twice_where_all_take_part(name: str) -> None:
    """|S| / N is 1 for clients 0, 1, 1 and for 0 and 1 with weight 2: the law that the table exempts them from.

    By day a loop that counts the participants otherwise is told apart.
    """
    data = uneven_data(sizes=(3, 5))
    a, b = owned_rows(data)
    ends = []
    for owned, weights in (([a, b, b], [[1, 1, 1]]), ([a, b], [[1, 2], [1, 1]])):
        held = federated(np.asarray(data.x), np.asarray(data.y), owned)
        plans = [fixed(len(owned), 1, [(i, 0, float(w)) for i, w in enumerate(row)]) for row in weights]
        algorithm = build(CASES[name]._replace(schedule=plans[0], work=FULL))
        start = algorithm.init(SEED, len(owned))
        ends += [go(algorithm, held, "scan", 3, start, plan.init(start.key))[0].server for plan in plans]
    assert distance(ends[0], ends[1]) < 1e-12
    assert distance(ends[0], ends[2]) > VISIBLE


def test_what_travels() -> None:
    """SCAFFOLD doubles the traffic both ways, FedNova adds one number up, FedDyn adds nothing."""
    data = uneven_data()

    def bytes_of(recipe: Callable[..., Algorithm], **options: Any) -> tuple[int, int]:
        cost = recipe(MODEL, FOUR, client_learning_rate=0.2, work=PASSES, **options).cost(
            data, engine_for(data, "scan")
        )
        return cost.uplink, cost.downlink

    up, down = bytes_of(algorithms.fed_avg)
    assert bytes_of(algorithms.scaffold) == (2 * up, 2 * down)
    assert bytes_of(algorithms.fed_nova) == (up + 8, down)
    assert bytes_of(algorithms.fed_dyn, mu=1.0) == bytes_of(algorithms.fed_prox, mu=1.0) == (up, down)


def _halving() -> Channel:
    """Sends half of what is owed and remembers the rest."""

    def send(key: Any, message: Any, memory: Any) -> tuple[Any, Any]:
        sent = jax.tree.map(lambda m, owed: (m + owed) / 2, message, memory)
        return sent, sent

    init = functools.partial(jax.tree.map, jnp.zeros_like)
    return Channel(send, lambda message, broadcast: (1, 0), init)


@pytest.mark.parametrize("name", nightly(["dyn", "scaffold", "nova_given_tau"], ["nova_given_tau"]))
def test_a_channel_with_a_memory(name: str) -> None:
    case = CASES[name]
    case = case._replace(options={**case.options, "channel": _halving()})
    state, _ = stepped(build(case), uneven_data(), 2)
    assert min(np.abs(leaf).max() for leaf in leaves(state.channel)) > VISIBLE
    plain, _ = stepped(algorithm_of(name), uneven_data(), 2)
    assert distance(state.server.params, plain.server.params) > VISIBLE


@pytest.mark.parametrize(
    "name",
    nightly(
        ["prox_ensemble_momentum", "dyn_ensemble", "scaffold", "nova_momentum_prox_ensemble", "anchored"],
        ["dyn_ensemble"],
    ),
)
def test_float32_stays_float32_under_rates_in_float64(name: str) -> None:
    """From the same start and data in both precisions; the rates of these cases are halved in every round."""
    case, exact = (CASES[name], algorithm_of(name)) if name in CASES else (anchored(1), anchored_at(1))
    start, ends = cast(exact.init(SEED, 6), jnp.float32), []
    for dtype, algorithm in ((jnp.float32, build(case, two_layer(jnp.float32))), (jnp.float64, exact)):
        data = cast(uneven_data(labels=case.loss == "cross_entropy"), dtype)
        after, _ = go(algorithm, data, "scan", case.rounds, cast(start, dtype))
        assert {leaf.dtype for leaf in jax.tree.leaves((after.server, after.client))} == {jnp.dtype(dtype)}
        ends.append(after.server.params)
    assert 0 < distance(*ends) < 1e-5
    assert distance(start.server.params, ends[0]) > 1e-3


def cast(tree: Any, dtype: Any) -> Any:
    """``tree`` with its floating leaves in ``dtype``."""
    return jax.tree.map(lambda leaf: leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf, tree)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "argument", "value"),
    [("prox", "mu", 0.5), ("dyn", "mu", 0.5), ("nova_momentum_prox_ensemble", "mu", 0.8)],
)
def test_a_traced_constant_is_the_number(name: str, argument: str, value: float) -> None:
    """And its derivative, through a differentiable loop, is that of finite differences."""
    case = CASES[name]._replace(work=Work(epochs=2, batch_size=2, differentiable=True))
    data = uneven_data()

    def end(number: Any) -> Any:
        algorithm = build(case._replace(options={**case.options, argument: number}))
        state = algorithm.init(SEED, 6)
        for _ in range(2):
            state, _ = algorithm.step(state, data, engine_for(data, "scan"))
        return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(state.server.params))

    found, slope = jax.jit(jax.value_and_grad(end))(jnp.float64(value))
    plain = jax.jit(lambda: end(value))()
    assert float(found) == pytest.approx(float(plain), rel=1e-13)
    apart = jax.jit(end)
    numeric = (apart(jnp.float64(value + 1e-5)) - apart(jnp.float64(value - 1e-5))) / 2e-5
    assert float(slope) == pytest.approx(float(numeric), rel=1e-6)
    assert abs(float(slope)) > 1e-3


def test_the_response_to_unit_gradients_is_the_papers_norm_of_a() -> None:
    """Wang et al.'s closed forms: T for SGD, momentum (eq. 5 ff), the proximal geometric sum."""
    rate, rho, mu = 0.1, 0.9, 2.0
    T = np.array([1, 4, 30])
    heavy = (T - rho * (1 - rho**T) / (1 - rho)) / (1 - rho)
    proximal = (1 - (1 - rate * mu) ** T) / (rate * mu)
    for optimizer, prox, expected in (
        (optax.sgd(rate), 0.0, T),
        (optax.sgd(rate, momentum=rho), 0.0, heavy),
        (optax.sgd(rate), mu, proximal),
    ):
        for most in (None, 30):
            response = jax.jit(functools.partial(unit_response, optimizer, prox, most=most, dtype=jnp.dtype(float)))
            found = [response(jnp.int32(steps)) for steps in T]
            np.testing.assert_allclose(np.array(found) / rate, expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("optimizer", "named"),
    [
        (optax.adam(0.2), "not linear"),
        (optax.sign_sgd(0.2), "not linear"),
        (optax.chain(optax.clip_by_global_norm(50.0), optax.sgd(0.2)), "not linear"),
        (optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.2)), "not linear"),
        (optax.chain(optax.centralize(), optax.sgd(0.2)), "treats parameters differently"),
        (optax.sgd(-0.2), "does not move against"),
        (optax.set_to_zero(), "does not move against"),
    ],
)
def test_fed_nova_refuses_optimisers_without_a_normaliser(optimizer: Any, named: str) -> None:
    with pytest.raises(
        ValueError, match=f"client_optimizer: got an optimiser that .*{named}|client_optimizer.*{named}"
    ):
        algorithms.fed_nova(MODEL, FOUR, work=FULL, client_optimizer=optimizer)


def test_linear_optimisers_pass_also_in_float32_and_while_tracing() -> None:
    """Heavy-ball momentum passes in the runs above."""
    for make in (optax.sgd, functools.partial(optax.sgd, momentum=0.9, nesterov=True)):
        check_linear("client_optimizer", make(0.5))
        with jax.enable_x64(False):
            check_linear("client_optimizer", make(0.5))
        jax.jit(lambda rate, make=make: (check_linear("client_optimizer", make(0.5)), rate)[1])(1.0)
        jax.jit(lambda rate, make=make: (check_linear("client_optimizer", make(rate)), rate)[1])(1.0)


@pytest.mark.parametrize(
    ("recipe", "changed", "named"),
    [
        ("fed_prox", {"mu": -0.1}, "mu: got -0.1, must be at least 0"),
        ("fed_prox", {"mu": float("nan")}, "mu: got nan"),
        ("fed_prox", {"mu": np.ones(2)}, r"mu: got an array of shape \(2,\)"),
        ("fed_dyn", {"mu": 0.0}, "mu: got 0.0, must be above 0 and finite"),
        ("fed_dyn", {"mu": -1.0}, "mu: got -1.0, must be above 0 and finite"),
        ("scaffold", {"server_learning_rate": 0.0}, "server_learning_rate: got 0.0"),
        ("fed_nova", {"mu": -1.0}, r"mu: got -1\.0, must be at least 0 and finite"),
        ("fed_nova", {"mu": 20.0}, r"mu \* client_learning_rate: got 2.0, must be at least 0 and below 1"),
        ("fed_nova", {"tau_eff": 0.0}, "tau_eff: got 0.0"),
        ("fed_nova", {"client_learning_rate": 0.0}, "client_learning_rate: got 0.0"),
        ("modified_local_gd", {"first_index": -1}, "first_index: got -1, must be a whole number from 0 to"),
        ("modified_local_gd", {"first_index": 0.5}, "first_index: got 0.5"),
        ("modified_local_gd", {"alpha": lambda k: jnp.float32(1.5)}, r"anchoring: got alpha\(0\) = 1.5, must be"),
        ("modified_local_gd", {"work": Work()}, "exactly one of steps and epochs"),
        ("scaffold", {"weighting": "size"}, "weighting: got 'size'"),
    ],
)
def test_bad_arguments(recipe: str, changed: dict[str, Any], named: str) -> None:
    needed = {"fed_prox": {"mu": 0.1}, "fed_dyn": {"mu": 0.1}}.get(recipe, {})
    arguments = {"client_learning_rate": 0.1, "work": FULL, **needed} | changed
    with pytest.raises(ValueError, match=named):
        build_named = getattr(algorithms, recipe)
        build_named(MODEL, FOUR, **arguments_of(build_named, arguments))
