"""FedProx, FedDyn, SCAFFOLD, FedNova, Modified Local-GD and the adaptive servers as plain NumPy loops.

Written from the papers, with the papers' signs (a client's update is client - server) and nothing of fedtangent.
``wrong`` names one mistake for a loop to make, for negative controls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from .reference import Params, Weight, gradient, mean

Selections = Sequence[Sequence[int]]  # per round, the participants
Extra = Callable[[Params], Params]  # what is added to the gradient of the client's own loss


class Clients(NamedTuple):
    """What the clients compute with: data, batches by (round, client), and the round's rate."""

    x: np.ndarray
    y: np.ndarray
    batches: dict[tuple[int, int], list[np.ndarray]]
    rate: Callable[[int], float]
    loss: str = "squared_error"
    momentum: float = 0.0

    def steps(self, t: int, i: int) -> int:
        """Local steps of client i in round t."""
        return len(self.batches[t, i])

    def train(self, t: int, i: int, start: Params, extra: Extra = lambda w: {}) -> tuple[Params, list[Params]]:
        """SGD (with heavy-ball momentum) on the own loss plus ``extra``; also the own gradients of all steps."""
        w, seen, buffer = start, [], zeros(start)
        for rows in self.batches[t, i]:
            seen.append(gradient(w, self.x[rows], self.y[rows], self.loss))
            buffer = plus(plus(seen[-1], extra(w)), buffer, self.momentum)
            w = plus(w, buffer, -self.rate(t))
        return w, seen


def plus(a: Params, b: Params, factor: float = 1.0) -> Params:
    """``a + factor b``; an empty ``b`` is 0."""
    return {name: a[name] + factor * b[name] for name in a} if b else a


def zeros(like: Params) -> Params:
    return {name: np.zeros_like(value) for name, value in like.items()}


def fed_prox(
    w: Params, selections: Selections, clients: Clients, *, mu: float, weight: Weight, wrong: str = ""
) -> Params:
    """Li et al. 2020, algorithm 2."""
    sign = -1 if wrong == "sign" else 0 if wrong == "no_prox" else 1
    for t, chosen in enumerate(selections):
        if chosen:

            def pull(v: Params, w: Params = w) -> Params:
                return {name: sign * mu * (v[name] - w[name]) for name in v}

            w = mean([clients.train(t, i, w, pull)[0] for i in chosen], [weight(i) for i in chosen])
    return w


def fed_dyn(
    w: Params,
    selections: Selections,
    clients: Clients,
    *,
    alpha: float,
    num_clients: int,
    weight: Weight = lambda i: 1,
    server_rate: float = 1.0,
    wrong: str = "",
) -> Params:
    """Acar et al. 2021, algorithm 1; ``own[i]`` is the client's gradient, grad L_i(theta_i)."""
    own, h = [zeros(w)] * num_clients, zeros(w)
    for t, chosen in enumerate(selections):
        if not chosen:
            continue
        found = {}
        for i in chosen:

            def extra(v: Params, w: Params = w, g: Params = own[i]) -> Params:
                tilt = 1 if wrong == "tilt_sign" else -1
                return {name: tilt * g[name] + alpha * (v[name] - w[name]) for name in v}

            found[i] = clients.train(t, i, w, extra)[0]
            if wrong != "forgetful":
                own[i] = plus(own[i], plus(found[i], w, -1), -alpha)
        average = mean(list(found.values()), [weight(i) for i in chosen])
        everybody = len(chosen) if wrong == "participants" else num_clients
        h = plus(h, plus(average, w, -1), -alpha * len(chosen) / everybody)
        target = average if wrong == "no_h" else plus(average, h, -1 / alpha)
        w = plus(w, plus(target, w, -1), server_rate)
    return w


def scaffold(
    x: Params,
    selections: Selections,
    clients: Clients,
    *,
    num_clients: int,
    server_rate: float,
    wrong: str = "",
) -> Params:
    """Karimireddy et al. 2020, algorithm 1 with option II."""
    own, c = [zeros(x)] * num_clients, zeros(x)
    for t, chosen in enumerate(selections):
        if not chosen:
            continue
        moved, changed = zeros(x), zeros(x)
        for i in chosen:
            correction = plus(own[i], c, -1) if wrong == "sign" else plus(c, own[i], -1)
            y, _ = clients.train(t, i, x, lambda v, correction=correction: correction)
            steps = 3 if wrong == "steps" else clients.steps(t, i)
            rate = clients.rate(0) if wrong == "rate" else clients.rate(t)
            new = plus(plus(own[i], c, -1), plus(x, y, -1), 1 / (steps * rate))
            moved = plus(moved, plus(y, x, -1), 1 / len(chosen))
            changed = plus(changed, plus(new, own[i], -1), 1 / len(chosen))
            if wrong != "forgetful":
                own[i] = new
        x = plus(x, moved, server_rate)
        c = plus(c, changed, 1 if wrong == "fraction" else len(chosen) / num_clients)
    return x


