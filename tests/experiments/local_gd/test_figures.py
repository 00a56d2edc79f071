"""The experiments of Local-GD: their smoke runs whole, the row space they take place in, claims on made-up rows."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from fedtangent import theory
from fedtangent._src.experiments.lab import NOT_SEEN, SEEN, UNDECIDED
from fedtangent._src.experiments.local_gd import fig1d, halfspaces, problems, regression

from ...nightly import nightly
from ..performed import performed, study_of


def run(name: str, folder, *changes: str):
    found, metrics = performed(f"local_gd.{name}", changes, folder)
    assert found.failed == () and all(v.passed for v in found.verdicts)
    assert (folder / "figures" / f"{name}.png").is_file()
    return found, metrics


def test_figure_1a(tmp_path):
    found, metrics = run("fig1a", tmp_path)
    assert len(found.rows) == 2 and len(metrics) == 2 * 3 * 61
    for row in found.rows:
        assert row["g_c_end"] < row["g_c_half"] < row["g_c_start"]
        assert row["g_finite_largest"] < 1e-12 < row["g_closed_largest"] < 1e-3 * row["g_c_start"]


@pytest.mark.slow
def test_figure_1a_with_the_printed_loss_is_not_its_closed_form(tmp_path):
    found, _ = run("fig1a", tmp_path, "loss=squared_error")
    assert found.claims[0].verdict == NOT_SEEN
    assert all(row["unfinished"] > 0.01 for row in found.rows)


@pytest.mark.parametrize("name", nightly(["fig1b", "fig1c"], ["fig1b"]))
def test_figures_1b_and_1c(name, tmp_path):
    found, metrics = run(name, tmp_path)
    assert [row["dimension"] for row in found.rows] == [10, 20, 60] * 2
    assert len(metrics) == 6 * len(regression.LINES[name[-1]])
    for row in found.rows:
        assert (row["limit_closed"] > 1e-3) == (row["dimension"] < 20)  # no model fits all
        assert row["g_c"] < row["size"] or row["dimension"] == 20


@pytest.mark.slow
def test_figure_1d(tmp_path):
    found, metrics = run("fig1d", tmp_path)
    assert len(found.verdicts) == 4 and len(metrics) == 2 * 4 * 29
    for row in found.rows:
        assert row["drawn back to S"] < 0.05 < row["projected to S"]
        assert row["G to C, end"] < row["G to C, half"] < row["G to C, start"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fig1e", "fig1f", "fig1g"])
def test_figures_1e_to_1g(name, tmp_path):
    found, metrics = run(name, tmp_path)
    assert [row["dimension"] for row in found.rows] == [20, 40, 80] * 2
    assert len(metrics) == 6 * len(halfspaces.TOWARDS[name[-1]])
    assert len(found.verdicts) == (2 if name == "fig1g" else 1)


@pytest.mark.slow
def test_figure_2(tmp_path):
    found, _ = run("fig2", tmp_path)
    assert [row["alpha"] for row in found.rows] == [0.5, 10.0] * 2
    for row in found.rows:
        assert 1 <= row["smallest"] < row["largest"] <= 24
        assert row["G to C, end"] < row["G to C, half"]


# ---- the problems --------------------------------------------------------------------------------------------------


def test_the_row_space_is_where_runs_in_all_dimensions_are():
    found = problems.classification(0, 3, 4, 30, 0.5).in_span()
    assert found.x.shape == (12, 12) and found.basis.shape == (30, 12)
    whole = found._replace(x=found.x @ found.basis.T, basis=np.eye(30))
    np.testing.assert_allclose(found.basis.T @ found.basis, np.eye(12), atol=1e-14)
    assert np.array_equal(np.sign(np.einsum("nid,nd->ni", whole.x.reshape(3, 4, 30), found.truths)).ravel(), found.y)
    told = {"learning_rate": 0.05, "local_steps": 7, "loss": "exponential_sum", "mu": 0.1}
    with jax.enable_x64():
        few, many = (problems.simulated(p, "fed_prox", 4, **told) for p in (found, whole))
    assert few.shape == (5, 12) and many.shape == (5, 30)
    assert problems.off(found.lifted(few), many) < 1e-12
    assert problems.off(found.lifted(few)[1:], many[:-1]) > 0.1


def test_problems_are_drawn_as_the_paper_says():
    found = problems.regression(1, 20, 30, 400)
    noise = found.y.reshape(20, 30) - np.einsum("nid,nd->ni", found.x.reshape(20, 30, -1), found.truths)
    assert noise.std() == pytest.approx(0.2, rel=0.1)
    assert found.truths.std() == pytest.approx(2.0, rel=0.05)
    assert np.std(found.x) == pytest.approx(1.0, rel=0.02)
    spread = problems.classification(1, 20, 5, 400, 0.5).truths
    assert (spread - spread.mean(axis=0)).std() == pytest.approx(0.5, rel=0.05)
    assert spread.mean(axis=0).std() == pytest.approx(1.0, rel=0.1)
    again = problems.regression(1, 20, 30, 400)
    assert np.array_equal(found.x, again.x)
    assert not np.array_equal(found.y, problems.regression(2, 20, 30, 400).y)


def test_a_dirichlet_problem_has_one_truth_and_no_node_without_an_example():
    rare, even = (problems.dirichlet_halfspaces(0, 10, 100, 120, alpha) for alpha in (0.05, 100.0))
    for found in (rare, even):
        assert found.partition.sizes.min() >= 1 and found.partition.sizes.sum() == 100
        assert np.ptp(found.truths, axis=0).max() == 0
        assert set(found.y) == {-1.0, 1.0}
    assert rare.partition.sizes.max() > 2 * even.partition.sizes.max()


def test_where_no_model_fits_all_labels_a_certificate_is_raised():
    told = fig1d.SMOKE
    with pytest.raises(ValueError, match="y: got labels that no hyperplane through 0 separates"):
        fig1d._classified(told, problems.classification(0, 4, 20, 8, 5.0).in_span())


def test_what_is_alike_in_the_dual_and_by_the_engine():
    problem = problems.classification(3, 4, 5, 40, 0.5).in_span()
    with jax.enable_x64():
        one, other = (fig1d._classified(fig1d.SMOKE, problem, simulate=flag) for flag in (True, False))
    for name in fig1d.METHODS:
        assert problems.off(one.paths[name], other.paths[name]) < 1e-12
    assert problems.off(one.paths["G"], one.paths["G-Mod"]) > 0.01


def test_a_rate_at_which_descent_diverges_leaves_runs_out():
    problem = problems.classification(3, 4, 5, 40, 0.5).in_span()
    wild = dataclasses.replace(fig1d.SMOKE, learning_rate=1e4)
    with jax.enable_x64():
        assert fig1d.tried(wild, problem, simulate=True) is None
        assert fig1d.tried(wild, problem, simulate=False) is None
        assert fig1d.tried(fig1d.SMOKE, problem, simulate=False) is not None
    assert fig1d.left_out([], 4) == ()
    assert fig1d.left_out(["seed 1"], 4) == ("1 of 4 runs diverged and are left out: seed 1",)


# ---- claims --------------------------------------------------------------------------------------------------------


def test_claims_of_figure_1a():
    def rows(closed: float, half: float, end: float):
        return [{"g_c_start": 1.0, "g_closed_largest": closed * u, "g_c_half": half * u, "g_c_end": end * u}
                for u in (0.9, 1.0, 1.1)]  # fmt: skip

    assert [c.verdict for c in regression.claims(rows(1e-9, 0.1, 1e-3))] == [SEEN] * 3
    assert [c.verdict for c in regression.claims(rows(1e-3, 0.1, 0.5))] == [NOT_SEEN] * 3


def test_claims_of_figures_1b_and_1c():
    def rows(peak: float, end: float):
        of = ((10, 1.0, 1.0), (20, peak, 0.5), (60, end, end))
        return [{"seed": seed, "dimension": d, "g_c": u * v, "error_c": u * v, "error_g": u * w, "size": 1.0,
                 "g_closed": 1e-9 * u * v} for seed, u in enumerate((0.9, 1.0, 1.1)) for d, v, w in of]  # fmt: skip

    assert [c.verdict for c in regression._claims_b(rows(9.0, 1e-3), 20)] == [SEEN] * 3
    assert [c.verdict for c in regression._claims_b(rows(0.1, 1.0), 20)] == [SEEN, NOT_SEEN, NOT_SEEN]
    assert [c.verdict for c in regression._claims_c(rows(9.0, 0.1), 20)] == [SEEN, SEEN, NOT_SEEN, SEEN]
    np.testing.assert_allclose(regression._peak(rows(10.0, 0.1), "g_c", 20), [1.0] * 3)


def test_claims_by_dimension():
    def rows(power: float):
        return [{"seed": seed, "dimension": d, **{key: 0.5 * (d / 10) ** power + 0.001 * seed for name in "ef"
                                                  for key in halfspaces.TOWARDS[name].values()},
                 **dict.fromkeys(halfspaces.TOWARDS["g"].values(), 0.5 * (d / 10) ** power)}
                for seed in range(3) for d in (10, 100)]  # fmt: skip

    falling, rising = rows(-1.0), rows(1.0)
    np.testing.assert_allclose(halfspaces._by_dimension(falling, "G to C"), [-0.45] * 3)
    assert [c.verdict for c in halfspaces.claims_f(falling)] == [SEEN] * 3
    assert [c.verdict for c in halfspaces.claims_f(rising)] == [NOT_SEEN] * 3
    assert [c.verdict for c in halfspaces.claims_e(falling)] == [SEEN, SEEN, UNDECIDED]
    assert [c.verdict for c in halfspaces.claims_g(falling)] == [SEEN] * 6
    assert [c.verdict for c in halfspaces.claims_g(rising)] == [NOT_SEEN] * 4 + [SEEN] * 2


def test_claims_of_figures_1d_and_2():
    def rows(end: float, half: float):
        one = {
            f"{name} to C, {when}": value for name in fig1d.METHODS for when, value in (("end", end), ("half", half))
        }
        one |= {"C to S": 0.05} | {f"accuracy {name}": 0.7 for name in (*fig1d.METHODS, "C")}
        return [{key: value * u for key, value in one.items()} | {"alpha": 1.0} for u in (0.9, 1.0, 1.1)]

    assert [c.verdict for c in fig1d.claims(rows(0.05, 0.5))] == [SEEN] * 4 + [UNDECIDED] * 2 + [SEEN]
    assert [c.verdict for c in fig1d.claims(rows(0.5, 0.1))] == [NOT_SEEN] * 4 + [UNDECIDED] * 2 + [SEEN]
    assert [c.verdict for c in halfspaces.claims(rows(0.05, 0.5))] == [SEEN] * 4
    assert [c.verdict for c in halfspaces.claims(rows(0.5, 0.1))] == [NOT_SEEN, SEEN] * 2


def test_a_slope_and_what_is_no_projection_are_told_from_the_rows():
    rounds = np.arange(2, 402.0)
    assert fig1d.slope(3 / rounds) == pytest.approx(-1)
    row = {"S to ideal": 1e-8, "first round to ideal": 0.4, "least margin": 1.0, "least margin of round 1": 0.1,
           "drawn back slope": -1.02, "projected slope": 0.0}  # fmt: skip
    assert all(v.passed for v in fig1d._verdicts_of([row], ""))
    wrong = {"S to ideal": 0.4, "least margin": 0.1, "drawn back slope": 0.0}
    assert not any(v.holds for v in fig1d._verdicts_of([row | wrong], ""))
    same = {"first round to ideal": 1e-8, "least margin of round 1": 1.0, "projected slope": -1.02}
    assert not any(v.control_fails for v in fig1d._verdicts_of([row | same], ""))


def test_an_accuracy_is_that_of_the_angle():
    problem = problems.classification(0, 4, 5, 40, 0.0).in_span()
    own = problem.basis.T @ problem.truths[0]
    path = np.stack([own, -own])
    one = fig1d.Classified(problem, theory.feasible_sets(problem.x, problem.y, problem.partition),
                           {"G": path, "G-Mod": path[::-1]}, own, own)  # fmt: skip
    found = halfspaces.accuracies(one, 0, 2000)
    exact = 1 - np.arccos(np.linalg.norm(own) / np.linalg.norm(problem.truths[0])) / np.pi
    assert found["exact C"] == pytest.approx(exact) and found["exact G"] == pytest.approx(1 - exact)
    error = np.sqrt(exact * (1 - exact) / 8000)
    assert abs(found["accuracy C"] - exact) < 4 * error < abs(found["accuracy C"] - 0.5)


# ---- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("fig1a", "dimension=5", "dimension: got 5, must be above examples_per_node, 5"),
        ("fig1a", "loss=logistic", "loss: got 'logistic', allowed are squared_error, squared_error_sum"),
        ("fig1b", "dimensions=5,20,60", "dimensions: got 5, must be above examples_per_node, 5"),
        ("fig1c", "dimensions=10,30,60", "dimensions: got 10,30,60, must have 20, the number of examples, a smaller"),
        ("fig1g", "dimensions=10,30,60", "dimensions: got 10, must be at least 20, the examples of all nodes"),
        ("fig2", "num_examples=90", r"num_examples: got 90, must be from 4 \(num_nodes\) to 80 \(dimension\)"),
    ],
)
def test_bad_settings_are_refused(name, change, message):
    with pytest.raises(ValueError, match=message):
        study_of(f"local_gd.{name}", (change,))
