"""DeepLin's round beside the engine's, the terms of eq. (17) beside the residual they add up to, and Theorem IV.2."""

from __future__ import annotations

import itertools
import math
import re

import jax.numpy as jnp
import numpy as np
import pytest

from fedtangent import theory
from fedtangent._src import models
from fedtangent._src.data import federated_data, partition
from fedtangent._src.engine import Devices, params_by_round
from fedtangent._src.federated import schedule
from fedtangent._src.federated.algorithms import fed_avg
from fedtangent._src.federated.algorithms.common import Averaging
from fedtangent._src.federated.local import Work
from fedtangent._src.theory.deep_linear import gram, rounds
from fedtangent._src.theory.deep_linear.theorem import linear_model, stable_learning_rate

from .. import documents

DEPTH, WIDTH, STEPS, RATE = 3, 24, 4, 0.01
HELD = partition.of([np.arange(5), np.arange(5, 8), np.arange(8, 14)])


def draw(seed: int = 0, depth: int = DEPTH, width: int = WIDTH) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """Weights, inputs [14, 6] and targets [14, 3]."""
    rng = np.random.default_rng(seed)
    sizes = (6, *[width] * (depth - 1), 3)
    weights = [rng.standard_normal((b, a)) for a, b in itertools.pairwise(sizes)]
    return weights, rng.standard_normal((14, 6)), rng.standard_normal((14, 3))


def engine_path(seed: int, num_rounds: int, x: np.ndarray, y: np.ndarray) -> list[list[np.ndarray]]:
    """The server's weights after every round, in the paper's shapes."""
    algorithm = fed_avg(
        models.deep_linear(6, 3, WIDTH, DEPTH, jnp.float64), schedule.all_clients(3), client_learning_rate=RATE,
        loss="squared_error_sum", work=Work(steps=STEPS, batch_size=None), averaging=Averaging(weighting="uniform"),
    )  # fmt: skip
    path = params_by_round(
        algorithm, federated_data(x, y, HELD, jnp.float64), num_rounds=num_rounds, seed=seed, devices=Devices("scan")
    )
    return [[np.asarray(layer[0][r, 0]).T for layer in path[::2]] for r in range(num_rounds + 1)]


def test_a_round_of_the_engine_is_eqs_6_to_8():
    _, x, y = draw()
    path = engine_path(3, 4, x, y)
    for before, after in itertools.pairwise(path):
        own = rounds.full_batch_work(x, y, HELD, RATE, STEPS)
        for right, work in (
            (True, own),
            (False, own._replace(local_steps=STEPS - 1)),
            (False, own._replace(y=-y)),
            (False, own._replace(learning_rate=RATE / 5)),  # of the mean of a client's squares
        ):
            told = rounds.averaged(rounds.local_paths(before, work))
            off = max(np.abs(a - b).max() for a, b in zip(told, after, strict=True))
            assert (off < 1e-10) == right, (off, work)
        weighted = [sum(n * p.weights[i] for n, p in zip((5, 3, 6), rounds.local_paths(before, own), strict=True)) / 14
                    for i in range(DEPTH)]  # fmt: skip
        assert max(np.abs(a - b).max() for a, b in zip(weighted, after, strict=True)) > 1e-5


@pytest.mark.parametrize("depth", [1, 2, 3, 5])
def test_the_four_terms_are_the_residual_after_the_round(depth):
    """Eq. (16) and (17), in a round that is not the first; without any one term, or with another P(0), they are not."""
    initial, x, y = draw(1, depth)
    work = rounds.full_batch_work(x, y, HELD, RATE, STEPS)
    weights = rounds.averaged(rounds.local_paths(initial, work))
    after = rounds.averaged(rounds.local_paths(weights, work))
    residual = gram.products(after, x).outputs - y
    terms = rounds.residual_terms(initial, weights, work)
    size = np.linalg.norm(residual)
    assert np.linalg.norm(terms.total - residual) < 1e-9 * size
    for i, term in enumerate(terms):
        needed = depth > 1 or i in (0, 2)  # a linear model's kernel stays, and it has no products
        assert (np.linalg.norm(terms.total - term - residual) > 1e-6 * size) == needed, i
    if depth > 1:
        other = rounds.residual_terms(weights, weights, work)
        assert np.linalg.norm(other.first - terms.first) > 1e-4 * size
        assert np.linalg.norm(other.total - residual) < 1e-9 * size  # whatever the P(0) that they are written with


