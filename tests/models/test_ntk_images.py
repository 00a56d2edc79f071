"""Networks of images in the NTK parameterization: their kernels, in tiles and beside formulas, draws and training."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import fedtangent as ft
from fedtangent._src import liveness
from fedtangent._src.comparison.statistics import width_slope
from fedtangent._src.kernels.gram import kernel_blocks
from fedtangent._src.kernels.large import large_kernel
from fedtangent._src.models import kernels
from fedtangent._src.models.ntk_images import READOUTS, ntk_cnn, ntk_resnet, ntk_transformer
from fedtangent._src.types import Model

from ..drawn import parameters
from ..nightly import nightly
from .cntk_reference import cntk

SHAPE, C = (4, 4, 2), 2


def images(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, *SHAPE))


NETWORKS: dict[str, Model] = {
    **{f"cnn {readout}": ntk_cnn(SHAPE, C, 8, readout=readout) for readout in READOUTS},
    "cnn layer norm": ntk_cnn(SHAPE, C, 8, 1, layer_norm=True),
    "resnet": ntk_resnet(SHAPE, C, 8, (1, 1)),
    "transformer": ntk_transformer(SHAPE, C, 8),
}


# ---- kernels ----


@functools.cache
def kernels_of(readout: str, depth: int, window: int) -> Any:
    return ntk_cnn(SHAPE, C, depth=depth, window=window, readout=readout).kernel(images(2), images(2, seed=1))  # type: ignore[misc]


@pytest.mark.parametrize(("depth", "window"), nightly([(1, 3), (2, 2)], [(2, 2)]))
@pytest.mark.parametrize("readout", READOUTS)
def test_kernel_is_that_of_the_formulas(readout: str, depth: int, window: int) -> None:
    x, y, computed = images(2), images(2, seed=1), kernels_of(readout, depth, window)
    for i in range(2):
        for j in range(2):
            right, wrong = (cntk(x[i], y[j], d, window, readout) for d in (depth, depth + 1))
            for name, expected, other in zip(("nngp", "ntk"), right, wrong, strict=True):
                value = float(getattr(computed, name)[i, j])
                assert abs(value / expected - 1) < 1e-10, name
                assert abs(value / other - 1) > 1e-3, name


def test_kernels_of_other_readouts_differ() -> None:
    ntk = {readout: np.asarray(kernels_of(readout, 2, 2).ntk) for readout in READOUTS}
    assert all(np.max(np.abs(ntk[a] / ntk[b] - 1)) > 0.05 for a in READOUTS for b in READOUTS if a != b)


@pytest.mark.parametrize("name", nightly(NETWORKS, ["cnn global"]))
def test_tiles_are_the_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y, kernel = images(5), images(3, seed=1), NETWORKS[name].kernel
    assert isinstance(kernel, kernels.AnalyticKernel) and kernel.side(x) > 5
    whole = kernel(x), kernel(x, y)
    monkeypatch.setattr(kernels.AnalyticKernel, "side", lambda self, x: 2)
    calls: list[tuple[int, int]] = []
    tiled = kernel.blocks(x, None, tick=lambda done, total: calls.append((done, total))), kernel(x, y)
    assert calls == [(i, 6) for i in range(7)]  # of 3 x 3 tiles three are mirrored
    for one, other in zip(whole, tiled, strict=True):
        for block in ("nngp", "ntk"):
            a, b = np.asarray(getattr(one, block)), np.asarray(getattr(other, block))
            # where an angle is 0 float64 has half its digits: on the diagonal, where a pair is an example with itself
            assert np.max(np.abs(a - b)) < (1e-7 if a.shape == (5, 5) else 1e-13) * np.max(a)
            off = ~np.eye(*a.shape, dtype=bool)
            assert np.max(np.abs(a - b)[off]) < 1e-13 * np.max(a)
            assert np.max(np.abs(np.roll(a, 1, 0) - b)) > 1e-3 * np.max(a)
    square = np.asarray(tiled[0].ntk)
    assert np.array_equal(square, square.T)
    assert kernel(x.astype(np.float32), get="ntk").dtype == np.float64  # as without tiles


def test_blocks_and_large_kernels_use_the_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y, kernel = images(5), images(3, seed=1), NETWORKS["cnn global"].kernel
    assert isinstance(kernel, kernels.AnalyticKernel)
    whole = kernel_blocks(kernel, x, y)
    monkeypatch.setattr(kernels.AnalyticKernel, "side", lambda self, x: 2)
    totals: list[int] = []
    tiled = kernel_blocks(kernel, x, y, tick=lambda done, total: totals.append(total))
    large = large_kernel(kernel, x, y, tick=lambda done, total: totals.append(total))
    assert set(totals) == {6, 3}
    for name, block in whole._asdict().items():
        assert np.allclose(getattr(tiled, name), block, rtol=1e-7), name
    assert np.allclose(large.ntk_train, whole.ntk_train, rtol=1e-5)
    assert np.allclose(large.at_test(np.eye(5)), whole.ntk_test_train, rtol=1e-5)


def test_sides_of_tiles_follow_the_work_of_a_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    flat, pooled = (NETWORKS[f"cnn {name}"].kernel for name in ("flatten", "global"))
    assert isinstance(flat, kernels.AnalyticKernel) and isinstance(pooled, kernels.AnalyticKernel)
    x = images(1)
    assert flat.side(x) > 3 * pooled.side(x)
    assert 0 < pooled.tile_bytes(x) <= kernels.TILE_BYTES
    vectors = ft.models.mlp(32, C).kernel
    assert isinstance(vectors, kernels.AnalyticKernel) and vectors.tile_bytes(x) == 0
    pair = kernels._pair_bytes(pooled, SHAPE, "float64")
    places = 16
    assert 8 * places**2 < pair < 30 * 8 * places**2  # some arrays of a number for every pair of places
    monkeypatch.setattr(liveness, "memory_limit", lambda: pair)
    with pytest.raises(ValueError, match=r"^kernel: got examples of shape \(4, 4, 2\), a pair of which needs up to "):
        pooled(x)


def test_too_little_memory_is_refused_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm, data, clients = run_of(NETWORKS["cnn global"])
    monkeypatch.setattr(liveness, "memory_limit", lambda: 10_000)
    monkeypatch.setattr(kernels, "_blocks", lambda *args: pytest.fail("a kernel was computed"))
    monkeypatch.setattr("fedtangent._src.comparison.followed.check_kernels", lambda model, x: None)
    with pytest.raises(ValueError, match=r"^kernel: got examples of shape"):
        ft.predict(algorithm, data, clients, num_rounds=2)


# ---- networks ----


def test_outputs_are_those_of_the_formula() -> None:
    model = ntk_cnn(SHAPE, C, width=8)
    x, params = jnp.asarray(images(3), jnp.float32), parameters(model)

    def formula(params: Any) -> tuple[jax.Array, jax.Array]:
        """With the mean over places, and with their maximum."""
        z = x
        for weight, bias in (params[0], params[2]):
            scale = np.float32((2 / np.prod(weight.shape[:3])) ** 0.5)
            y = lax.conv_general_dilated(z, weight, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            z = jax.nn.relu(scale * y + 0.1 * bias)
        right, wrong = (
            np.float32(0.5) * h @ params[5][0] + 0.1 * params[5][1] for h in (z.mean((1, 2)), z.max((1, 2)))
        )
        return right, wrong

    outputs, (right, wrong) = jax.jit(lambda p: (model.apply(p, x), formula(p)))(params)
    assert np.max(np.abs(outputs - np.asarray(right))) < 1e-6
    assert np.max(np.abs(outputs - np.asarray(wrong))) > 0.1


@pytest.mark.parametrize("name", nightly(NETWORKS, ["cnn flatten"]))
def test_it_starts_as_the_same_numbers_and_keeps_its_dtype(name: str) -> None:
    model, x = NETWORKS[name], images(2)
    with jax.enable_x64(False):
        narrow = jax.jit(model.init)(jax.random.key(0))
    wide, apply = jax.jit(model.init)(jax.random.key(0)), jax.jit(model.apply)
    assert jax.tree.all(jax.tree.map(lambda a, b: np.array_equal(a, b) and a.dtype == jnp.float32, narrow, wide))
    outputs = apply(wide, x)
    doubled = apply(jax.tree.map(lambda a: np.asarray(a, np.float64), wide), x)
    assert outputs.dtype == jnp.float32 and doubled.dtype == jnp.float64
    assert outputs.shape == (2, C) and np.max(np.abs(outputs - doubled)) < 1e-5
    assert np.max(np.abs(apply(wide, x.reshape(2, -1)) - outputs)) < 1e-6
    at_width = model.at_width
    assert at_width is not None and at_width(3).kernel is model.kernel and "width 3" in at_width(3).name


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_kernels_of_draws_approach_it(name: str) -> None:
    """The distance of a network's own kernel falls as width^-1/2; from the kernel of another network it stays."""
    model, x, widths = NETWORKS[name], jnp.asarray(images(3)), (16, 64, 256)
    other = NETWORKS["resnet" if name != "resnet" else "cnn flatten"]
    errors: dict[str, list[np.ndarray]] = {"right": [], "wrong": []}
    for width in widths:
        network = model.at_width(width)  # type: ignore[misc]
        keys = jax.random.split(jax.random.key(width), 200)
        draws = np.asarray(jax.jit(lambda keys, n=network: lax.map(lambda k: tangent_kernel(n, k, x), keys))(keys))
        for which, of in (("right", model), ("wrong", other)):
            theta = np.asarray(of.kernel(x, get="ntk"))  # type: ignore[misc]
            distance = np.linalg.norm((draws - theta).reshape(len(draws), -1), axis=1)
            errors[which].append(distance / np.linalg.norm(theta))
    right, wrong = (width_slope(widths, errors[which]) for which in ("right", "wrong"))
    assert right.within(-0.65, -0.35), (right, np.mean(errors["right"], axis=1))
    assert wrong.outside(-0.65, -0.35), (wrong, np.mean(errors["wrong"], axis=1))


