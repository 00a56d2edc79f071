"""Theorems 1 and 2 and Lemma 2 of NTK-FL: bounds, their conditions, and the network trained in plain NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from fedtangent._src.theory.ntk_fl import convergence as theory
from fedtangent._src.theory.ntk_fl import lemmas
from fedtangent._src.theory.ntk_fl.lemmas import active_neurons, empirical_kernel, expected_kernel
from fedtangent._src.types import Partition

from .two_layer_reference import Network, descend, descend_linear, draw, fed_avg_round, sphere

# Close to each other: lambda_max is more than 4 times lambda_min, so that the control can fail.
INPUTS = np.array([[1.0, 0.0], [0.9, np.sqrt(1 - 0.81)]])
CLIENTS = Partition(np.array([0, 1], np.int32), np.array([0, 1, 2], np.int32))
DELTA = 0.2


def squared(nets: list[Network], x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.array([np.sum((net.outputs(x) - y) ** 2) for net in nets])


def lazy_case(width: int = 10_000) -> tuple[Network, np.ndarray, np.ndarray]:
    """Targets so close to the start that a neuron moves as little as the proof asks, along the slowest mode."""
    net = draw(0, width, 2)
    slowest = np.linalg.eigh(expected_kernel(INPUTS))[1][:, 0]
    residual = 1.5e-3 * slowest + 1e-5
    return net, INPUTS, net.outputs(INPUTS) - residual


def theorem(net: Network, x, y, **options) -> theory.NtkTheorem:
    start = theory.TwoLayerStart(len(net.c), kernel=empirical_kernel(x, net.v))
    return theory.ntk_theorem_1(x, net.outputs(x) - y, start, **({"learning_rate": 1e-2, "delta": DELTA} | options))


def test_theorem_1_where_all_its_assumptions_hold():
    net, x, y = lazy_case()
    found = theorem(net, x, y)
    eta = theory.largest_learning_rate(found.constants)
    assert eta == pytest.approx(found.constants.lambda_min / (2 * 2))
    found = theorem(net, x, y, learning_rate=0.999 * eta)
    assert found.failing == (), found
    assert found.proof_factor() <= found.rate()
    steps = 800
    path = descend(net, x, y, 0.999 * eta, steps)
    decay, times = squared(path, x, y), np.arange(steps + 1)
    assert np.all(decay <= found.residual_bound(times) * (1 + 1e-12))
    reach = max(np.linalg.norm(p.v - net.v, axis=1).max() for p in path[:: steps // 10])
    assert 0 < reach <= found.radius == found.constants.movement_bound()
    start, constants = np.linalg.norm(net.outputs(x) - y), found.constants  # steps of eta / sqrt(N n), summed
    assert found.radius == pytest.approx(4 * np.sqrt(2) * start / (np.sqrt(10_000) * constants.lambda_min))
    wrong = found.residual_bound(times, found.constants.lambda_max)
    assert np.max(decay / wrong) > 5
    # a quarter of the true rate: the first-order rate of the slowest mode is 2 eta lambda / N
    slope = np.log(decay[steps // 2] / decay[-1]) / (steps - steps // 2)
    kernel = np.linalg.eigvalsh(empirical_kernel(x, net.v))
    assert slope == pytest.approx(2 * 0.999 * eta * kernel[0] / 2, rel=0.01)
    assert slope / -np.log(found.rate()) == pytest.approx(4, rel=0.05)


def test_theorem_1_fails_for_the_weights_of_ntk_fl_at_large_times():
    """Its assumptions hold, and the network at the linearised weights keeps a residual while the bound goes to 0."""
    net, x, y = lazy_case()
    eta = 0.999 * theorem(net, x, y).constants.lambda_min / 4
    found = theorem(net, x, y, learning_rate=eta)
    assert found.failing == ()
    j, residual, late = net.jacobian(x), net.outputs(x) - y, 100_000
    values, vectors = np.linalg.eigh(j @ j.T)
    left = vectors @ ((1 - eta * values / 2) ** late * (vectors.T @ residual))  # of the linearised network
    end = net.moved(-j.T @ np.linalg.solve(j @ j.T, residual - left))
    assert np.sum(active_neurons(x, end.v) != active_neurons(x, net.v)) > 0
    assert np.sum(left**2) <= found.residual_bound(late) < 1e-30
    assert squared([end], x, y)[0] > 1e10 * found.residual_bound(late)
    few = descend_linear(net, x, y, eta, 300)  # and not before
    assert np.all(squared(few, x, y) <= found.residual_bound(np.arange(301)) * (1 + 1e-12))


def test_theorem_2_where_all_its_assumptions_hold():
    net, x, y = lazy_case()
    residual, kernel = net.outputs(x) - y, empirical_kernel(x, net.v)
    given, start = {"local_steps": 4, "delta": DELTA}, theory.TwoLayerStart(len(net.c), kernel=kernel)
    first = theory.ntk_theorem_2(x, residual, CLIENTS, start, learning_rate=1e-3, **given)
    eta = 0.999 * theory.largest_learning_rate(first.constants)
    found = theory.ntk_theorem_2(x, residual, CLIENTS, start, learning_rate=eta, **given)
    assert found.failing == () and found.proof_factor() <= found.rate(), found
    nets, reach, rounds = [net], 0.0, 400
    for k in range(rounds):
        done = fed_avg_round(nets[-1], x, y, [CLIENTS.client(m) for m in range(2)], eta, 4)
        nets.append(done.server)
        if k % 100 == 0:
            reach = max(reach, *(np.linalg.norm(p[-1].v - net.v, axis=1).max() for p in done.local))
    decay, times = squared(nets, x, y), np.arange(rounds + 1)
    assert np.all(decay <= found.residual_bound(times) * (1 + 1e-12))
    assert 0 < reach <= found.radius
    # the server's neurons over all rounds, and a client's inside one: (1 + eta)^tau grows with the local steps
    size, growth = np.linalg.norm(residual), (1 + eta) ** 4 - 1
    server = 4 * growth / (4 * eta) * np.sqrt(2) * size / (np.sqrt(10_000) * found.constants.lambda_min)
    assert found.radius == pytest.approx(server + growth * size / np.sqrt(2 * 10_000), rel=1e-9)
    assert np.max(decay / found.residual_bound(times, found.constants.lambda_max)) > 2
    slope = np.log(decay[rounds // 2] / decay[-1]) / (rounds - rounds // 2)
    assert slope / -np.log(found.rate()) == pytest.approx(4, rel=0.05)
    # the M of the rate comes from dividing by N and by M: FedAvg on mean losses does without it
    alone = theory.ntk_theorem_1(x, residual, start, learning_rate=eta)
    assert (1 - alone.rate()) * 4 / 2 == pytest.approx(1 - found.rate())


def test_proof_factor_is_51_and_76():
    x, rng = sphere(0, 6, 4), np.random.default_rng(0)
    part = Partition(np.arange(6, dtype=np.int32), np.array([0, 2, 6], np.int32))
    kernel = np.linalg.eigvalsh(expected_kernel(x))
    for _ in range(20):
        eta, r, delta = 10 ** rng.uniform(-4, 0), 10 ** rng.uniform(-5, 0), rng.uniform(0.01, 0.5)
        n, tau = int(10 ** rng.uniform(2, 6)), int(rng.integers(1, 9))
        start = theory.TwoLayerStart(n, covariance=0.25)
        one = theory.ntk_theorem_1(x, np.ones(6), start, learning_rate=eta, delta=delta, radius=r)
        sampling = np.sqrt(np.log(2 * 36 / delta) / (2 * n))
        first = 3 * np.sqrt(2) * r / (np.sqrt(np.pi) * delta * 0.5) + sampling - kernel[0] / 6  # (46)
        second = np.sqrt(2) * r / (np.sqrt(np.pi) * delta * 0.5)  # (49)
        assert one.proof_factor() == pytest.approx(1 + 2 * eta * (first + second) + eta**2, rel=1e-12)
        two = theory.ntk_theorem_2(
            x, np.ones(6), part, start, learning_rate=eta, local_steps=tau, delta=delta, radius=r
        )
        total = 0.0
        for u in range(tau):  # (68) and (70), step by step
            grown = (1 + eta) ** u
            t1 = grown * (2 * np.sqrt(2) * r / (np.sqrt(np.pi) * delta * 0.5) + sampling) + (grown - 1) * kernel[-1] / 6
            t2 = grown * np.sqrt(2 / np.pi) * r / (delta * 0.5)
            total += eta / 2 * (t1 + t2 - kernel[0] / 6)
        g = (1 + eta) ** tau - 1
        expected = 1 + 2 * total + 2 * np.sqrt(2 / np.pi) * r * g / (delta * 0.5 * 2) + (g / 2) ** 2  # (74), (75b)
        assert two.proof_factor() == pytest.approx(expected, rel=1e-9)


def test_the_conditions_are_what_the_proof_needs():
    """Where they hold, (76) is at most the theorem's factor; with each of the three ten times too large it is not."""
    x = sphere(1, 6, 4)
    part = Partition(np.arange(6, dtype=np.int32), np.array([0, 2, 6], np.int32))
    for tau in (1, 3, 10):
        given = {"local_steps": tau, "delta": 0.1}
        first = theory.ntk_theorem_2(x, np.ones(6), part, theory.TwoLayerStart(10), learning_rate=1e-3, **given)
        eta = 0.9999 * theory.largest_learning_rate(first.constants)
        found = theory.ntk_theorem_2(
            x, np.ones(6), part, theory.TwoLayerStart(10), learning_rate=eta, radius=0.0, **given
        )
        required = {a.name: a for a in found.assumptions}
        wide, close = int(np.ceil(required["wide_enough"].measured)), required["lazy"].required
        start = theory.TwoLayerStart(wide)
        good = theory.ntk_theorem_2(x, np.ones(6), part, start, learning_rate=eta, radius=close, **given)
        assert good.failing == () and good.proof_factor() <= good.rate()
        for change in ({"learning_rate": 10 * eta}, {"width": wide // 100}, {"radius": 10 * close}):
            given_now = {"learning_rate": eta, "width": wide, "radius": close} | change
            start = theory.TwoLayerStart(given_now.pop("width"))
            bad = theory.ntk_theorem_2(x, np.ones(6), part, start, **given_now, **given)
            assert bad.failing and bad.proof_factor() > bad.rate(), change


def test_what_is_reported_of_data_that_do_not_fit():
    x = np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 2.0]])
    found = theory.ntk_theorem_1(x, np.ones(3), theory.TwoLayerStart(50, kernel=np.eye(3)), learning_rate=100.0)
    expected = {"unit_inputs", "positive_definite", "stable_step", "small_step", "wide_enough", "lazy", "lemma_4"}
    assert set(found.failing) == expected
    assert "positive_definite: FAILS" in repr(found)
    assert found.constants.movement_bound() == np.inf and found.rate() == 1


