"""Analytic stax kernels against networks of finite width and against formulas written here in NumPy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedtangent._src.kernels.neural_tangents import nt, stax

MIN_DRAWS = 200
MAX_STANDARD_ERRORS = 4.0
W_STD, B_STD = 1.4, 0.3


def dense_net(width: int = 64, w_std: float = W_STD, act: Callable[[], Any] = stax.Relu) -> Any:
    """One hidden layer: its units are independent, so that the mean over draws is the limit at any width."""
    return stax.serial(stax.Dense(width, w_std, B_STD), act(), stax.Dense(2, w_std, B_STD))


def conv_net(channels: int = 16, w_std: float = W_STD, act: Callable[[], Any] = stax.Relu) -> Any:
    """One convolution and average pooling: its channels are independent."""
    conv = stax.Conv(channels, (3, 3), padding="SAME", W_std=w_std, b_std=B_STD)
    pool = stax.AvgPool((2, 2), strides=(2, 2))
    return stax.serial(conv, act(), pool, stax.Flatten(), stax.Dense(2, w_std, B_STD))


def norm_net(width: int = 2048, w_std: float = W_STD, norm: bool = True) -> Any:
    """LayerNorm couples the units: the mean over draws is off by O(1 / width), below the standard error here."""
    layers = [stax.Dense(width, w_std, B_STD), *([stax.LayerNorm()] if norm else []), stax.Relu()]
    return stax.serial(*layers, stax.Dense(2, w_std, B_STD))


def finite_kernels(net: Any, x: jax.Array, draws: int, seed: int = 0) -> dict[str, np.ndarray]:
    """For each random draw of the network, [draws, n, n]: f f^T and J J^T, both averaged over the outputs."""
    init, apply, _ = net

    def one(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        params = init(key, x.shape)[1]
        outputs = apply(params, x)
        jacobians = jax.tree.leaves(jax.jacrev(apply)(params, x))
        flat = jnp.concatenate([j.reshape(*outputs.shape, -1) for j in jacobians], axis=-1)
        share = 1 / outputs.shape[1]
        return outputs @ outputs.T * share, jnp.einsum("icp,jcp->ij", flat, flat) * share

    nngp, ntk = jax.lax.map(one, jax.random.split(jax.random.key(seed), draws))
    return {"nngp": np.asarray(nngp), "ntk": np.asarray(ntk)}


def standard_errors_off(draws: np.ndarray, expected: np.ndarray) -> float:
    """The largest |mean over draws - expected| of all entries, in measured standard errors of that mean."""
    assert draws.shape[0] >= MIN_DRAWS
    error = draws.std(axis=0, ddof=1) / np.sqrt(draws.shape[0])
    return float(np.max(np.abs(draws.mean(axis=0) - expected) / error))


CASES: dict[str, tuple[Any, tuple[int, ...], dict[str, Any]]] = {
    "dense": (dense_net(), (4, 5), {"W_std": dense_net(w_std=1.1 * W_STD), "nonlinearity": dense_net(act=stax.Erf)}),
    "conv": (conv_net(), (3, 4, 4, 2), {"W_std": conv_net(w_std=1.1 * W_STD), "nonlinearity": conv_net(act=stax.Erf)}),
    "layer_norm": (norm_net(), (3, 5), {"W_std": norm_net(w_std=1.1 * W_STD), "no norm": norm_net(norm=False)}),
}


@pytest.mark.versions
@pytest.mark.parametrize("case", CASES)
def test_analytic_kernel_is_the_mean_over_finite_networks(case: str):
    net, shape, wrong_nets = CASES[case]
    x = 1.5 * jax.random.normal(jax.random.key(1), shape)
    draws = finite_kernels(net, x, draws=300 if case == "layer_norm" else 1500)
    right = net[2](x, None, ("nngp", "ntk"))
    for get in ("nngp", "ntk"):
        assert standard_errors_off(draws[get], np.asarray(getattr(right, get))) < MAX_STANDARD_ERRORS
    for name, wrong_net in wrong_nets.items():
        wrong = wrong_net[2](x, None, ("nngp", "ntk"))
        for get in ("nngp", "ntk"):
            off = standard_errors_off(draws[get], np.asarray(getattr(wrong, get)))
            assert off > MAX_STANDARD_ERRORS, f"{name}: a wrong {get} passes ({off:.1f} standard errors)"


def arc_cosine(x1: np.ndarray, x2: np.ndarray, w_std: float, b_std: float) -> dict[str, np.ndarray]:
    """NNGP and NTK of a ReLU network with one hidden layer and biases (Cho and Saul 2009; Jacot et al. 2018)."""
    d, w2, b2 = x1.shape[1], w_std**2, b_std**2
    k12 = w2 / d * x1 @ x2.T + b2
    k11 = w2 / d * np.sum(x1**2, axis=1)[:, None] + b2
    k22 = w2 / d * np.sum(x2**2, axis=1)[None, :] + b2
    norm = np.sqrt(k11 * k22)
    angle = np.arctan2(np.sqrt(np.maximum(norm**2 - k12**2, 0.0)), k12)
    covariance = norm / (2 * np.pi) * (np.sin(angle) + (np.pi - angle) * np.cos(angle))
    nngp = w2 * covariance + b2
    return {"nngp": nngp, "ntk": nngp + w2 * (np.pi - angle) / (2 * np.pi) * k12}


@pytest.fixture(params=[True, False], ids=["float64", "float32"])
def precision(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The dtype that neural-tangents computes kernels in: the widest there is, whatever that of the inputs."""
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", request.param)
    yield np.float64 if request.param else np.float32
    jax.config.update("jax_enable_x64", before)


