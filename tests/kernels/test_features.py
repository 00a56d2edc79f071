"""The features of a kernel, and the model that is linear in them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedtangent._src.kernels.empirical import empirical_ntk
from fedtangent._src.kernels.features import KernelFeatures, kernel_features
from fedtangent._src.kernels.gram import KernelBlocks, kernel_blocks
from fedtangent._src.models.dense import mlp

N, M, C = 5, 3, 2
X = np.random.default_rng(0).normal(size=(N + M, 3))
F0 = np.random.default_rng(1).normal(size=(N + M, C))


@pytest.fixture(autouse=True)
def _float64():
    with jax.enable_x64(True):
        yield


def analytic() -> KernelBlocks:
    return kernel_blocks(mlp(3, C, (8,), "erf").kernel, X[:N], X[N:])


def whole(blocks: KernelBlocks) -> np.ndarray:
    cross = blocks.ntk_test_train
    return np.block([[blocks.ntk_train, cross.T], [cross, blocks.ntk_test]])


def coupled(x: np.ndarray) -> np.ndarray:
    """The whole tangent kernel of a network of 29 weights, [p C, p C]."""
    model = mlp(3, C, (4,), "erf", dtype=jnp.float64)
    kernel = np.asarray(empirical_ntk(model, model.init(jax.random.key(0)), x, x, trace=False))
    rows = kernel.reshape(len(x) * C, len(x) * C)
    return 0.5 * (rows + rows.T)


def rows_of(features: KernelFeatures) -> np.ndarray:
    phi = np.concatenate([features.train, features.test])
    return phi.reshape(-1, phi.shape[-1])


def test_products_of_features_are_the_kernel() -> None:
    blocks = analytic()
    features = kernel_features(blocks, C)
    assert features.train.shape == (N, N + M) and features.test.shape == (M, N + M)
    np.testing.assert_allclose(rows_of(features) @ rows_of(features).T, whole(blocks), rtol=1e-12, atol=1e-12)
    given = kernel_features(whole(blocks), C, N)
    np.testing.assert_array_equal(given.train, features.train)


@pytest.mark.parametrize("outputs", ["shared", "full"])
def test_the_tangent_kernel_of_the_model_is_the_kernel(outputs: str) -> None:
    """By automatic differentiation; another kernel is not."""
    theta = whole(analytic()) if outputs == "shared" else coupled(X)
    for features in (kernel_features(theta, C, N, outputs), kernel_features(theta, C, N, outputs).rotated(3)):
        model, x = features.model, np.concatenate([features.train, features.test])
        start = model.init(jax.random.key(0))
        assert not np.any(np.asarray(model.apply(start, x)))
        jacobian = jax.jit(jax.jacobian(lambda w: model.apply(w, x)))(start).reshape((N + M) * C, -1)  # noqa: B023
        expected = np.kron(theta, np.eye(C)) if outputs == "shared" else theta
        np.testing.assert_allclose(jacobian @ jacobian.T, expected, rtol=1e-11, atol=1e-11)
        assert np.max(np.abs(jacobian @ jacobian.T - 1.01 * expected)) > 1e-3


def test_repeated_points_have_fewer_features() -> None:
    model = mlp(3, C, (8,), "erf")
    features = kernel_features(kernel_blocks(model.kernel, X[[0, 1, 1, 2]], X[[2, 3]]), C)
    assert features.train.shape == (4, 4) and features.test.shape == (2, 4)
    np.testing.assert_allclose(features.train[1], features.train[2], atol=1e-7)


@pytest.mark.parametrize("outputs", ["shared", "full"])
@pytest.mark.parametrize("models", [(), (3,)])
def test_the_model_starts_as_any_function(outputs: str, models: tuple[int, ...]) -> None:
    theta = whole(analytic()) if outputs == "shared" else coupled(X) + np.eye((N + M) * C)
    f0 = np.random.default_rng(2).normal(size=(*models, N + M, C))
    for features in (kernel_features(theta, C, N, outputs), kernel_features(theta, C, N, outputs).rotated(0)):
        weights, x = features.start(f0), np.concatenate([features.train, features.test])
        apply = features.model.apply if not models else jax.vmap(features.model.apply, (0, None))
        np.testing.assert_allclose(apply(weights, x), f0, rtol=1e-10, atol=1e-10)


def test_a_function_outside_the_span_is_refused() -> None:
    """A network's own function is inside, though the kernel of its few weights is singular."""
    model, x = mlp(3, C, (4,), "erf", dtype=jnp.float64), np.random.default_rng(3).normal(size=(20, 3))
    features = kernel_features(coupled(x), C, 12, "full")
    assert features.train.shape[-1] < 20 * C
    features.start(np.asarray(model.apply(model.init(jax.random.key(0)), x)))
    with pytest.raises(ValueError, match=r"f0: got a function that differs by .* from all combinations"):
        features.start(np.random.default_rng(4).normal(size=(20, C)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((np.eye(8) + np.eye(8, k=1), C, N), r"kernel: got a matrix up to 1 off its transpose, must be symmetric"),
        ((np.diag([1.0, -0.1, 1.0]), 1, 2), r"kernel: got eigenvalues from -0.1 to 1, must be positive semidefinite"),
        ((np.zeros((3, 3)), 1, 2), r"kernel: got zeros only, must have a positive eigenvalue"),
        ((np.eye(8), C, None), r"num_train: got None, must be the number of training points"),
        ((np.eye(8), C, 9), r"num_train: got 9, must be a whole number from 1 to 8"),
        ((np.eye(7), C, 3, "full"), r"kernel: got 1 rows of test points, must be a multiple of output_size 2"),
        ((np.eye(8), C, 3, "some"), r"outputs: got 'some', allowed are shared, full"),
        ((np.full((2, 2), np.nan), 1, 1), r"kernel: got nan at entry \(0, 0\)"),
        ((KernelBlocks(np.eye(2), np.zeros((1, 2))), 1), r"kernel: got KernelBlocks without ntk_test"),
        ((KernelBlocks(np.eye(2), np.zeros((1, 2))), 1, 2), r"num_train: got 2, must be None with KernelBlocks"),
    ],
)
def test_bad_kernels_are_refused(arguments, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kernel_features(*arguments)


@pytest.mark.parametrize(
    ("f0", "message"),
    [(F0[:-1], r"f0: got shape \(7, 2\)"), (F0[None][:0], r"f0: got shape \(0, 8, 2\)"), (F0 * np.nan, r"f0: got nan")],
)
def test_bad_starts_are_refused(f0: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kernel_features(analytic(), C).start(f0)


X32 = np.random.default_rng(5).normal(size=(12, 4)).astype(np.float32)


def test_a_kernel_in_float32_is_known_to_its_rounding() -> None:
    """The products of four numbers have four features, in either precision."""
    both = [X32.astype(dtype) for dtype in (np.float32, np.float64)]
    features = [kernel_features(x @ x.T, 1, 8) for x in both]
    assert [f.train.shape for f in features] == [(8, 4), (8, 4)]
    again = rows_of(features[0]) @ rows_of(features[0]).T
    np.testing.assert_allclose(again, X32 @ X32.T, rtol=1e-4, atol=1e-5)


BLOCKS = kernel_blocks(mlp(3, C, (8,), "erf").kernel, X[:N], X[N:])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (BLOCKS._replace(ntk_train=BLOCKS.ntk_train + np.eye(N, k=1)), C),
            "kernel.ntk_train: got a matrix up to 1 off",
        ),
        ((BLOCKS._replace(ntk_train=BLOCKS.ntk_train * np.nan), C), "kernel.ntk_train: got nan at entry"),
        (
            (BLOCKS._replace(ntk_test_train=BLOCKS.ntk_test_train.T), C),
            r"ntk_test_train \(5, 3\) and ntk_test \(3, 3\)",
        ),
        ((np.eye(4), 0, 2), "output_size: got 0, must be a whole number"),
        ((np.eye(4), 1.5, 2), "output_size: got 1.5, must be a whole number"),
        ((BLOCKS, C, None, "full"), "kernel: got 5 rows of training points, must be a multiple of output_size 2"),
    ],
)
def test_blocks_that_do_not_fit_are_refused(arguments, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kernel_features(*arguments)
