"""Models linear in their weights: linear in the inputs, or in radial basis functions of one number.

The first is from the Local-GD paper (section 2), the second from Fed-ensemble (2024, section V-A).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Float, Shaped

from fedtangent._src import checks
from fedtangent._src.checks import number, whole
from fedtangent._src.models.dense import flatten_inputs
from fedtangent._src.models.entry import CROSS_ENTROPY, EXPONENTIAL, LOGISTIC, MOST_UNITS, SQUARED_ERROR, network
from fedtangent._src.models.kernels import KERNELS, Blocks, Kernels, as_floating, check_dtype, check_get, select
from fedtangent._src.types import AnyArray, Array, ArrayLike, Key, Model, PyTree


class LinearStructure(NamedTuple):
    """A model linear in its parameters: ``f(x) = features(x) @ params["weights"]``.

    ``features`` maps inputs [n, ...] to [n, num_features].
    """

    features: Callable[[AnyArray], AnyArray]  # x [n, ...] -> [n, num_features], in x's dtype


@partial(jax.jit, static_argnames="sigma")
def _gram(
    phi1: Float[Array, "n f"], phi2: Float[Array, "m f"], sigma: float
) -> tuple[Float[Array, "n m"], Float[Array, "n m"]]:
    """Computes the prior covariance and the tangent kernel of ``f = phi w`` with weights w ~ N(0, sigma^2).

    ``phi1`` and ``phi2`` are the features of the two batches of inputs.
    """
    gram = phi1 @ phi2.T
    return sigma**2 * gram, gram


@network(
    {"sigma": None},
    ("localgd",),
    learning_rates={SQUARED_ERROR: 0.03, CROSS_ENTROPY: 1.0, EXPONENTIAL: 0.03, LOGISTIC: 1.0},
)
def linear(input_size: int, output_size: int = 1, sigma: float = 0.0, dtype: DTypeLike = jnp.float32) -> Model:
    """Builds a model linear in the inputs, ``f(x) = x W``, without a bias (section 2 of the Local-GD paper).

    Inputs [n, ...] are flattened to [n, d]. ``params["weights"]`` is [d, C] and starts as N(0, sigma^2). The paper
    has C = 1 and starts at W = 0. The kernel is exact at any size, not a limit of infinite width: ``nngp = sigma^2 x1
    x2'`` and ``ntk = x1 x2'``, [n1, n2] each.

    Args:
        input_size: Numbers d of an example.
        output_size: Number of outputs C.
        sigma: Standard deviation of the initial weights (0: every run starts as the zero function).
        dtype: Type of the parameters.

    Raises:
        ValueError: A size is below 1, ``sigma`` is negative, or ``dtype`` is not floating. ``init`` raises it for
            ``float64`` without 64-bit mode.
    """
    for name, size in (("input_size", input_size), ("output_size", output_size)):
        whole(name, size)
    number("sigma", sigma, at_least=0)
    features = partial(flatten_inputs, input_size=int(input_size))
    return _of_features(f"linear({input_size})", features, int(input_size), float(sigma), output_size, dtype)


def _of_one_number(input_shape: tuple[int, ...], output_size: int) -> dict[str, int]:
    if math.prod(input_shape) != 1:
        raise ValueError(
            f"model: got 'rbf_linear' for examples of shape {input_shape}, must be another model: it takes one number"
        )
    return {"output_size": output_size}


@network(
    {"num_features": MOST_UNITS, "bandwidth": None, "sigma": None},
    ("shi2024",),
    _of_one_number,
    kinds=("vector",),
    learning_rates={SQUARED_ERROR: 0.1},
)
def rbf_linear(
    num_features: int = 100,
    bandwidth: float = 0.08,
    sigma: float = 1.0,
    seed: int = 0,
    output_size: int = 1,
    dtype: DTypeLike = jnp.float32,
) -> Model:
    """Builds a linear model of radial basis functions of one number (Fed-ensemble, 2024, section V-A).

    It is ``f(x) = sum_p w_p exp(-(x - v_p)^2 / (2 b^2))`` for scalar ``x``. The defaults of ``num_features`` and
    ``bandwidth`` come from this paper, which does not state sigma. ``params["weights"]`` is [num_features, C]. The
    kernel is exact, not a limit of infinite width. With the vector phi(x) of all basis functions it is ``nngp = sigma^2
    phi(x1) phi(x2)'`` and ``ntk = phi(x1) phi(x2)'``, [n1, n2] each.

    Args:
        num_features: Number of basis functions.
        bandwidth: Width b of each.
        sigma: Standard deviation of the initial weights, which are N(0, sigma^2).
        seed: Seed of the centres v_p, which are uniform in [-1, 1] and stay fixed.
        output_size: Number of outputs C.
        dtype: Type of the parameters.

    Raises:
        ValueError: A size is below 1, ``bandwidth`` is not positive, ``sigma`` is negative, ``seed`` is not from 0 to
            2^32 - 1, or ``dtype`` is not floating. ``init`` raises it for ``float64`` without 64-bit mode.
    """
    for name, size in (("num_features", num_features), ("output_size", output_size)):
        whole(name, size)
    number("bandwidth", bandwidth, above=0)
    number("sigma", sigma, at_least=0)
    centres = np.random.default_rng(checks.seed(seed)).uniform(-1.0, 1.0, num_features)

    def features(x: Shaped[AnyArray, "n ..."]) -> Float[Array, "n num_features"]:
        x = flatten_inputs(x, 1)
        return jnp.exp(-((x - jnp.asarray(centres, x.dtype)[None, :]) ** 2) / (2 * float(bandwidth) ** 2))

    name = f"rbf_linear({num_features}, b={bandwidth}, seed={seed})"
    return _of_features(name, features, num_features, float(sigma), output_size, dtype)


def _of_features(
    name: str,
    features: Callable[[AnyArray], AnyArray],
    num_features: int,
    sigma: float,
    output_size: int,
    dtype: DTypeLike,
) -> Model:
    """Builds the model ``features(x) @ weights`` with initial weights from N(0, sigma^2)."""
    features = jax.jit(features)
    check_dtype(dtype, needs_x64=False)

    def init(key: Key) -> PyTree:
        check_dtype(dtype, needs_x64=True)
        return {"weights": sigma * jax.random.normal(key, (num_features, output_size), dtype)}

    def apply(params: PyTree, x: Shaped[AnyArray, "n ..."]) -> Float[Array, "n C"]:
        return features(x.astype(params["weights"].dtype)) @ params["weights"]

    def kernel(x1: ArrayLike, x2: ArrayLike | None = None, get: str | tuple[str, ...] = KERNELS) -> Blocks:
        names = check_get(get)
        phi1 = jnp.asarray(features(as_floating(x1)))
        nngp, gram = _gram(phi1, phi1 if x2 is None else jnp.asarray(features(as_floating(x2))), sigma)
        blocks = Kernels(nngp=nngp if "nngp" in names else None, ntk=gram if "ntk" in names else None)
        return select(blocks, get)

    return Model(
        name=name,
        init=init,
        apply=apply,
        kernel=kernel,
        output_size=output_size,
        structure=LinearStructure(features),
        is_linear=True,
        vocabulary=0,
    )
