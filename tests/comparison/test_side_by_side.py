"""The side-by-side, end to end: what it reports, and that it notices a wrong theory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import CancelledError

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedtangent._src.cli.compare import _metrics
from fedtangent._src.comparison import all_verdicts, linear_models, predicted, simulated
from fedtangent._src.comparison.cases import build
from fedtangent._src.comparison.predicted import Predicted
from fedtangent._src.comparison.settings import Setting, standardised
from fedtangent._src.comparison.side_by_side import WITHOUT_NTK_FL, Comparison, run
from fedtangent._src.comparison.simulated import (
    Simulated,
    Training,
    cohorts,
    init_key,
    network_functions,
    network_training,
    train,
    training_of,
)
from fedtangent._src.comparison.statistics import width_slope
from fedtangent._src.comparison.verdicts import EXACT, Verdict
from fedtangent._src.engine import Evaluation, memory, simulate
from fedtangent._src.engine import run as engine_run
from fedtangent._src.engine.history import History
from fedtangent._src.engine.memory import DoesNotFit
from fedtangent._src.engine.run import resolve_mapping
from fedtangent._src.types import Algorithm, Cohort

from ..nightly import nightly
from ..stand_ins import stand_in
from .tiny import network


def named(result: Comparison, start: str) -> list[Verdict]:
    found = [v for v in result.verdicts if v.statement.startswith(start)]
    assert found, [v.statement for v in result.verdicts]
    return found


def test_a_linear_model_follows_the_flow_to_rounding(linear_result: Comparison) -> None:
    (verdict,) = named(linear_result, "simulation = flow")
    assert verdict.passed
    assert repr(linear_result).startswith(f"Comparison({linear_result.setting.title}: Simulation and theory agree")
    error = linear_result.gaps[0].error
    assert error.shape == (3, 2, 5)
    # at round 0 the flow is the initial function itself
    assert np.max(error) <= EXACT
    assert float(verdict.measured) <= EXACT


def test_predicted_and_simulateds_of_a_linear_model_are_one(linear_result: Comparison) -> None:
    gap = linear_result.gaps[0]
    np.testing.assert_allclose(gap.simulated, gap.predicted, rtol=1e-9)
    assert gap.simulated[-1] < 0.9 * gap.simulated[0]


def test_the_drawn_flow_is_that_of_the_networks_at_every_round(linear_result: Comparison) -> None:
    """At the evaluated rounds it is what the networks did, in between what the flow says of each."""
    setting, curve, seen = linear_result.setting, linear_result.curve, linear_result.simulated[-1]
    assert curve.rounds.tolist() == list(range(setting.size.num_rounds + 1))
    np.testing.assert_allclose(curve.left[list(seen.rounds)], linear_result.gaps[-1].simulated, rtol=1e-9)
    np.testing.assert_allclose(curve.score[list(seen.rounds)], setting.problem.score(seen.ensemble), rtol=1e-9)
    predict = linear_result.theory.flow.predict_train
    each = [np.asarray(predict(start, curve.rounds.tolist())) for start in seen.train[0].swapaxes(0, 1)]
    np.testing.assert_allclose(curve.left, setting.problem.left(np.stack(each, axis=2)), rtol=1e-9)
    assert np.ptp(curve.left[:4]) > 1  # from round to round


def test_rows_of_a_regression_name_every_method(network_result: Comparison) -> None:
    assert [row.method for row in network_result.rows] == [
        *[f"Fed-ensemble, width {w}" for w in (16, 32, 64)],
        "NTK-FL, averaged kernel, width 64",
        "federated flow, expected, round 10",
        "GP limit (Theorem 2)",
    ]
    for row in network_result.rows:
        assert row.accuracy is None
        measured = (row.test_mse, row.nll, row.coverage, row.mean_difference, row.variance_ratio)
        assert np.isfinite([value for value in measured if value is not None]).all()
        assert 0 <= row.coverage <= 1
    assert network_result.rows[-1].variance_ratio == 1.0
    assert network_result.rows[-1].mean_difference is None  # nothing to compare the limit with but itself


@pytest.mark.slow
def test_rows_of_a_classification_have_accuracies_and_both_kernels(digits_result: Comparison) -> None:
    assert all(row.accuracy is not None and 0 <= row.accuracy <= 1 for row in digits_result.rows)
    assert "NTK-FL, exact kernel, width 32" in [row.method for row in digits_result.rows]
    assert named(digits_result, "NTK-FL, exact kernel: mean")
    setting, row, seen = digits_result.setting, digits_result.rows[2], digits_result.simulated[2]
    right = [np.mean(np.argmax(e, axis=-1) == setting.problem.labels_test) for e in seen.test[-1].mean(axis=0)]
    assert row.accuracy == pytest.approx(np.mean(right), rel=1e-12)
    exact = [m for m in digits_result.ntk_fl if "exact" in m.method]
    assert all(m.info["kernel_error"].max() == 0 for m in exact)


def test_a_row_measures_what_its_networks_did(network_result: Comparison) -> None:
    setting, row, seen = network_result.setting, network_result.rows[2], network_result.simulated[2]
    ensembles = seen.test[-1].mean(axis=0)
    assert row.test_mse == pytest.approx(np.mean((ensembles - setting.problem.y_test) ** 2), rel=1e-7)  # in float32
    assert row.flow_error == pytest.approx(network_result.gaps[2].error[-1].mean(), rel=1e-12)
    # each of four clients sends one model's float32 weights a round: 64 inputs, 64 hidden, 1 output, biases
    assert row.uplink_mib is not None
    assert row.uplink_mib * 2**20 == 10 * 4 * 4 * (64 * 64 + 64 + 64 + 1)


def test_what_is_told_twice_is_one_number(network_result: Comparison) -> None:
    """Table, metrics.csv, figures and verdicts of one run."""
    rows = {row.method: row for row in network_result.rows}
    last: dict[tuple[str, str, str], float] = {
        (m.algorithm, m.split, m.metric): m.value for m in _metrics(0, network_result) if m.round == 10
    }
    name = network_result.setting.name
    for width in (16, 32, 64):
        networks = last[f"Fed-ensemble, width {width} [{name}]", "test", "mse"]
        assert networks == pytest.approx(rows[f"Fed-ensemble, width {width}"].test_mse, rel=1e-12)
    # the flow from the networks' starts is another number than its expectation, and has another name
    from_starts = last[f"federated flow, starts of width 64 [{name}]", "test", "mse"]
    assert network_result.curve.score[-1].mean() == pytest.approx(from_starts, rel=1e-9)
    assert abs(rows["federated flow, expected, round 10"].test_mse / from_starts - 1) > 1e-3
    (slope,) = named(network_result, "error of each network to the flow: slope")
    drawn = width_slope((16, 32, 64), [gap.run_error for gap in network_result.gaps])
    assert slope.measured == str(drawn)
    other = width_slope((16, 32, 64), [gap.error[-1] for gap in network_result.gaps])
    assert slope.measured != str(other)  # of the last round alone


def test_every_kind_of_verdict_is_there(linear_result: Comparison, network_result: Comparison) -> None:
    for result in (linear_result, network_result):
        assert named(result, "variance of initial functions = prior's")[0].holds is not False  # few: undecided
        (apart,) = named(result, "initial functions of different draws, models")
        assert apart.holds is not False, apart
        assert all(v.subject == result.setting.name for v in result.verdicts)
        (models,) = named(result, "law of each of 2 models = flow's, round")
        (ensemble,) = named(result, "law of the ensemble of 2 = flow's, round")
        assert models.passed
        assert ensemble.passed
        assert ensemble.control == "ensemble of 1"
    (linearised,) = named(network_result, "linearised network of width 64 = flow of its kernel")
    assert linearised.passed
    named(network_result, "error of each network to the flow")
    named(network_result, "NTK-FL, averaged kernel: mean")
    named(network_result, "NTK-FL, averaged kernel: variance")
    for what in ("mean", "variance"):
        named(network_result, f"{what} = the flow's from the same initial functions, 3 rounds")


@pytest.mark.slow
@pytest.mark.theory
def test_the_flows_fixed_point_is_theorem_2_under_three_schedules(whole_result: Comparison) -> None:
    found = named(whole_result, "flow repeated for ever = Theorem 2")
    assert len(found) == 3
    assert all(v.passed for v in found)


def test_networks_come_nearer_to_the_flow_with_their_width(network_result: Comparison) -> None:
    errors = [gap.error[-1].mean() for gap in network_result.gaps]
    assert errors[0] > errors[1] > errors[2]
    for gap in network_result.gaps:
        assert np.all(gap.error[0] < 1e-12)


def test_predictions_cover_the_evaluated_rounds(network_result: Comparison) -> None:
    assert network_result.setting.size.rounds == (0, 4, 8, 10)
    assert len(network_result.theory.moments) == 4
    assert all(seen.rounds == (0, 4, 8, 10) for seen in network_result.simulated)
    assert network_result.simulated[0].test.shape == (4, 2, 5, 24, 1)
    assert network_result.simulated[0].train.shape == (4, 2, 5, 24, 1)


def test_ntk_fl_starts_from_fed_ensembles_networks(network_result: Comparison) -> None:
    by_width = {seen.width: seen for seen in network_result.simulated}
    for moved in network_result.ntk_fl:
        np.testing.assert_array_equal(moved.test[0], by_width[moved.width].test[0])


def test_cohorts_are_those_that_the_simulation_records_and_a_comparison_repeats_itself(
    linear_setting: Setting, linear_result: Comparison
) -> None:
    setting, first = linear_setting, linear_result.simulated[0]
    algorithm = setting.algorithm.on(setting.model(100))
    again = train([training_of(setting, algorithm, "again", 100)])[0]
    np.testing.assert_array_equal(again.test, first.test)
    draws = again.test[0]  # [K, E, m, C]
    assert len({draws[k, e].tobytes() for k in range(2) for e in range(4)}) == 8
    expected = cohorts(setting)
    for draw in (0, 1):
        run_ = simulate(
            algorithm,
            setting.problem.federated(),
            num_rounds=10,
            seed=setting.seed,
            start=init_key(setting, draw, 100),
            evaluation=Evaluation(5),
        )
        recorded = run_.history.rounds["cohort"]
        for name in ("client", "model", "weight"):
            np.testing.assert_array_equal(getattr(recorded, name), getattr(expected, name))
    other = cohorts(dataclasses.replace(setting, seed=5))
    assert np.any(other.model != expected.model)


def test_networks_of_different_widths_start_apart(linear_setting: Setting) -> None:
    """Of one key the narrower network's weights are the first of the wider one's."""
    first, second = (jax.random.normal(init_key(linear_setting, 0, width), (8,)) for width in (64, 128))
    assert np.all(first != second)


def more_steps(setting: Setting, blocks: object, plan: Cohort, *rest: object, **options: object) -> object:
    more = {"local_steps": setting.followed.local_steps + 2, **options}
    return RIGHT_FLOW(setting, blocks, plan, *rest, **more)


def larger_step(setting: Setting, blocks: object, plan: Cohort, *rest: object, **options: object) -> object:
    larger = {"learning_rate": 1.01 * setting.followed.learning_rate, **options}
    return RIGHT_FLOW(setting, blocks, plan, *rest, **larger)


def equal_weights(setting: Setting, blocks: object, plan: Cohort, *rest: object, **options: object) -> object:
    return RIGHT_FLOW(setting, blocks, plan._replace(weight=np.sign(plan.weight) * 3), *rest, **options)


RIGHT_FLOW = predicted.run_flow


def test_a_wrong_flow_is_noticed(linear_result: Comparison, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is trained anew: the right networks are held against a mistaken theory."""
    setting, seen = linear_result.setting, linear_result.simulated[0]
    propagated = linear_models._propagated(
        linear_result.theory, linear_models.some_points(setting.problem), setting.size.num_rounds
    )
    monkeypatch.setattr(linear_models, "_propagated", lambda *given: propagated)
    for theory_of in (RIGHT_FLOW, more_steps, larger_step, equal_weights):
        monkeypatch.setattr(predicted, "run_flow", theory_of)
        theory = predicted.predict(setting, linear_result.theory.cohorts)
        verdicts = [linear_models.linear_verdict(theory, seen), *linear_models.law_verdicts(theory)]
        assert len(verdicts) == 3
        assert all(v.holds is (theory_of is RIGHT_FLOW) for v in verdicts), theory_of


