"""The four empirical kernels of neural-tangents against one another and against Jacobians; linearize; taylor_expand."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedtangent._src.kernels.neural_tangents import nt, stax

pytestmark = pytest.mark.versions  # neural-tangents' own numbers, not ours

IMPLEMENTATIONS = {i.name: i for i in nt.NtkImplementation if i is not nt.NtkImplementation.AUTO}
TOLERANCE = 1e-10


class Perceptron(nn.Module):
    """Normalisation, a tied matrix, nested jit, recomputation and a split (jnp.split has several outputs)."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        h = nn.LayerNorm(param_dtype=float)(nn.Dense(6, param_dtype=float)(x))
        tied = nn.Dense(6, param_dtype=float)
        h = jax.jit(jnp.tanh)(tied(h))
        h = jax.checkpoint(lambda z: jnp.sin(z) * jnp.cos(z))(tied(h))
        left, right = jnp.split(h, 2, axis=-1)
        return nn.Dense(2, param_dtype=float)(nn.gelu(left) * right)


class Convolutional(nn.Module):
    """Strided and grouped convolutions, GroupNorm, max and average pooling."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        h = nn.relu(nn.Conv(4, (3, 3), param_dtype=float)(x))
        h = nn.max_pool(nn.GroupNorm(2, param_dtype=float)(h), (2, 2), (2, 2))
        h = nn.avg_pool(nn.relu(nn.Conv(4, (2, 2), feature_group_count=2, param_dtype=float)(h)), (2, 2))
        return nn.Dense(2, param_dtype=float)(h.reshape(h.shape[0], -1))


class Attention(nn.Module):
    """Self-attention and a scan over positions."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        h = nn.MultiHeadDotProductAttention(2, qkv_features=4, param_dtype=float)(x)
        scale = self.param("scale", nn.initializers.normal(1.0), (h.shape[-1],), float)
        last, _ = jax.lax.scan(lambda c, z: (jnp.tanh(c * scale[None] + z), None), h[:, 0], h.swapaxes(0, 1))
        return nn.Dense(2, param_dtype=float)(last)


def from_stax(*layers: Any) -> tuple[Callable[..., Any], Callable[..., jax.Array]]:
    init, apply, _ = stax.serial(*layers)
    return (lambda key, x: init(key, x.shape)[1]), apply


NETS: dict[str, tuple[Any, Any, tuple[int, ...]]] = {
    "dense": (
        *from_stax(stax.Dense(8, 1.5, 0.3), stax.Relu(), stax.Dense(8, 1.5, 0.3), stax.Erf(), stax.Dense(2)),
        (5,),
    ),
    "conv": (
        *from_stax(
            stax.Conv(4, (3, 3), padding="SAME"),
            stax.Relu(),
            stax.AvgPool((2, 2), strides=(2, 2)),
            stax.LayerNorm(),
            stax.Flatten(),
            stax.Dense(2, 1.5, 0.3),
        ),
        (4, 4, 2),
    ),
    "flax perceptron": (Perceptron().init, Perceptron().apply, (3,)),
    "flax convolutional": (Convolutional().init, Convolutional().apply, (6, 6, 2)),
    "flax attention": (Attention().init, Attention().apply, (3, 4)),
}


def make(name: str) -> tuple[Callable[..., jax.Array], Any, jax.Array, jax.Array]:
    """The network's function, parameters, and two batches."""
    init, apply, shape = NETS[name]
    x1, x2 = (jax.random.normal(jax.random.key(i), (n, *shape)) for i, n in enumerate((3, 2)))
    return apply, init(jax.random.key(2), x1), x1, x2


def from_jacobians(apply: Callable[..., jax.Array], params: Any, x1: jax.Array, x2: jax.Array) -> jax.Array:
    """J(x1) J(x2)^T, [n1, n2, C, C]."""

    def jacobian(x: jax.Array) -> jax.Array:
        leaves = jax.tree.leaves(jax.jacrev(apply)(params, x))
        return jnp.concatenate([leaf.reshape(x.shape[0], 2, -1) for leaf in leaves], axis=-1)

    return jnp.einsum("icp,jdp->ijcd", jacobian(x1), jacobian(x2))


SLOW = [pytest.param(name, None, marks=pytest.mark.slow) for name in NETS if name.startswith("flax")]
SLOW += [pytest.param(name, 0, marks=pytest.mark.slow) for name in ("flax convolutional", "flax attention")]