def test_linear_rate_is_the_slowest_mode_of_the_evolution():
    net, x = draw(3, 60, 4), sphere(4, 7, 4)
    h, eta = empirical_kernel(x, net.v), 3.0
    j, y = net.jacobian(x), np.linalg.eigh(h)[1][:, 0] + net.outputs(x)
    nets = descend_linear(net, x, y, eta, 5)
    linear = [np.sum((net.outputs(x) + j @ (p.v - net.v).ravel() - y) ** 2) for p in nets]
    np.testing.assert_allclose(linear[5] / linear[0], theory.linear_rate(h, eta) ** 5, rtol=1e-9)


def followed(num: int, dim: int, width: int, eta: float, steps: int, seed: int = 0):
    """Both paths, and what Lemma 2 is about at each step."""
    net, x = draw(seed, width, dim), sphere(seed + 1, num, dim)
    y = np.random.default_rng(seed + 2).choice([-1.0, 1.0], num)
    real, linear = descend(net, x, y, eta, steps), descend_linear(net, x, y, eta, steps)
    j = net.jacobian(x)
    residual = np.array([p.outputs(x) - y for p in real])[:-1]
    straight = np.array([net.outputs(x) + j @ (p.v - net.v).ravel() - y for p in linear])[:-1]
    switched = np.array([np.sum(active_neurons(x, p.v) != active_neurons(x, net.v)) for p in real])[:-1]
    gap = np.array([np.abs(a.v - b.v).sum() for a, b in zip(real, linear, strict=True)])
    reach = max(np.linalg.norm(p.v - net.v, axis=1).max() for p in real)
    part = np.concatenate([[np.zeros(j.shape[1])], np.cumsum(
        [-eta / num * (p.jacobian(x) - j).T @ r for p, r in zip(real, residual, strict=False)], axis=0)])  # fmt: skip
    return gap, np.abs(part).sum(axis=1), np.abs(residual).max(axis=1), switched, residual - straight, reach