def test_float64_is_asked_for(linear_setting: Setting) -> None:
    jax.config.update("jax_enable_x64", False)
    try:
        with pytest.raises(ValueError, match="jax_enable_x64: got False, must be True; call"):
            run(linear_setting)
    finally:
        jax.config.update("jax_enable_x64", True)


def test_starts_of_another_law_and_starts_alike_are_noticed(linear_setting: Setting) -> None:
    blocks = linear_setting.blocks()
    drawn = network_functions(linear_setting, 100, 800, linear_setting.problem.x_test).reshape(1, 2, 400, -1, 1)

    def judge(starts: np.ndarray, prior: float = 1.0) -> list[Verdict]:
        theory = stand_in(Predicted, setting=linear_setting, blocks=blocks._replace(nngp_test=prior * blocks.nngp_test))
        return all_verdicts._starts(theory, (stand_in(Simulated, width=100, test=starts),))

    law, apart = judge(drawn)
    assert law.passed and apart.passed, (law, apart)
    assert judge(drawn, 2.0)[0].holds is False
    assert judge(0.6 * drawn)[0].holds is False  # of the networks that are trained alone
    for alike in (np.repeat(drawn[:, :1], 2, axis=1), np.repeat(drawn[:, :, :1], 400, axis=2)):
        assert judge(alike)[1].holds is False


