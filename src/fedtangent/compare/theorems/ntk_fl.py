"""Theorems 1 and 2 and Lemmas 1 and 2 of NTK-FL (Yue et al., ICML 2022), on the two-layer ReLU network of eq. (12)."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedtangent import data as datasets
from fedtangent.compare.ntk_descents import Descents, descents
from fedtangent.compare.theorems import SCALES, TheoremCheck
from fedtangent.engine.run import predict, simulate
from fedtangent.federated import algorithms, schedule
from fedtangent.federated.local import Work
from fedtangent.models.two_layer import two_layer_relu
from fedtangent.theory.ntk_fl.convergence import (
    NtkTheorem,
    TwoLayerStart,
    largest_learning_rate,
    linear_rate,
    ntk_theorem_1,
    ntk_theorem_2,
)
from fedtangent.theory.ntk_fl.lemmas import (
    empirical_kernel,
    expected_kernel,
    residual_part,
    switched_bound,
    undecided_bound,
    weight_gap_bound,
)
from fedtangent.types import Array, Model, Partition, PyTree

DELTA = 0.2
PAIR = np.array([[1.0, 0.0], [0.9, np.sqrt(1 - 0.81)]])  # lambda_max is more than 4 times lambda_min
CLIENTS = Partition(np.array([0, 1], np.int32), np.array([0, 1, 2], np.int32))
LOCAL_STEPS = 4


class Lazy(NamedTuple):
    """Two examples, targets so close to the start that all assumptions hold at the largest step they allow."""

    model: Model
    key: jax.Array  # of the run
    params: PyTree  # which start a run from that key
    y: np.ndarray  # [2]
    residual: np.ndarray  # [2]
    kernel: np.ndarray  # [2, 2]


def checks(scale: str, seed: int) -> list[TheoremCheck]:
    """One row for each statement. Needs JAX's 64-bit types.

    Raises:
        ValueError: an unknown ``scale``.
    """
    if scale not in SCALES:
        raise ValueError(f"scale: got {scale!r}, allowed are {', '.join(SCALES)}")
    large = scale == "large"
    case = lazy(seed, 40_000 if large else 10_000)
    return [
        theorem_1(case, 3000 if large else 800),
        *theorem_2(case, 1500 if large else 400),
        linearised(seed, 1024 if large else 256),
        lemma_1(seed, 100_000 if large else 10_000),
        lemma_2(seed, 1024 if large else 256),
    ]


def lazy(seed: int, width: int) -> Lazy:
    """The run on which all assumptions of both theorems hold."""
    model = two_layer_relu(2, width, seed=seed, dtype=jnp.float64)
    key = jax.random.key(seed)
    params = model.init(jax.random.split(key, 1)[0])
    slowest = np.linalg.eigh(expected_kernel(PAIR))[1][:, 0]
    residual = 1.5e-3 * slowest + 1e-5
    start = np.asarray(model.apply(params, jnp.asarray(PAIR)))[:, 0]
    return Lazy(model, key, params, start - residual, residual, empirical_kernel(PAIR, params["v"]))


def theorem_1(case: Lazy, steps: int) -> TheoremCheck:
    """Gradient descent at the largest step that the theorem allows."""
    width = len(case.params["v"])
    start = TwoLayerStart(width, kernel=case.kernel)
    first = ntk_theorem_1(PAIR, case.residual, start, learning_rate=1e-3, delta=DELTA)
    eta = 0.999 * largest_learning_rate(first.constants)
    theorem = ntk_theorem_1(PAIR, case.residual, start, learning_rate=eta, delta=DELTA)
    paths = descents(case.model, case.params, PAIR, case.y[:, None], eta, steps)
    where = f"N = 2, n = {width}, eta = {eta:.3g} (the largest allowed), {steps} steps of gradient descent"
    return _bounded("NTK-FL Theorem 1", theorem, paths.network, np.arange(steps + 1), where)


def theorem_2(case: Lazy, rounds: int) -> list[TheoremCheck]:
    """FedAvg of the recipe at the largest step that the theorem allows, and its rate to first order."""
    width = len(case.params["v"])
    start, of = TwoLayerStart(width, kernel=case.kernel), (PAIR, case.residual, CLIENTS)
    first = ntk_theorem_2(*of, start, learning_rate=1e-3, local_steps=LOCAL_STEPS, delta=DELTA)
    eta = 0.999 * largest_learning_rate(first.constants)
    theorem = ntk_theorem_2(*of, start, learning_rate=eta, local_steps=LOCAL_STEPS, delta=DELTA)
    at, squared = _fed_avg(case, eta, rounds)
    where = f"N = 2, M = 2, n = {width}, eta = {eta:.3g} (the largest allowed), tau = {LOCAL_STEPS}, {rounds} rounds"
    late = len(at) // 2
    slope = float(np.log(squared[late] / squared[-1]) / (at[-1] - at[late]))
    first_order = 2 * eta * LOCAL_STEPS * float(np.linalg.eigvalsh(case.kernel)[0]) / (2 * 2)
    return [
        _bounded("NTK-FL Theorem 2", theorem, squared, at, where),
        TheoremCheck(
            "NTK-FL Theorem 2, (58)",
            "late decay of the squared residual's logarithm, a round, over 2 eta tau lambda_min(H) / (N M)",
            where,
            f"{slope / first_order:.4f}",
            "1, to 2 % (the theorem's own rate is a quarter of it)",
            abs(slope / first_order - 1) < 0.02,
            f"without the 1/M of (58): {slope / first_order / 2:.3f}",
            abs(slope / first_order / 2 - 1) > 0.1,
        ),
    ]


def _fed_avg(case: Lazy, eta: float, rounds: int) -> tuple[np.ndarray, np.ndarray]:
    """Rounds and squared residuals; a client's mean loss is over N / M examples, so that its step is eta / M."""
    algorithm = algorithms.fed_avg(
        case.model, schedule.all_clients(2), client_learning_rate=eta / 2, work=Work(steps=LOCAL_STEPS)
    )
    held = datasets.federated_data(PAIR, case.y[:, None], CLIENTS, dtype=jnp.float64)
    outputs = jax.jit(lambda state: predict(algorithm, state, jnp.asarray(PAIR)).mean[:, 0])

    def look(state: PyTree) -> dict[str, float]:
        return {"squared": float(np.sum((np.asarray(outputs(state)) - case.y) ** 2))}

    run = simulate(algorithm, held, rounds, 0, evaluate_every=max(rounds // 20, 1), evaluate=look, init_key=case.key)
    seen = run.history.evaluations
    return np.array([e.round for e in seen]), np.array([e.metrics["squared"] for e in seen])


def linearised(seed: int, width: int) -> TheoremCheck:
    """NTK-FL evolves the linearised network; at its weights the network itself does not keep Theorem 1's rate."""
    x, y, model, params = _sphere(seed, width, 20)
    kernel = empirical_kernel(x, params["v"])
    eta = len(x) / float(np.linalg.eigvalsh(kernel)[-1])
    paths = descents(model, params, x, y[:, None], eta, 400)
    steps, start = np.arange(401), paths.linear[0]
    exact = start * linear_rate(kernel, eta) ** steps
    theorem = ntk_theorem_1(x, _residual(model, params, x, y), TwoLayerStart(width), learning_rate=eta)
    seen = exact > 1e-9 * start
    ratio = float(np.max(paths.linear[seen] / exact[seen]))
    wrong = float(np.max(paths.tangent / theorem.residual_bound(steps)))
    return TheoremCheck(
        "NTK-FL eq. (9a)",
        "squared residual of the linearised network / (1 - eta lambda_min(H) / N)^(2 t), largest over t",
        f"sphere, N = {len(x)}, n = {width}, half of the largest stable step, 400 steps",
        f"{ratio:.6f}",
        "<= 1",
        ratio <= 1 + 1e-9,
        f"Theorem 1 for the network at NTK-FL's own weights: {wrong:.3g}",
        wrong > 1,
    )


def lemma_1(seed: int, draws: int) -> TheoremCheck:
    """All examples at once, orthonormal inputs and few neurons: independent events, so that a union counts."""
    width, num, radius, delta = 4, 20, 0.012, 0.1
    z = np.abs(np.random.default_rng(seed).standard_normal((draws, width, num)))
    largest = np.sum(z <= radius, axis=1).max(axis=1)
    fails = {form: float(np.mean(largest > undecided_bound(radius, 1.0, delta, width, num, form)))
             for form in ("printed", "concentration", "union")}  # fmt: skip
    allowed = delta + 3 * np.sqrt(delta * (1 - delta) / draws)
    return TheoremCheck(
        "NTK-FL Lemma 1",
        "how often some |S_i| is above the bound: Markov's inequality for the union, and Hoeffding's",
        f"N = {num} orthonormal inputs, n = {width}, R = {radius} alpha, delta = {delta}, {draws} draws",
        f"{fails['union']:.3f}, {fails['concentration']:.3f}",
        f"<= delta + 3 standard errors = {allowed:.3f}",
        bool(max(fails["union"], fails["concentration"]) <= allowed),
        f"the lemma as printed, for all examples at once: {fails['printed']:.3f}",
        bool(fails["printed"] > allowed),
    )


def lemma_2(seed: int, width: int) -> TheoremCheck:
    """The gap of the weights, under Lemma 2 and, with what did switch, under (25d) and the part that it leaves out."""
    x, y, model, params = _sphere(seed, width, 20)
    steps, size, dim = 300, len(x), x.shape[1]
    eta = size / float(np.linalg.eigvalsh(empirical_kernel(x, params["v"]))[-1])

    def watch(start: PyTree, weights: PyTree) -> dict[str, Array]:
        active = [jnp.asarray(x) @ w["v"].T >= 0 for w in (start, weights)]
        moved = jnp.max(jnp.linalg.norm(weights["v"] - start["v"], axis=1))
        return {"switched": jnp.sum(active[0] != active[1]), "moved": moved}

    paths: Descents = descents(model, params, x, y[:, None], eta, steps, watch=watch)
    sizes: dict[str, Any] = {"learning_rate": eta, "width": width, "input_size": dim}
    counted = switched_bound(paths.largest[:-1], paths.watched["switched"][:-1], num_examples=size, **sizes)
    sharp = counted + residual_part(paths.apart, num_examples=size, **sizes)
    radius = float(paths.watched["moved"].max())
    printed = weight_gap_bound(paths.largest[:-1], radius=radius, **sizes)
    over = [float(np.max(paths.gap[3:] / bound[3:])) for bound in (printed, sharp, counted / np.sqrt(width))]
    return TheoremCheck(
        "NTK-FL Lemma 2",
        "l1 distance of NTK and descent weights / Lemma 2's bound; / (25d) with what did switch and the part left out",
        f"sphere, N = {size}, n = {width}, half of the largest stable step, {steps} steps, R = {radius:.2g} measured",
        f"{over[0]:.2g}; {over[1]:.2g}",
        "<= 1",
        max(over[:2]) <= 1,
        f"(25d) for a factor 1/n in eq. (12): {over[2]:.3g}",
        over[2] > 1,
    )


def _sphere(seed: int, width: int, size: int) -> tuple[np.ndarray, np.ndarray, Model, PyTree]:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((size, 10))
    model = two_layer_relu(10, width, seed=seed, dtype=jnp.float64)
    params = model.init(jax.random.key(seed))
    return x / np.linalg.norm(x, axis=1, keepdims=True), rng.choice(np.array([-1.0, 1.0]), size), model, params


def _residual(model: Model, params: PyTree, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.asarray(model.apply(params, jnp.asarray(x)))[:, 0] - y


def _bounded(name: str, theorem: NtkTheorem, squared: np.ndarray, at: np.ndarray, where: str) -> TheoremCheck:
    """The decay under the theorem's rate, where all its assumptions hold, and above the control's."""
    ratio = float(np.max(squared[1:] / theorem.residual_bound(at)[1:]))
    wrong = float(np.max(squared[1:] / theorem.residual_bound(at, theorem.constants.lambda_max)[1:]))
    failing = ", ".join(theorem.failing) or "none"
    return TheoremCheck(
        name,
        f"squared residual / bound, largest after the start; assumptions that fail: {failing}",
        where,
        f"{ratio:.4f}",
        "<= 1, no assumption fails",
        ratio <= 1 and not theorem.failing,
        f"lambda_max for lambda: {wrong:.3g}",
        wrong > 1.1,
    )
