"""Features of a kernel: a linear model whose tangent kernel is a given matrix, for runs without a closed form."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Float64

from fedtangent._src import checks
from fedtangent._src.kernels.gram import KernelBlocks, joined
from fedtangent._src.types import AnyArray, Array, ArrayLike, Key, Model, PyTree

FEWEST_COPIES, FEWEST_WEIGHTS = 4, 4096  # of each feature and of all features in a rotated basis
OUTPUTS = ("shared", "full")
LARGEST_REMAINDER = 1e-6  # share of an initial function that may lie outside the span of the features
NEGATIVE = 1e-8  # the most negative eigenvalue that rounding explains, relative to the largest


@dataclasses.dataclass(frozen=True)
class KernelFeatures:
    """Features phi of a kernel at training and test points, ``phi phi' = Theta``, and the model linear in them.

    ``simulate`` trains the model on the features, as it trains a network on its inputs. If the algorithm treats all
    directions of weight space alike, the functions along the run depend on Theta only, not on the choice of phi.

    Attributes:
        model: The model ``phi(x) W``, whose weights start at zero.
        train: Features of the training points, [n, r]; [n, C, r] for a kernel that couples outputs.
        test: Features of the test points, [m, r] or [m, C, r].
        left_inverse: Matrix [r, p] that maps a function's values at all p points (or pairs of point and output) to
            weights.
        mix: Orthogonal matrix [C, C] by which the model multiplies its outputs; the identity unless ``rotated``.
    """

    model: Model
    train: Float64[np.ndarray, "n *C r"]
    test: Float64[np.ndarray, "m *C r"]
    left_inverse: Float64[np.ndarray, "r p"]
    mix: Float64[np.ndarray, "C C"]

    def start(self, f0: Float[AnyArray, "*K points C"]) -> PyTree:
        """Computes the weights with which the model starts as the function ``f0``.

        Args:
            f0: Initial function at all points, training points first, [n + m, C]; or of K models, [K, n + m, C].

        Returns:
            Weights for the argument ``start`` of ``simulate``: [r, C] of one model, [K, r, C] of K models; [r] and
            [K, r] for a kernel that couples outputs.

        Raises:
            ValueError: ``f0`` has another shape, is not finite, or is no combination of the features.
        """
        phi, functions = np.concatenate([self.train, self.test]), checks.real_array("f0", f0).astype(np.float64)
        if functions.ndim not in (2, 3) or 0 in functions.shape or functions.shape[-2:] != (len(phi), len(self.mix)):
            allowed = f"({len(phi)}, {len(self.mix)}), or one such array for each model"
            raise ValueError(f"f0: got shape {functions.shape}, must be {allowed}")
        checks.finite("f0", functions)
        is_coupled, r = phi.ndim == 3, phi.shape[-1]
        rows = phi.reshape(-1, r)
        values = functions.reshape(*functions.shape[:-2], -1, 1) if is_coupled else functions @ self.mix
        weights = self.left_inverse @ values
        size, remainder = np.max(np.abs(values)), np.max(np.abs(rows @ weights - values))
        if remainder > LARGEST_REMAINDER * size:
            raise ValueError(
                f"f0: got a function that differs by {remainder / size:.2g} of its size from all combinations of the "
                f"kernel's features, must be at most {LARGEST_REMAINDER:g}: spanned(f0) removes the difference"
            )
        return jnp.asarray(weights[..., 0] if is_coupled else weights)

    def spanned(self, f0: Float[AnyArray, "*K points C"]) -> Float64[np.ndarray, "*K points C"]:
        """Returns the part of each function that is a combination of the features.

        The kernel must be one that the outputs share. Functions drawn with a singular covariance have rounding errors
        outside this part.

        Args:
            f0: Functions at all points, training points first, [n + m, C], or of K models [K, n + m, C].
        """
        return np.asarray(np.concatenate([self.train, self.test]) @ (self.left_inverse @ np.asarray(f0, np.float64)))

    def rotated(self, seed: int) -> KernelFeatures:
        """Returns features of the same kernel in a random basis of a larger weight space.

        The r features are rotated at random, and each is spread, with random signs, over equally many weights: at least
        4 a feature, and at least 4096 in all. Outputs that share the kernel are rotated too. The model has the same
        functions as before.

        Args:
            seed: Seed, from 0 to 2^32 - 1, of the rotations, which are uniform, and of the signs.
        """
        rng, is_coupled = np.random.default_rng(checks.seed(seed)), self.train.ndim == 3
        r = self.train.shape[-1]
        copies = max(FEWEST_COPIES, -(-FEWEST_WEIGHTS // r))
        signs = rng.choice([-1.0, 1.0], copies * r) / np.sqrt(copies)
        turn = np.repeat(_random_rotation(rng, r), copies, axis=1) * signs
        mix = self.mix if is_coupled else _random_rotation(rng, len(self.mix)) @ self.mix
        return KernelFeatures(
            feature_model(copies * r, mix, is_coupled),
            self.train @ turn,
            self.test @ turn,
            turn.T @ self.left_inverse,
            mix,
        )


def kernel_features(
    kernel: KernelBlocks | ArrayLike, output_size: int = 1, num_train: int | None = None, outputs: str = "shared"
) -> KernelFeatures:
    """Computes features of a kernel, and the linear model that has this kernel as its tangent kernel.

    The kernel is factored by its eigenvectors. Eigenvalues below the rounding error of the largest one are dropped, so
    that a singular kernel, for example of repeated points, has fewer features than rows.

    Args:
        kernel: Tangent kernel at n training and m test points: ``KernelBlocks`` with ``ntk_test``, or a symmetric
            positive semidefinite matrix [n + m, n + m], training points first.
        output_size: Number of outputs C.
        num_train: Number n of training points of a matrix; None with ``KernelBlocks``.
        outputs: "shared" if all outputs have the same kernel and are independent; "full" if the kernel couples outputs:
            then it is [(n + m) C, (n + m) C], the C rows of one point adjacent.

    Returns:
        Features at training and test points, and the model.

    Raises:
        ValueError: The kernel is not symmetric and finite, has a negative eigenvalue or is 0, a size does not fit,
            ``KernelBlocks`` lack ``ntk_test``, ``num_train`` is missing or not needed, or ``outputs`` is unknown.

    Example, the features of a dense network's kernel at four training and two test points:

        >>> import numpy as np, fedtangent as ft
        >>> network = ft.models.mlp(input_size=1, output_size=1, widths=(64,))
        >>> kernels = ft.kernels.kernel_blocks(network.kernel, np.linspace(-1, 1, 4)[:, None], [[-0.5], [0.5]])
        >>> features = ft.models.kernel_features(kernels)
        >>> features.train.shape, features.test.shape
        ((4, 6), (2, 6))
        >>> bool(np.allclose(features.train @ features.train.T, kernels.ntk_train))
        True
    """
    checks.choice("outputs", outputs, OUTPUTS)
    checks.whole("output_size", output_size)
    rows_per_point = output_size if outputs == "full" else 1
    if isinstance(kernel, KernelBlocks):
        if num_train is not None:
            raise ValueError(f"num_train: got {num_train}, must be None with KernelBlocks, which hold the number")
        theta, rows = _joined(kernel), len(kernel.ntk_train)
    else:
        theta = checks.symmetric("kernel", kernel)
        if num_train is None:
            raise ValueError("num_train: got None, must be the number of training points, whose rows come first")
        rows = checks.whole("num_train", num_train, 1, len(theta) // rows_per_point) * rows_per_point
    for count, points in ((rows, "training"), (len(theta) - rows, "test")):
        if count % rows_per_point:
            raise ValueError(
                f"kernel: got {count} rows of {points} points, must be a multiple of output_size {output_size}"
            )
    # a kernel in float32 is known to the rounding of float32
    dtype = np.result_type(kernel.ntk_train if isinstance(kernel, KernelBlocks) else np.asarray(kernel))
    rounding = len(theta) * max(np.finfo(dtype).eps if dtype.kind == "f" else 0.0, np.finfo(np.float64).eps)
    eigenvalues, vectors = np.linalg.eigh(theta)
    smallest, largest = float(eigenvalues[0]), float(eigenvalues[-1])
    if smallest < -max(NEGATIVE, rounding) * largest:
        raise ValueError(f"kernel: got eigenvalues from {smallest:.3g} to {largest:.3g}, must be positive semidefinite")
    if not largest > 0:
        raise ValueError("kernel: got zeros only, must have a positive eigenvalue")
    is_kept = eigenvalues > rounding * largest
    scale, basis = np.sqrt(eigenvalues[is_kept]), vectors[:, is_kept]
    train, test = (basis * scale)[:rows], (basis * scale)[rows:]
    if outputs == "full":
        train, test = (part.reshape(-1, rows_per_point, len(scale)) for part in (train, test))
    mix = np.eye(output_size)
    model = feature_model(len(scale), mix, outputs == "full")
    return KernelFeatures(model, train, test, (basis / scale).T, mix)


def _joined(kernel: KernelBlocks) -> Float64[np.ndarray, "p p"]:
    """Returns the tangent kernel at all points; raises ``ValueError`` if its three blocks do not fit together."""
    if kernel.ntk_test is None:
        raise ValueError("kernel: got KernelBlocks without ntk_test, must have it: kernels.kernel_blocks computes it")
    train, cross, test = (np.asarray(b) for b in (kernel.ntk_train, kernel.ntk_test_train, kernel.ntk_test))
    if cross.shape != (len(test), len(train)):
        shapes = f"ntk_train {train.shape}, ntk_test_train {cross.shape} and ntk_test {test.shape}"
        raise ValueError(f"kernel: got {shapes}, must be [n, n], [m, n] and [m, m]")
    for name, block in (("ntk_train", train), ("ntk_test", test)):
        checks.symmetric(f"kernel.{name}", block)
    checks.finite("kernel.ntk_test_train", cross)
    return joined(train, cross, test).astype(np.float64)


def feature_model(size: int, mix: Float64[AnyArray, "C C"], is_coupled: bool) -> Model:
    """Builds the model ``phi W mix'`` whose inputs are features phi, or ``phi w`` for a kernel that couples outputs.

    Its weights start at zero, whatever the key. Inputs are [n, r], or [n, C, r] for a kernel that couples outputs;
    ``apply`` raises ``ValueError`` for inputs with another number of features.

    Args:
        size: Number r of features.
        mix: Orthogonal matrix [C, C] by which outputs are multiplied; for a kernel that couples outputs only its size
            counts.
        is_coupled: Whether the kernel couples outputs.
    """

    def init(key: Key) -> PyTree:
        return jnp.zeros((size,) if is_coupled else (size, len(mix)))

    def apply(params: Float[AnyArray, "r *C"], x: Float[AnyArray, "n *Cr"]) -> Float[Array, "n C"]:
        if x.shape[-1] != size:
            raise ValueError(
                f"x: got inputs of shape {x.shape}, must be the {size} features of training or test points"
            )
        outputs = jnp.asarray(x, params.dtype) @ params
        return outputs if is_coupled else outputs @ jnp.asarray(mix.T, params.dtype)

    return Model("kernel features", init, apply, None, len(mix), is_linear=True, vocabulary=0)


def _random_rotation(rng: np.random.Generator, size: int) -> Float64[np.ndarray, "size size"]:
    """Draws an orthogonal matrix [size, size] from the uniform distribution."""
    q, upper = np.linalg.qr(rng.standard_normal((size, size)))
    return q * np.sign(np.diag(upper))
