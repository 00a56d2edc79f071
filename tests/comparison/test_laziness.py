"""The distance of a network to its prediction in its parts: networks of which it is known how lazy they are."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedtangent._src.comparison import laziness
from fedtangent._src.comparison.all_verdicts import without_clients
from fedtangent._src.comparison.cases import LOCAL_STEPS
from fedtangent._src.comparison.laziness import (
    METRICS,
    Parts,
    _limit,
    at_points,
    check_linearisable,
    laziness_diagnostics,
    linearised_flow,
    linearised_paths,
    parts,
    watched_draws,
)
from fedtangent._src.comparison.predicted import Predicted, run_flow
from fedtangent._src.comparison.settings import Scale, Setting
from fedtangent._src.comparison.side_by_side import Comparison
from fedtangent._src.comparison.simulated import Simulated, cohorts, init_key, trained_networks
from fedtangent._src.comparison.statistics import fitted_slope
from fedtangent._src.engine import Devices, Evaluation
from fedtangent._src.engine.building import build
from fedtangent._src.engine.description import describe
from fedtangent._src.engine.run import predict, simulate
from fedtangent._src.entries import catalogue
from fedtangent._src.federated.algorithms import fed_ensemble
from fedtangent._src.federated.local import Work
from fedtangent._src.kernels.empirical import empirical_ntk
from fedtangent._src.models.dense import mlp
from fedtangent._src.models.recurrent import lstm
from fedtangent._src.theory.flow import Rule

from ..stand_ins import stand_in
from .tiny import linear, network

ROUNDS = 8


def test_parts_by_their_definition() -> None:
    rng = np.random.default_rng(0)
    net, line, limit = rng.standard_normal((3, 2, 5, 3))
    found = parts(net, line, limit)
    for k in range(2):
        moved = np.linalg.norm(line[k])
        assert found.feature_learning[k] == pytest.approx(np.linalg.norm(net[k] - line[k]) / moved, rel=1e-12)
        assert found.initial_kernel[k] == pytest.approx(np.linalg.norm(line[k] - limit[k]) / moved, rel=1e-12)
        assert found.total[k] == pytest.approx(np.linalg.norm(net[k] - limit[k]) / moved, rel=1e-12)
    assert np.all(found.total < found.feature_learning + found.initial_kernel)  # the triangle's, and not their sum
    assert parts(net, line) == Parts(pytest.approx(found.feature_learning))
    still = parts(*np.zeros((3, 2, 5, 3)))
    assert not np.any(still)
    assert np.isnan(parts(net, line * np.nan).feature_learning).all()
    assert tuple(Parts._fields) == METRICS[:3]


def by_training(setting: Setting, width: int) -> np.ndarray:
    """Outputs [r, K, n + m, C] of linearised networks of the first draw, trained."""
    x = jnp.asarray(np.concatenate([setting.problem.x_train, setting.problem.x_test]))
    model = setting.model(width)
    paths = linearised_paths(setting.algorithm, model, setting.problem.federated(), x, setting.size.rounds)
    return paths(setting.seed, init_key(setting, 0, width))


def outputs(seen: Simulated) -> np.ndarray:
    """Of the networks of the first draw, [r, K, n + m, C]."""
    return np.concatenate([seen.train, seen.test], axis=-2)[:, :, 0]


def test_a_linear_model_has_no_parts() -> None:
    """It is its own linearisation, and its kernel the limit's: the three paths are computed in three ways."""
    setting = dataclasses.replace(linear(), size=linear().size._replace(draws=1))
    seen = trained_networks(setting, 100, False, 1)
    flow = run_flow(setting, setting.blocks(), cohorts(setting))
    start = outputs(seen)[0]
    test = flow.predict(start[:, : len(setting.problem.x_train)], start[:, len(setting.problem.x_train) :], seen.rounds)
    train = flow.predict_train(start[:, : len(setting.problem.x_train)], seen.rounds)
    paths = outputs(seen), by_training(setting, 100), np.concatenate([train, test], axis=-2)
    found = parts(*(path - start for path in paths))
    assert np.max(found) < 1e-10
    assert seen.watched is not None
    assert np.max(seen.watched.drift) < 1e-10
    assert watched_draws(setting) == 0


