"""The two-layer ReLU network of NTK-FL (Yue et al., ICML 2022, eq. (12)), and its tangent kernel (eq. (13) there).

``f(v; x) = n^{-1/2} sum_r c_r max(v_r' x, 0)`` has n neurons with trained weights v_r and fixed signs c_r. The factor
``n^{-1/2}`` corrects eq. (12) (erratum `ntk_fl.12`). The tangent kernel of inputs x_i and x_j is ``1/n x_i' x_j`` times
the number of neurons that are active (``v_r' x > 0``) at both.
"""

from __future__ import annotations

from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Float, Float64, Shaped

from fedtangent._src import checks
from fedtangent._src.checks import number, symmetric, whole
from fedtangent._src.models.dense import flatten_inputs
from fedtangent._src.models.kernels import KERNELS, Blocks, Kernels, as_floating, check_dtype, check_get, select
from fedtangent._src.types import AnyArray, Array, ArrayLike, Key, Model, PyTree


def two_layer_relu(
    input_size: int,
    width: int,
    alpha: float = 1.0,
    covariance: ArrayLike | None = None,
    seed: int = 0,
    dtype: DTypeLike = jnp.float32,
) -> Model:
    """Builds ``f(v; x) = n^{-1/2} sum_r c_r max(v_r' x, 0)`` of n neurons with one output; only v is trained.

    ``init(key)`` draws ``{"v": [n, input_size]}`` (Assumption 1 of the NTK-FL paper). ``kernel`` is the one of infinite
    width: ``ntk`` is eq. (13) of that paper, for any signs c; ``nngp`` is the covariance of the initial f over random v
    and c.

    Args:
        input_size: Number of features of an example.
        width: Number n of neurons.
        alpha: Standard deviation of v: rows are N(0, alpha^2 I).
        covariance: Covariance of the rows of v, [input_size, input_size]; None for ``alpha^2 I``.
        seed: Seed of the signs c, +1 or -1 with equal probability, which are no parameters (``output_signs``).
        dtype: Type of the parameters.

    Raises:
        ValueError: A size is below 1, ``alpha`` is not positive, the covariance is not [input_size, input_size],
            symmetric and positive definite, there is a covariance and ``alpha`` is not 1, ``seed`` is not from 0 to
            2^32 - 1, or ``dtype`` is not floating. ``init`` raises it for ``float64`` without 64-bit mode.
    """
    for name, size in (("input_size", input_size), ("width", width)):
        whole(name, size)
    check_dtype(dtype, needs_x64=False)
    spread = _spread(input_size, alpha, covariance)
    signs = output_signs(width, seed)

    def init(key: Key) -> PyTree:
        check_dtype(dtype, needs_x64=True)
        normal = jax.random.normal(key, (width, input_size), dtype)
        return {"v": normal @ jnp.asarray(spread.T, dtype)}

    def apply(params: PyTree, x: Shaped[AnyArray, "n ..."]) -> Float[Array, "n 1"]:
        v = params["v"]
        hidden = jax.nn.relu(flatten_inputs(x, input_size).astype(v.dtype) @ v.T)
        return hidden @ jnp.asarray(signs / np.sqrt(width), v.dtype)[:, None]

    def kernel(x1: ArrayLike, x2: ArrayLike | None = None, get: str | tuple[str, ...] = KERNELS) -> Blocks:
        names = check_get(get)
        first = flatten_inputs(as_floating(x1), input_size)
        second = None if x2 is None else flatten_inputs(as_floating(x2), input_size)
        nngp, ntk = map(jnp.asarray, arc_cosine(first, second, spread))
        return select(Kernels(nngp if "nngp" in names else None, ntk if "ntk" in names else None), get)

    return Model(
        name=f"two_layer_relu({input_size}-{width}-1)",
        init=init,
        apply=apply,
        kernel=kernel,
        output_size=1,
        at_width=lambda other: two_layer_relu(input_size, other, alpha, covariance, seed, dtype),
        vocabulary=0,
    )


