"""Networks trained in a plain loop under the rules that the simulator draws at random, or does not have.

Minibatches in a fixed order, gradient flow (many small steps), FedNova with unequal numbers of steps: the error to the
flow with the analytic kernel falls as width^-1/2, that to a flow without the rule does not.
"""

from __future__ import annotations

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedtangent._src.comparison.statistics import width_slope
from fedtangent._src.comparison.verdicts import SLOPE, SLOPE_MARGIN
from fedtangent._src.kernels.gram import kernel_blocks
from fedtangent._src.models.dense import mlp
from fedtangent._src.theory.flow import Rule, federated_flow
from fedtangent._src.types import Cohort, Partition

WIDTHS, NETWORKS, ROUNDS = (128, 512, 2048), 12, 6
RATES = {"minibatches": 0.4, "gradient flow": 0.8, "fed_nova": 0.4}  # small steps are a flow
SIZES, STEPS = np.array([2, 3, 4, 6]), np.array([2, 3, 4, 6])
FINE = 40  # small steps for one of the flow's
RNG = np.random.default_rng(5)
X, Y = RNG.standard_normal((15, 3)), RNG.standard_normal((15, 2))
OFFSETS = np.cumsum([0, *SIZES])
ROWS = [np.arange(a, b) for a, b in itertools.pairwise(OFFSETS)]
ONE_BY_ONE = [[rows[t : t + 1] for t in range(len(rows))] for rows in ROWS]
RULES = {
    "minibatches": ({"batches": ONE_BY_ONE}, {}),
    "gradient flow": ({"dynamics": "gradient_flow"}, {}),
    "fed_nova": ({"algorithm": "fed_nova"}, {}),
}


def network(width):
    return mlp(3, 2, widths=(width,), activation="erf", w_std=1.5, b_std=0.3, dtype=jnp.float64)


@partial(jax.jit, static_argnums=0)
def descend(width, w, x, y, rate):
    def loss(w):
        return jnp.sum((network(width).apply(w, x) - y) ** 2) / (2 * len(x))

    return jax.tree.map(lambda p, g: p - rate * g, w, jax.grad(loss)(w))


def trained(width: int, key: jax.Array, name: str) -> np.ndarray:
    """The network's outputs before and after all rounds, [2, n, C]."""
    model = network(width)
    w = model.init(key)
    seen = [np.asarray(model.apply(w, X))]
    share = SIZES / SIZES.sum()
    for _ in range(ROUNDS):
        moved = []
        for rows, steps in zip(ROWS, STEPS, strict=True):
            own = w
            for t in range(steps * (FINE if name == "gradient flow" else 1)):
                batch = rows[t % len(rows)][None] if name == "minibatches" else rows
                own = descend(
                    width, own, X[batch], Y[batch], RATES[name] / FINE if name == "gradient flow" else RATES[name]
                )
            moved.append(jax.tree.map(jnp.subtract, own, w))
        scale = share @ STEPS / STEPS if name == "fed_nova" else np.ones(len(STEPS))
        stacked = jax.tree.map(lambda *m: jnp.stack(m), *moved)
        step = jax.tree.map(partial(jnp.tensordot, share * scale, axes=1), stacked)
        w = jax.tree.map(jnp.add, w, step)
    return np.stack([*seen, np.asarray(model.apply(w, X))])


@pytest.mark.slow
@pytest.mark.theory
@pytest.mark.parametrize("name", RULES)
def test_networks_come_nearer_with_their_width(name):
    blocks = kernel_blocks(network(1).kernel, X, X)
    shape = (ROUNDS, len(SIZES))
    cohorts = Cohort(
        np.tile(np.arange(4), (ROUNDS, 1)), np.zeros(shape, int), np.tile(SIZES.astype(float), (ROUNDS, 1))
    )
    held = Partition(np.arange(15, dtype=np.int32), OFFSETS.astype(np.int32))
    right, wrong = (federated_flow(blocks, Y, held, cohorts, Rule(STEPS, RATES[name], **rule)) for rule in RULES[name])
    found: dict[str, list[np.ndarray]] = {"right": [], "wrong": []}
    for width in WIDTHS:
        runs = np.stack([trained(width, jax.random.key(100 + e), name) for e in range(NETWORKS)])
        for what, flow in (("right", right), ("wrong", wrong)):
            predicted = np.stack([flow.predict_train(run[0], ROUNDS, 0) for run in runs])
            moved = np.linalg.norm(predicted - runs[:, 0], axis=(1, 2))
            found[what].append(np.linalg.norm(predicted - runs[:, 1], axis=(1, 2)) / moved)
    band = SLOPE - SLOPE_MARGIN, SLOPE + SLOPE_MARGIN
    assert width_slope(WIDTHS, found["right"]).within(*band), found
    assert width_slope(WIDTHS, found["wrong"]).outside(*band), found