@pytest.mark.parametrize(
    ("changed", "says"), [({"draws": 1}, "draws: got 1"), ({"widths": (8, 16)}, "8, 16.*3 or more different ones")]
)
def test_what_could_tell_nothing_is_refused_before_anything_runs(changed: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        run(dataclasses.replace(network(), size=network().size._replace(**changed)), say=pytest.fail)
    still = dataclasses.replace(network().followed, server_learning_rate=np.zeros(network().size.num_rounds))
    with pytest.raises(ValueError, match="num_rounds"):
        run(dataclasses.replace(network(), rule=still), say=pytest.fail)


def test_unknown_names_are_refused_with_the_allowed_ones() -> None:
    with pytest.raises(ValueError, match=r"case: got 'nope', allowed are digits, fashion_mnist, sine"):
        build("nope")
    with pytest.raises(ValueError, match=r"scale: got 'nope', allowed are smoke, default, paper"):
        build("sine", scale="nope")


def test_standardised_inputs_have_one_norm() -> None:
    rng = np.random.default_rng(0)
    train, test = rng.uniform(size=(20, 9)), rng.uniform(size=(5, 9))
    scaled = standardised(train, test)
    for x in scaled:
        np.testing.assert_allclose(np.linalg.norm(x, axis=1), 3.0, rtol=1e-12)
    centred = test - train.mean(axis=0)
    np.testing.assert_allclose(scaled[1], 3 * centred / np.linalg.norm(centred, axis=1, keepdims=True), rtol=1e-12)
    same = np.ones((4, 9))
    assert np.all(standardised(same, same)[0] == 0)


def test_a_comparison_of_networks_that_learned_little_says_so(linear_result: Comparison) -> None:
    assert linear_result.remark == ""
    gap = linear_result.gaps[-1]
    idle = linear_result._replace(gaps=(gap._replace(simulated=np.full_like(gap.simulated, 0.5)),))
    assert idle.remark.startswith("the networks learned little: their training residual")
    assert "learned little" in repr(idle)


def test_ntk_fl_whose_jacobian_does_not_fit_is_left_out_of_a_users_run_only(
    linear_setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(algorithm: Algorithm, *rest: object, **more: object) -> object:
        if algorithm.name == "ntk_fl":
            raise DoesNotFit("mapping: scan needs 2 GiB, the device has 1 GiB")
        return resolve_mapping(algorithm, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(simulated, "resolve_mapping", no_room)
    with pytest.raises(DoesNotFit, match="2 GiB"):
        run(linear_setting)
    said: list[str] = []
    result = run(dataclasses.replace(linear_setting, ntk_fl=None), say=said.append)
    assert result.ntk_fl == () and WITHOUT_NTK_FL in result.notes
    assert all(verdict.passed is not False for verdict in result.verdicts)
    assert any("needs 2 GiB" in line for line in said)


@pytest.mark.parametrize("cores", nightly([1, 3], [3]))
def test_networks_are_the_same_on_any_number_of_cores(
    linear_setting: Setting, linear_result: Comparison, monkeypatch: pytest.MonkeyPatch, cores: int
) -> None:
    monkeypatch.setattr(engine_run, "usable_cores", lambda: cores)
    both = [network_training(linear_setting, 100), network_training(linear_setting, 100)]
    assert both[0].resolved.at_once == cores
    said: list[str] = []
    for again in train(both, say=said.append):
        np.testing.assert_array_equal(again.test, linear_result.simulated[0].test)
        np.testing.assert_array_equal(again.train, linear_result.simulated[0].train)
    assert said == [f"{linear_setting.name}: Fed-ensemble: {2 * linear_setting.size.draws} runs of K = 2"]


def test_runs_on_several_cores_need_memory_for_all_of_them(
    linear_setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolved = network_training(linear_setting, 100).resolved
    monkeypatch.setattr(engine_run, "usable_cores", lambda: 64)
    for times, at_once in ((2.5, 2), (1.0, 1), (1e6, 64)):
        limit = int(times * resolved.plan.total / memory.USABLE)
        assert resolved._replace(plan=resolved.plan._replace(limit=limit)).at_once == at_once


@pytest.mark.parametrize("cores", [1, 2])
def test_a_run_that_fails_ends_the_others(linear_setting: Setting, monkeypatch: pytest.MonkeyPatch, cores: int) -> None:
    monkeypatch.setattr(engine_run, "usable_cores", lambda: cores)
    training, begun = network_training(linear_setting, 100), list[int]()

    class Failing(Training):
        def run(self, draw: int, stopped: Callable[[], bool]) -> tuple[History, float]:
            begun.append(draw)
            if draw == 1:
                raise KeyboardInterrupt
            return super().run(draw, stopped)

    many = dataclasses.replace(linear_setting, size=linear_setting.size._replace(draws=200))
    with pytest.raises(KeyboardInterrupt):
        train([Failing(*training._replace(setting=many))])
    assert len(begun) < 100
    with pytest.raises(CancelledError):
        training.run(0, lambda: True)


def test_initial_functions_of_any_number_of_networks(linear_setting: Setting) -> None:
    setting = dataclasses.replace(network(), seed=3)
    x = setting.problem.x_test
    few, more = (network_functions(setting, 16, count, x) for count in (3, 4))  # K = 2: two blocks each
    np.testing.assert_array_equal(few, more[:3])
    further = (init_key(setting, setting.size.draws + draw, 16) for draw in (1, 2))
    keys = [key for block in further for key in jax.random.split(block, 2)]
    model, x = setting.model(16, np.float32), x.astype(np.float32)
    expected = [np.asarray(model.apply(model.init(key), jnp.asarray(x))) for key in keys]
    np.testing.assert_allclose(more, expected, rtol=0, atol=2e-6)