def test_a_trained_linearised_network_is_the_flow_of_its_own_kernel() -> None:
    """Of two models and two outputs; not with a client less, nor is one model the other."""
    setting = dataclasses.replace(small(16), ntk_fl=None)  # as a user's run it is in float64
    once = setting.size._replace(num_rounds=1, evaluate_every=1)
    seen = trained_networks(dataclasses.replace(setting, size=once), 16, False, 1)
    assert seen.watched is not None
    line, model, plan = by_training(setting, 16), setting.model(16), cohorts(setting)
    points = at_points(setting.problem, *np.split(np.arange(line.shape[2])[:, None], [len(setting.problem.x_train)]))[
        :, 0
    ]
    line = line[:, :, points]

    def flow(k: int, own: int, clients: list[int]) -> float:
        theory = stand_in(Predicted, setting=setting, cohorts=without_clients(plan, clients))
        params = jax.tree.map(lambda leaf: leaf[own], seen.watched.starts[0])  # type: ignore[union-attr]
        found = linearised_flow(theory, model, params, line[0, k], k)
        return float(np.max(np.abs(found - line[:, k])) / np.max(np.abs(line[-1, k] - line[0, k])))

    for k in range(2):
        assert flow(k, k, []) < 1e-9
    assert flow(0, 0, [1]) > 1e-3
    assert flow(0, 1, []) > 1e-3


def small(width: int, **options: Any) -> Setting:
    """Two models of two outputs on 24 digits; a step a tenth of the kernel's at the start."""
    base = network()
    problem, plan = base.problem, base.algorithm.schedule
    x, y = problem.x_train, np.concatenate([problem.y_train, -np.roll(problem.y_train, 1)], axis=1)
    given = {"activation": "erf", "w_std": 2**0.5, "b_std": 0.1, "dtype": jnp.float64} | options
    share = given.pop("share", 0.1)
    model = mlp(x.shape[1], 2, widths=(width,), **given)
    params = jax.jit(model.init)(jax.random.key(0))
    largest = float(
        np.linalg.eigvalsh(np.asarray(jax.jit(lambda p: empirical_ntk(model, p, jnp.asarray(x)))(params)))[-1]
    )
    rate, work = share * plan.num_clients / largest, Work(steps=LOCAL_STEPS, batch_size=None)
    return dataclasses.replace(
        base,
        problem=dataclasses.replace(
            problem, y_train=y, y_test=np.concatenate([problem.y_test, -problem.y_test], axis=1)
        ),
        algorithm=fed_ensemble(model, plan, client_learning_rate=rate, work=work),
        rule=Rule(LOCAL_STEPS, rate),
        size=Scale((width,), 1, ROUNDS, ROUNDS // 2),
    )


def lazy(width: int, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """Feature learning and drift of two networks at the end, [K]."""
    setting = small(width, **options)
    seen, line = trained_networks(setting, width, False, 1), by_training(setting, width)
    assert seen.watched is not None
    return parts(*(path[-1] - path[0] for path in (outputs(seen), line))).feature_learning, seen.watched.drift[-1, :, 0]


SMALL_WEIGHTS = {"parameterization": "standard", "w_std": 0.1, "last_w_std": 0.01, "b_std": 0.0}


@pytest.mark.slow
def test_wide_networks_with_small_steps_are_lazy_and_small_weights_are_not() -> None:
    wide, drift = lazy(1024)
    assert np.all(wide < 0.01) and np.all(drift < 0.02)
    rich, drift = lazy(64, **SMALL_WEIGHTS)
    assert np.all(rich > 0.3) and np.all(drift > 0.3)


@pytest.mark.slow
def test_feature_learning_falls_with_width_and_rises_with_the_step() -> None:
    widths = (32, 128, 512)
    found = [lazy(w)[0] for w in widths]
    slope = fitted_slope(np.array(widths, float), found)[0].value
    assert -1.4 < slope < -0.4, slope
    narrow, far = lazy(8)[0], lazy(8, share=1.0)[0]
    assert np.all(narrow > 0.05) and np.mean(far) > np.mean(narrow)
    # A small last layer alone does not do it: a wide network then learns on the features that it has.
    features, drift = lazy(256, parameterization="standard", last_w_std=0.01)
    assert np.all(features < 0.01) and np.all(drift < 0.02)


SMALL = {"dataset": "digits", "num_train": 40, "num_test": 8, "num_clients": 4, "num_rounds": 4, "widths": (8,)}


@pytest.mark.slow
def test_along_a_run_the_parts_are_those_of_its_own_predictions() -> None:
    """Of minibatches and K = 2; with the initial functions and minibatches of the run's own seed, and no other's."""
    options = {"widths": (64,), "algorithm": "fed_ensemble", "num_models": 2, "batch_size": 4}
    built = build(describe(**SMALL | options, client_learning_rate=0.1))
    watch = laziness_diagnostics(built, 2)
    assert (watch.why_no_limit, watch.rounds, watch.x.shape[0]) == ("", (0, 2, 4), 48)
    for seed in (0, 5):
        own = watch.of_seed(built.algorithm, 4, seed)
        run = simulate(
            built.algorithm, built.data, num_rounds=4, seed=seed, evaluation=Evaluation(2, own), devices=Devices("scan")
        )
        first, _, last = (e.metrics for e in run.history.evaluations)
        assert first["total"] == first["feature_learning"] == first["drift"] == 0
        start, line, limit = own.predictions
        found = np.asarray(predict(built.algorithm, run.state, own.x).members, np.float64)
        assert limit is not None
        expected = parts(found - start, line[-1], limit[-1])
        for name, values in expected._asdict().items():
            assert last[name] == pytest.approx(np.mean(values), rel=1e-12)
            assert last[f"{name}_model_1"] == pytest.approx(values[1], rel=1e-12)
        assert 0 < last["feature_learning"] < 0.5 and 0 < last["initial_kernel"] < 0.5
        other = watch.of_seed(built.algorithm, 4, seed + 1).parts(run.state)
        assert np.all(other.feature_learning > 2 * expected.feature_learning)
    late = run.state._replace(round=run.state.round + 1)
    assert np.isnan(list(own.parts(late))).all()


EVERY = {
    "dp_fed_avg": {"noise_multiplier": 1.0, "clip_norm": 0.1},
    "fed_be": {"server_examples": 8},
    "ntk_dfl": {"ntk_unstable": "clip"},
    "ntk_fl": {"ntk_unstable": "clip"},
    "cp_ntk_fl": {"ntk_unstable": "clip", "sparsity": 0.5},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(catalogue("algorithms")) - {"lg_fed_avg"}))  # it needs two layers
def test_a_linear_model_is_its_own_linearisation_under_every_algorithm(name: str) -> None:
    """Noise, quantisers, mixing of models and all: what is drawn for one is drawn for the other."""
    given = {
        "dataset": "digits",
        "num_train": 40,
        "num_test": 8,
        "num_clients": 4,
        "num_rounds": 2,
        "model": "logistic",
    }
    models = {"num_models": 2} if name in ("fed_ensemble", "random_walk") else {}
    built = build(describe(**given, **models, **EVERY.get(name, {}), algorithm=name, loss="squared_error"))
    if built.algorithm.params is None:
        return  # refused: check_watchable
    x = built.examples.test.x
    run = simulate(built.algorithm, built.data, num_rounds=4, seed=0, devices=Devices("scan"))
    line = linearised_paths(built.algorithm, built.model, built.data, x, (0, 4))(0)
    assert np.max(np.abs(line[1] - line[0])) > 0.02  # ten thousand times what the two may differ by
    np.testing.assert_allclose(line[1], predict(built.algorithm, run.state, x).members, atol=2e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"algorithm": "fed_adam"}, "algorithm: got 'fed_adam'"),
        ({"parameterization": "standard"}, "must be in the ntk parameterization"),
        ({"parameterization": "maximal_update"}, "whose tangent kernel changes in training at every width"),
        ({"channel": "qsgd:4"}, "its channel changes the updates"),
    ],
)
def test_where_there_is_no_limit_it_is_said_why(options: dict[str, Any], message: str) -> None:
    built = build(describe(**SMALL, **options))
    with pytest.raises(ValueError, match=message):
        _limit(built, built.data.x)