def test_relu_kernel_is_the_arc_cosine_formula(precision: Any):
    rng = np.random.default_rng(0)
    x1, x2 = (rng.normal(size=(n, 4)).astype(np.float32).astype(float) for n in (7, 6))
    kernels = dense_net()[2](jnp.asarray(x1), jnp.asarray(x2), ("nngp", "ntk"))
    right, no_bias = (arc_cosine(x1, x2, W_STD, b_std) for b_std in (B_STD, 0.0))
    tolerance = 1e-12 if precision == np.float64 else 20 * np.finfo(np.float32).eps
    for get in ("nngp", "ntk"):
        ours = np.asarray(getattr(kernels, get))
        assert ours.dtype == precision
        scale = np.abs(right[get]).max()
        assert np.abs(ours - right[get]).max() < tolerance * scale
        assert np.abs(ours - no_bias[get]).max() > 1e-2 * scale


def test_relu_kernel_of_inputs_with_themselves_is_the_arc_cosine_formula():
    x = np.random.default_rng(1).normal(size=(6, 3))
    kernels = dense_net()[2](jnp.asarray(x), None, ("nngp", "ntk"))
    right = arc_cosine(x, x, W_STD, B_STD)
    off_diagonal = ~np.eye(len(x), dtype=bool)
    for get in ("nngp", "ntk"):
        error = np.abs(np.asarray(getattr(kernels, get)) - right[get])
        assert error[off_diagonal].max() < 1e-12 * np.abs(right[get]).max()
        # the angle of a point with itself is the square root of a rounding error
        assert error.max() < 2 * np.sqrt(np.finfo(float).eps) * np.abs(right[get]).max()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.slow
def test_batched_kernel_is_the_kernel(case: str):
    net, shape, _ = CASES[case]
    x1 = jax.random.normal(jax.random.key(0), (4, *shape[1:]))
    x2 = jax.random.normal(jax.random.key(1), (6, *shape[1:]))
    whole = net[2](x1, x2, ("nngp", "ntk"))
    for device_count in (0, -1):
        batched = nt.batch(net[2], batch_size=2, device_count=device_count)(x1, x2, ("nngp", "ntk"))
        for get in ("nngp", "ntk"):
            np.testing.assert_allclose(getattr(batched, get), getattr(whole, get), rtol=1e-12)
    assert not np.allclose(batched.ntk[:, ::-1], whole.ntk, rtol=1e-12)


@pytest.mark.versions
def test_monte_carlo_kernel_fn_estimates_the_analytic_kernel():
    (init, apply, kernel), x = dense_net(), jax.random.normal(jax.random.key(0), (3, 5))

    counts = range(2, 2 * MIN_DRAWS + 1, 2)  # yields the mean over the first 2, 4, 6, ... networks
    fn = nt.monte_carlo_kernel_fn(init, apply, jax.random.key(0), n_samples=counts, device_count=0)
    means = list(fn(x, None, ("nngp", "ntk")))
    right, wrong = (f(x, None, ("nngp", "ntk")) for f in (kernel, dense_net(w_std=1.2 * W_STD)[2]))
    for get in ("nngp", "ntk"):
        sums = np.stack([n * np.asarray(getattr(mean, get)) for n, mean in zip(counts, means, strict=True)])
        draws = np.diff(sums, axis=0, prepend=0) / 2
        assert standard_errors_off(draws, np.asarray(getattr(right, get))) < MAX_STANDARD_ERRORS
        assert standard_errors_off(draws, np.asarray(getattr(wrong, get))) > MAX_STANDARD_ERRORS


def test_analytic_kernel_under_jit_and_grad():
    x, y = jax.random.normal(jax.random.key(0), (2, 4, 5))
    kernel = dense_net()[2]
    compiled = jax.jit(lambda x: kernel(x, y, "ntk"))
    np.testing.assert_allclose(compiled(x), kernel(x, y, "ntk"), rtol=1e-12)
    slope = jax.jit(jax.grad(lambda s: kernel(s * x, y, "ntk").sum()))(1.0)
    step = 1e-5
    difference = (compiled((1 + step) * x).sum() - compiled((1 - step) * x).sum()) / (2 * step)
    np.testing.assert_allclose(slope, difference, rtol=1e-7)