def output_signs(width: int, seed: int = 0) -> Float64[np.ndarray, "width"]:
    """Draws the fixed second layer c, each entry +1 or -1 with equal probability.

    Args:
        width: Number n of neurons.
        seed: Seed of the draw, from 0 to 2^32 - 1.
    """
    return np.random.default_rng(checks.seed(seed)).choice(np.array([-1.0, 1.0]), width)


def arc_cosine(
    x1: Float[AnyArray, "n1 d"], x2: Float[AnyArray, "n2 d"] | None, spread: Float64[np.ndarray, "d d"]
) -> tuple[Float[AnyArray, "n1 _"], Float[AnyArray, "n1 _"]]:
    """Computes the prior and the tangent kernel of ``two_layer_relu`` at infinite width, [n1, n2] each.

    For inputs a of ``x1`` and b of ``x2``, weights v ~ N(0, A A') and the ReLU s, these are ``E[s(v.a) s(v.b)]`` and
    ``a.b P(v.a >= 0, v.b >= 0)``. The second, eq. (13) of the NTK-FL paper, equals ``a.b (pi - theta) / (2 pi)``, where
    theta is the angle between A'a and A'b. NumPy arrays are computed in NumPy, JAX arrays in JAX.

    Args:
        x1: Inputs [n1, d].
        x2: Inputs [n2, d]; None means ``x1``; the angle of an input with itself is then exactly 0.
        spread: A [d, d].
    """
    xp: ModuleType = np if isinstance(x1, np.ndarray) else jnp
    second = x1 if x2 is None else x2
    turned = [xp.asarray(x @ spread, x.dtype) for x in (x1, second)]
    norms = [xp.sqrt(xp.sum(t**2, axis=1)) for t in turned]
    product = norms[0][:, None] * norms[1][None, :]
    cosine = xp.clip(turned[0] @ turned[1].T / xp.where(product == 0, 1, product), -1, 1)
    if x2 is None:
        # an arc cosine next to 1 would keep half of the digits
        same = xp.eye(len(x1), dtype=bool) & (product > 0)
        cosine = xp.where(same, xp.ones((), x1.dtype), cosine)
    angle = xp.arccos(cosine)
    nngp = product * (xp.sin(angle) + (np.pi - angle) * cosine) / (2 * np.pi)
    return nngp, (x1 @ second.T) * (np.pi - angle) / (2 * np.pi)


def _spread(input_size: int, alpha: float, covariance: ArrayLike | None) -> Float64[np.ndarray, "d d"]:
    """Returns a matrix A [d, d] such that ``A A'`` is the covariance of each row of v in ``two_layer_relu``."""
    number("alpha", alpha, above=0)
    if covariance is None:
        return float(alpha) * np.eye(input_size)
    if alpha != 1.0:
        raise ValueError(f"alpha: got {alpha!r}, must be left out where a covariance is given")
    return square_root(covariance, input_size)


def square_root(covariance: ArrayLike, input_size: int) -> Float64[np.ndarray, "d d"]:
    """Computes the lower Cholesky factor A of a covariance ``A A'``, [d, d].

    Args:
        covariance: Covariance of the initial weights of each neuron, [d, d].
        input_size: Number d of features of an example.

    Raises:
        ValueError: The covariance is not [d, d], symmetric and positive definite.
    """
    matrix = symmetric("covariance", covariance)
    if matrix.shape != (input_size, input_size):
        raise ValueError(f"covariance: got shape {matrix.shape}, must be {(input_size, input_size)}")
    try:
        return np.linalg.cholesky(matrix)
    except np.linalg.LinAlgError as error:
        least = float(np.linalg.eigvalsh(matrix)[0])
        raise ValueError(f"covariance: got a least eigenvalue of {least:.3g}, must be positive definite") from error
