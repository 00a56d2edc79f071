"""The LSTM against a plain loop and flax's cell; its written-out gradient against JAX's and finite differences."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedtangent._src import pytrees
from fedtangent._src.models import lstm

from ..drawn import parameters

SIZES = {"vocabulary": 7, "embedding": 3, "units": 5, "layers": 2, "dtype": jnp.float64}
X = np.random.default_rng(0).integers(0, 7, (4, 6))


def sigmoid(z):
    return 1 / (1 + np.exp(-z))


def plain_loop(params, x) -> np.ndarray:
    """Logits after every character, [n, T, C]."""
    params = jax.tree.map(np.asarray, params)
    h = params["embedding"][x]
    for layer in range(2):
        part = params[f"layer_{layer}"]
        state = cell = np.zeros((len(x), 5))
        outputs = []
        for t in range(x.shape[1]):
            z = h[:, t] @ part["input"] + state @ part["recurrent"] + part["bias"]
            i, f, o, g = np.split(z, 4, axis=1)
            cell = sigmoid(f) * cell + sigmoid(i) * np.tanh(g)
            state = sigmoid(o) * np.tanh(cell)
            outputs.append(state)
        h = np.stack(outputs, axis=1)
    return h @ params["output"]["kernel"] + params["output"]["bias"]


def test_outputs_are_those_of_a_plain_loop():
    params = parameters(lstm(**SIZES), scale=0.5)
    every = plain_loop(params, X)
    np.testing.assert_allclose(jax.jit(lstm(**SIZES, positions="all").apply)(params, X), every, atol=1e-14)
    last = jax.jit(lstm(**SIZES).apply)(params, X.astype(np.float32))
    np.testing.assert_allclose(last, every[:, -1], atol=1e-14)
    assert np.abs(every[:, -1] - every[:, -2]).max() > 1e-4  # negative control: another position


def test_one_layer_is_flaxs_cell():
    model = lstm(vocabulary=7, embedding=3, units=5, layers=1, dtype=jnp.float64, positions="all", output_size=2)
    params = parameters(model, scale=0.5)
    params = jax.tree.map(np.asarray, params)
    part = params["layer_0"]
    gates = zip("ifog", *(np.split(part[name], 4, axis=-1) for name in ("input", "recurrent", "bias")), strict=True)
    cell_params = {}
    for name, kernel, recurrent, bias in gates:
        cell_params |= {f"i{name}": {"kernel": kernel}, f"h{name}": {"kernel": recurrent, "bias": bias}}
    network = nn.RNN(nn.LSTMCell(5, param_dtype=jnp.float64, dtype=jnp.float64))
    apply = jax.jit(lambda cell: network.apply({"params": {"cell": cell}}, params["embedding"][X]))
    hidden = np.asarray(apply(cell_params))
    expected = hidden @ params["output"]["kernel"] + params["output"]["bias"][None, None]
    np.testing.assert_allclose(jax.jit(model.apply)(params, X), expected, atol=1e-14)
    cell_params["if"], cell_params["io"] = cell_params["io"], cell_params["if"]  # negative control: two gates exchanged
    assert np.abs(np.asarray(apply(cell_params)) - hidden).max() > 1e-4


@pytest.mark.parametrize("positions", ["last", "all"])
def test_gradient_is_that_of_jax_and_of_finite_differences(positions):
    params = parameters(lstm(**SIZES), scale=0.5)

    def gradient(differentiation):
        model = lstm(**SIZES, positions=positions, differentiation=differentiation)
        return jax.jit(jax.grad(lambda p: jnp.sum(jnp.sin(model.apply(p, X)))))(params)

    ours, theirs = gradient("reverse"), gradient("any")
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-13)
    params, ours = jax.tree.map(np.asarray, (params, ours))
    direction = jax.tree.map(np.cos, params)
    moved = [jax.tree.map(lambda p, d, s=s: p + s * d, params, direction) for s in (1e-5, -1e-5)]
    every = [np.sin(plain_loop(p, X)) for p in moved]
    chosen = [e if positions == "all" else e[:, -1] for e in every]
    numeric = (chosen[0].sum() - chosen[1].sum()) / 2e-5
    assert abs(float(pytrees.vdot(ours, direction)) - numeric) < 1e-8 * abs(numeric) + 1e-8
    wrong = {**ours, "layer_0": {**ours["layer_0"], "recurrent": np.zeros((5, 20))}}  # negative control
    assert abs(float(pytrees.vdot(wrong, direction)) - numeric) > 1e-4


@pytest.mark.slow
def test_clients_with_their_own_parameters_at_once_and_second_order():
    model = lstm(**SIZES)
    params = jax.vmap(model.init)(jax.random.split(jax.random.key(0), 2))
    gradient = jax.grad(lambda p: jnp.sum(jnp.sin(model.apply(p, X))))
    together = jax.jit(jax.vmap(gradient))(params)
    apart = jax.jit(gradient)(pytrees.take(params, 1))
    for a, b in zip(jax.tree.leaves(together), jax.tree.leaves(apart), strict=True):
        np.testing.assert_allclose(a[1], b, rtol=0, atol=1e-13)

    def norm(differentiation):
        m = lstm(**{**SIZES, "layers": 1, "units": 3}, differentiation=differentiation)
        inner = jax.grad(lambda p: jnp.sum(jnp.sin(m.apply(p, X[:, :3]))))
        return jax.jit(jax.grad(lambda p: pytrees.vdot(inner(p), inner(p))))(m.init(jax.random.key(0)))

    for a, b in zip(jax.tree.leaves(norm("reverse")), jax.tree.leaves(norm("any")), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-12)


def test_forward_mode_where_asked_for():
    params = parameters(lstm(**SIZES), scale=0.5)
    forward = lstm(**SIZES, differentiation="any")
    moved = jax.jit(lambda p: jax.jvp(lambda q: forward.apply(q, X), (p,), (jax.tree.map(jnp.cos, p),))[1])(params)
    assert np.all(np.isfinite(moved))
    with pytest.raises(TypeError, match="forward-mode"):
        jax.linearize(lambda p: lstm(**SIZES).apply(p, X), params)[1](params)


def test_shakespeares_sizes_and_initial_values():
    params = jax.eval_shape(lstm().init, jax.random.key(0))
    # embedding, two layers of 4 gates, output
    assert pytrees.size(params) == 640 + (8 + 256 + 1) * 1024 + (256 + 256 + 1) * 1024 + 257 * 80
    # 86 characters and 4 special ones: layer by layer as in Reddi et al. (2021), 720 + 271,360 + 525,312 + 23,130
    assert pytrees.size(jax.eval_shape(lstm(90).init, jax.random.key(0))) == 820_522
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(jnp.float32)}
    params = jax.jit(lstm(units=16).init)(jax.random.key(0))
    assert float(params["layer_1"]["bias"].sum()) == 16
    block = np.asarray(params["layer_0"]["recurrent"][:, 16:32])
    np.testing.assert_allclose(block @ block.T, np.eye(16), atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"units": 0}, "units"), ({"positions": "first"}, "last, all"), ({"differentiation": "none"}, "reverse, any")],
)
def test_bad_input(options, message):
    with pytest.raises(ValueError, match=message):
        lstm(**options)


def test_input_of_another_shape():
    model = lstm(**SIZES)
    with pytest.raises(ValueError, match="characters"):
        model.apply(parameters(model), X[0])
