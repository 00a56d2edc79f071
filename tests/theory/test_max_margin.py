"""Projections onto feasible sets, the parallel projection method and its limits, by independent paths.

References: scikit-learn's support vector machine, least-distance programming by non-negative least squares (Lawson and
Hanson, 1974, chapter 23), and descent on eq. (12) step by step.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np
import pytest
from scipy.optimize import minimize, nnls
from sklearn.svm import SVC

from fedtangent import theory
from fedtangent._src.theory.local_gd.max_margin import project
from fedtangent._src.types import Partition

from .. import documents


class Problem(NamedTuple):
    x: np.ndarray  # [n, d]
    y: np.ndarray  # [n]
    w: np.ndarray  # [d]


def draw(seed: int, most: int = 60) -> Problem:
    """Separable with a margin of 1e-3 to 1 of a unit vector; fewer or more dimensions than examples, duplicates."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(2, most))
    d = n + int(rng.integers(5, most)) if seed % 4 == 0 else max(2, n // 3) if seed % 4 == 1 else int(
        rng.integers(2, 2 * most)
    )  # fmt: skip
    x, w = rng.standard_normal((n, d)), rng.standard_normal(d)
    w /= np.linalg.norm(w)
    margin = 10.0 ** rng.uniform(-3, 0)
    y = np.where(x @ w >= 0, 1.0, -1.0)
    x += np.outer(y * margin, w)
    if seed % 4 == 1:  # some at the margin
        x[: n // 4] += np.outer(y[: n // 4] * margin - x[: n // 4] @ w, w)
    if seed % 4 == 2:
        x[: n // 2], y[: n // 2] = x[n - n // 2 :], y[n - n // 2 :]
    if seed % 4 == 3:
        x *= 10.0 ** rng.uniform(-2, 2)
    return Problem(x, y, np.zeros(d) if seed % 3 == 0 else rng.standard_normal(d) * 10.0 ** rng.uniform(-2, 1))


def side_by_side(problems: list[Problem]) -> tuple[theory.FeasibleSets, np.ndarray]:
    """One node for each problem, all in the most dimensions that there are, and where each is projected from."""
    most = max(p.x.shape[1] for p in problems)
    x = np.concatenate([np.pad(p.x, ((0, 0), (0, most - p.x.shape[1]))) for p in problems])
    y = np.concatenate([p.y for p in problems])
    offsets = np.cumsum([0, *(len(p.y) for p in problems)])
    sets = theory.feasible_sets(x, y, Partition(np.arange(len(y)), offsets), separable=False)
    return sets, np.stack([np.pad(p.w, (0, most - len(p.w))) for p in problems])


def least_distance(p: Problem) -> np.ndarray:
    """The nearest point of the set by the method of Lawson and Hanson, in the primal."""
    signed = p.x * p.y[:, None]
    lacking = 1 - signed @ p.w
    b, _ = nnls(np.vstack([signed.T, lacking]), np.eye(len(p.w) + 1)[-1], maxiter=10_000)
    return p.w + signed.T @ b / (1 - lacking @ b)


def off(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def test_projections_are_those_of_another_solver():
    """100 problems of every kind in one call, and each certified by its KKT conditions."""
    problems = [draw(seed) for seed in range(100)]
    sets, at = side_by_side(problems)
    found = project(sets, at)
    for p, point in zip(problems, np.asarray(found.point), strict=True):
        assert off(point[: len(p.w)], least_distance(p)) < 1e-8
        assert not np.any(point[len(p.w) :])
    assert np.max(np.asarray(found.residual)) < 1e-6
    assert np.max(np.asarray(found.residual)[2::4]) < 1e-10  # repeated examples: without a ridge it is 5e-7
    assert np.min(np.asarray(found.dual)) >= 0
    wrong = [least_distance(p._replace(y=-p.y)) for p in problems]
    assert min(off(w, least_distance(p)) for w, p in zip(wrong, problems, strict=True)) > 1e-3


def support_vector_machine(p: Problem) -> tuple[np.ndarray, float]:
    """scikit-learn's hard margin, and how far from it the exact one can be at most, relative to its norm.

    Without intercept: each example mirrored through 0 with the other label makes it 0. Scaled to its own margin, it is
    in the set, and its squared norm, which is that of the exact one or more, less twice scikit-learn's own dual value,
    which is that or less, bounds the squared distance.
    """
    size = np.linalg.norm(least_distance(p))  # only so that its tolerance, which is absolute, means the same
    machine = SVC(kernel="linear", C=1e12, tol=1e-10, cache_size=500)
    machine.fit(size * np.concatenate([p.x, -p.x]), np.concatenate([p.y, -p.y]))
    w = machine.coef_[0]
    value = np.abs(machine.dual_coef_).sum() - w @ w / 2
    w = w / np.min(size * p.x @ w * p.y)
    return size * w, float(np.sqrt(max(w @ w - 2 * value, 0.0)))


@pytest.mark.slow
def test_from_zero_it_is_the_support_vector_machine():
    """As far as scikit-learn itself knows: where it is sure to 1e-6, to that."""
    problems = [draw(seed) for seed in range(200)]
    problems = [p._replace(w=np.zeros_like(p.w)) for p in problems]
    sets, at = side_by_side(problems)
    points = np.asarray(project(sets, at).point)
    machines, unsure = zip(*map(support_vector_machine, problems), strict=True)
    away = [off(w[: len(p.w)], m) for w, p, m in zip(points, problems, machines, strict=True)]
    assert np.all(np.array(away) <= np.maximum(unsure, 1e-6))
    assert np.median(away) < 2e-7
    assert np.mean(np.array(away) < 1e-6) > 0.8
    one = theory.hard_margin(theory.feasible_sets(*problems[0][:2], everything(problems[0])))
    np.testing.assert_allclose(one, points[0][: len(one)], rtol=1e-9)


def test_examples_that_are_there_many_times_in_few_dimensions():
    """199 examples of whole numbers in five dimensions: the dual has many solutions, the point is one."""
    rng = np.random.default_rng(1)
    x = np.round(rng.standard_normal((200, 5)))
    x = x[np.any(x != 0, axis=1)]
    y = np.where(x @ rng.standard_normal(5) > 0, 1.0, -1.0)
    p = Problem(x, y, np.zeros(5))
    assert len(np.unique(x, axis=0)) < len(x)
    sets = theory.feasible_sets(x, y, everything(p))
    assert off(theory.hard_margin(sets), least_distance(p)) < 1e-10
    column = theory.feasible_sets(x, y[:, None], everything(p))  # [n, 1] is the same
    np.testing.assert_array_equal(column.signed, sets.signed)
    rows = np.arange(len(y))
    twice = Partition(np.concatenate([rows, rows]), np.array([0, len(y), 2 * len(y)]))
    path = theory.parallel_projections(theory.feasible_sets(x, y, twice), 1)
    assert off(path[-1], least_distance(p)) < 1e-10


@pytest.mark.parametrize("x64", [True, False])
def test_small_margins_are_exact_whatever_jax_computes_in(x64):
    """Two examples nearly opposite: the machine is (0, 1 / m)."""
    for m in (1e-2, 1e-3, 1e-4):
        x = np.array([[1, m], [-1, m]])
        with jax.enable_x64(x64):
            sets = theory.feasible_sets(x, np.ones(2), Partition(np.arange(2), np.array([0, 1, 2])))
            found = theory.hard_margin(sets)
            path = theory.parallel_projections(sets, 2)
        np.testing.assert_allclose(found * m, [0, 1], atol=1e-8)
        assert path.dtype == np.float64 and sets.margins(found).min() > 1 - 1e-8
    with pytest.raises(ValueError, match=r"sets: got a residual of .* too thin"):
        theory.hard_margin(
            theory.feasible_sets(
                np.array([[1, 1e-7], [-1, 1e-7]]), np.ones(2), Partition(np.arange(2), np.array([0, 2]))
            )
        )


def everything(p: Problem) -> Partition:
    return Partition(np.arange(len(p.y)), np.array([0, len(p.y)]))


# ---- the method of many projections ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def case() -> tuple[theory.FeasibleSets, np.ndarray]:
    """Four nodes of unequal size with truths near one another, in more dimensions than examples of a node."""
    rng = np.random.default_rng(11)
    sizes, truth = (4, 7, 5, 6), rng.standard_normal(16)
    x = rng.standard_normal((sum(sizes), 16))
    truths = np.repeat(truth + 0.4 * rng.standard_normal((4, 16)), sizes, axis=0)
    y = np.sign(np.sum(x * truths, axis=1))
    sets = theory.feasible_sets(x, y, Partition(np.arange(len(y)), np.cumsum((0, *sizes))))
    return sets, np.asarray(theory.hard_margin(sets))


def nodes(sets: theory.FeasibleSets) -> list[np.ndarray]:
    """The signed examples of each node, [n_i, d]."""
    return [np.asarray(rows)[np.asarray(held)] for rows, held in zip(sets.signed, sets.held, strict=True)]


def projections_by_hand(sets, rounds, alpha=None, start=None, weights=None):
    """Eq. (13) and (16) with the projections of Lawson and Hanson."""
    signed = nodes(sets)
    weights = np.full(len(signed), 1 / len(signed)) if weights is None else weights
    start = np.zeros(sets.dimension) if start is None else start
    path = [start]
    for k in range(rounds):
        own = [least_distance(Problem(rows, np.ones(len(rows)), path[-1])) for rows in signed]
        share = 1.0 if alpha is None else alpha[k]
        path.append((1 - share) * start + share * (weights @ np.array(own)))
    return np.stack(path)


def test_parallel_projections_round_by_round(case):
    sets, _ = case
    start = np.random.default_rng(1).standard_normal(16)
    shares = np.array([0.1, 0.2, 0.3, 0.4])
    for options in (
        {},
        {"alpha": theory.halpern(8)},
        {"start": start, "weights": shares, "alpha": np.linspace(0, 1, 8)},
    ):
        found, expected = theory.parallel_projections(sets, 8, **options), projections_by_hand(sets, 8, **options)
        np.testing.assert_allclose(found, expected, atol=1e-9)
    assert off(theory.parallel_projections(sets, 8)[-1], projections_by_hand(sets, 8, theory.halpern(8))[-1]) > 0.01
    assert off(theory.parallel_projections(sets, 8)[-1], projections_by_hand(sets, 8, weights=shares)[-1]) > 0.01


def test_the_plain_mean_ends_in_all_sets_and_not_at_the_machine(case):
    """Lemma 3 and Theorem 2, constraint by constraint."""
    sets, machine = case
    path = theory.parallel_projections(sets, 1000)
    short = [1 - sets.margins(w).min() for w in (path[10], path[100], path[300], path[1000])]
    assert short[0] > 10 * short[1] > 1e4 * short[2] > 0
    assert short[3] < 1e-12
    assert theory.direction_distance(path[-1], machine) > 1e-2


def test_drawn_back_at_the_right_pace_it_ends_at_the_machine(case):
    """Theorem 3: the distance falls as 1 / k; and from elsewhere at the nearest point of the intersection (Lemma 4)."""
    sets, machine = case
    rounds = 1000
    path = theory.parallel_projections(sets, rounds, alpha=theory.halpern(rounds))
    at = np.array([125, 250, 500, 1000])
    distance = theory.direction_distance(path[at], machine)
    slope = np.polyfit(np.log(at), np.log(distance), 1)[0]
    assert slope == pytest.approx(-1, abs=0.25)
    assert distance[-1] < 0.03
    start = 3 * np.random.default_rng(2).standard_normal(16)
    away = theory.parallel_projections(sets, rounds, alpha=theory.halpern(rounds), start=start)[-1]
    rows = np.concatenate(nodes(sets))
    assert off(away, least_distance(Problem(rows, np.ones(len(rows)), start))) < 0.03
    assert off(away, machine) > 0.1


def test_halpern_has_the_index_of_either_place():
    np.testing.assert_allclose(theory.halpern(3), [1 / 2, 2 / 3, 3 / 4])  # eq. (16)
    np.testing.assert_allclose(theory.halpern(3, 0), [0, 1 / 2, 2 / 3])  # eq. (63)


# ---- the exponential loss ----------------------------------------------------------------------------------------


def test_local_problems_of_the_exponential_loss_are_solved(case):
    """Eq. (12) by scipy's minimiser, for two rounds; another lambda and a mean in place of the sum are told apart."""
    sets, _ = case

    def by_hand(level: float, count=lambda rows: 1.0) -> np.ndarray:
        w = np.zeros(sets.dimension)
        for _ in range(2):
            own = []
            for rows in nodes(sets):

                def loss(v, rows=rows, w=w):
                    e = np.exp(-rows @ v) / count(rows)
                    return e.sum() + level / 2 * np.sum((v - w) ** 2), -rows.T @ e + level * (v - w)

                own.append(minimize(loss, w, jac=True, method="BFGS", options={"gtol": 1e-11, "maxiter": 5000}).x)
            w = np.mean(own, axis=0)
        return w

    level = 1e-2
    found = theory.exponential_models(sets, 2, np.log(1 / level))[-1]
    assert off(found, by_hand(level)) < 1e-6
    assert off(found, by_hand(level / 2)) > 0.01
    assert off(found, by_hand(level, len)) > 0.01


@pytest.mark.parametrize("modified", [False, True])
def test_with_local_steps_it_is_the_loop_of_algorithm_2(case, modified):
    """In the weights, step by step, for nodes of unequal size; the control has a step less, or another lambda."""
    sets, _ = case
    held = [np.asarray(s)[np.asarray(h)] for s, h in zip(sets.signed, sets.held, strict=True)]

    def loop(steps: int, pull: float) -> np.ndarray:
        w = np.zeros(sets.dimension)
        for k in range(3):
            ends = []
            for signed in held:
                own = w.copy()
                for _ in range(steps):
                    own = own + 0.02 * (signed.T @ np.exp(-signed @ own) - pull * (own - w))
                ends.append(own)
            w = (1 - 1 / (k + 2) if modified else 1.0) * np.mean(ends, axis=0)
        return w

    alpha = theory.halpern(3) if modified else None
    found = theory.exponential_models(sets, 3, np.log(1 / 0.3), learning_rate=0.02, local_steps=7, alpha=alpha)[-1]
    assert off(found, loop(7, 0.3)) < 1e-12
    assert off(found, loop(6, 0.3)) > 1e-3
    assert off(found, loop(7, 0.1)) > 1e-3


def test_weaker_and_weaker_it_points_where_the_projections_do(case):
    """Lemma 2: ``|w - ln(1/lambda) w_bar| = O(ln ln (1/lambda))``, so that directions meet."""
    sets, _ = case
    bars = theory.parallel_projections(sets, 3)[-1]
    levels = np.array([1e1, 1e2, 1e3, 1e4, 1e5])
    models = np.stack([theory.exponential_models(sets, 3, level)[-1] for level in levels])
    distance = theory.direction_distance(models, bars)
    assert np.all(np.diff(np.log(distance)) < 0)
    assert distance[-1] < 1e-3
    residual = np.linalg.norm(models - levels[:, None] * bars, axis=1) / np.log(levels)
    assert residual.max() < 3 * np.linalg.norm(bars)
    modified = theory.parallel_projections(sets, 3, alpha=theory.halpern(3, 0))[-1]
    assert theory.direction_distance(models, modified)[-1] > 10 * distance[-1]


@pytest.mark.slow
def test_the_example_of_the_documentation(capsys):
    names = documents.run("local_regression(")
    assert "246 rounds to a thousandth" in capsys.readouterr().out
    assert theory.direction_distance(names["path"][-1], names["x"][0]) > 1  # of another direction


# ---- what is not separable, and bad input ------------------------------------------------------------------------


def test_a_certificate_of_what_is_not_separable():
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((40, 5)), rng.choice([-1.0, 1.0], 40)
    with pytest.raises(ValueError, match="y: got labels that no hyperplane through 0 separates"):
        theory.feasible_sets(x, y, Partition(np.arange(40), np.array([0, 20, 40])))
    sets = theory.feasible_sets(x, y, Partition(np.arange(40), np.array([0, 20, 40])), separable=False)
    b = theory.farkas(sets)
    signed = x * y[:, None]
    assert b.min() >= 0
    assert np.linalg.norm(b @ signed) < 1e-12 * b.sum()
    with pytest.raises(ValueError, match=r"sets: got a residual of .* at node 0"):
        theory.parallel_projections(sets, 2)
    for p in map(draw, range(12)):  # all separable, some with a margin of 1e-3
        assert theory.farkas(theory.feasible_sets(p.x, p.y, everything(p))) is None


def test_two_opposite_examples_and_an_example_of_zeros_are_not_separable():
    for x in ([[1.0, 2.0], [1.0, 2.0]], [[1.0, 0.0], [0.0, 0.0]]):
        with pytest.raises(ValueError, match="no hyperplane through 0 separates"):
            theory.feasible_sets(np.array(x), np.array([1.0, -1.0]), Partition(np.arange(2), np.array([0, 2])))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: theory.feasible_sets(np.eye(2), [0, 1], Partition(np.arange(2), np.array([0, 2]))),
         "y: got label 0, must be -1 or 1"),
        (lambda s: theory.parallel_projections(s, -1), "num_rounds: got -1, must be a whole number"),
        (lambda s: theory.parallel_projections(s, 2, alpha=[1.0]), r"alpha: got shape \(1,\), must be \(2,\)"),
        (lambda s: theory.parallel_projections(s, 2, alpha=[1.0, 1.5]), "alpha: got 1.5, must be from 0 to 1"),
        (lambda s: theory.parallel_projections(s, 2, start=[1.0]), r"start: got shape \(1,\), must be \(16,\)"),
        (lambda s: theory.parallel_projections(s, 2, weights="none"), "weights: got 'none', allowed are uniform"),
        (lambda s: theory.exponential_models(s, 2, np.nan), "log_inverse: got nan, must be finite"),
        (lambda s: theory.exponential_models(s, 2, 1.0, local_steps=3), "local_steps: got 3 with learning_rate=None"),
        (
            lambda s: theory.exponential_models(s, 2, 1.0, learning_rate=1e9, local_steps=99),
            r"learning_rate: got 1e\+09, at which node 0 diverges in round 0, must be less",
        ),
        (lambda s: theory.halpern(0), "num_rounds: got 0, must be a whole number"),
        (lambda s: project(s, np.zeros(3)), r"w: got shape \(3,\), must be \[16\] or \[4, 16\]"),
    ],
)  # fmt: skip
def test_bad_input_is_refused(case, call, message):
    with pytest.raises(ValueError, match=message):
        call(case[0])