def test_the_limit_is_what_wide_networks_tend_to():
    """FedAvg of the linear model, from the network's own start; the error falls with the root of the width."""
    _, x, y = draw(2)
    errors = []
    for width in (64, 256, 1024):
        own = []
        for seed in range(6):
            weights = draw(seed, width=width)[0]
            work = rounds.full_batch_work(x, y, HELD, RATE, STEPS)
            limit = theory.deep_linear_limit(work, DEPTH).models(5, linear_model(weights))
            for _ in range(5):
                weights = rounds.averaged(rounds.local_paths(weights, work))
            own.append(np.linalg.norm(linear_model(weights) - limit[-1]) / np.linalg.norm(limit[-1] - limit[0]))
        errors.append(np.mean(own))
    assert np.polyfit(np.log([64, 256, 1024]), np.log(errors), 1)[0] == pytest.approx(-0.5, abs=0.15)


def test_the_theorem_on_given_data():
    rng = np.random.default_rng(0)
    x = np.linalg.qr(rng.standard_normal((12, 4)))[0] * np.array([1.1, 1.0, 1.0, 0.9])
    y = x @ rng.standard_normal((4, 2)) / 2
    held = partition.of([np.arange(6), np.arange(6, 12)])
    weights = [rng.standard_normal(s) for s in ((800, 4), (800, 800), (2, 800))]
    work = rounds.full_batch_work(x, y, held, 0.001, 5)
    found = theory.deep_linear_theorem(weights, work)
    c = found.constants
    jacobian = gram.dense(gram.products(weights, x))
    assert c.lambda_min == pytest.approx(np.sort(np.linalg.eigvalsh(jacobian))[-8], rel=1e-6)
    assert (
        c.lambda_min == pytest.approx(3 * 0.81 / 2, rel=0.2) and c.rank == 4 and c.kappa == pytest.approx((11 / 9) ** 2)
    )
    assert c.rate() == pytest.approx(1 - 0.001 * 5 * c.lambda_min / 4)
    assert c.step_limit() == pytest.approx(2 / (50 * 3 * c.kappa * 5 * 1.21))
    names = {a.name: a.holds for a in found.assumptions}
    assert names == {"step": True, "realisable": True, "width": c.least_width() <= 800}
    assert (
        found.linear_rate == pytest.approx(1 - 2 * 0.001 * 5 * 3 * 0.81 / 2 / 2, abs=1e-3)
        and found.linear_rate < c.rate()
    )
    path = [weights]
    for _ in range(3):
        path.append(rounds.averaged(rounds.local_paths(path[-1], work)))
    loss = [np.sum((gram.products(w, x).outputs - y) ** 2) for w in path]
    for t, w in enumerate(path):
        kept = {a.name: a.holds for a in found.hypotheses(w, loss[t] / loss[0], t)}
        assert kept == dict.fromkeys(("A", "B, largest", "B, least", "B, between", "C"), True)
    broken = {a.name: a.holds for a in found.hypotheses([2 * w for w in weights], 1.01, 1)}
    assert broken == {"A": False, "B, largest": False, "B, least": True, "B, between": False, "C": False}
    assert not found.hypotheses([w / 2 for w in weights], 1.0, 0)[2].holds
    assert "rho 0.9" in repr(found) and found.failing == (() if names["width"] else ("width",))


def test_the_constants_are_those_of_the_paper():
    """Each formula written out again, columns for examples, on inputs of rank 4 of 6."""
    weights, x, y = draw(6)
    x[:, 4:] = x[:, :2]
    work, delta = theory.full_batch_work(x, y, HELD, RATE, STEPS), 0.2
    c = theory.deep_linear_theorem(weights, work, delta).constants
    n, outputs, rank, upright, targets = 3, 3, 4, x.T, y.T
    singular = np.linalg.svd(upright, compute_uv=False)[:rank]
    kappa, star = singular[0] ** 2 / singular[-1] ** 2, targets @ np.linalg.pinv(upright)
    product = np.linalg.multi_dot(weights[::-1]) / math.sqrt(WIDTH ** (DEPTH - 1) * outputs)
    values = np.linalg.eigvalsh(gram.dense(gram.products(weights, x)))
    shared, norm = rank * kappa**4 * n**2, np.linalg.norm(star, 2)
    residual = np.linalg.norm(product @ upright - star @ upright)
    expected = {
        "rate": 1 - RATE * STEPS * values[-rank * outputs] / (2 * n),
        "step_limit": outputs / (50 * DEPTH * kappa * STEPS * singular[0] ** 2),
        "least_width": DEPTH * max(shared * outputs * (1 + norm**2), shared * math.log(rank / delta), math.log(DEPTH)),
        "radius": 16 * math.sqrt(outputs * n) * residual * singular[0] / (DEPTH * singular[-1] ** 2),
        "kernel_bound": 0.109 * DEPTH * singular[0] ** 2 / (outputs * kappa),
    }
    assert {name: getattr(c, name)() for name in expected} == pytest.approx(expected, rel=1e-9)
    assert c.drift_bound(2) == pytest.approx(57 * 2 * RATE * DEPTH * singular[0] ** 2 / (10 * outputs))
    small = c._replace(truth=0.0, delta=1e-9)
    assert small.least_width() == pytest.approx(DEPTH * shared * math.log(rank / 1e-9))


