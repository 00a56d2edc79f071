"""The plane through three models: its frame, the surface on it, and what cannot be one."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedtangent._src import models
from fedtangent._src.measures.loss_surface import barrier, grid, mean_loss, plane_through, point, segment, surface
from fedtangent._src.types import Array, PyTree

from ..drawn import parameters


def trees(seed: int = 0, dtype: Any = np.float64) -> list[PyTree]:
    """Three models of an odd structure: nested, an empty node, a scalar."""
    rng = np.random.default_rng(seed)
    return [
        {"a": [(rng.normal(size=(3, 2)).astype(dtype), ()), dtype(rng.normal())], "b": rng.normal(size=5).astype(dtype)}
        for _ in range(3)
    ]


def flat(tree: PyTree) -> np.ndarray:
    return np.concatenate([np.ravel(np.asarray(leaf, np.float64)) for leaf in jax.tree.leaves(tree)])


@pytest.mark.parametrize(("dtype", "rounding"), [(np.float64, 1e-15), (np.float32, 1e-6)])
def test_coordinates_lead_back_to_the_models(dtype: Any, rounding: float) -> None:
    three = trees(dtype=dtype)
    plane = plane_through(three)
    for c, model in zip(plane.coordinates, three, strict=True):
        found = point(plane, *c)
        assert jax.tree.structure(found) == jax.tree.structure(model)
        assert [leaf.dtype for leaf in jax.tree.leaves(found)] == [dtype] * 3
        np.testing.assert_allclose(flat(found), flat(model), rtol=0, atol=8 * rounding)
    np.testing.assert_allclose(
        flat(point(plane, *plane.coordinates.mean(axis=0))),
        np.mean([flat(m) for m in three], axis=0),
        rtol=0,
        atol=8 * rounding,
    )


def test_the_frame_is_orthonormal_and_keeps_distances() -> None:
    three = trees(1)
    plane = plane_through(three)
    frame = np.stack([flat(plane.first), flat(plane.second)])
    np.testing.assert_allclose(frame @ frame.T, np.eye(2), atol=1e-15)
    for i, j in ((0, 1), (0, 2), (1, 2)):
        apart = np.linalg.norm(plane.coordinates[i] - plane.coordinates[j])
        assert apart == pytest.approx(np.linalg.norm(flat(three[i]) - flat(three[j])), rel=1e-14)
    assert plane.coordinates[1, 1] == 0 and plane.coordinates[2, 1] > 0
    nearly = [three[0], three[1], jax.tree.map(lambda a, b, c: b + 1e-5 * c, *three)]  # ill-conditioned, still a plane
    frame = np.stack([flat(part) for part in plane_through(nearly)[1:3]])
    np.testing.assert_allclose(frame @ frame.T, np.eye(2), atol=1e-15)


def quadratic(params: PyTree, hessian: Array, centre: Array) -> Array:
    away = jnp.concatenate([jnp.ravel(leaf) for leaf in jax.tree.leaves(params)]) - centre
    return 0.5 * away @ hessian @ away


def test_a_quadratic_loss_has_its_closed_form() -> None:
    three, rng = trees(2), np.random.default_rng(3)
    root, centre = rng.normal(size=(12, 12)), rng.normal(size=12)
    hessian = root @ root.T
    plane = plane_through(three)
    a, b = grid(plane, 31)
    b = b[:20]
    found = surface(quadratic, plane, a, b, (hessian, centre))
    # In the plane the loss is 0.5 (z' G z + 2 g' z) + c, from the weights alone: a Gram-Schmidt of NumPy's own.
    w = np.stack([flat(t) for t in three])
    q, r = np.linalg.qr((w[1:] - w[0]).T)
    q = q * np.sign(np.diag(r))
    curvature, slope, start = q.T @ hessian @ q, q.T @ hessian @ (w[0] - centre), w[0] - centre
    z = np.stack(np.meshgrid(a, b), axis=-1)
    expected = 0.5 * np.einsum("ija,ab,ijb->ij", z, curvature, z) + z @ slope + 0.5 * start @ hessian @ start
    assert found.shape == (len(b), len(a)) and len(a) != len(b)
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    assert np.max(np.abs(surface(quadratic, plane, a, -b, (hessian, centre)) - expected)) > 1  # a wrong side shows


def test_a_segment_is_a_line_of_the_surface_and_has_its_barrier() -> None:
    three = trees(4)
    plane = plane_through(three)
    middle = 0.5 * (flat(three[0]) + flat(three[1]))
    shares = np.linspace(0, 1, 21)
    on_line = segment(quadratic, three[0], three[1], shares, (-np.eye(12), middle))
    along = surface(quadratic, plane, shares * plane.coordinates[1, 0], [0.0], (-np.eye(12), middle))
    np.testing.assert_allclose(on_line, along[0], rtol=1e-12, atol=1e-12)
    assert barrier(on_line) == pytest.approx(plane.coordinates[1, 0] ** 2 / 8, rel=1e-12)  # a hill of curvature -1
    assert barrier(segment(quadratic, three[0], three[1], shares, (np.eye(12), middle))) == pytest.approx(0, abs=1e-12)


def test_the_grid_is_a_square_around_the_models() -> None:
    plane = plane_through(trees(5))
    low, high = plane.coordinates.min(axis=0), plane.coordinates.max(axis=0)
    wide = int(np.argmax(high - low))
    a, b = grid(plane, 40, margin=0.25)
    assert len(a) == len(b) == 40
    np.testing.assert_allclose([np.ptp(a), np.ptp(b)], 1.5 * np.max(high - low), rtol=1e-12)
    for values, lo, hi in zip((a, b), low, high, strict=True):
        assert values[0] < lo and values[-1] > hi and np.ptp(np.diff(values)) < 1e-12
        assert 0.5 * (values[0] + values[-1]) == pytest.approx(0.5 * (lo + hi), rel=1e-12)
    reach = 0.25 * (high - low)[wide]
    assert (a, b)[wide][0] == pytest.approx(low[wide] - reach, rel=1e-12)


@pytest.mark.parametrize("block", [7, 31, 100])
def test_the_mean_loss_does_not_depend_on_the_block(block: int) -> None:
    model = models.build("mlp", 4, 3, widths=(5,))
    rng = np.random.default_rng(6)
    x, y = jnp.asarray(rng.normal(size=(31, 4))), jnp.asarray(rng.integers(0, 3, 31))
    params = parameters(model)
    logits = np.asarray(model.apply(params, x), np.float64)
    expected = np.mean(np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(31), np.asarray(y)])
    assert float(mean_loss(model, "cross_entropy", block)(params, x, y)) == pytest.approx(expected, rel=1e-6)


def test_a_grid_is_one_program_whatever_its_size() -> None:
    traced: list[int] = []

    def counted(params: PyTree) -> Array:
        traced.append(1)
        return jnp.sum(params["b"])

    plane = plane_through(trees())
    a = np.linspace(0, 1, 40)
    found = surface(counted, plane, a, a)  # 1600 points: four calls
    once = len(traced)
    np.testing.assert_allclose(found[3, 5], np.sum(point(plane, a[5], a[3])["b"]), rtol=1e-12)
    surface(counted, plane, a, a[:20])
    assert len(traced) == once <= 3


three = trees()
ON_A_LINE = jax.tree.map(lambda x, y: x + 2 * (y - x), three[0], three[1])
BAD = {
    "two": (three[:2], "models: got a list of 2, must be a list of three models"),
    "equal": ([three[0], three[1], three[1]], r"models: got models\[1\] and models\[2\] at distance"),
    "equal to the first": ([three[0], three[0], three[1]], r"models: got models\[0\] and models\[1\] at distance"),
    "collinear": ([three[0], three[1], ON_A_LINE], "models: got three on one line"),
    "shapes": (
        [three[0], three[1], {**three[0], "b": np.zeros(4)}],
        r"models: models\[0\] and models\[2\] differ",
    ),
    "structure": ([three[0], {"a": np.zeros(2)}, three[1]], r"models: models\[0\] and models\[1\] differ in structure"),
    "integers": ([{"a": np.arange(3)}] * 3, "models: got int64 arrays, must be floating"),
    "not finite": ([three[0], three[1], jax.tree.map(lambda x: x * np.nan, three[2])], "models: got nan at entry"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_plane_is_one_clear_error(name: str) -> None:
    given, says = BAD[name]
    with pytest.raises(ValueError, match=says) as caught:
        plane_through(given)
    assert "\n" not in str(caught.value)


def test_models_on_a_line_in_float32_are_found() -> None:
    one, two, _ = trees(7, np.float32)
    third = jax.tree.map(lambda x, y: (x + np.float32(0.3) * (y - x)).astype(np.float32), one, two)
    with pytest.raises(ValueError, match="three on one line"):
        plane_through([one, two, third])


def test_other_mistakes_are_named() -> None:
    plane = plane_through(three)
    for call, says in (
        (lambda: grid(plane, 1), "num_points: got 1"),
        (lambda: grid(plane, 5, -1.0), "margin: got -1.0"),
        (lambda: surface(quadratic, plane, [[0.0]], [0.0]), r"a: got shape \(1, 1\)"),
        (lambda: surface(quadratic, plane, [0.0], []), r"b: got shape \(0,\)"),
        (lambda: segment(quadratic, three[0], three[1], 0.5), r"shares: got shape \(\)"),
        (lambda: mean_loss(models.build("mlp", 4, 3), "x"), "loss: got 'x'"),
        (lambda: mean_loss(models.build("mlp", 4, 3), "logistic_sum"), "loss: got 'logistic_sum', must be 'logistic'"),
        (lambda: mean_loss(models.build("mlp", 4, 3), "cross_entropy", 0), "block: got 0"),
    ):
        with pytest.raises(ValueError, match=says):
            call()
