"""Models of which a part is trained, and LoRA: kernels against Jacobians, the last layer against a linear model."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

import fedtangent as ft
from fedtangent._src.models.trainable import LowRank

from .. import documents
from ..drawn import parameters
from ..nightly import nightly

C, N = 2, 24
RNG = np.random.default_rng(0)
X, LABELS = RNG.normal(size=(N, 5, 5, 1)), RNG.integers(0, C, N)
DATA, CLIENTS = (X[:16], LABELS[:16], X[16:], LABELS[16:]), [np.arange(i, 16, 4) for i in range(4)]
ROUNDS = {"num_rounds": 4, "seed": 0}


class Network(linen.Module):
    """A convolution, unless there is none, a hidden layer and a last layer."""

    convolves: bool = True

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return linen.Dense(C, name="last")(Features(self.convolves, name="body")(x))


class Features(linen.Module):
    """The network without its last layer."""

    convolves: bool = True

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = (linen.tanh(linen.Conv(3, (3, 3))(x)) if self.convolves else x).reshape(len(x), -1)
        return linen.tanh(linen.Dense(6)(x))


NETWORK = ft.models.from_flax(Network(), X[:1], C)
WEIGHTS = jax.tree.map(jnp.float64, parameters(NETWORK, 1, 0.3))
DENSE = ft.models.from_flax(Network(convolves=False), X[:1], C)  # for runs, whose programs are smaller then
DENSE_WEIGHTS = jax.tree.map(jnp.float64, parameters(DENSE, 1, 0.3))


def doubled(model: Any, seed: int = 0) -> Any:
    return jax.tree.map(jnp.float64, model.init(jax.random.key(seed)))


def fed_avg(model: Any, rate: float = 0.05, **more: Any) -> Any:
    return ft.fed_avg(model, ft.schedules.uniform_sampling(4, 3), rate, ft.Work(steps=3, batch_size=2), **more)


@functools.cache
def jacobians() -> dict[str, np.ndarray]:
    """Of every parameter of the network, by its path: [N C, entries]."""
    whole = jax.jit(jax.jacrev(NETWORK.apply))(WEIGHTS, X)
    leaves = jax.tree.leaves_with_path(whole)
    return {
        jax.tree_util.keystr(p, simple=True, separator="/"): np.asarray(leaf).reshape(N * C, -1) for p, leaf in leaves
    }


def kernel(model: Any, params: Any) -> np.ndarray:
    return np.asarray(ft.kernels.empirical_ntk(model, params, jnp.asarray(X), trace=False)).reshape(N * C, N * C)


def relative(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).max() / np.abs(b).max())


SELECTIONS = {
    "last": ("^last/", ("last/kernel", "last/bias")),
    "kernels": ("kernel", ("body/Conv_0/kernel", "body/Dense_0/kernel", "last/kernel")),
    "function": (lambda path: path.endswith("Conv_0/bias"), ("body/Conv_0/bias",)),
    "tree": (jax.tree.map(lambda leaf: leaf.ndim == 4, WEIGHTS), ("body/Conv_0/kernel",)),
}


@pytest.mark.parametrize("case", nightly(SELECTIONS, ["tree"]))
def test_the_kernel_is_the_sum_over_the_selected_columns_of_the_jacobian(case: str) -> None:
    """By day of a tree; the next test trains what an expression selects."""
    select, paths = SELECTIONS[case]
    model, columns = ft.models.trainable(NETWORK, WEIGHTS, select), jacobians()
    params = doubled(model)
    assert np.array_equal(model.apply(params, X), NETWORK.apply(WEIGHTS, X))
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == sum(columns[path].shape[1] for path in paths)
    selected = sum(columns[path] @ columns[path].T for path in paths)
    whole = sum(j @ j.T for j in columns.values())
    assert relative(kernel(model, params), selected) < 1e-12 < 0.01 < relative(whole, selected)


def test_training_the_last_layer_is_training_a_linear_model_on_the_features() -> None:
    """Minibatches, cohorts and clients' order are the same, so that runs agree to rounding; with other features not."""
    body = ft.models.from_flax(Features(convolves=False), X[:1], 6)
    linear = ft.models.from_flax(linen.Dense(C), np.zeros((1, 6)), C)._replace(init=lambda key: DENSE_WEIGHTS["last"])
    on_inputs = fed_avg(linear, loss="cross_entropy")

    def trained(algorithm: Any, data: Any) -> tuple[Any, np.ndarray]:
        run = ft.simulate(algorithm, data, CLIENTS, **ROUNDS)
        return jax.tree.map(lambda leaf: np.asarray(leaf[0]), algorithm.params(run.state)), run.history.curves()[
            "test.nll"
        ]

    def on_features(weights: Any) -> tuple[Any, np.ndarray]:
        train, test = (np.asarray(body.apply(weights, x)) for x in (DATA[0], DATA[2]))
        return trained(on_inputs, (train, DATA[1], test, DATA[3]))

    mine, curve = trained(fed_avg(PARTS["last"](), loss="cross_entropy"), DATA)
    body_weights = DENSE_WEIGHTS["body"]
    (right, expected), (wrong, other) = (on_features(w) for w in (body_weights, jax.tree.map(jnp.abs, body_weights)))
    assert mine["body"]["Dense_0"]["kernel"] is None
    for name, start in DENSE_WEIGHTS["last"].items():
        moved = np.abs(right[name] - start).max()
        apart, far = (float(np.abs(mine["last"][name] - w[name]).max() / moved) for w in (right, wrong))
        assert apart < 1e-5 < 0.1 < far  # inputs are rounded to float32: images here, features there
    assert relative(curve, expected) < 1e-6 < 0.01 < relative(curve, other)