def test_the_thresholds_of_hypothesis_b_are_1_25_and_0_75():
    weights, x, y = draw(7)
    found = theory.deep_linear_theorem(weights, theory.full_batch_work(x, y, HELD, RATE, STEPS))
    required = {a.name: a.required for a in found.hypotheses(weights, 1.0, 0)}
    assert (required["B, largest"], required["B, least"]) == (1.25, 0.75)
    assert required["B, between"] == pytest.approx(2 * math.sqrt(DEPTH))
    tails = [weights[2], weights[2] @ weights[1]]
    heads = [weights[0] @ x.T, weights[1] @ weights[0] @ x.T]
    least, largest = np.linalg.svd(x.T, compute_uv=False)[[-1, 0]]
    lows, highs = [], []
    for layers in (1, 2):
        for product, rank, low, high in ((tails[layers - 1], 3, 1, 1), (heads[layers - 1], 6, least, largest)):
            values = np.linalg.svd(product, compute_uv=False) / WIDTH ** (layers / 2)
            lows.append(values[rank - 1] / low)
            highs.append(values[0] / high)
    assert found.singular_values(weights) == pytest.approx((min(lows), max(highs)), rel=1e-9)


def test_the_linear_rate_is_that_of_many_rounds_and_not_of_each():
    """With K > 1 the round's map is not symmetric where ``X M`` is measured: a first round may leave more."""
    rng = np.random.default_rng(2)
    x, star = rng.standard_normal((12, 4)) * [3, 1, 0.3, 1], rng.standard_normal((4, 2))
    weights = [rng.standard_normal(s) for s in ((16, 4), (2, 16))]
    held = partition.of([np.arange(4), np.arange(4, 8), np.arange(8, 12)])
    work = theory.full_batch_work(x, x @ star, held, 1.0, 50)
    found = theory.deep_linear_theorem(weights, work._replace(learning_rate=0.5 * stable_learning_rate(work, 2)))
    limit = found.linear
    turn = np.stack([limit.local(star + e[:, None]).mean(axis=0)[:, 0] - star[:, 0] for e in np.eye(4)], axis=1)
    values = np.linalg.eigvalsh(turn)
    path = limit.models(60, star + np.eye(4)[:, :2])
    loss = np.sum((x @ (path - star)) ** 2, axis=(1, 2))
    assert loss[60] / loss[59] == pytest.approx(found.linear_rate, rel=1e-3)
    assert values[-1] ** 2 == pytest.approx(found.linear_rate, rel=1e-9)
    _, singular, right = np.linalg.svd(x, full_matrices=False)
    root = singular[:, None] * right
    worst = np.linalg.norm(root @ turn @ np.linalg.inv(root), 2) ** 2
    assert worst > 1.05 * found.linear_rate
    square = np.sum((path - star) ** 2, axis=(1, 2))
    assert np.all(square[1:] <= square[:-1] * found.linear_rate * (1 + 1e-9))


def test_one_output_has_its_limit_too():
    weights, x, y = draw(8)
    weights, y = [*weights[:2], weights[2][:1]], y[:, :1]
    work = theory.full_batch_work(x, y, HELD, RATE, STEPS)
    models = theory.deep_linear_limit(work, DEPTH).models(3, linear_model(weights))
    assert models.shape == (4, 6, 1)
    twice = theory.deep_linear_limit(work._replace(y=np.repeat(y, 2, axis=1), learning_rate=2 * RATE), DEPTH)
    np.testing.assert_allclose(models, twice.models(3, np.repeat(models[0], 2, axis=1))[..., :1], atol=1e-12)


def test_the_example_of_the_documentation_says_what_it_prints(capsys: pytest.CaptureFixture[str]):
    example, names = documents.example("deep_linear_theorem("), documents.run("deep_linear_theorem(")
    assert names["theorem"].failing == ()
    printed = re.findall(r"0\.\d{4}|\d\.\de-\d\d", capsys.readouterr().out)
    assert printed == re.findall(r"0\.\d{4}|\d\.\de-\d\d", example.splitlines()[-1]) and len(printed) == 5


