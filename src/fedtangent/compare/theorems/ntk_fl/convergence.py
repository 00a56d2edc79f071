"""Theorems 1 and 2 of NTK-FL (Yue et al., ICML 2022), on the two-layer ReLU network of eq. (12)."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedtangent import data as datasets
from fedtangent.compare.theorems import TheoremEntry, of_scale
from fedtangent.compare.theorems.ntk_fl.descents import descents
from fedtangent.compare.verdicts import Verdict
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
from fedtangent.theory.ntk_fl.lemmas import empirical_kernel, expected_kernel
from fedtangent.types import Model, Partition, PyTree

DELTA = 0.2
PAIR = np.array([[1.0, 0.0], [0.9, np.sqrt(1 - 0.81)]])  # lambda_max is more than 4 times lambda_min
CLIENTS = Partition(np.array([0, 1], np.int32), np.array([0, 1, 2], np.int32))
LOCAL_STEPS = 4


class AllowedRun(NamedTuple):
    """Two examples, targets so close to the start that all assumptions hold at the largest step they allow."""

    model: Model
    key: jax.Array  # of the run
    params: PyTree  # which start a run from that key
    y: np.ndarray  # [2]
    residual: np.ndarray  # [2]
    kernel: np.ndarray  # [2, 2]


def checks(scale: str, seed: int) -> list[Verdict]:
    """Both theorems where all their assumptions hold, and the linearised network's own rate."""
    width, steps, rounds, narrow = of_scale(scale, (10_000, 800, 400, 256), (40_000, 3000, 1500, 1024))
    case = allowed_run(seed, width)
    return [theorem_1(case, steps), *theorem_2(case, rounds), linearised(seed, narrow)]


def allowed_run(seed: int, width: int) -> AllowedRun:
    """The run on which all assumptions of both theorems hold."""
    model = two_layer_relu(2, width, seed=seed, dtype=jnp.float64)
    key = jax.random.key(seed)
    params = model.init(jax.random.split(key, 1)[0])
    slowest = np.linalg.eigh(expected_kernel(PAIR))[1][:, 0]
    residual = 1.5e-3 * slowest + 1e-5
    start = np.asarray(model.apply(params, jnp.asarray(PAIR)))[:, 0]
    return AllowedRun(model, key, params, start - residual, residual, empirical_kernel(PAIR, params["v"]))


def theorem_1(case: AllowedRun, steps: int) -> Verdict:
    """Gradient descent at the largest step that the theorem allows."""
    width = len(case.params["v"])
    start = TwoLayerStart(width, kernel=case.kernel)
    first = ntk_theorem_1(PAIR, case.residual, start, learning_rate=1e-3, delta=DELTA)
    eta = 0.999 * largest_learning_rate(first.constants)
    theorem = ntk_theorem_1(PAIR, case.residual, start, learning_rate=eta, delta=DELTA)
    paths = descents(case.model, case.params, PAIR, case.y[:, None], eta, steps)
    where = f"N = 2, n = {width}, eta = {eta:.3g} (the largest allowed), {steps} steps of gradient descent"
    return _bounded("NTK-FL Theorem 1", theorem, paths.network, np.arange(steps + 1), where)


def theorem_2(case: AllowedRun, rounds: int) -> list[Verdict]:
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
        Verdict.of(
            "NTK-FL Theorem 2, (58)",
            "late decay of the squared residual's logarithm, a round, over 2 eta tau lambda_min(H) / (N M)",
            where,
            (
                f"{slope / first_order:.4f}",
                "1, to 2 % (the theorem's own rate is a quarter of it)",
                abs(slope / first_order - 1) < 0.02,
            ),
            ("without the 1/M of (58)", f"{slope / first_order / 2:.3f}", abs(slope / first_order / 2 - 1) > 0.1),
        ),
    ]


def _fed_avg(case: AllowedRun, eta: float, rounds: int) -> tuple[np.ndarray, np.ndarray]:
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


def linearised(seed: int, width: int) -> Verdict:
    """NTK-FL evolves the linearised network; at its weights the network itself does not keep Theorem 1's rate."""
    x, y, model, params = sphere(seed, width, 20)
    kernel = empirical_kernel(x, params["v"])
    eta = len(x) / float(np.linalg.eigvalsh(kernel)[-1])
    paths = descents(model, params, x, y[:, None], eta, 400)
    steps, start = np.arange(401), paths.linear[0]
    exact = start * linear_rate(kernel, eta) ** steps
    residual = np.asarray(model.apply(params, jnp.asarray(x)))[:, 0] - y
    theorem = ntk_theorem_1(x, residual, TwoLayerStart(width), learning_rate=eta)
    seen = exact > 1e-9 * start
    ratio = float(np.max(paths.linear[seen] / exact[seen]))
    wrong = float(np.max(paths.tangent / theorem.residual_bound(steps)))
    return Verdict.of(
        "NTK-FL eq. (9a)",
        "squared residual of the linearised network / (1 - eta lambda_min(H) / N)^(2 t), largest over t",
        f"sphere, N = {len(x)}, n = {width}, half of the largest stable step, 400 steps",
        (f"{ratio:.6f}", "<= 1", ratio <= 1 + 1e-9),
        ("Theorem 1 for the network at NTK-FL's own weights", f"{wrong:.3g}", wrong > 1),
    )


def sphere(seed: int, width: int, size: int) -> tuple[np.ndarray, np.ndarray, Model, PyTree]:
    """Inputs of norm one, signs to learn, the two-layer network and its initial weights."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((size, 10))
    model = two_layer_relu(10, width, seed=seed, dtype=jnp.float64)
    params = model.init(jax.random.key(seed))
    return x / np.linalg.norm(x, axis=1, keepdims=True), rng.choice(np.array([-1.0, 1.0]), size), model, params


def _bounded(name: str, theorem: NtkTheorem, squared: np.ndarray, at: np.ndarray, where: str) -> Verdict:
    """The decay under the theorem's rate, where all its assumptions hold, and above the control's."""
    ratio = float(np.max(squared[1:] / theorem.residual_bound(at)[1:]))
    wrong = float(np.max(squared[1:] / theorem.residual_bound(at, theorem.constants.lambda_max)[1:]))
    failing = ", ".join(theorem.failing) or "none"
    return Verdict.of(
        name,
        f"squared residual / bound, largest after the start; assumptions that fail: {failing}",
        where,
        (f"{ratio:.4f}", "<= 1, no assumption fails", ratio <= 1 and not theorem.failing),
        ("lambda_max for lambda", f"{wrong:.3g}", wrong > 1.1),
    )


ENTRIES = (
    TheoremEntry(
        "ntk_fl.convergence",
        "rates of gradient descent and of FedAvg on the two-layer ReLU network",
        checks,
        papers=("yue2022",),
        statement="Theorems 1 and 2, eq. (9a) of NTK-FL",
    ),
)