@pytest.mark.parametrize(("num", "eta"), [(10, 2.0), (1, 0.8)])
def test_lemma_2(num, eta):
    dim, width, steps = 6, 128, 150
    gap, part, gamma, switched, apart, reach = followed(num, dim, width, eta, steps)
    sizes = {"learning_rate": eta, "width": width, "input_size": dim}
    printed = lemmas.weight_gap_bound(gamma, radius=reach, delta=0.05, **sizes)
    counted = lemmas.switched_bound(gamma, switched, num_examples=num, **sizes)
    summed = np.abs(np.cumsum(np.concatenate([np.zeros((1, num)), apart]), axis=0)).sum(axis=1)
    rest = lemmas.residual_part(summed, num_examples=num, **sizes)
    assert gap[1] < 1e-12 and gap[-1] > 1.2 * gap[5] > gap[2] > 0  # it grows from the second step
    assert np.all(gap <= printed)
    assert np.all(part <= counted + 1e-12)  # (25b)-(25d)
    assert np.all(gap <= counted + rest + 1e-12)
    assert np.any(part > counted / np.sqrt(width))  # the scaling 1/n of eq. (12) as it is printed
    assert np.max(np.abs(gap - part)) > 0.02 * gap[-1]  # what (25a) leaves out is there


def test_lemma_2_leaves_out_a_part():
    """One example with entries of equal size: (25b)-(25d) lose nothing, and the gap is larger than they say."""
    dim, width, eta, steps = 4, 40, 1.0, 60
    net, x = draw(1, width, dim), np.full((1, dim), 0.5)
    y = net.outputs(x) + 3.0
    real, linear = descend(net, x, y, eta, steps), descend_linear(net, x, y, eta, steps)
    gamma = np.array([abs(float(p.outputs(x)[0] - y[0])) for p in real])[:-1]
    switched = np.array([np.sum(active_neurons(x, p.v) != active_neurons(x, net.v)) for p in real])[:-1]
    gap = np.array([np.abs(a.v - b.v).sum() for a, b in zip(real, linear, strict=True)])
    counted = lemmas.switched_bound(gamma, switched, learning_rate=eta, width=width, input_size=dim, num_examples=1)
    assert counted[-1] > 0 and gap[-1] > 1.2 * counted[-1]


