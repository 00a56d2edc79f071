"""The maximal-update parameterization beside the tables of Yang et al. (2022), and what does not follow from theory."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedtangent as ft
from fedtangent._src.comparison.comparing import check_widths
from fedtangent._src.experiments.lab import interval
from fedtangent._src.kernels.gram import analytic
from fedtangent._src.models import cnn, mlp
from fedtangent._src.models.dense import forward

from ..documents import run

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(6, 4)), RNG.normal(size=(6, 3))
W_STD, B_STD, RATE = 1.3, 0.4, 0.3


def rates_of_table_3(sizes: list[int]) -> list[tuple[float, float]]:
    """SGD's rate for each layer's weights and biases, by fan-in and fan-out: fan_out, then 1, then 1 / fan_in.

    The constants of finite size are those of ``mlp``: the squares of w_std and b_std, and the inputs' 1 / fan_in.
    """
    last, rates = len(sizes) - 2, []
    for i, (fan_in, fan_out) in enumerate(itertools.pairwise(sizes)):
        of_weights = fan_out / fan_in if i == 0 else 1 / fan_in if i == last else 1.0
        rates.append((W_STD**2 * of_weights, B_STD**2 * (1.0 if i == last else fan_out)))
    return rates


def sgd_step(layers: list, rates: list[tuple[float, float]]) -> list:
    """Takes one step of SGD on the mean of halved squared errors, in NumPy; layers are (weights, biases)."""
    inputs, h = [], X
    for i, (weight, bias) in enumerate(layers):
        inputs.append(h)
        z = h @ weight + bias
        h = z if i == len(layers) - 1 else np.maximum(z, 0)
    signal, stepped = (h - Y) / len(X), []
    for i in reversed(range(len(layers))):
        weight, bias = layers[i]
        of_weight, of_bias = inputs[i].T @ signal, signal.sum(axis=0)
        stepped.append((weight - RATE * rates[i][0] * of_weight, bias - RATE * rates[i][1] * of_bias))
        signal = (signal @ weight.T) * (inputs[i] > 0)
    return stepped[::-1]


def outputs_of(layers: list) -> np.ndarray:
    h = X
    for i, (weight, bias) in enumerate(layers):
        h = h @ weight + bias
        h = h if i == len(layers) - 1 else np.maximum(h, 0)
    return h


@pytest.mark.parametrize(
    "widths", [*(pytest.param(both, marks=pytest.mark.slow) for both in ((32, 32), (64, 64))), (24, 40), (16,)]
)
def test_steps_of_sgd_are_those_of_the_papers_table(widths):
    """Table 3 has no factors and a rate for each layer; ``mlp`` has factors (table 9) and one rate.

    By day of two layers of other widths and of one layer.
    """
    model = mlp(4, 3, widths, "relu", "maximal_update", w_std=W_STD, b_std=B_STD, dtype=jnp.float64)
    params, sizes = model.init(jax.random.key(1)), [4, *widths, 3]
    factors = model.structure.layers
    layers = [
        (factor.weight_scale * np.asarray(weight), factor.bias_scale * np.asarray(bias)[0])
        for factor, (weight, bias) in zip(factors, params[::2], strict=True)
    ]
    np.testing.assert_allclose(model.apply(params, X), outputs_of(layers), rtol=0, atol=1e-13)
    wrong, ones = layers, [(W_STD**2, B_STD**2)] * len(layers)
    gradient = jax.jit(jax.grad(lambda p: 0.5 * jnp.sum((model.apply(p, X) - Y) ** 2) / len(X)))
    for _ in range(3):
        params = jax.tree.map(lambda leaf, slope: leaf - RATE * slope, params, gradient(params))
        layers, wrong = sgd_step(layers, rates_of_table_3(sizes)), sgd_step(wrong, ones)
    np.testing.assert_allclose(model.apply(params, X), outputs_of(layers), rtol=0, atol=1e-11)
    assert not np.max(np.abs(model.apply(params, X) - outputs_of(wrong))) < 1e-2  # the control: one rate, no factors


def test_it_starts_with_the_variances_of_the_table():
    """1 / fan_in for the first and hidden layers, 1 / fan_in^2 for the last; biases do not depend on the width."""
    model = mlp(4, 50, (300, 300), "relu", "maximal_update", w_std=W_STD, b_std=B_STD)
    layers = zip(model.structure.layers, jax.jit(model.init)(jax.random.key(0))[::2], strict=True)
    stds = [(f.weight_scale * np.std(w), f.bias_scale * np.std(b)) for f, (w, b) in layers]
    expected = [(W_STD / 4**0.5, B_STD), (W_STD / 300**0.5, B_STD), (W_STD / 300, B_STD)]
    np.testing.assert_allclose(stds, expected, rtol=0.35)  # 50 biases: 4 standard errors are 0.4


def test_a_federated_run_is_that_of_the_ntk_network_with_small_outputs_and_a_rate_times_the_width():
    """The symmetry of abc-parameterizations (Yang and Hu, 2021): factors, variances and the rate move together."""
    n, scales = 16, {"b_std": None, "dtype": jnp.float64}
    ours = mlp(4, 3, (n, n), "erf", "maximal_update", **scales)
    ntk = mlp(4, 3, (n, n), "erf", "ntk", last_w_std=(2 / n) ** 0.5, **scales)
    clients = ft.partition.iid(len(X), num_clients=3, seed=0)

    def outputs(model, rate):
        work = ft.Work(steps=4, batch_size=None)
        algorithm = ft.fed_avg(model, ft.schedules.all_clients(3), rate, work, loss="squared_error")
        params = ft.params_by_round(algorithm, (X, Y), clients, num_rounds=3, seed=0)
        return np.stack(
            [model.apply(jax.tree.map(lambda leaf, r=r: jnp.asarray(leaf[r, 0]), params), X) for r in range(4)]
        )

    found = outputs(ours, 0.2)
    np.testing.assert_allclose(found, outputs(ntk, 0.2 * n), rtol=0, atol=1e-12)
    assert np.max(np.abs(found - found[0])) > 0.1
    assert np.max(np.abs(found - outputs(ntk, 0.2))) > 0.1  # the control


def test_a_convolution_steps_as_the_papers_table_says():
    """In NumPy loops, with gradients by central differences."""
    model = cnn((4, 4, 1), 2, (3, 5), (6,), window=3, pool=2, convolution="lax", parameterization="maximal_update")
    images, targets = jnp.asarray(RNG.normal(size=(3, 4, 4, 1))), RNG.normal(size=(3, 2))
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), model.init(jax.random.key(0)))
    factors = {"Conv_0": (3, 3), "Conv_1": (1, 5), "Dense_0": (1, 6), "Dense_1": (1 / 6, 1)}  # squared: weights, biases
    flat = {
        (layer, kind): np.asarray(params[layer][kind]) * pair[kind == "bias"] ** 0.5
        for layer, pair in factors.items()
        for kind in ("kernel", "bias")
    }

    def apply(weights):
        h = np.asarray(images)
        for layer in ("Conv_0", "Conv_1"):
            kernel, bias = weights[layer, "kernel"], weights[layer, "bias"]
            padded, side = np.pad(h, ((0, 0), (1, 1), (1, 1), (0, 0))), h.shape[1]
            z = np.array(
                [[np.tensordot(padded[:, i : i + 3, j : j + 3], kernel, 3) for j in range(side)] for i in range(side)]
            ).transpose(2, 0, 1, 3)
            h = np.maximum(z + bias, 0).reshape((3, side // 2, 2, side // 2, 2, -1)).max(axis=(2, 4))
        h = np.maximum(h.reshape((3, -1)) @ weights["Dense_0", "kernel"] + weights["Dense_0", "bias"], 0)
        return h @ weights["Dense_1", "kernel"] + weights["Dense_1", "bias"]

    def loss(weights):
        return 0.5 * np.sum((apply(weights) - targets) ** 2) / 3

    def stepped(squares):
        new = {}
        for (layer, kind), leaf in flat.items():
            slope = np.zeros_like(leaf)
            for at in np.ndindex(leaf.shape):
                shift = np.zeros_like(leaf)
                shift[at] = 1e-5
                slope[at] = (
                    loss(flat | {(layer, kind): leaf + shift}) - loss(flat | {(layer, kind): leaf - shift})
                ) / 2e-5
            new[layer, kind] = leaf - RATE * squares[layer][kind == "bias"] * slope
        return new

    @jax.jit
    def before_and_after(params):
        slopes = jax.grad(lambda p: 0.5 * jnp.sum((model.apply(p, images) - targets) ** 2) / 3)(params)
        after = jax.tree.map(lambda leaf, slope: leaf - RATE * slope, params, slopes)
        return model.apply(params, images), model.apply(after, images)

    before, after = before_and_after(params)
    np.testing.assert_allclose(before, apply(flat), rtol=0, atol=1e-13)
    np.testing.assert_allclose(after, apply(stepped(factors)), rtol=0, atol=1e-8)
    assert np.max(np.abs(after - apply(stepped(dict.fromkeys(factors, (1, 1)))))) > 1e-2  # the control
    with pytest.raises(ValueError, match="parameterization: got 'ntk', allowed are standard, maximal_update"):
        cnn(parameterization="ntk", convolution="lax")


WIDTHS = (32, 128, 512)


def change(parameterization: str, width: int, seed: int, optimizer, rate: float | None) -> tuple[float, float]:
    """Root mean square change of the last hidden features, and of the outputs, in two rounds of FedAvg."""
    model = mlp(4, 3, (width, width), "relu", parameterization)
    clients = ft.partition.iid(len(X), num_clients=3, seed=0)
    work = ft.Work(steps=2, batch_size=None)
    algorithm = ft.fed_avg(
        model, ft.schedules.all_clients(3), rate, work, loss="squared_error", client_optimizer=optimizer
    )
    params = ft.params_by_round(algorithm, (X, Y), clients, num_rounds=2, seed=seed)
    before, after = (
        forward(model.structure, jax.tree.map(lambda leaf, r=r: jnp.asarray(leaf[r, 0]), params), X)[1] for r in (0, 2)
    )
    moved = [np.sqrt(np.mean((np.asarray(b) - np.asarray(a)) ** 2)) for a, b in zip(before, after, strict=True)]
    return float(moved[-2]), float(moved[-1])


def slopes(parameterization: str, optimizer=None, rate: float | None = 0.2):
    """Intervals over eight seeds of the slopes of both changes in log-log coordinates."""
    found = [[change(parameterization, w, seed, optimizer, rate) for seed in range(8)] for w in WIDTHS]
    return slopes_of(found, WIDTHS)


def cnn_change(parameterization: str, width: int, seed: int, rate: float) -> tuple[float, float]:
    """The same of a convolutional network of which all layers grow: inputs of its last layer, and outputs."""
    model = cnn((4, 4, 1), 3, (width, width), (width,), 3, 2, "lax", parameterization)
    images = jnp.asarray(np.random.default_rng(1).normal(size=(6, 4, 4, 1)), jnp.float32)
    algorithm = ft.fed_avg(
        model, ft.schedules.all_clients(3), rate, ft.Work(steps=2, batch_size=None), loss="squared_error"
    )
    clients = ft.partition.iid(len(X), num_clients=3, seed=0)
    params = ft.params_by_round(algorithm, (np.asarray(images), Y), clients, num_rounds=2, seed=seed)
    at = [jax.tree.map(lambda leaf, r=r: jnp.asarray(leaf[r, 0]), params) for r in (0, 2)]
    plan = model.structure.plan(at[0], images)
    shifts = [jnp.zeros(call.output) for call in plan.calls]

    @jax.jit
    def layers(params):
        outputs, inputs = jax.vmap(lambda x: model.structure.run(plan, params, shifts, x[None]))(images)
        return inputs[-1] * (width**0.5 if parameterization == "maximal_update" else 1.0), outputs

    moved = [np.sqrt(np.mean((np.asarray(b) - np.asarray(a)) ** 2)) for a, b in zip(*map(layers, at), strict=True)]
    return float(moved[0]), float(moved[1])


def slopes_of(found: list[list[tuple[float, float]]], widths: tuple[int, ...]):
    """Intervals over seeds of the slopes of both changes in log-log coordinates; changes by width and seed."""
    logs = np.log(np.array(found)).reshape((len(widths), -1))
    each = np.polynomial.polynomial.polyfit(np.log(widths), logs, 1)[1]
    return [interval(of_layer) for of_layer in each.reshape((-1, 2)).T]


@pytest.mark.slow
def test_so_it_is_of_convolutions():
    widths = (8, 32, 128)

    def slopes(parameterization, rate):
        return slopes_of([[cnn_change(parameterization, w, seed, rate) for seed in range(8)] for w in widths], widths)

    features, outputs = slopes("maximal_update", 0.05)
    assert fits(features, 0, -0.5) and fits(outputs, 0, 0.5), (features, outputs)
    features, outputs = slopes("standard", 1e-4)  # the control
    assert fits(features, 0.5, 0) and fits(outputs, 1, 0), (features, outputs)


def fits(slope, expected: float, wrong: float) -> bool:
    """Whether a slope is within twice its interval of the expected one, and a wrong one is not in the interval."""
    return abs(slope.mean - expected) < 2 * (slope.high - slope.mean) and not slope.low < wrong < slope.high


@pytest.mark.slow
def test_the_change_of_features_does_not_depend_on_the_width():
    """The coordinate check of Yang et al. (2022): each other parameterization, and Adam, is a control."""
    features, outputs = slopes("maximal_update")
    assert fits(features, 0, -0.5) and fits(outputs, 0, 0.5), (features, outputs)
    features, outputs = slopes("ntk")
    assert fits(features, -0.5, 0) and fits(outputs, 0, 0.5), (features, outputs)
    features, outputs = slopes("standard", rate=1e-4)
    assert fits(features, 0.5, 0) and fits(outputs, 1, 0), (features, outputs)
    features, outputs = slopes("maximal_update", optax.adam(1e-4), rate=None)
    assert features.low > 0.25 and outputs.low > 0.25, (features, outputs)  # hidden layers take too large steps


def test_theory_of_infinite_width_refuses_it_and_the_linearisation_follows_it():
    model = mlp(4, 3, (16,), "erf", "maximal_update", dtype=jnp.float64)
    assert (model.at_width(8).name, model.at_width(8).kernel) == ("mlp(4-8-3, erf, maximal_update)", None)
    with pytest.raises(ValueError, match="must have an analytic kernel"):
        analytic(model, X)
    with pytest.raises(ValueError, match="whose tangent kernel changes in training at every width, must be in the ntk"):
        check_widths(model, (8, 16, 32))
    data, clients = (X, Y, X[:2], Y[:2]), ft.partition.iid(len(X), num_clients=3, seed=0)
    fed_avg = ft.fed_avg(model, ft.schedules.all_clients(3), 0.3, ft.Work(steps=2, batch_size=None))
    with pytest.raises(ValueError, match=r"widths: got .* must be left out .* without an analytic kernel"):
        ft.compare(fed_avg, data, clients, num_rounds=4, widths=(8, 16, 32))
    side = ft.compare(fed_avg, data, clients, num_rounds=4, seed=0)
    assert isinstance(side, ft.types.FromStart) and side.how == "the flow of the tangent kernel at the start"
    (verdict,) = side.verdicts
    assert verdict.holds and verdict.control_fails
    assert side.feature_learning[-1, 0] > 0.05, side.feature_learning
    linear = mlp(4, 3, (), parameterization="maximal_update", dtype=jnp.float64)  # without a width it is linear
    np.testing.assert_array_equal(linear.kernel(X).ntk, mlp(4, 3, (), dtype=jnp.float64).kernel(X).ntk)


@pytest.mark.slow
def test_the_example_of_the_page_trains_a_wide_network_at_the_rate_of_a_narrow_one() -> None:
    """By day the steps are held to those of the table above."""
    names = run("narrow.at_width(")
    first, last = (row.metrics["test"] for row in names["run"].history.evaluations)
    assert names["model"].name == "mlp(64-256-256-10, relu, maximal_update)"
    assert last["accuracy"] > 0.7 > 2 * first["accuracy"], (first, last)
