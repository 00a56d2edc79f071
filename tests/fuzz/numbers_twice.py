"""Numbers, computed a second way: NumPy in float64, by the formulas, for settings that are drawn at random.

Each check draws a setting from a generator and compares a result of the package with a second computation, which is
multiplied by ``1 + wrong``: with a ``wrong`` above 0 it must fail (``test_fuzz`` tries that).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from case import Case, drawn
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.stats import norm

import fedtangent as ft

Check = Callable[[np.random.Generator, float], None]
FLOAT32 = 2.0**-22  # a few roundings


def _alike(result: Any, expected: Any, wrong: float, relative: float, size: float | None = None) -> None:
    """Raises ``AssertionError`` for results that differ by more than ``relative`` of the largest (or of ``size``)."""
    expected = np.asarray(expected, np.float64) * (1 + wrong)
    largest = np.abs(expected).max(initial=0) if size is None else size
    np.testing.assert_allclose(np.asarray(result, np.float64), expected, rtol=0, atol=relative * largest + 1e-300)


def _clients(rng: np.random.Generator, num_clients: int) -> list[np.ndarray]:
    ends = np.cumsum(rng.integers(1, 6, num_clients))
    return np.split(rng.permutation(ends[-1]), ends[:-1])


def training(rng: np.random.Generator, wrong: float) -> None:
    """Rounds of FedAvg, FedProx and SCAFFOLD of a linear model, by loops over clients and steps."""
    clients = _clients(rng, rng.integers(1, 5))
    n, d, outputs = sum(map(len, clients)), int(rng.integers(1, 4)), int(rng.integers(1, 3))
    size = 10.0 ** rng.integers(-6, 7)
    x, y = rng.normal(size=(n, d)).astype(np.float32), (size * rng.normal(size=(n, outputs))).astype(np.float32)
    model, steps, rate, server_rate = ft.models.linear(d, outputs), int(rng.integers(1, 4)), 0.1, rng.uniform(0.5, 1.5)
    name, weighting = rng.choice(["fed_avg", "fed_prox", "scaffold"]), str(rng.choice(["examples", "uniform"]))
    mu = 0.5 if name == "fed_prox" else 0.0
    bits = 32 if rng.integers(3) == 0 else None
    averaging = ft.Averaging(server_learning_rate=server_rate, weighting=weighting, secure_aggregation=bits)
    options: dict[str, Any] = {"work": ft.Work(steps=steps), "loss": "squared_error", "averaging": averaging}
    options |= {"mu": mu} if mu else {}
    everyone = ft.schedules.all_clients(len(clients))
    algorithm = getattr(ft, name)(model, everyone, client_learning_rate=rate, **options)
    start = {"weights": (size * rng.normal(size=(d, outputs))).astype(np.float32)}
    mapping = ft.Devices(str(rng.choice(["scan", "vmap"])))
    data = ft.data.federated_data(x, y, clients)
    rounds = int(rng.integers(1, 4))
    run = ft.simulate(algorithm, data, num_rounds=rounds, start=start, devices=mapping)
    phi = np.asarray(model.apply({"weights": jnp.eye(d)}, x), np.float64)
    share = np.array([len(rows) if weighting == "examples" else 1 for rows in clients], float)
    share, w = share / share.sum(), start["weights"].astype(np.float64)
    common, controls = np.zeros_like(w), np.zeros((len(clients), *w.shape))
    for _ in range(rounds):
        moved, changes = [], []
        for i, rows in enumerate(clients):
            v = w.copy()
            for _ in range(steps):
                slope = phi[rows].T @ (phi[rows] @ v - y[rows]) / len(rows) + mu * (v - w)
                v -= rate * (slope + (common - controls[i] if name == "scaffold" else 0))
            moved.append(w - v)
            changes.append((w - v) / (steps * rate) - common)
        common = common + np.tensordot(share, changes, 1)
        controls = controls + np.array(changes)
        w = w - server_rate * np.tensordot(share, moved, 1)
    # the terms of a sum may cancel, so that the error is of the size of what is added up
    largest = max(np.abs(start["weights"]).max(), np.abs(y).max())
    _alike(algorithm.params(run.state)["weights"][0], w, wrong, 50 * FLOAT32, largest)
    assert run.status == "finished"


def uncertainty(rng: np.random.Generator, wrong: float) -> None:
    """Accuracy, log-likelihood, Brier score and calibration error of an ensemble whose logits have any size."""
    models, n, classes = (int(v) for v in (rng.integers(1, 4), rng.integers(1, 40), rng.integers(2, 5)))
    size = 10.0 ** rng.integers(-3, 4)
    members = (size * rng.normal(size=(models, n, classes))).astype(np.float32)
    labels, exact = rng.integers(0, classes, n), members.astype(np.float64)
    top = exact.max(axis=2, keepdims=True)
    logs = exact - top - np.log(np.exp(exact - top).sum(axis=2, keepdims=True))
    highest = logs.max(axis=0)
    log_mean = highest + np.log(np.exp(logs - highest).mean(axis=0))
    p, rows = np.exp(log_mean), np.arange(n)
    measures = ft.measures
    # logits of size s are rounded to s times the unit
    close = 8 * max(size, 1.0) * FLOAT32
    _alike(
        measures.negative_log_likelihood(members, labels), -log_mean[rows, labels].mean(), wrong, close, max(size, 1)
    )
    squares = ((p - np.eye(classes)[labels]) ** 2).sum(axis=1)
    _alike(measures.brier_score(members, labels), squares.mean(), wrong, close, 1.0)
    _alike(measures.accuracy(members, labels), (p.argmax(1) == labels).mean(), wrong, 1e-6)
    bins, confidence = measures.reliability(members, labels, 10), p.max(1)
    edges = np.abs(confidence[:, None] * 10 - np.arange(11)[None]).min(axis=1)
    if edges.min() > 100 * close or size > 100:  # none that rounding may put into the next bin
        where = np.clip(np.ceil(confidence * 10 - 1e-9) - 1, 0, 9).astype(int)
        right = p.argmax(1) == labels
        gaps = [abs((right - confidence)[where == b].sum()) for b in range(10)]
        _alike(measures.calibration_error(bins), sum(gaps) / n, wrong, close, 1.0)


def kernel(rng: np.random.Generator, wrong: float) -> None:
    """The tangent kernel of a network by its Jacobian, in blocks of any size."""
    depth, d, outputs = (int(v) for v in (rng.integers(1, 3), rng.integers(1, 4), rng.integers(1, 3)))
    model = ft.models.mlp(d, outputs, tuple(int(v) for v in rng.integers(2, 7, depth)))
    params = model.init(jax.random.key(int(rng.integers(2**31))))
    x1, x2 = (jnp.asarray(rng.normal(size=(int(rng.integers(1, 8)), d)), jnp.float32) for _ in range(2))

    def rows(x: jax.Array) -> np.ndarray:
        jacobian = jax.jacobian(model.apply)(params, x)
        return np.concatenate(
            [np.asarray(leaf, np.float64).reshape(len(x), outputs, -1) for leaf in jax.tree.leaves(jacobian)], axis=2
        )

    block, trace = rng.choice([None, 1, 2, 3]), bool(rng.integers(2))
    both = rng.integers(2) == 0
    result = ft.kernels.empirical_ntk(model, params, x1, x2 if both else None, trace=trace, block_size=block)
    whole = np.einsum("ikp,jmp->ikjm", rows(x1), rows(x2 if both else x1))
    _alike(result, np.einsum("ikjk->ij", whole) / outputs if trace else whole, wrong, 64 * FLOAT32)


def limit(rng: np.random.Generator, wrong: float) -> None:
    """The Gaussian-process limit by a plain solve."""
    n, m, outputs = (int(v) for v in (rng.integers(1, 8), rng.integers(1, 6), rng.integers(1, 3)))
    theta_root, prior_root = (rng.normal(size=(n + m, n + m + 3)) for _ in range(2))
    theta, prior = theta_root @ theta_root.T, prior_root @ prior_root.T
    y = 10.0 ** rng.integers(-6, 7) * rng.normal(size=(n, outputs))
    blocks = ft.kernels.KernelBlocks(
        theta[:n, :n], theta[n:, :n], prior[:n, :n], prior[n:, :n], prior[n:, n:], theta[n:, n:]
    )
    result = ft.theory.gp_limit(blocks, y)
    b = np.linalg.solve(theta[:n, :n], theta[:n, n:]).T
    digits = 1e-13 * np.linalg.cond(theta[:n, :n])
    _alike(result.mean, b @ y, wrong, digits)
    cross = b @ prior[:n, n:]
    _alike(result.cov, prior[n:, n:] + b @ prior[:n, :n] @ b.T - cross - cross.T, wrong, digits, np.abs(prior).max())


def flow(rng: np.random.Generator, wrong: float) -> None:
    """The mean of the federated kernel flow, by gradient steps on the weights of a linear model."""
    ft.enable_x64()
    clients = _clients(rng, rng.integers(1, 4))
    n, m, d, steps, rounds = sum(map(len, clients)), 3, 4, int(rng.integers(1, 4)), int(rng.integers(1, 5))
    phi, y = rng.normal(size=(n + m, d)), rng.normal(size=(n, 2))
    theta, rate, server_rate = phi @ phi.T, 0.05, rng.uniform(0.5, 1.5)
    blocks = ft.kernels.KernelBlocks(
        theta[:n, :n], theta[n:, :n], theta[:n, :n], theta[n:, :n], theta[n:, n:], theta[n:, n:]
    )
    offsets = np.concatenate([[0], np.cumsum([len(rows) for rows in clients])]).astype(np.int32)
    partition = ft.types.Partition(np.concatenate(clients).astype(np.int32), offsets)
    share = rng.uniform(0.1, 1, (rounds, len(clients))) * (rng.random((rounds, len(clients))) < 0.8)
    share[:, 0] += 0.1
    who = np.broadcast_to(np.arange(len(clients), dtype=np.int32), share.shape)
    mu = float(rng.choice([0.0, 0.5]))
    rule = ft.theory.Rule(steps, rate, mu=mu, server_learning_rate=server_rate)
    result = ft.theory.federated_flow(blocks, y, partition, ft.types.Cohort(who, np.zeros_like(who), share), rule)
    w = np.zeros((d, 2))
    for weights in share:
        moved = np.zeros_like(w)
        for part, rows in zip(weights / weights.sum(), clients, strict=True):
            v = w.copy()
            for _ in range(steps):
                v -= rate * (phi[rows].T @ (phi[rows] @ v - y[rows]) / len(rows) + mu * (v - w))
            moved += part * (w - v)
        w = w - server_rate * moved
    _alike(result.mean(rounds)[0], phi[n:] @ w, wrong, 1e-11)


def partition(rng: np.random.Generator, wrong: float) -> None:
    """Every example has one client, and each client the number that the partition promises."""
    labels = rng.choice(int(rng.integers(1, 6)), int(rng.integers(12, 60)), p=None)
    n, num_clients, seed = len(labels), int(rng.integers(1, 9)), int(rng.integers(1000))
    alpha = float(10.0 ** rng.integers(-4, 4))
    parts = [
        ft.partition.iid(n, num_clients, seed),
        ft.partition.quantity_skew(n, num_clients, alpha, seed),
        *(ft.partition.dirichlet(labels, num_clients, alpha, seed, dirichlet_method=m) for m in METHODS),
    ]
    for part in parts:
        _alike(np.bincount(part.indices, minlength=n), np.ones(n), wrong, 1e-9)
    assert np.ptp(parts[0].sizes) <= 1 and np.ptp(parts[2].sizes) <= 1 and min(p.sizes.min() for p in parts) >= 1


METHODS = ("per_client", "hsu", "per_class")


def channel(rng: np.random.Generator, wrong: float) -> None:
    """A channel treats a message and its 2^k-fold alike, to the last bit; the norm of a clip grows with them."""
    power, values = 2.0 ** int(rng.integers(-60, 61)), rng.normal(size=int(rng.integers(1, 30))).astype(np.float32)
    bits, share = int(rng.integers(2, 9)), float(rng.uniform(0.05, 1))
    channels, key = ft.channels, jax.random.key(int(rng.integers(2**31)))

    def of(scale: float) -> ft.types.Channel:
        kinds = [
            lambda: channels.qsgd(bits),
            lambda: channels.uniform_quantiser(bits),
            lambda: channels.top_k(fraction=share),
            lambda: channels.random_k(fraction=share),
            lambda: channels.clip(scale * share),
            lambda: channels.chain(channels.clip(scale * share), channels.top_k(fraction=share), channels.qsgd(bits)),
        ]
        return kinds[kind]()

    kind = int(rng.integers(6))
    small, large = (of(s).send(key, {"a": jnp.asarray(values * s)}, ())[0]["a"] for s in (1.0, power))
    _alike(np.asarray(large, np.float64) / power, small, wrong, 1e-6)
    if kind == 4:
        length = np.linalg.norm(values.astype(np.float64))
        _alike(small, values * min(1, share / length), wrong, 4 * FLOAT32)


def privacy(rng: np.random.Generator, wrong: float) -> None:
    """Epsilon of all clients in every round lies between the exact one of Gaussian noise and the bound of zCDP."""
    noise, rounds, delta = (
        float(10 ** rng.uniform(-0.5, 2)),
        int(rng.integers(1, 50)),
        float(10.0 ** rng.integers(-8, -1)),
    )
    of_run = {"num_clients": 10, "clients_per_round": 10, "num_rounds": rounds, "delta": delta}
    result = ft.measures.epsilon(noise_multiplier=noise, sampling="poisson", **of_run)
    move = math.sqrt(rounds) / noise

    def lacking(epsilon: float) -> float:  # Balle and Wang, 2018, theorem 8
        first = norm.cdf(move / 2 - epsilon / move)
        return float(first - math.exp(epsilon + norm.logcdf(-move / 2 - epsilon / move)) - delta)

    exact = 0.0 if lacking(0.0) <= 0 else brentq(lacking, 0.0, 10 * move**2 + 100 * move)
    rho = move**2 / 2
    assert exact * (1 + wrong) <= result * (1 + 1e-9) + 1e-12, (exact, result)
    assert result <= (rho + 2 * math.sqrt(rho * math.log(1 / delta))) * (1 - wrong) * (1 + 1e-6), (result, rho)
    assert result >= 0


CHECKS: dict[str, Check] = {
    check.__name__: check for check in (training, uncertainty, kernel, limit, flow, partition, channel, privacy)
}


def _run(name: str, seed: int) -> int:
    try:
        CHECKS[name](np.random.default_rng(seed), 0.0)
    except KeyboardInterrupt:  # a case that takes long
        return 130
    return 0


def some_numbers(number: int, start: int) -> list[Case]:
    """Cases of so many numbers, of all checks in turn."""
    seeds = drawn(st.integers(0, 2**31 - 1), number, start)
    return [
        Case(f"numbers.{name}({seed})", functools.partial(_run, name, seed), False)
        for name, seed in zip(itertools.cycle(CHECKS), seeds, strict=False)
    ]
