"""Every option of the flow carried out on a linear model, step by step in weight space: plain NumPy.

Written from the algorithms' papers (FedProx: Li et al., 2020, algorithm 2; FedDyn: Acar et al., 2021, algorithm 1;
SCAFFOLD: Karimireddy et al., 2020, algorithm 1, option II; FedNova: Wang et al., 2020, eq. 6 and 7; FedAvgM: Hsu et
al., 2019, section 4.3; Modified Local-GD: Local-GD paper, algorithm 3; FedAsync: Xie et al., 2019, algorithm 1;
FedBuff: Nguyen et al., 2022, algorithm 1). It knows nothing of kernels.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.linalg import expm


def train(run: Any, rule: dict[str, Any], model: int, w0: np.ndarray, y: np.ndarray | None = None) -> list[np.ndarray]:
    """One model's weights [P, C] after 0, 1, .. R rounds."""
    y = run.y if y is None else y
    state = {
        "w": np.array(w0),
        "start": np.array(w0),
        "v": 0.0 * w0,
        "h": 0.0 * w0,
        "own": [0.0 * w0 for _ in run.clients],
    }
    path = state["path"] = [state["w"]]
    for r in range(len(run.client)):
        mine = [s for s in range(run.client.shape[1]) if run.model[r, s] == model and run.weight[r, s] > 0]
        if mine:
            weights = np.array([run.weight[r, s] for s in mine])
            who, p = [int(run.client[r, s]) for s in mine], weights / weights.sum()
            if rule.get("algorithm") in ("fed_async", "fed_buff"):
                late_round(run, rule, state, r, list(zip(mine, who, p, strict=True)), y)
            else:
                one_round(run, rule, state, r, who, p, y)
        path.append(state["w"])
    return path


def one_round(run: Any, rule: dict, state: dict, r: int, who: list[int], p: np.ndarray, y: np.ndarray) -> None:
    algorithm, w, rate = rule.get("algorithm", "fed_avg"), state["w"], run.rates[r]
    server = np.broadcast_to(rule.get("server_learning_rate", 1.0), len(run.client))[r]
    tilts = {
        "fed_dyn": lambda i: -state["own"][i],
        "scaffold": lambda i: state["h"] - state["own"][i],
    }
    trained = [local(run, rule, i, w, tilts.get(algorithm, lambda i: 0.0)(i), rate, y) for i in who]
    steps = [run.steps[i] for i in who]
    mean = sum(q * x for q, x in zip(p, trained, strict=True))
    if algorithm == "fed_nova":
        mu = rule.get("mu", 0.0)
        sizes = [rate * np.array(rule.get("step_weights", np.ones(t)))[:t] for t in steps]
        a = [sum(s[t] * np.prod(1 - mu * s[t + 1 :]) for t in range(len(s))) / rate for s in sizes]
        direction = sum(q * (w - x) / own for q, x, own in zip(p, trained, a, strict=True))
        state["w"] = w - server * np.dot(p, a) * direction
    elif algorithm == "fed_dyn":
        alpha = rule["mu"]
        for i, x in zip(who, trained, strict=True):
            state["own"][i] = state["own"][i] - alpha * (x - w)
        state["h"] = state["h"] - alpha * len(who) / len(run.clients) * (mean - w)
        state["w"] = w + server * (mean - state["h"] / alpha - w)
    elif algorithm == "scaffold":
        changes = []
        for i, x, t in zip(who, trained, steps, strict=True):
            new = state["own"][i] - state["h"] + (w - x) / (t * rate)
            changes.append(new - state["own"][i])
            state["own"][i] = new
        state["w"] = w + server * (mean - w)
        state["h"] = state["h"] + len(who) / len(run.clients) * sum(q * d for q, d in zip(p, changes, strict=True))
    elif algorithm == "modified_local_gd":
        alpha = rule.get("anchoring", np.ones(len(run.client)))[r]
        state["w"] = (1 - alpha) * state["start"] + alpha * (w + server * (mean - w))
    else:
        momentum = rule.get("server_momentum", 0.0)
        state["v"] = momentum * state["v"] + (w - mean)
        step = (w - mean) + momentum * state["v"] if rule.get("nesterov") else state["v"]
        state["w"] = w - server * (step if momentum else w - mean)


def late_round(run: Any, rule: dict, state: dict, r: int, answers: list, y: np.ndarray) -> None:
    """Clients answer to the model of ``delays`` rounds ago: the server mixes models (FedAsync) or adds updates."""
    w, table = state["w"], rule.get("delay_weights", np.ones(9))
    server = np.broadcast_to(rule.get("server_learning_rate", 1.0), len(run.client))[r]
    step = 0.0 * w
    for slot, i, p in answers:
        age = min(int(np.broadcast_to(rule.get("delays", 0), run.client.shape)[r, slot]), r)
        start = state["path"][r - age]
        trained = local(run, rule, i, start, 0.0, run.rates[r], y)
        step = step + p * table[age] * (trained - (w if rule["algorithm"] == "fed_async" else start))
    state["w"] = w + server * step


def local(run: Any, rule: dict, i: int, start: np.ndarray, tilt: Any, rate: float, y: np.ndarray) -> np.ndarray:
    """The client's weights after its local steps."""
    mu, decay = rule.get("mu", 0.0), rule.get("weight_decay", 0.0)
    weights = np.array(rule.get("step_weights", np.ones(run.steps.max())))[: run.steps[i]]
    rows = run.clients[i]
    if rule.get("dynamics") == "gradient_flow":
        return _flow(run, rows, start, tilt, mu, decay, rate * weights.sum(), y)
    w = start.copy()
    for t in range(run.steps[i]):
        batch = rule["batches"][i][t] if "batches" in rule else rows
        gradient = run.train[batch].T @ (run.train[batch] @ w - y[batch]) / len(batch)
        w = w - rate * weights[t] * (gradient + tilt + mu * (w - start) + decay * w)
    return w


def _flow(
    run: Any, rows: np.ndarray, start: np.ndarray, tilt: Any, mu: float, decay: float, time: float, y: np.ndarray
) -> np.ndarray:
    """The solution of ``w' = -(H w - q)`` at ``time``, by one matrix exponential for all outputs."""
    phi = run.train[rows]
    h = phi.T @ phi / len(rows) + (mu + decay) * np.eye(phi.shape[1])
    q = phi.T @ y[rows] / len(rows) + mu * start - tilt
    size, outputs = start.shape
    system = np.zeros((size + outputs, size + outputs))
    system[:size, :size], system[:size, size:] = -h, q
    moved = expm(time * system)[:size]
    return moved[:, :size] @ start + moved[:, size:]


def weight_map(run: Any, rule: dict[str, Any], model: int) -> np.ndarray:
    """L [P, P] with ``w_R = L w_0 + constant``."""
    size = run.train.shape[1]
    return train(run, rule, model, np.eye(size), np.zeros((len(run.train), size)))[-1]