PARTS: dict[str, Callable[[], Any]] = {
    "last": lambda: ft.models.trainable(DENSE, DENSE_WEIGHTS, "^last/"),
    "lora": lambda: ft.models.lora(DENSE, DENSE_WEIGHTS, 2),
    "lora of a convolution": lambda: ft.models.lora(NETWORK, WEIGHTS, 2),
}
SIZES = {
    "last": 6 * C + C,
    "lora": 2 * ((25 + 6) + (6 + C)),
    "lora of a convolution": 2 * ((9 + 3) + (75 + 6) + (6 + C)),
}


@functools.cache
def part_of(case: str) -> tuple[Any, dict[str, Any]]:
    """FedAvg of a part, and the start and the evaluation of its runs."""
    model = PARTS[case]()
    return fed_avg(model, 0.01), {"start": model.init(jax.random.key(0)), "evaluation": ft.Evaluation(2), **ROUNDS}


@functools.cache
def run_of(case: str) -> Any:
    algorithm, given = part_of(case)
    return ft.simulate(algorithm, DATA, CLIENTS, **given)


@functools.cache
def run_of_everything(convolves: bool) -> Any:
    """Every parameter is trained, in doubles from the same start."""
    network, weights = (NETWORK, WEIGHTS) if convolves else (DENSE, DENSE_WEIGHTS)
    whole = network._replace(init=lambda key: weights)
    return ft.simulate(fed_avg(whole, 0.01), DATA, CLIENTS, evaluation=ft.Evaluation(2), **ROUNDS)


@pytest.mark.parametrize("case", nightly(PARTS, ["lora"]))
def test_only_trained_parameters_travel(case: str) -> None:
    last, expected = run_of(case).history.evaluations[-1], 4 * 3 * SIZES[case] * 8
    assert last.uplink_bytes == last.downlink_bytes == expected
    assert run_of_everything("convolution" in case).history.evaluations[-1].uplink_bytes != expected


