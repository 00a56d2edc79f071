"""Lemma 1 and Theorem 1 of Local-GD beside plain NumPy: descent step by step, and the paper's d x d matrices."""

from __future__ import annotations

import numpy as np
import pytest

from fedtangent import theory
from fedtangent._src.data import partition
from fedtangent._src.kernels.gram import KernelBlocks
from fedtangent._src.types import Cohort, Partition

SIZES = (5, 3, 4)


@pytest.fixture(scope="module")
def problem() -> tuple[np.ndarray, np.ndarray, Partition]:
    """Three nodes with truths of their own and noise, in more dimensions than examples."""
    rng = np.random.default_rng(3)
    x = rng.standard_normal((sum(SIZES), 20))
    y = np.concatenate([rows @ rng.standard_normal(20) for rows in np.split(x, np.cumsum(SIZES)[:-1])])
    return x, y + 0.2 * rng.standard_normal(len(y)), Partition(np.arange(len(y)), np.cumsum((0, *SIZES)))


def descend(x, y, partition, rate, steps, weights, rounds, start, mean=True):
    """Algorithms 1 and 2 of the paper."""
    path = [start]
    for _ in range(rounds):
        models = []
        for i in range(partition.num_clients):
            w, rows = path[-1].copy(), partition.client(i)
            for _ in range(steps):
                w -= rate * x[rows].T @ (x[rows] @ w - y[rows]) / (len(rows) if mean else 1)
            models.append(w)
        path.append(np.asarray(weights) @ models)
    return np.stack(path)


