"""Deep linear networks: products of matrices, whose tangent kernel is linear in the inputs at infinite width."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Float, Shaped

from fedtangent._src.checks import whole
from fedtangent._src.models.dense import DenseLayer, DenseStructure, Sized, flatten_inputs, sizes_of
from fedtangent._src.models.entry import MOST_LAYERS, MOST_UNITS, SQUARED_ERROR, network
from fedtangent._src.models.kernels import AnalyticKernel, StaxNetwork, check_dtype, stax
from fedtangent._src.types import AnyArray, Array, Key, Model, PyTree


def _same(z: Array) -> Array:
    return z


@network({"width": MOST_UNITS, "depth": MOST_LAYERS}, ("liu_deep_linear",), learning_rates={SQUARED_ERROR: 0.3})
def deep_linear(
    input_size: int | Sized,
    output_size: int | None = None,
    width: int = 500,
    depth: int = 3,
    dtype: DTypeLike = jnp.float32,
) -> Model:
    """Builds a deep linear network, whose kernel is linear in the inputs (eq. (1) of the DeepLin paper).

    It is ``f(x) = (m^(L-1) C)^(-1/2) W^L .. W^1 x`` with L matrices whose entries are N(0, 1), and no bias. Parameters
    have the structure of ``mlp``'s: ``params[2 l][0]`` is the transpose of ``W^(l + 1)``, [fan_in, fan_out]. ``apply``
    multiplies the matrices from the output's side before the examples: a step on n examples costs ``O(n d C)`` and
    terms that do not depend on n. The kernel is the limit of infinite width, [n1, n2] for every output: ``nngp = x1 x2'
    / C``, ``ntk = L x1 x2' / C``.

    Args:
        input_size: Numbers d of an example, or a ``Dataset``.
        output_size: Number of outputs C; None with a ``Dataset``.
        width: Width m of the hidden layers.
        depth: Number L of layers, at least 1.
        dtype: Type of the parameters.

    Raises:
        ValueError: A size is below 1 or missing, or ``dtype`` is not floating. ``init`` raises it for ``float64``
            without 64-bit mode.
    """
    input_size, output_size = sizes_of(input_size, output_size)
    for name, size in (("input_size", input_size), ("output_size", output_size), ("width", width), ("depth", depth)):
        whole(name, size)
    check_dtype(dtype, needs_x64=False)
    sizes = (input_size, *(width,) * (depth - 1), output_size)
    scales = [1.0, *(width**-0.5,) * (depth - 1)]
    scales[-1] *= output_size**-0.5
    total = math.prod(scales)

    def init(key: Key) -> PyTree:
        check_dtype(dtype, needs_x64=True)
        params: list[PyTree] = []
        for i, shape in enumerate(itertools.pairwise(sizes)):
            weight = jax.random.normal(jax.random.fold_in(key, i), shape, dtype)
            params.extend([(weight, None), ()] if i + 1 < depth else [(weight, None)])
        return params

    def apply(params: PyTree, x: Shaped[AnyArray, "n ..."]) -> Float[Array, "n C"]:
        product = total * params[-1][0].T  # with rows for outputs: products of few rows are fast, of few columns slow
        for layer in params[-3::-2]:
            product = product @ layer[0].T
        return flatten_inputs(x, input_size).astype(product.dtype) @ product.T

    def descend(
        params: PyTree, x: Array, loss: Callable[[Array], Array], rate: float | Array, steps: Array, most: int | Array
    ) -> tuple[PyTree, Array]:
        together = TOGETHER if isinstance(most, Array) else min(most, TOGETHER)
        weights = tuple(layer[0] for layer in params[::2])
        x, rate = (jnp.asarray(value, weights[0].dtype) for value in (flatten_inputs(x, input_size), rate))
        weights, lost = _descended(weights, total, lambda product: loss(x @ product.T), rate, steps, together)
        return [(weights[i // 2], None) if i % 2 == 0 else () for i in range(len(params))], lost

    def in_stax() -> StaxNetwork:

        layer_of, layers = stax(), zip(sizes[:-1], sizes[1:], scales, strict=True)
        built: StaxNetwork = layer_of.serial(*(layer_of.Dense(m, scale * n**0.5, None) for n, m, scale in layers))
        return built

    return Model(
        name=f"deep_linear({'-'.join(map(str, sizes))})",
        init=init,
        apply=apply,
        kernel=AnalyticKernel(functools.cache(in_stax), lambda x: flatten_inputs(x, input_size)),
        output_size=output_size,
        structure=DenseStructure(input_size, _same, tuple(DenseLayer(scale, None) for scale in scales), descend),
        at_width=None if depth == 1 else lambda width: deep_linear(input_size, output_size, width, depth, dtype),
        is_linear=depth == 1,
        vocabulary=0,
    )


# Steps after which the weights are written. A step alone would read and write every weight for C multiplications of
# each; measured on two cores at the paper's size, 2 to 5 steps are 1.5 times as fast as one by one, 10 less.
TOGETHER = 5


def _descended(
    weights: tuple[Array, ...], scale: float, loss: Callable[[Array], Array], rate: Array, steps: Array, together: int
) -> tuple[tuple[Array, ...], Array]:
    """Takes gradient steps on the loss of a deep linear network, ``loss(scale * W^L .. W^1)``.

    Args:
        weights: Transposes of W^1 to W^L.
        scale: Factor of the product of the weights.
        loss: Loss as a function of the scaled product ``scale * W^L .. W^1``, [C, d].
        rate: Step size.
        steps: Number of steps.
        together: Steps between two writes of the full weight matrices; it changes the speed, not the result.

    Returns:
        The new weights, and the losses before each step, summed over all steps.
    """
    # Multiplied from the output's side, all products and their gradients have C rows, and a weight's gradient is a
    # product of two of them: ``above``, the factor that multiplies the weight, and ``below``, the gradient by their
    # product. So within ``together`` steps a weight is ``w - rate below' above`` and need not be written.
    *hidden, last = weights
    outputs, dtype = last.shape[1], last.dtype
    empty = [[jnp.zeros((together * outputs, size), dtype) for size in w.shape[::-1]] for w in hidden]

    def block(b: Array, carry: PyTree) -> PyTree:
        hidden, last, lost = carry

        def step(t: Array, carry: PyTree) -> PyTree:
            last, factors, lost = carry
            products = [scale * last.T]
            for w, (above, below) in zip(hidden[::-1], factors[::-1], strict=True):
                p = products[-1]
                products.append(p @ w.T - rate * (p @ above.T) @ below)
            value, q = jax.value_and_grad(loss)(products[-1])
            all_rows = []
            for w, (above, below), p in zip(hidden, factors, products[-2::-1], strict=True):
                rows = ((above, p), (below, q))
                all_rows.append([jax.lax.dynamic_update_slice_in_dim(a, row, t * outputs, 0) for a, row in rows])
                q = q @ w - rate * (q @ below.T) @ above
            return last - rate * scale * q.T, all_rows, lost + value.astype(lost.dtype)

        count = jnp.minimum(steps - b * together, together)
        last, factors, lost = jax.lax.fori_loop(0, count, step, (last, empty, lost))
        hidden = [w - rate * below.T @ above for w, (above, below) in zip(hidden, factors, strict=True)]
        return hidden, last, lost

    start = (hidden, last, jnp.zeros((), jnp.float32))
    hidden, last, lost = jax.lax.fori_loop(0, -(-steps // together), block, start)
    return (*hidden, last), lost