@pytest.mark.parametrize("case", nightly(PARTS, ["lora"]))
def test_a_run_is_simulated_predicted_and_compared(case: str) -> None:
    """By day without a convolution, of which the kernels below are."""
    (algorithm, given), run = part_of(case), run_of(case)
    theory = ft.predict(algorithm, DATA, CLIENTS, forecasting=ft.Forecasting(rates=False), **given)
    side = ft.compare(algorithm, DATA, CLIENTS, **given)
    (verdict,) = side.verdicts
    assert verdict.passed and verdict.control_fails, verdict
    curves = [h.curves()["train.mse"] for h in (run.history, theory.history, side.history, side.history.predicted)]
    assert relative(curves[0], curves[2]) < 1e-6 and relative(curves[1], curves[3]) < 1e-9
    lazy = float(side.feature_learning[-1, 0])
    assert lazy < 1e-12 if case == "last" else 1e-4 < lazy < 0.5  # the last layer is linear in its weights
    other = run_of_everything("convolution" in case).history.curves()["train.mse"]
    assert relative(other, curves[0]) > 1e-3 and relative(other, curves[1]) > 1e-3


# ---- LoRA ----


@pytest.mark.parametrize("dtype", [pytest.param(jnp.float32, marks=pytest.mark.slow), jnp.float64])
def test_lora_starts_as_the_pre_trained_network_bit_for_bit(dtype: Any) -> None:
    weights = jax.tree.map(lambda leaf: leaf.astype(dtype), WEIGHTS)
    model, x = ft.models.lora(NETWORK, weights, 3, alpha=5), X.astype(dtype)
    params = model.init(jax.random.key(0))
    assert np.array_equal(model.apply(params, x), NETWORK.apply(weights, x))
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype(dtype)}
    moved = jax.tree.map(lambda leaf: leaf + 0.01, params)
    assert not np.array_equal(model.apply(moved, x), NETWORK.apply(weights, x))


@pytest.mark.parametrize(("rank", "alpha"), nightly([(1, None), (100, None), (2, 5.0)], [(2, 5.0)]))
def test_its_kernel_is_that_of_the_matrices_seen_through_a(rank: int, alpha: float | None) -> None:
    """By the chain rule from the Jacobian of the matrices; rank 100 is more than any matrix has."""
    model, columns = ft.models.lora(NETWORK, WEIGHTS, rank, alpha=alpha), jacobians()
    params, expected = doubled(model), np.zeros((N * C, N * C))
    leaves = jax.tree.leaves_with_path(params, is_leaf=lambda leaf: isinstance(leaf, LowRank))
    assert len(leaves) == 3
    for path, pair in leaves:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        of_matrix = columns[name].reshape(N * C, len(pair.a), -1)
        of_b = np.einsum("nio,ir->nro", of_matrix, pair.a).reshape(N * C, -1) * ((alpha or rank) / rank)
        expected += of_b @ of_b.T
    measured = kernel(model, params)
    assert relative(measured, expected) < 1e-12
    full = sum(columns[name] @ columns[name].T for name in columns if name.endswith("kernel"))
    assert relative(measured, full) > 0.05


def test_on_average_its_kernel_is_that_of_the_full_matrices() -> None:
    """Within four standard errors of the mean over draws, but not with another factor."""
    columns = jacobians()
    full = sum(columns[name] @ columns[name].T for name in columns if name.endswith("kernel"))
    rows = np.arange(6)  # the trace of a corner

    def traces(alpha: float | None) -> np.ndarray:
        model = ft.models.lora(NETWORK, WEIGHTS, 4, alpha=alpha)

        def trace(key: jax.Array) -> jax.Array:
            jacobian = jax.jacrev(lambda p: model.apply(p, X[:3]).ravel())(model.init(key))
            return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(jacobian))

        return np.asarray(jax.jit(jax.vmap(trace))(jax.random.split(jax.random.key(0), 400)))

    def z(of_draws: np.ndarray) -> float:
        return float((of_draws.mean() - np.trace(full[np.ix_(rows, rows)])) / (of_draws.std(ddof=1) / 20))

    assert abs(z(traces(None))) < 4 < abs(z(traces(5.0)))