def test_too_many_examples_for_their_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(laziness, "MOST_EXAMPLES", 39)
    built = build(describe(**SMALL))
    with pytest.raises(ValueError, match="data: got 40 training examples, must be at most 39"):
        _limit(built, built.data.x)


def test_a_model_without_forward_derivatives_is_refused() -> None:
    x = jnp.zeros((2, 5), jnp.int32)
    check_linearisable(lstm(5, 3, differentiation="any"), x)
    with pytest.raises(ValueError, match="which JAX cannot differentiate in forward mode"):
        check_linearisable(lstm(5, 3, differentiation="reverse"), x)


@pytest.mark.slow
def test_networks_of_a_comparison(whole_result: Comparison, linear_result: Comparison) -> None:
    """The parts are those of the first draw's networks, their trained linearisations, and the flow beside them."""
    assert linear_result.laziness == ()
    found, setting = whole_result.laziness, whole_result.setting
    assert [lazy.width for lazy in found] == list(setting.size.widths)
    for lazy, seen, gap in zip(found, whole_result.simulated, whole_result.gaps, strict=True):
        curves = lazy.curves()
        assert tuple(curves) == METRICS and all(v.shape == (4, 2, 1) for v in curves.values())
        line = np.split(by_training(setting, seen.width), [len(setting.problem.x_train)], axis=-2)
        paths = (seen.train[:, :, 0], seen.test[:, :, 0]), line, (gap.train[:, :, 0], gap.test[:, :, 0])
        net, own, flow = (at_points(setting.problem, *path) for path in paths)
        expected = parts(net - net[0], own - own[0], flow - flow[0])
        for name, values in expected._asdict().items():
            # networks compute in float32: two programs differ by up to 1.8e-7, some 1.5 of its eps
            np.testing.assert_allclose(curves[name][..., 0], values, rtol=0, atol=8 * np.finfo(np.float32).eps)
