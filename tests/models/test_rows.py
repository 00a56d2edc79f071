"""No network reads the padding of a batch: rows that influence each other are refused wherever a network comes in."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import fedtangent as ft
from fedtangent._src.data.dataset import SourceInfo
from fedtangent._src.entries import catalogue
from fedtangent._src.measures.loss_surface import mean_loss
from fedtangent._src.models import rows

from ..nightly import nightly

FLOAT = jnp.dtype(jnp.float32)
PARTS = ("simulate", "empirical_ntk", "mean_loss", "linearised", "trainable", "predict")
SHAPES = {"image": (8, 8, 1), "tokens": (5,), "vector": (6,)}


class OverBatch(nn.Module):
    """Normalises over the axes ``over``; its last layer may start at 0, so that at first nothing is to be seen."""

    over: int | tuple[int, ...]
    last: Any = nn.initializers.lecun_normal()

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        h = nn.Dense(8)(x)
        h = (h - h.mean(self.over, keepdims=True)) / jnp.sqrt(h.var(self.over, keepdims=True) + 1e-5)
        return nn.Dense(2, kernel_init=self.last)(nn.relu(h))


def own_model(over: int) -> ft.types.Model:
    module = OverBatch(over)
    init, apply = (lambda key: module.init(key, jnp.zeros((2, 3)))), (lambda params, x: module.apply(params, x))
    return ft.types.Model("own", init, apply, None, 2)


@pytest.mark.parametrize("name", nightly(sorted(catalogue("models")), ["mlp"]))
def test_the_packages_networks_look_at_one_example(name: str) -> None:
    kind = catalogue("models")[name].kinds[0]
    shape = (1,) if name == "rbf_linear" else SHAPES[kind]
    model = ft.models.build(name, shape, 2)
    dtype = jnp.dtype(jnp.int32) if model.vocabulary else FLOAT
    assert rows.module_of(model.apply).startswith("fedtangent.")  # which is why they are not measured in each run
    assert rows.change_by_others(model, shape, dtype)[0] < 1e-4  # rounding, of other shapes too


@pytest.mark.parametrize(
    "last", [nn.initializers.lecun_normal(), pytest.param(nn.initializers.zeros, marks=pytest.mark.slow)]
)
def test_a_flax_network_that_normalises_over_its_batch_is_refused(last: Any) -> None:
    with pytest.raises(ValueError, match=r"module: got OverBatch, whose output for an example changes by .* padded"):
        ft.models.from_flax(OverBatch(0, last), jnp.zeros((1, 3)), 2)
    assert ft.models.from_flax(OverBatch(-1, last), jnp.zeros((1, 3)), 2).name == "OverBatch"  # over features


def test_how_outputs_depend_on_others() -> None:
    """By their number, by the largest of them, by NaN; a network that is NaN anyway cannot be told to depend on any."""

    def change(apply: Any) -> float:
        model = ft.types.Model("m", lambda key: jnp.ones((3, 2)), apply, None, 2)
        return rows.change_by_others(model, (3,), FLOAT)[0]

    assert change(lambda w, x: x @ w) < 1e-6
    assert change(lambda w, x: jnp.log(-x) @ w) == 0
    assert change(lambda w, x: x @ w / x.shape[0]) > 1
    assert change(lambda w, x: x @ w - jnp.max(x @ w, axis=0, keepdims=True)) > 0.1
    assert change(lambda w, x: jnp.log(3 - jnp.max(x)) + x @ w) == np.inf
    assert change(lambda w, x: jax.nn.softmax(x @ w, axis=0)) > 0.1


def test_an_nnx_network_and_a_stax_network() -> None:
    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.layer = nnx.Linear(3, 2, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.layer(x) - jnp.max(self.layer(x), axis=0, keepdims=True)

    with pytest.raises(ValueError, match="module: got Net, whose output"):
        ft.models.from_flax(Net, jnp.zeros((1, 3)), 2)
    stax = ft.kernels.stax()
    init_fn, apply_fn, kernel_fn = stax.serial(stax.Dense(4), stax.Relu(), stax.Dense(2))
    coupled = (init_fn, lambda params, x, **more: apply_fn(params, x - x.mean(0, keepdims=True), **more), kernel_fn)
    with pytest.raises(ValueError, match="network: got stax, whose output"):
        ft.models.from_stax(coupled, 3)


@pytest.mark.parametrize("part", nightly(PARTS, ["simulate"]))
def test_a_model_of_ones_own(part: str) -> None:
    def use(model: ft.types.Model) -> object:
        x, y = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32), np.arange(6) % 2
        params = model.init(jax.random.key(0))
        if part == "empirical_ntk":
            return ft.kernels.empirical_ntk(model, params, jnp.asarray(x))
        if part == "mean_loss":
            return jax.jit(mean_loss(model, "cross_entropy", 4))(params, jnp.asarray(x), jnp.asarray(y))
        if part == "linearised":
            model = ft.models.linearised(model, params)
        if part == "trainable":
            model = ft.models.trainable(model, params, "Dense_0")
        work = ft.Work(epochs=1, batch_size=4)
        everyone = ft.schedules.all_clients(1)
        algorithm = ft.fed_avg(model, everyone, client_learning_rate=0.1, work=work, loss="cross_entropy")
        run = ft.predict if part == "predict" else ft.simulate
        return run(algorithm, (x, y), [np.arange(6)], num_rounds=1)

    with pytest.raises(ValueError, match=r"model: got .*own.*, whose output for an example changes by"):
        use(own_model(0))
    if part != "predict":
        use(own_model(-1))  # over features: as good as any


def test_padding_does_not_reach_a_network() -> None:
    """Two batches of 4 and 2 of six rows, the second padded: the update is that of the plain steps in NumPy."""
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(6, 3)).astype(np.float32), rng.normal(size=(6, 2)).astype(np.float32)
    model = ft.models.from_flax(OverBatch(-1), x[:1], 2)
    work = ft.Work(epochs=1, batch_size=4)
    everyone = ft.schedules.all_clients(1)
    algorithm = ft.fed_avg(model, everyone, client_learning_rate=0.1, work=work, loss="squared_error")
    start = model.init(jax.random.key(3))
    data = ft.data.federated_data(x, y, [np.arange(6)])
    run = ft.simulate(algorithm, data, num_rounds=1, start=start, seed=5)
    batches = np.asarray(_drawn(work))
    params = start
    slope_at = jax.jit(jax.grad(lambda p, a, b: 0.5 * jnp.mean(jnp.sum((model.apply(p, a) - b) ** 2, axis=1))))
    for batch in batches:
        keep = batch[batch >= 0]
        slope = slope_at(params, x[keep], y[keep])
        params = jax.tree.map(lambda w, g: w - 0.1 * g, params, slope)
    after = jax.tree.map(lambda leaf: leaf[0], algorithm.params(run.state))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), after, params)


def _drawn(work: ft.Work) -> jax.Array:
    from fedtangent._src import streams
    from fedtangent._src.federated.local import drawn_batches

    update_key = streams.slot_keys(streams.keys(5).train, jnp.int32(0), jnp.int32(0))[0]
    return drawn_batches(work, update_key, jnp.int32(6), 6, 2)


class OfTokens(nn.Module):
    """Reads tokens by an embedding, a table or a one-hot vector of ``symbols``."""

    reads: str
    symbols: int = 80

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        if self.reads == "embedding":
            h = nn.Embed(self.symbols, 4)(x)
        elif self.reads == "one hot":
            h = nn.Dense(4)(jax.nn.one_hot(x, self.symbols))
        else:
            table = self.param("table", nn.initializers.normal(), (self.symbols, 4))
            h = table[x] if self.reads == "table" else jnp.take(table, x, axis=0, mode="clip")
        return nn.Dense(2)(jnp.tanh(h).reshape(len(x), -1))


@pytest.mark.parametrize("reads", nightly(["embedding", "one hot", "table", "clipped"], ["embedding", "clipped"]))
def test_a_network_of_unknown_vocabulary_that_lacks_a_token_of_the_data_is_refused(reads: str) -> None:
    """JAX reads beyond a table without an error. Tokens below 80 are read; 80 is the first that is not.

    By day of one network, whose output is then NaN.
    """
    model = ft.models.from_flax(OfTokens(reads), jax.ShapeDtypeStruct((1, 5), jnp.int32), 2)
    x, y, clients = np.zeros((6, 5), np.int32), np.arange(6) % 2, np.arange(6) % 3
    recipe = ft.fed_avg(model, ft.schedules.all_clients(3), 0.1, loss="cross_entropy")
    for largest in (1, 79, 80, 89):
        x[3, 2] = largest
        tokens = ft.data.Dataset("text", x, y, x, y, 2, None, SourceInfo("", "", ""), "tokens")
        for data in (tokens, tokens._replace(x_train=0 * x)):
            if largest < 80:
                ft.simulate(recipe, data, clients, num_rounds=1, seed=0)
                continue
            with pytest.raises(
                ValueError, match=f"reads the token {largest} of the data as (NaN|another token), must tell"
            ):
                ft.simulate(recipe, data, clients, num_rounds=1, seed=0)
    if reads != "embedding":
        return
    said = ft.fed_avg(model._replace(vocabulary=90), ft.schedules.all_clients(3), 0.1, loss="cross_entropy")
    x[3, 2] = 89
    ft.simulate(said, tokens._replace(x_train=x), clients, num_rounds=1, seed=0)


def test_a_network_of_unknown_vocabulary_is_compiled_once_for_all_its_runs() -> None:
    """A test of tokens that every run compiled anew took seven seconds a run of a small transformer."""
    compiled: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, duration, **_: compiled.append(event) if "backend_compile" in event else None
    )
    example, x = jax.ShapeDtypeStruct((1, 5), jnp.int32), np.arange(30, dtype=np.int32).reshape(6, 5)
    model, other = (ft.models.from_flax(OfTokens("embedding", symbols), example, 2) for symbols in (80, 81))
    numbers = []
    for read, tokens in ((model, x), (model, x + 1), (other, x)):
        compiled.clear()
        rows.check_reads(read, tokens)
        numbers.append(len(compiled))
    assert numbers[0] > 0 == numbers[1] < numbers[2]