def test_training_changes_matrices_by_the_rank_that_was_chosen() -> None:
    ends = part_of("lora")[0].params(run_of("lora").state)
    pair = jax.tree.map(lambda leaf: np.asarray(leaf[0]), ends["body"]["Dense_0"]["kernel"])
    assert np.linalg.matrix_rank(pair.a @ pair.b) == 2 and ends["last"]["bias"] is None
    some = jax.eval_shape(ft.models.lora(DENSE, DENSE_WEIGHTS, 2, "Dense_0").init, jax.random.key(0))
    assert some["body"]["Dense_0"]["kernel"].a.shape == (25, 2) and some["last"]["kernel"] is None
    assert pair.a.shape == (25, 2) and pair.b.shape == (2, 6)


REFUSED = {
    "nothing": (
        lambda: ft.models.trainable(NETWORK, WEIGHTS, "Dense_7"),
        "select: got 'Dense_7', which matches no parameter; the parameters are body/Conv_0/bias, body/Conv_0/kernel, "
        "body/Dense_0/bias, body/Dense_0/kernel, last/bias, last/kernel",
    ),
    "no matrix": (
        lambda: ft.models.lora(NETWORK, WEIGHTS, 1, "bias"),
        "select: got 'bias', which matches no matrix; the matrices are body/Conv_0/kernel, body/Dense_0/kernel, last/",
    ),
    "expression": (lambda: ft.models.trainable(NETWORK, WEIGHTS, "("), "select: got '(', which is no regular"),
    "function": (lambda: ft.models.trainable(NETWORK, WEIGHTS, lambda path: 1), "select: got [1, 1,"),
    "tree": (lambda: ft.models.trainable(NETWORK, WEIGHTS, {"last": True}), "select: got a mask of structure"),
    "params": (lambda: ft.models.trainable(NETWORK, WEIGHTS["last"], "a"), "params: got parameters of shapes {'bias'"),
    "model": (lambda: ft.models.lora(3, WEIGHTS, 1), "model: got 3, must be a Model"),
    "rank": (lambda: ft.models.lora(NETWORK, WEIGHTS, 0), "rank: got 0, must be a whole number of at least 1"),
    "alpha": (lambda: ft.models.lora(NETWORK, WEIGHTS, 1, alpha=0), "alpha: got 0, must be above 0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_one_line(case: str) -> None:
    build, said = REFUSED[case]
    with pytest.raises(ValueError) as caught:
        build()
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.slow
def test_the_example_of_the_documentation_up_to_its_comparison() -> None:
    names = documents.run("adapted = ft", until="    both = ")
    assert names["model"] is names["adapted"] and names["start"]["layers_0"]["kernel"].a.shape == (6, 2)


@pytest.mark.slow
def test_the_example_of_the_documentation(capsys: pytest.CaptureFixture[str]) -> None:
    names = documents.run("adapted = ft")
    assert names["both"].feature_learning[-1, 0] > 1e-3 and names["both"].verdicts[0].passed
    last, adapted = capsys.readouterr().out.splitlines()
    assert last.startswith("a part of Sequential") and adapted.startswith("LoRA of rank 2 of Sequential")
    assert last.endswith(str(8 * 4 * 8 * (16 * 2 + 2))) and adapted.endswith(str(8 * 4 * 8 * 2 * (6 + 16 + 16 + 2)))


def test_lora_of_lora_begins_as_the_inner_one() -> None:
    network = ft.models.mlp(3, 2, widths=(4,))
    inner = ft.models.lora(network, parameters(network), 2)
    weights = parameters(inner, 1, 0.3, 0.1)
    outer, x = ft.models.lora(inner, weights, 1), jnp.ones((2, 3))
    assert np.array_equal(outer.apply(jax.jit(outer.init)(jax.random.key(2)), x), inner.apply(weights, x))