def off(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("loss", ["squared_error", "squared_error_sum"])
@pytest.mark.parametrize("weights", ["uniform", "examples", (0.2, 0.7, 0.1)])
def test_every_round_of_finite_local_work(problem, loss, weights):
    x, y, partition = problem
    shares = {"uniform": np.full(3, 1 / 3), "examples": np.array(SIZES) / sum(SIZES)}.get(str(weights), weights)
    start = np.random.default_rng(1).standard_normal(20)
    rate = 0.05 if loss == "squared_error" else 0.012
    mean = loss == "squared_error"
    expected = descend(x, y, partition, rate, 7, shares, 9, start, mean)
    run = theory.local_regression(x, y, partition, learning_rate=rate, local_steps=7, weights=weights, loss=loss)
    assert off(run.models(9, start), expected) < 1e-12
    assert off(run.after(range(10), start), expected) < 1e-12
    assert off(run.after(9, start), expected[9]) < 1e-12
    one = theory.local_regression(x, y, partition, learning_rate=rate, local_steps=1, weights=weights, loss=loss)
    assert off(one.models(9, start), expected) > 1e-3
    without = Partition(partition.indices[: sum(SIZES[:2])], partition.offsets[:3])
    missing = theory.local_regression(x, y, without, learning_rate=rate, local_steps=7, loss=loss)
    assert off(missing.models(9, start), expected) > 1e-3


def test_steps_that_hardly_move_keep_their_digits():
    """Two nearly equal examples: a direction whose share of the way per step is 1e-13 of an answer of 1e6."""
    x, y = np.array([[1.0, 0.0, 0.0], [1.0, 1e-6, 0.0]]), np.array([1.0, 2.0])
    nodes = Partition(np.arange(2), np.array([0, 2]))
    run = theory.local_regression(x, y, nodes, learning_rate=0.1, local_steps=3, loss="squared_error_sum")
    expected = descend(x, y, nodes, 0.1, 3, [1.0], 1, np.zeros(3), mean=False)[-1]
    assert off(run.models(1)[-1], expected) < 1e-14
    two = theory.local_regression(x, y, nodes, learning_rate=0.1, local_steps=2, loss="squared_error_sum")
    assert off(two.models(1)[-1], expected) > 1e-3


def test_the_limit_form_is_the_papers_matrices(problem):
    """Eq. (4) to (6), with projections and pseudo-inverses written out."""
    x, y, partition = problem
    run, start = theory.local_regression(x, y, partition), np.random.default_rng(2).standard_normal(20)
    projection, answer = np.zeros((20, 20)), np.zeros(20)
    for i in range(3):
        rows = x[partition.client(i)]
        inverse = rows.T @ np.linalg.inv(rows @ rows.T)
        projection += inverse @ rows / 3
        answer += inverse @ y[partition.client(i)] / 3
    expected = start.copy()
    for k in range(1, 12):
        expected = (np.eye(20) - projection) @ expected + answer
        powers = [np.linalg.matrix_power(np.eye(20) - projection, j) for j in range(k + 1)]
        assert off(powers[k] @ start + sum(powers[:k]) @ answer, expected) < 1e-12  # eq. (6)
        if k > 1:  # as (27) is printed, without the power; and with the sum below (26) for the mean
            assert off(powers[k] @ start + k * powers[1] @ answer, expected) > 1e-2
            assert off(powers[k] @ start + sum(powers[:k]) @ (3 * answer), expected) > 1e-2
        assert off(run.after(k, start), expected) < 1e-12
    assert off(run.models(11, start)[-1], expected) < 1e-12
    values = np.linalg.eigvalsh(projection)[-sum(SIZES) :][::-1]
    np.testing.assert_allclose(run.eigenvalues, values, atol=1e-12)
    assert run.contraction == pytest.approx(1 - values[-1])


def test_many_steps_come_near_the_limit_form_as_predicted(problem):
    x, y, partition = problem
    exact = theory.local_regression(x, y, partition).models(5)[1:]
    for steps in (200, 400):
        run = theory.local_regression(x, y, partition, learning_rate=0.02, local_steps=steps)
        rows = [x[partition.client(i)] for i in range(3)]
        least = min(np.linalg.eigvalsh(r @ r.T / len(r))[0] for r in rows)
        assert run.unfinished == pytest.approx((1 - 0.02 * least) ** steps)
        gap = np.linalg.norm(run.models(5)[1:] - exact, axis=1) / np.linalg.norm(exact, axis=1)
        assert 1e-3 * run.unfinished < gap[0] < 10 * run.unfinished
        assert run.unfinished <= np.exp(-0.02 * least * steps)


def test_the_distance_to_the_centralised_model_falls_at_the_predicted_rate(problem):
    x, y, partition = problem
    run, centralised = theory.local_regression(x, y, partition), theory.minimum_norm(x, y)
    assert off(x @ centralised, y) < 1e-12
    assert off(centralised, x.T @ np.linalg.inv(x @ x.T) @ y) < 1e-12  # eq. (7)
    assert off(run.limit(), centralised) < 1e-10
    distance = np.linalg.norm(run.models(300) - centralised, axis=1)
    slope = np.polyfit(np.arange(150, 300), np.log(distance[150:300]), 1)[0]
    assert slope == pytest.approx(np.log(run.contraction), rel=1e-3)
    assert abs(slope / np.log(1 - run.eigenvalues[-2]) - 1) > 0.05  # another eigenvalue is told apart
    for tolerance in (0.3, 1e-2, 1e-4):
        first = int(np.argmax(distance <= tolerance * distance[0]))
        assert run.rounds_to(tolerance) == first > 0


def test_where_it_ends_from_elsewhere(problem):
    x, y, partition = problem
    start = np.random.default_rng(5).standard_normal(20)
    run = theory.local_regression(x, y, partition)
    assert off(run.models(5000, start)[-1], theory.minimum_norm(x, y, start)) < 1e-9
    assert off(run.limit(start), theory.minimum_norm(x, y, start)) < 1e-10
    assert off(run.limit(start), theory.minimum_norm(x, y)) > 0.1


def test_fewer_dimensions_than_examples_end_elsewhere(problem):
    """The centralised model is not where it ends, and where it does depends on the local work."""
    x, y, partition = problem
    x = x[:, :4]
    run = theory.local_regression(x, y, partition, learning_rate=0.05, local_steps=30)
    end = descend(x, y, partition, 0.05, 30, np.full(3, 1 / 3), 150, np.zeros(4))[-1]
    assert off(run.limit(), end) < 1e-9
    assert off(run.limit(), theory.minimum_norm(x, y)) > 0.01
    other = theory.local_regression(x, y, partition, learning_rate=0.05, local_steps=1)
    assert off(run.limit(), other.limit()) > 0.01


def test_it_is_the_federated_flow_of_the_linear_kernel(problem):
    """Partial participation, weights of cohorts, an uneven number of examples: function space beside weight space."""
    x, y, partition = problem
    rng = np.random.default_rng(7)
    at = rng.standard_normal((6, 20))
    client = np.stack([rng.permutation(3)[:2] for _ in range(8)]).astype(np.int32)
    cohorts = Cohort(client, np.zeros_like(client), rng.uniform(0.5, 2.0, client.shape))
    run = theory.local_regression(x, y, partition, learning_rate=0.04, local_steps=6)
    start = rng.standard_normal(20)
    models = run.models(cohorts, start)
    kernels = KernelBlocks(ntk_train=x @ x.T, ntk_test_train=at @ x.T)
    flow = theory.federated_flow(kernels, y[:, None], partition, cohorts, theory.Rule(6, 0.04))
    begin, after = (v[None, :, None] for v in (x @ start, at @ start))
    for r in range(9):
        predicted = np.asarray(flow.predict(begin, after, r)).reshape(-1)
        assert off(predicted, at @ models[r]) < 1e-9
    wrong = run.models(8, start)
    assert off(predicted, at @ wrong[8]) > 1e-2


def test_theorem_1_says_which_assumptions_hold(problem):
    x, y, partition = problem
    found = theory.local_theorem_1(theory.local_regression(x, y, partition))
    assert found.applies
    assert off(found.centralised, theory.minimum_norm(x, y)) == 0
    short = theory.local_theorem_1(theory.local_regression(x[:, :10], y, partition))
    assert [a.name for a in short.assumptions if not a.holds] == ["overparameterised", "interpolation"]
    run = theory.local_regression(x, y, partition, learning_rate=0.05, local_steps=3)
    assert [a.name for a in theory.local_theorem_1(run).assumptions if not a.holds] == ["converged"]
    away = theory.local_theorem_1(theory.local_regression(x, y, partition), np.ones(20))
    assert [a.name for a in away.assumptions if not a.holds] == ["start"]
    assert "FAILS" in str(away)


def test_a_node_of_lower_rank_takes_the_pseudo_inverse(problem):
    x, y, partition = problem
    x = x.copy()
    x[1], y = x[0], np.where(np.arange(len(y)) == 1, y[0], y)
    run = theory.local_regression(x, y, partition)
    assert run.deficient == (0,)
    assert not run.bases[~run.known].any() and np.linalg.matrix_rank(run.bases[0]) == run.known[0].sum()
    expected = np.mean([np.linalg.pinv(x[partition.client(i)]) @ y[partition.client(i)] for i in range(3)], axis=0)
    assert off(run.models(1)[1], expected) < 1e-12
    assert "full rank: FAILS" in str(theory.local_theorem_1(run))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": np.ones(12)}, r"x: got shape \(12,\), must be \[n, d\]"),
        ({"y": np.ones(11)}, r"y: got shape \(11,\), must be \(12,\) or \(12, C\)"),
        ({"y": np.full(12, np.nan)}, r"y: got nan at entry \(0,\)"),
        ({"partition": [0]}, "partition: got .*, must be a Partition"),
        ({"partition": Partition(np.arange(12), np.array([0, 0, 12]))}, "partition: got client 0 without examples"),
        ({"learning_rate": 0.1}, "local_steps: got None with learning_rate=0.1, both or neither must be set"),
        ({"learning_rate": 0.0, "local_steps": 2}, "learning_rate: got 0.0, must be above 0"),
        ({"learning_rate": 0.1, "local_steps": 0}, "local_steps: got 0, must be a whole number"),
        ({"loss": "logistic"}, "loss: got 'logistic', allowed are squared_error, squared_error_sum"),
        ({"weights": "none"}, "weights: got 'none', allowed are uniform, examples"),
        ({"weights": (1, 2)}, r"weights: got shape \(2,\), must be \(3,\)"),
        ({"weights": (1, -1, 2)}, "weights: got -1 as the least, must be at least 0"),
        (
            {"x": np.ones((12, 5))},
            "x: got 5 dimensions and 5 examples at node 0, must have more dimensions than examples",
        ),
    ],
)
def test_bad_input_is_refused(problem, changes, message):
    given = dict(zip(("x", "y", "partition"), problem, strict=True)) | changes
    with pytest.raises(ValueError, match=message):
        theory.local_regression(**given)


