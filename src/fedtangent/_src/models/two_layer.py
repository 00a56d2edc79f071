"""The two-layer ReLU network of NTK-FL's analysis (Yue et al., ICML 2022, eq. 12), with the kernel of eq. (13).

``f(v; x) = n^{-1/2} sum_r c_r max(v_r' x, 0)``: the first layer v is trained, the signs c stay fixed. With the factor
``n^{-1/2}`` (erratum `ntk_fl.12`) the tangent kernel is ``1/n x_i' x_j sum_r 1_ir 1_jr``.
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

    ``init(key)`` draws ``{"v": [n, input_size]}`` (Assumption 1). ``kernel``: ``ntk`` is eq. (13), for any signs c;
    ``nngp`` is the covariance of f at the start over random v and c.

    Args:
        input_size: Numbers of an example.
        width: Number n of neurons.
        alpha: Standard deviation of v: rows are N(0, alpha^2 I).
        covariance: Covariance of the rows instead, [input_size, input_size].
        seed: Seed of the signs c, +1 or -1 with equal probability, which are no parameters (``output_signs``).
        dtype: Type of the parameters.

    Raises:
        ValueError: A size is below 1, ``alpha`` is not positive, the covariance is not [input_size, input_size],
            symmetric and positive definite, or alpha is not 1 beside a covariance.
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
        seed: Seed of the draw.
    """
    return np.random.default_rng(checks.seed(seed)).choice(np.array([-1.0, 1.0]), width)


def arc_cosine(
    x1: Float[AnyArray, "n1 d"], x2: Float[AnyArray, "n2 d"] | None, spread: Float64[np.ndarray, "d d"]
) -> tuple[Float[AnyArray, "n1 _"], Float[AnyArray, "n1 _"]]:
    """Computes ``(E[s(v.a) s(v.b)], a.b P(v.a >= 0, v.b >= 0))`` for v ~ N(0, A A') and s the ReLU; [n1, n2] each.

    The inputs are a of ``x1`` and b of ``x2``. With theta the angle between A'a and A'b, the second, eq. (13), is
    ``a.b (pi - theta) / (2 pi)``. NumPy arrays are computed in NumPy, JAX arrays in JAX.

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
    """Returns A [d, d] with ``A A'`` the covariance of a row of v."""
    number("alpha", alpha, above=0)
    if covariance is None:
        return float(alpha) * np.eye(input_size)
    if alpha != 1.0:
        raise ValueError(f"alpha: got {alpha!r}, must be left out where a covariance is given")
    return square_root(covariance, input_size)


def square_root(covariance: ArrayLike, input_size: int) -> Float64[np.ndarray, "d d"]:
    """Computes the lower Cholesky factor of a covariance.

    Args:
        covariance: Covariance of the rows of v, [d, d].
        input_size: Numbers d of an example.

    Raises:
        ValueError: Another shape, or a matrix that is not symmetric and positive definite.
    """
    matrix = symmetric("covariance", covariance)
    if matrix.shape != (input_size, input_size):
        raise ValueError(f"covariance: got shape {matrix.shape}, must be {(input_size, input_size)}")
    try:
        return np.linalg.cholesky(matrix)
    except np.linalg.LinAlgError as error:
        least = float(np.linalg.eigvalsh(matrix)[0])
        raise ValueError(f"covariance: got a least eigenvalue of {least:.3g}, must be positive definite") from error