@pytest.mark.parametrize("steps", [1, 3])
def test_a_round_changes_balancedness_by_gradients_of_every_step_less_the_clients_differences(steps: int):
    weights, x, y = draw(5)

    def changed(rate: float) -> tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]]:
        paths = rounds.local_paths(weights, rounds.full_batch_work(x, y, HELD, rate, steps))
        after = rounds.averaged(paths)
        moves = [b - a for b, a in zip(rounds.balancedness(after), rounds.balancedness(weights), strict=True)]
        of_steps, apart = [np.zeros_like(move) for move in moves], [np.zeros_like(move) for move in moves]
        for path in paths:
            for before, residual in zip(path.before, path.residuals, strict=True):
                pairs = itertools.pairwise(rounds.gradients(before, residual))
                of_steps = [t + rate**2 * (b.T @ b - a @ a.T) / 3 for t, (a, b) in zip(of_steps, pairs, strict=True)]
            differences = itertools.pairwise([w - mean for w, mean in zip(path.weights, after, strict=True)])
            apart = [t + (b.T @ b - a @ a.T) / 3 for t, (a, b) in zip(apart, differences, strict=True)]
        return moves, of_steps, apart

    moves, of_steps, apart = changed(RATE)
    for move, step, difference in zip(moves, of_steps, apart, strict=True):
        np.testing.assert_allclose(move, step - difference, atol=1e-14)
        assert not np.allclose(move, step, atol=1e-8)  # control: without the clients' differences
    smaller = changed(RATE / 10)[0]  # of second order in the rate
    for move, small in zip(moves, smaller, strict=True):
        assert np.linalg.norm(small) / np.linalg.norm(move) == pytest.approx(1 / 100, rel=0.3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y": np.ones((13, 3))}, "y: got 13 rows, must be 14, as x has"),
        ({"y": np.ones(14)}, r"y: got shape \(14,\), must be \[n, C\]"),
        ({"x": np.full((14, 6), np.inf)}, "x: got inf"),
        ({"partition": partition.of([np.arange(14), np.arange(0)])}, "partition: got client 1 without examples"),
        ({"partition": partition.of([np.arange(13)])}, "partition: got example 13 0 times"),
        ({"partition": partition.of([np.arange(14), np.arange(2)])}, "partition: got example 0 2 times"),
        ({"learning_rate": 0.0}, "learning_rate: got 0"),
        ({"local_steps": 0}, "local_steps: got 0"),
    ],
)
def test_bad_work_is_refused(changes, message):
    _, x, y = draw()
    given = {"x": x, "y": y, "partition": HELD, "learning_rate": RATE, "local_steps": STEPS, **changes}
    with pytest.raises(ValueError, match=message):
        theory.full_batch_work(**given)


def test_a_theorem_for_what_diverges_or_does_not_fit_is_refused():
    weights, x, y = draw()
    work = theory.full_batch_work(x, y, HELD, RATE, STEPS)
    limit = 2 * 3 / (3 * max(np.linalg.norm(x[HELD.client(c)], 2) for c in range(3)) ** 2)
    with pytest.raises(
        ValueError, match=f"learning_rate: got .*, at which local descent diverges, must be at most {limit:.4g}"
    ):
        theory.deep_linear_theorem(weights, work._replace(learning_rate=1.01 * limit))
    with pytest.raises(ValueError, match="weights: got 3 outputs, must be 2, as y has"):
        theory.deep_linear_theorem(weights, work._replace(y=y[:, :2]))
    with pytest.raises(ValueError, match="delta: got 0"):
        theory.deep_linear_theorem(weights, work, 0.0)
    with pytest.raises(ValueError, match="learning_rate: got 10, at which local descent diverges"):
        theory.residual_terms(weights, weights, work._replace(learning_rate=10.0, local_steps=8))
    with pytest.raises(ValueError, match="weights: got 3 outputs, must be 2, as y has"):
        theory.residual_terms(weights, weights, work._replace(y=y[:, :2]))
    with pytest.raises(ValueError, match="depth: got 0"):
        theory.deep_linear_limit(work, 0)
    with pytest.raises(ValueError, match="work: got None, must be a FullBatchWork"):
        theory.deep_linear_theorem(weights, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="weights: got nan"):
        theory.balancedness([weights[0], weights[1] * np.nan, weights[2]])
    with pytest.raises(ValueError, match=r"weights: got shapes .*, must be .*, as at the start"):
        theory.deep_linear_theorem(weights, work).hypotheses(weights[:2], 1.0, 0)
    with pytest.raises(ValueError, match=r"hidden layers of widths \[4, 5\]"):
        gram.products([np.ones((4, 6)), np.ones((5, 4)), np.ones((3, 5))], x)