def coefficients(steps: int, rate: float, momentum: float, mu: float) -> np.ndarray:
    """Wang et al. 2020, the vector a: how much each own gradient counts after ``steps`` steps, by matrix powers.

    One step takes (displacement / rate, buffer) to ``M (displacement / rate, buffer) + (-1, 1) g``.
    """
    M = np.array([[1 - rate * mu, -momentum], [rate * mu, momentum]])
    return np.array([-(np.linalg.matrix_power(M, steps - 1 - k) @ [-1, 1])[0] for k in range(steps)])


def fed_nova(
    x: Params,
    selections: Selections,
    clients: Clients,
    *,
    weight: Weight,
    mu: float = 0.0,
    tau_eff: float | None = None,
    server_rate: float = 1.0,
    wrong: str = "",
) -> Params:
    """Wang et al. 2020, eq. 6: ``x -= tau_eff sum_i p_i eta d_i`` with ``d_i = G_i a_i / |a_i|_1``."""
    for t, chosen in enumerate(selections):
        if not chosen:
            continue
        rate, total = clients.rate(t), sum(weight(i) for i in chosen)
        directions, sizes = [], []
        for i in chosen:

            def pull(v: Params, x: Params = x) -> Params:
                return {name: mu * (v[name] - x[name]) for name in v}

            _, seen = clients.train(t, i, x, pull)
            a = coefficients(len(seen), rate, clients.momentum, mu)
            sizes.append(len(seen) if wrong == "steps" else np.abs(a).sum())
            directions.append({n: sum(k * g[n] for k, g in zip(a, seen, strict=True)) / sizes[-1] for n in x})
        p = [weight(i) / total for i in chosen]
        if wrong == "not_normalised":
            directions = [plus(zeros(x), d, size) for d, size in zip(directions, sizes, strict=True)]
        tau = tau_eff if tau_eff is not None else float(np.dot(p, sizes))
        tau = 1.0 if wrong == "not_normalised" else float(np.mean(sizes)) if wrong == "plain_tau" else tau
        for share, d in zip(p, directions, strict=True):
            x = plus(x, d, -server_rate * tau * share * rate)
    return x


def modified_local_gd(w: Params, selections: Selections, clients: Clients, *, first_index: int) -> Params:
    """Local-GD paper, algorithm 3, with alpha of round k ``1 - 1 / (k + first_index + 1)``."""
    start = w
    for k, chosen in enumerate(selections):
        alpha = 1 - 1 / (k + first_index + 1)
        average = mean([clients.train(k, i, w)[0] for i in chosen], [1] * len(chosen))
        w = {name: (1 - alpha) * start[name] + alpha * average[name] for name in w}
    return w


def adaptive(
    x: Params,
    selections: Selections,
    clients: Clients,
    *,
    method: str,
    weight: Weight,
    rate: Callable[[int], float],
    beta_1: float,
    beta_2: float,
    tau: float,
    initial: float,
    wrong: str = "",
) -> Params:
    """Reddi et al. 2021, algorithm 2 (FedAdagrad, FedYogi, FedAdam); ``initial`` is v_{-1}."""
    m, v = zeros(x), {name: np.full_like(value, 0.0 if wrong == "zero_start" else initial) for name, value in x.items()}
    for t, chosen in enumerate(selections):
        if not chosen:
            continue
        average = mean([clients.train(t, i, x)[0] for i in chosen], [weight(i) for i in chosen])
        for name in x:
            delta = average[name] - x[name]
            m[name] = beta_1 * m[name] + (1 - beta_1) * delta
            if method == "adagrad":
                v[name] = v[name] + delta**2
            elif method == "yogi" and wrong != "as_adam":
                v[name] = v[name] - (1 - beta_2) * delta**2 * np.sign(v[name] - delta**2)
            else:
                v[name] = beta_2 * v[name] + (1 - beta_2) * delta**2
        first = 1 - beta_1 ** (t + 1) if wrong == "bias_correction" else 1
        second = 1 - beta_2 ** (t + 1) if wrong == "bias_correction" else 1
        x = {n: x[n] + rate(t) * (m[n] / first) / (np.sqrt(v[n] / second) + tau) for n in x}
    return x


def fed_avg_m(
    w: Params,
    selections: Selections,
    clients: Clients,
    *,
    weight: Weight,
    momentum: float,
    rate: Callable[[int], float],
    nesterov: bool = False,
    wrong: str = "",
) -> Params:
    """Hsu et al. 2019, section 4.3: ``v = momentum v + dw``, ``w = w - v`` with ``dw = w - mean``."""
    v = zeros(w)
    for t, chosen in enumerate(selections):
        if not chosen:
            continue
        dw = plus(w, mean([clients.train(t, i, w)[0] for i in chosen], [weight(i) for i in chosen]), -1)
        v = plus(dw, v, 0.0 if wrong == "forgetful" else momentum)
        step = plus(dw, v, momentum) if nesterov != (wrong == "nesterov") else v
        w = plus(w, step, -rate(t))
    return w