def test_figure_9_s_bound_is_twice_a_sum():
    np.testing.assert_array_equal(lemmas.figure_bound([5.0, 2.0, 1.0]), [0.0, 0.0, 4.0, 6.0])


def refused(**changes):
    given = {"residual": np.ones(2), "network": theory.TwoLayerStart(3), "learning_rate": 1.0}
    theory.ntk_theorem_1(np.eye(2), **(given | changes))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: refused(residual=np.ones(3)), r"residual: got shape \(3,\), must be \(2,\)"),
        (lambda: refused(learning_rate=0.0), "learning_rate: got 0.0, must be above 0"),
        (lambda: refused(network=theory.TwoLayerStart(0)), "width: got 0, must be above 0"),
        (lambda: refused(delta=0.0), "delta: got 0.0, must be above 0 and below 1"),
        (lambda: refused(network=3), "network: got 3, must be a TwoLayerStart"),
        (lambda: refused(network=theory.TwoLayerStart(3, kernel=np.eye(3))), r"network.kernel: got shape \(3, 3\)"),
        (
            lambda: theory.ntk_theorem_2(np.eye(2), np.ones(2), CLIENTS, theory.TwoLayerStart(3), learning_rate=1.0,
                                         local_steps=0),
            "local_steps: got 0, must be a whole number of at least 1",
        ),
        (
            lambda: theory.ntk_theorem_2(np.eye(2), np.ones(2), Partition(np.array([0, 0]), np.array([0, 1, 2])),
                                         theory.TwoLayerStart(3), learning_rate=1.0, local_steps=1),
            "partition: got example 0 2 times",
        ),
        (
            lambda: theory.ntk_theorem_2(np.eye(2), np.ones(2), Partition(np.array([0, 1]), np.array([0, 0, 2])),
                                         theory.TwoLayerStart(3), learning_rate=1.0, local_steps=1),
            "partition: got client 0 without examples, must be one or more each",
        ),
        (
            lambda: lemmas.weight_gap_bound([-1.0], learning_rate=1.0, width=2, input_size=2, radius=1.0),
            "gamma: got -1, every number must be at least 0",
        ),
        (
            lambda: lemmas.switched_bound([1.0], [1.0, 2.0], learning_rate=1.0, width=2, input_size=2,
                                              num_examples=1),
            r"switched: got shape \(2,\), must be \(1,\)",
        ),
        (
            lambda: lemmas.residual_part([-1.0], learning_rate=1.0, width=2, input_size=2, num_examples=1),
            "apart: got -1, every number must be at least 0",
        ),
    ],
)  # fmt: skip
def test_refuses(call, message):
    with pytest.raises(ValueError, match=message):
        call()
