"""Modules of flax.nnx: the outputs and kernel of the same linen network, draws of a key, refusals by name."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from fedtangent._src.kernels.empirical import empirical_ntk
from fedtangent._src.models import from_flax

from .. import documents

X = np.random.default_rng(0).normal(size=(5, 6, 6, 1))


class Convolution(nnx.Module):
    """A convolution and a dense layer in a list."""

    def __init__(self, channels: int = 3, *, rngs: nnx.Rngs, more: Any = None) -> None:
        self.convolution = nnx.Conv(1, channels, (3, 3), rngs=rngs)
        self.layers = nnx.List([nnx.Linear(36 * channels, 2, rngs=rngs)])
        self.still = nnx.Dropout(0.5, deterministic=True)
        self.more = None if more is None else more(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.layers[0](self.still(nnx.tanh(self.convolution(x)).reshape(len(x), -1)))


class Linen(linen.Module):
    """The same network."""

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return linen.Dense(2)(linen.tanh(linen.Conv(3, (3, 3))(x)).reshape(len(x), -1))


def weights_of(module: nnx.Module) -> Any:
    return nnx.to_pure_dict(nnx.state(module, nnx.Param))


@pytest.mark.parametrize("made", [Convolution, lambda rngs: Convolution(rngs=rngs)], ids=["class", "function"])
def test_a_model_has_the_functions_of_its_module(made: Any) -> None:
    model, module = from_flax(made, X[:1], 2), Convolution(rngs=nnx.Rngs(jax.random.key(3)))
    params = weights_of(module)
    drawn, other = (model.init(jax.random.key(seed)) for seed in (3, 4))
    for a, b, c in zip(*(jax.tree.leaves(tree) for tree in (drawn, params, other)), strict=True):
        assert np.array_equal(a, b) and (not np.array_equal(a, c) or not np.any(a))  # biases start at 0
    assert np.array_equal(model.apply(params, X), module(X)) and model.name == "Convolution"
    assert not np.array_equal(model.apply(other, X), module(X))


def test_outputs_and_kernel_are_those_of_the_same_linen_network() -> None:
    model, twin = from_flax(Convolution, X[:1], 2), from_flax(Linen(), X[:1], 2)
    params = jax.tree.map(jnp.float64, model.init(jax.random.key(0)))
    same = {"Conv_0": params["convolution"], "Dense_0": params["layers"][0]}
    np.testing.assert_allclose(model.apply(params, X), twin.apply(same, X), rtol=0, atol=1e-14)
    of_model, of_twin = (
        jax.jit(lambda params, net=net: empirical_ntk(net, params, jnp.asarray(X), trace=False))
        for net in (model, twin)
    )
    kernels = [np.asarray(of_model(params)), np.asarray(of_twin(same))]
    np.testing.assert_allclose(*kernels, rtol=0, atol=1e-12 * kernels[0].max())
    wrong = {**same, "Conv_0": {**same["Conv_0"], "kernel": 2 * same["Conv_0"]["kernel"]}}
    assert np.abs(of_twin(wrong) - kernels[0]).max() > 1e-2


class Trained(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array, is_training: bool) -> jax.Array:
        return linen.Dense(2)(x.reshape(len(x), -1))


REFUSED = {
    "instance": (
        lambda: Convolution(rngs=nnx.Rngs(0)),
        "module: got an instance of Convolution, must be its class or a function lambda rngs: ..",
    ),
    "statistics": (
        lambda: lambda rngs: Convolution(rngs=rngs, more=lambda rngs: nnx.BatchNorm(2, rngs=rngs)),
        "module: got Convolution, which keeps more.mean (BatchStat), more.var (BatchStat), must keep nothing",
    ),
    "random state": (
        lambda: lambda rngs: Convolution(rngs=rngs, more=lambda rngs: nnx.Dropout(0.5, rngs=rngs)),
        "module: got Convolution, which keeps more.rngs.count (RngCount), more.rngs.key (RngKey), must keep nothing",
    ),
    "class of linen": (
        lambda: linen.Dense,
        "module: got the class Dense, must be an instance of it, such as Dense(..)",
    ),
    "dropout of linen": (
        lambda: linen.Sequential([jnp.ravel, linen.Dropout(0.5, deterministic=False)]),
        "module: got Sequential, which does not run on a batch of inputs alone: layers_1 needs PRNG",
    ),
    "another argument": (lambda: Trained(), "module: got Trained, which does not run on a batch of inputs alone: "),
    "other result": (lambda: lambda rngs: 3, "module: got a function that returns a int, must return a module of nnx"),
    "number": (lambda: 3, "module: got a int, must be a module of flax.linen, or a class of nnx"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(case: str) -> None:
    build, said = REFUSED[case]
    with pytest.raises(ValueError) as caught:
        from_flax(build(), X[:1], 2)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_another_number_of_outputs_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\(1, 6, 6, 1\) to \(1, 2\), must map to \(1, 3\)"):
        from_flax(Convolution, X[:1], 3)


@pytest.mark.slow
def test_the_example_of_the_documentation() -> None:
    """A recipe of the user's own trains an nnx network from given weights, in ten lines.

    By day outputs and kernel of an nnx network are held above.
    """
    text = documents.example("def cnn(rngs)")
    assert len([line for line in text[text.index("@ft.recipe") :].splitlines() if line]) <= 10
    side = documents.run("def cnn(rngs)")["both"]
    assert side.simulated[0].rounds[-1] == 8 and "its channel" in side.how
    assert 0 < side.feature_learning[-1, 0] < 0.5
    first, *_, last = side.history.curves()["train.mse"]
    assert last < 0.8 * first