def tangent_kernel(model: Model, key: jax.Array, x: jax.Array) -> jax.Array:
    """The kernel of one draw, from its Jacobian, as the mean over outputs."""
    params = jax.tree.map(lambda a: a.astype(jnp.float64), model.init(key))
    leaves = jax.tree.leaves(jax.jacrev(model.apply)(params, x))
    flat = jnp.concatenate([leaf.reshape(len(x), C, -1) for leaf in leaves], axis=-1)
    return jnp.einsum("icp,jcp->ij", flat, flat) / C


def run_of(model: Model, rate: float = 0.5) -> tuple[Any, Any, Any]:
    x = images(16)
    y = (x.mean(axis=(1, 2, 3)) > 0).astype(int)
    clients = ft.partition.iid(8, num_clients=2, seed=0)
    work, schedule = ft.Work(steps=2, batch_size=2), ft.schedules.all_clients(2)
    return ft.fed_avg(model, schedule, client_learning_rate=rate, work=work), (x[:8], y[:8], x[8:], y[8:]), clients


def test_it_is_predicted_with_images_as_they_are() -> None:
    algorithm, data, clients = run_of(NETWORKS["cnn global"])
    forecast = ft.predict(algorithm, data, clients, num_rounds=2, forecasting=ft.Forecasting(draws=2, rates=False))
    assert np.isfinite(forecast.loss) and forecast.plan.setting.problem.x_train.shape == (8, *SHAPE)


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: ntk_cnn(SHAPE), "output_size: got none"),
        (lambda: ntk_cnn(SHAPE, 2, readout="max"), "readout: got 'max', allowed are flatten, average, global"),
        (lambda: ntk_cnn(SHAPE, 2, activation="tanh"), "activation: got 'tanh', allowed are"),
        (lambda: ntk_cnn((1, 8), 2, readout="average"), "readout: got 'average' of 1 x 8 places, allowed are"),
        (lambda: ntk_cnn(SHAPE, 2, depth=0), "depth: got 0"),
        (lambda: ntk_cnn(SHAPE, 2, width=0), "width: got 0"),
        (lambda: ntk_cnn(SHAPE, 2, layer_norm="yes"), "layer_norm: got 'yes'"),
        (lambda: ntk_resnet(SHAPE, 2, blocks=()), "blocks: got ()"),
        (lambda: ntk_transformer(SHAPE, 2, patch=3), "patch: got 3, must divide"),
    ],
)
def test_bad_arguments(build: Any, says: str) -> None:
    with pytest.raises(ValueError, match="^" + says.replace("(", r"\(").replace(")", r"\)")):
        build()
