"""A user's own flax network trained here, beside her own loop: client steps per second of each mapping.

Her loop calls one compiled step of the same optimiser on the same batches, with nothing else: no clients, no server. A
small convolutional network, a residual block with group normalisation, self-attention and an LSTM, as people write them
in flax. A row of 1 loses nothing by running here.

    python benchmarks/own_network.py --output results/bench
"""

from __future__ import annotations

import argparse
import json
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import fedtangent as ft
from fedtangent._src.output.tables import TextTable, console
from fedtangent.types import Model

CLIENTS, STEPS, BATCH, CLASSES = 10, 20, 16, 10


class Convolutional(nn.Module):
    """Two convolutions of 8 and 16 filters, pooled."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for filters in (8, 16):
            x = nn.max_pool(nn.relu(nn.Conv(filters, (3, 3))(x)), (2, 2), (2, 2))
        return nn.Dense(CLASSES)(x.reshape(len(x), -1))


class Residual(nn.Module):
    """A residual block of 16 filters behind a convolution."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Conv(16, (3, 3))(x)
        h = nn.Conv(16, (3, 3))(nn.relu(nn.GroupNorm(4)(x)))
        x = x + nn.Conv(16, (3, 3))(nn.relu(nn.GroupNorm(4)(h)))
        return nn.Dense(CLASSES)(x.mean((1, 2)))


class Attention(nn.Module):
    """Self-attention over the rows of an image."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        h = nn.Dense(32)(x.reshape(*x.shape[:2], -1))
        h = h + nn.SelfAttention(4)(nn.LayerNorm()(h))
        return nn.Dense(CLASSES)((h + nn.Dense(32)(nn.relu(nn.Dense(64)(nn.LayerNorm()(h))))).mean(1))


class Recurrent(nn.Module):
    """An LSTM of 64 units over the rows of an image."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(CLASSES)(jnp.asarray(nn.RNN(nn.LSTMCell(64))(x.reshape(*x.shape[:2], -1)))[:, -1])


NETWORKS: dict[str, nn.Module] = {
    "convolutional": Convolutional(),
    "residual": Residual(),
    "attention": Attention(),
    "recurrent": Recurrent(),
}


class Row(NamedTuple):
    """One network and one way to train it."""

    network: str
    trained_by: str
    steps_per_s: float
    beside_own_loop: float


def best(run: Callable[[], object], steps: int, repeats: int) -> float:
    """Steps per second of the fastest of ``repeats`` runs, after one that compiles."""
    jax.block_until_ready(run())
    seconds = timeit.repeat(lambda: jax.block_until_ready(run()), number=1, repeat=repeats)
    return steps / min(seconds)


def own_loop(model: Model, x: np.ndarray, y: np.ndarray, steps: int) -> Callable[[], object]:
    """A plain loop over batches."""
    optimizer = optax.adam(1e-3)

    @jax.jit
    def step(params: object, state: object, x: jax.Array, y: jax.Array) -> tuple[object, object]:
        def loss(p: object) -> jax.Array:
            return optax.softmax_cross_entropy_with_integer_labels(model.apply(p, x), y).mean()

        updates, state = optimizer.update(jax.grad(loss)(params), state)
        return optax.apply_updates(params, updates), state

    def run() -> object:
        params = model.init(jax.random.key(0))
        state: object = optimizer.init(params)
        for i in range(steps):
            batch = slice(BATCH * i % len(x), BATCH * i % len(x) + BATCH)
            params, state = step(params, state, x[batch], y[batch])
        return params

    return run


def rows_of(name: str, rounds: int, repeats: int) -> list[Row]:
    """The mappings of one network beside the plain loop."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(400, 16, 16, 3)).astype(np.float32), rng.integers(0, CLASSES, 400)
    model = ft.models.from_flax(NETWORKS[name], jnp.zeros((1, 16, 16, 3)), CLASSES)
    clients, schedule = ft.partition.iid(400, CLIENTS, seed=0), ft.schedules.all_clients(CLIENTS)
    work = ft.Work(steps=STEPS, batch_size=BATCH)
    algorithm = ft.fed_avg(model, schedule, work=work, loss="cross_entropy", client_optimizer=optax.adam(1e-3))
    steps = rounds * CLIENTS * STEPS
    speeds = {"own loop": best(own_loop(model, x, y, steps), steps, repeats)}
    data = ft.data.federated_data(x, y, clients)
    for mapping in ("scan", "vmap", "auto"):

        def run(mapping: str = mapping) -> object:
            return ft.simulate(algorithm, data, num_rounds=rounds, seed=0, devices=ft.Devices(mapping)).state

        speeds[mapping] = best(run, steps, repeats)
    return [Row(name, way, speed, speed / speeds["own loop"]) for way, speed in speeds.items()]


def main() -> None:
    """Run, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="folder for own_network.json")
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    rows = [row for name in options.networks for row in rows_of(name, options.rounds, options.repeats)]
    cells = [[cell if isinstance(cell, str) else f"{cell:.3g}" for cell in row] for row in rows]
    console().print(TextTable("A user's network beside her own loop", Row._fields, cells))
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "own_network.json").write_text(json.dumps([row._asdict() for row in rows], indent=2))


if __name__ == "__main__":
    main()