@pytest.mark.parametrize(
    ("name", "vmap_axes"), [("dense", None), ("dense", 0), ("conv", None), ("conv", 0), ("flax perceptron", 0), *SLOW]
)
def test_all_implementations_are_the_product_of_jacobians(name: str, vmap_axes: int | None):
    apply, params, x1, x2 = make(name)
    from_parameters = jax.jit(lambda p: from_jacobians(apply, p, x1, x2))
    right = np.asarray(from_parameters(params))
    other = np.asarray(from_parameters(jax.tree.map(lambda leaf: leaf + 1e-8, params)))
    assert right.dtype == np.float64
    scale = np.abs(right).max()
    for implementation in IMPLEMENTATIONS.values():
        fn = nt.empirical_ntk_fn(apply, trace_axes=(), vmap_axes=vmap_axes, implementation=implementation)
        ours = np.asarray(jax.jit(fn)(x1, x2, params))
        assert np.abs(ours - right).max() < TOLERANCE * scale, implementation
        assert np.abs(ours - other).max() > TOLERANCE * scale


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_trace_over_outputs_and_kernel_with_itself(implementation: str):
    apply, params, x1, _ = make("dense")
    right = np.einsum("ijcc->ij", from_jacobians(apply, params, x1, x1)) / 2
    ours = nt.empirical_ntk_fn(apply, implementation=IMPLEMENTATIONS[implementation])(x1, None, params)
    assert np.abs(ours - right).max() < TOLERANCE * np.abs(right).max()
    kernels = nt.empirical_kernel_fn(apply, implementation=IMPLEMENTATIONS[implementation])(x1, None, "ntk", params)
    assert np.abs(kernels - right).max() < TOLERANCE * np.abs(right).max()


def test_auto_picks_the_implementation_with_the_fewest_operations(capsys: pytest.CaptureFixture[str]):
    apply, params, x1, x2 = make("dense")
    ours = nt.empirical_ntk_fn(apply, trace_axes=(), implementation=nt.NtkImplementation.AUTO)(x1, x2, params)
    right = from_jacobians(apply, params, x1, x2)
    assert np.abs(ours - right).max() < TOLERANCE * np.abs(right).max()
    counts = [float(line.rpartition("=")[2]) for line in capsys.readouterr().out.splitlines()]
    assert len(counts) == 3 and min(counts) > 0


def test_empirical_nngp_and_kernel_vector_products():
    apply, params, x1, x2 = make("dense")
    f1, f2 = apply(params, x1), apply(params, x2)
    np.testing.assert_allclose(nt.empirical_nngp_fn(apply)(x1, x2, params), f1 @ f2.T / 2, rtol=1e-12)
    vector = jax.random.normal(jax.random.key(3), f2.shape)
    product = nt.empirical_ntk_vp_fn(apply, x1, x2, params)(vector)
    np.testing.assert_allclose(product, np.einsum("ijcd,jd->ic", from_jacobians(apply, params, x1, x2), vector))


def test_batched_empirical_kernel_is_the_kernel():
    apply, params, x1, x2 = make("dense")
    x1, x2 = jnp.concatenate([x1, x1[:1]]), x2
    fn = nt.empirical_ntk_fn(apply, vmap_axes=0, implementation=IMPLEMENTATIONS["STRUCTURED_DERIVATIVES"])
    batched = nt.batch(fn, batch_size=2)(x1, x2, params)
    np.testing.assert_allclose(batched, jax.jit(fn)(x1, x2, params), rtol=1e-11)
    assert not np.allclose(batched[:, ::-1], batched, rtol=1e-11)


def test_unused_parameters_and_shared_structure():
    apply, params, x1, x2 = make("dense")
    right = from_jacobians(apply, params, x1, x2)
    padded = {"net": params, "unused": jnp.ones((3, 2))}
    for implementation in IMPLEMENTATIONS.values():
        fn = nt.empirical_ntk_fn(lambda p, x: apply(p["net"], x), trace_axes=(), implementation=implementation)
        assert np.abs(fn(x1, x2, padded) - right).max() < TOLERANCE * np.abs(right).max()


def test_threads_do_not_disturb_one_another():
    apply, params, x1, x2 = make("dense")
    results: dict[int, float] = {}

    def run(i: int) -> None:
        fn = nt.empirical_ntk_fn(apply, trace_axes=(), implementation=IMPLEMENTATIONS["STRUCTURED_DERIVATIVES"])
        scaled = jax.tree.map(lambda leaf: (1 + i) * leaf, params)
        right = from_jacobians(apply, scaled, x1, x2)
        results[i] = float(np.abs(fn(x1, x2, scaled) - right).max() / np.abs(right).max())

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4 and max(results.values()) < TOLERANCE


@pytest.mark.parametrize("name", ["dense", "flax perceptron"])
def test_linearize_and_taylor_expand_are_the_sums_of_directional_derivatives(name: str):
    apply, start, x, _ = make(name)
    params = jax.tree.map(lambda leaf: leaf + 0.1 * jnp.cos(jnp.arange(1.0 * leaf.size)).reshape(leaf.shape), start)
    direction = jax.tree.map(jnp.subtract, params, start)

    def along(t: float) -> jax.Array:
        return apply(jax.tree.map(lambda p, d: p + t * d, start, direction), x)

    def slope(t: float) -> jax.Array:
        return jax.jvp(along, (t,), (1.0,))[1]

    linear = along(0.0) + slope(0.0)
    quadratic = linear + 0.5 * jax.jvp(slope, (0.0,), (1.0,))[1]
    np.testing.assert_allclose(nt.linearize(apply, start)(params, x), linear, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(nt.taylor_expand(apply, start, 1)(params, x), linear, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(nt.taylor_expand(apply, start, 2)(params, x), quadratic, rtol=1e-12, atol=1e-12)
    assert np.abs(quadratic - linear).max() > 1e-3 and np.abs(apply(params, x) - quadratic).max() > 1e-4
