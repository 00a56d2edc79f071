"""Second-order terms of an age against the age carried out client by client in plain NumPy, and against the flow."""

from __future__ import annotations

import numpy as np
import pytest

from fedtangent._src.kernels.gram import KernelBlocks
from fedtangent._src.theory.fed_ensemble.second_order import (
    age_operators,
    commutator_sum,
    condition_15,
    equation_13,
    expansion,
    exponential_average,
    exponential_product,
    operator_u,
    variance,
)
from fedtangent._src.theory.flow import Rule, federated_flow
from fedtangent._src.types import Cohort, Partition

STEPS = np.array([1e-2, 5e-3, 2.5e-3, 1.25e-3])
SIZES = [3, 1, 5, 2, 3]
K, N, POINTS = 3, 5, 14
BAND = 0.06


class Toy:
    """Random features, unequal clients with their own numbers of steps, one age of per-client permutations."""

    def __init__(self, seed: int = 0):
        rng = np.random.default_rng(seed)
        features = rng.standard_normal((POINTS, 30)) / 30**0.5
        self.theta = features @ features.T
        self.rows = np.split(rng.permutation(POINTS), np.cumsum(SIZES)[:-1])
        self.model = np.array([rng.permutation(K) for _ in range(N)]).T
        self.taus = np.array([2, 5, 3, 4, 2])
        offsets = np.cumsum([0, *SIZES])
        self.partition = Partition(np.concatenate(self.rows).astype(np.int32), offsets.astype(np.int32))
        self.cohorts = Cohort(np.tile(np.arange(N), (K, 1)), self.model, np.tile(np.array(SIZES, float), (K, 1)))
        self.y = rng.standard_normal((POINTS, 2))

    def gram(self, i: int) -> np.ndarray:
        select = np.zeros((SIZES[i], POINTS))
        select[np.arange(SIZES[i]), self.rows[i]] = 1
        return self.theta[:, self.rows[i]] @ select / SIZES[i]

    def true_age(self, rate: float, dynamics: str, k: int = 0) -> np.ndarray:
        whole = np.eye(POINTS)
        for models in self.model:
            mine = np.flatnonzero(models == k)
            if len(mine) == 0:
                continue
            total = sum(SIZES[i] for i in mine)
            trained = [self.local(rate, int(i), dynamics) * SIZES[i] / total for i in mine]
            whole = sum(trained) @ whole
        return whole

    def local(self, rate: float, i: int, dynamics: str) -> np.ndarray:
        if dynamics == "gradient_descent":
            return np.linalg.matrix_power(np.eye(POINTS) - rate * self.gram(i), int(self.taus[i]))
        return exponential(-rate * self.taus[i] * self.gram(i))

    def age(self, rate: float, **options):
        return age_operators(self.theta, self.partition, self.cohorts, self.taus, rate, **options)


def exponential(a: np.ndarray) -> np.ndarray:
    """By its series: the arguments here are small."""
    term = total = np.eye(len(a))
    for k in range(1, 30):
        term = term @ a / k
        total = total + term
    return total


def slope(true, found) -> float:
    errors = [np.linalg.norm(true(h) - found(h)) for h in STEPS]
    return float(np.polyfit(np.log(STEPS), np.log(errors), 1)[0])


@pytest.fixture(scope="module")
def toy() -> Toy:
    return Toy()


def test_lemmas():
    rng = np.random.default_rng(1)
    several, p = rng.standard_normal((4, 6, 6)) / 3, rng.dirichlet(np.ones(4))

    def product(h):
        whole = np.eye(6)
        for a in several:
            whole = exponential(-h * a) @ whole
        return whole

    def average(h):
        return sum(w * exponential(-h * a) for w, a in zip(p, several, strict=True))

    for true, lemma in ((product, exponential_product), (average, lambda a, h: exponential_average(a, p, h))):
        assert slope(true, lambda h, f=lemma: f(several, h).first_order) == pytest.approx(2, abs=BAND)
        assert slope(true, lambda h, f=lemma: f(several, h).total) == pytest.approx(3, abs=BAND)
        for factor in (-1.0, 2.0):  # the other sign; without the 1/2
            wrong = slope(true, lambda h, f=lemma, c=factor: f(several, h).first_order + c * f(several, h).second_order)
            assert wrong == pytest.approx(2, abs=BAND)