def test_bad_questions_are_refused(problem):
    run = theory.local_regression(*problem)
    with pytest.raises(ValueError, match=r"start: got shape \(3,\), must be \(20,\)"):
        run.models(2, np.zeros(3))
    with pytest.raises(ValueError, match="rounds: got -1, must be a whole number"):
        run.after(-1)
    with pytest.raises(ValueError, match=r"tolerance: got 1.0, must be above 0 and below 1"):
        run.rounds_to(1.0)
    fast = theory.local_regression(*problem, learning_rate=5.0, local_steps=3)
    with pytest.raises(ValueError, match="learning_rate: got one at which local work diverges"):
        _ = fast.contraction


@pytest.mark.parametrize("rank", [9, 30])
def test_several_targets_are_as_many_runs(rank):
    """Columns of targets, of starts and of models, beside one run each; with all examples fitted and without."""
    rng = np.random.default_rng(rank)
    x, y, start = rng.standard_normal((20, rank)), rng.standard_normal((20, 3)), rng.standard_normal((rank, 3))
    nodes = partition.of([np.arange(7), np.arange(7, 16), np.arange(16, 20)])
    work = {"learning_rate": 0.02, "local_steps": 6, "loss": "squared_error_sum"}
    run, each = (
        theory.local_regression(x, y, nodes, **work),
        [theory.local_regression(x, y[:, c], nodes, **work) for c in range(3)],
    )

    def beside(read):
        return read(run, start), np.stack([read(one, start[:, c]) for c, one in enumerate(each)], axis=-1)

    for read in (
        lambda one, w: one.models(5, w),
        lambda one, w: one.after([0, 2, 5], w),
        lambda one, w: one.limit(w),
        lambda one, w: theory.minimum_norm(x, one.nodes.y[one.nodes.held], w),
    ):
        found, expected = beside(read)
        np.testing.assert_allclose(found, expected, atol=1e-10)
        assert not np.allclose(found[..., ::-1], expected, atol=1e-2)
    assert run.contraction == each[0].contraction
    assert run.rounds_to(1e-3, start) >= min(one.rounds_to(1e-3, start[:, c]) for c, one in enumerate(each))