def test_sums_by_definition():
    a = np.random.default_rng(2).standard_normal((4, 3, 3))
    pairs = sum(a[i] @ a[j] - a[j] @ a[i] for i in range(4) for j in range(i))
    assert np.allclose(commutator_sum(list(a)), pairs, rtol=0, atol=1e-12)
    p = np.array([0.1, 0.2, 0.3, 0.4])
    mean = np.tensordot(p, a, 1)
    central = sum(w * (x - mean) @ (x - mean) for w, x in zip(p, a, strict=True))
    assert np.allclose(variance(list(a), p.tolist()), central, rtol=0, atol=1e-12)


def test_age_operators_by_definition(toy):
    age = toy.age(0.3, model=1)
    for r, models in enumerate(toy.model):
        mine = np.flatnonzero(models == 1)
        weights = np.array([SIZES[i] for i in mine], float) / max(sum(SIZES[i] for i in mine), 1)
        moves = [0.3 * toy.taus[i] * toy.gram(i) for i in mine]
        mean = sum((w * a for w, a in zip(weights, moves, strict=True)), np.zeros((POINTS, POINTS)))
        square = sum((w * a @ a for w, a in zip(weights, moves, strict=True)), np.zeros((POINTS, POINTS)))
        discrete = sum(
            (-w * a @ a / toy.taus[i] for w, a, i in zip(weights, moves, mine, strict=True)), np.zeros((POINTS, POINTS))
        )
        assert np.allclose(age.means[r], mean, rtol=0, atol=1e-13)
        assert np.allclose(age.variances[r], square - mean @ mean, rtol=0, atol=1e-13)
        assert np.allclose(age.discreteness[r], discrete, rtol=0, atol=1e-13)


@pytest.mark.parametrize("dynamics", ["gradient_flow", "gradient_descent"])
def test_an_age_to_second_order(toy, dynamics):
    def true(h):
        return toy.true_age(h, dynamics)

    assert slope(true, lambda h: expansion(toy.age(h)).first_order) == pytest.approx(2, abs=BAND)
    right = {
        "expansion": lambda h: expansion(toy.age(h), dynamics).total,
        "U": lambda h: operator_u(toy.age(h), dynamics),
        "(13)": lambda h: equation_13(toy.age(h), dynamics),
    }
    for name, found in right.items():
        assert slope(true, found) == pytest.approx(3, abs=BAND), name
    other = {"gradient_flow": "gradient_descent", "gradient_descent": "gradient_flow"}[dynamics]
    wrong = {
        "the other dynamics": lambda h: expansion(toy.age(h), other).total,
        "no variance": lambda h: expansion(toy.age(h)._replace(variances=0 * toy.theta[None]), dynamics).total,
        "commutators reversed": lambda h: expansion(_reversed(toy.age(h)), dynamics).total,
        "no 1/2": lambda h: expansion(toy.age(h)).first_order + 2 * expansion(toy.age(h), dynamics).second_order,
        "(13) as printed": lambda h: equation_13(toy.age(h), dynamics, "printed"),
    }
    for name, found in wrong.items():
        assert slope(true, found) == pytest.approx(2, abs=BAND), name


def _reversed(age):
    return type(age)(*(part[::-1] for part in age))


def test_the_second_order_term_is_the_measured_difference(toy):
    for dynamics in ("gradient_flow", "gradient_descent"):
        errors = []
        for h in STEPS:
            found = expansion(toy.age(h), dynamics)
            measured = toy.true_age(h, dynamics) - found.first_order
            errors.append(np.linalg.norm(found.second_order - measured) / np.linalg.norm(measured))
        assert errors[-1] < 0.01
        assert np.polyfit(np.log(STEPS), np.log(errors), 1)[0] == pytest.approx(1, abs=BAND)


def test_against_the_exact_flow(toy):
    """``federated_flow`` is gradient descent: its age differs from the first-order one as predicted, slope 3 after."""

    def true(h):
        blocks = KernelBlocks(toy.theta, toy.theta[:1])
        flow = federated_flow(blocks, toy.y, toy.partition, toy.cohorts, Rule(toy.taus, float(h)), num_models=K)
        return np.eye(POINTS) - toy.theta @ np.asarray(flow.operator(K, 1))

    assert np.allclose(true(0.3), toy.true_age(0.3, "gradient_descent", 1), rtol=0, atol=1e-12)
    assert slope(true, lambda h: expansion(toy.age(h, model=1)).first_order) == pytest.approx(2, abs=BAND)
    assert slope(true, lambda h: expansion(toy.age(h, model=1), "gradient_descent").total) == pytest.approx(3, abs=BAND)


def test_rates_of_rounds_and_choice_of_rounds(toy):
    rates = np.array([0.1, 0.2, 0.3])
    age = toy.age(rates, rounds=[2, 0])
    assert np.allclose(age.means[0], toy.age(0.3).means[2], rtol=0, atol=1e-14)
    assert np.allclose(age.variances[1], toy.age(0.1).variances[0], rtol=0, atol=1e-14)


def test_condition_15_bounds_u():
    """Equal clients that take turns: the summed operator is Theta / nbar, and (15)'s value bounds U's norm."""
    rng = np.random.default_rng(3)
    n, clients = 12, 6
    features = rng.standard_normal((n, 40)) / 40**0.5
    theta = features @ features.T
    partition = Partition(rng.permutation(n).astype(np.int32), np.arange(0, n + 1, 2, dtype=np.int32))
    client = np.tile(np.arange(clients), (3, 1))
    cohorts = Cohort(client, (client + np.arange(3)[:, None]) % 3, np.full(client.shape, 2.0))
    for rate, holds in ((0.02, True), (10.0, False)):
        age = age_operators(theta, partition, cohorts, 3, rate)
        assert np.allclose(age.means.sum(axis=0), rate * 3 * theta / 4, rtol=1e-12, atol=1e-14)
        found = condition_15([age])
        assert found.decay == pytest.approx(rate * 3 / 4 * np.linalg.eigvalsh(theta)[0], rel=1e-9)
        assert np.linalg.norm(operator_u(age), 2) <= found.value * (1 + 1e-12)
        assert np.linalg.norm(operator_u(age), 2) > (1 - 0.5 * found.b1) * np.exp(-found.decay) - 1e-9
        assert found.value == pytest.approx((1 + found.b1 / 2) * np.exp(-found.decay))
        # (1 + c^2 B_1 / 2) e^(-c lambda) = 1 + c^2 B_1 / 2 - c lambda + (c lambda)^2 / 2 at a multiple c of the step
        assert found.largest_factor == pytest.approx(found.decay / (found.b1 / 2 + found.decay**2 / 2))
        assert found.holds is holds
        assert (found.largest_factor > 1) is holds


BAD = {
    "dynamics": (lambda t: expansion(t.age(0.1), "jump"), "dynamics: got 'jump', allowed are gradient_descent"),
    "order": (lambda t: equation_13(t.age(0.1), order="any"), "order: got 'any', allowed are acting, printed"),
    "no rounds": (lambda t: t.age(0.1, rounds=[]), "rounds: got none"),
    "round": (lambda t: t.age(0.1, rounds=[3]), "rounds: got 3, must be a whole number from 0 to 2"),
    "model": (lambda t: t.age(0.1, model=3), "model: got 3, must be a whole number from 0 to 2"),
    "rate": (lambda t: t.age(-0.1), "learning_rate: got -0.1, must be above 0"),
    "theta": (lambda t: age_operators(np.tri(3), t.partition, t.cohorts, 1, 0.1), "theta: got .*, must be symmetric"),
    "operators": (
        lambda t: exponential_product(np.ones((2, 3)), 0.1),
        r"operators: got shape \(2, 3\), must",
    ),
    "weights": (
        lambda t: exponential_average(np.ones((2, 3, 3)), [0.5, 0.6], 0.1),
        r"weights: got .* sum 1\.1",
    ),
    "no ages": (lambda t: condition_15([]), "ages: got none"),
}


@pytest.mark.parametrize("name", BAD)
def test_refuses(toy, name):
    call, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        call(toy)
