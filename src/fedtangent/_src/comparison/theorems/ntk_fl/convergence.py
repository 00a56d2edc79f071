"""Theorems 1 and 2 and Remark 2 of NTK-FL (Yue et al., ICML 2022), on the two-layer ReLU network of its eq. (12).

NTK-FL (Theorem 1) and FedAvg (Theorem 2) run at the largest learning rates that the theorems allow, on a case where all
assumptions hold. The rates of decay that the theorems state are a quarter of the true ones. The control of a theorem's
bound has five times its rate; the control of a true rate, by eq. (9a) or (58), is off by a factor of two.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float64, Num

import fedtangent as ft
from fedtangent._src.comparison.theorems import Claim, TheoremEntry, of_scale
from fedtangent._src.comparison.theorems.ntk_fl.evolution import (
    Start,
    TwoLayerProblem,
    fed_avg_run,
    initial,
    ntk_fl_run,
)
from fedtangent._src.data.partition.given import consecutive
from fedtangent._src.theory.ntk_fl.convergence import largest_learning_rate
from fedtangent._src.theory.ntk_fl.lemmas import empirical_kernel

DELTA = 0.2
PAIR = np.array([[1.0, 0.0], [0.9, np.sqrt(1 - 0.81)]])  # the two inputs; lambda_max is over 4 times lambda_min
CLIENTS = consecutive((1, 1))
LOCAL_STEPS = 4
ROUNDS = 3  # of NTK-FL
TOO_FAST = 5.0  # factor of the theorems' rate in a control; the true rate is 4 times theirs
RATE_BAND = 0.005  # of a measured rate; a switch of one neuron changes a kernel with least eigenvalue 0.11 by 1/n
REMARK_BAND = 0.01  # wider, as the remark is to first order in the step


class AllowedRun(NamedTuple):
    """Two examples and a network whose outputs are so close to the targets that Theorems 1 and 2 of NTK-FL apply.

    All assumptions hold even at the largest learning rates that the theorems allow.
    """

    task: TwoLayerProblem
    start: Start

    @property
    def of_kernel(self) -> ft.theory.TwoLayerStart:
        """The start, in the form that ``ntk_theorem_1`` and ``ntk_theorem_2`` take."""
        return ft.theory.TwoLayerStart(len(self.start.params["v"]), kernel=self.start.kernel)


class Decay(NamedTuple):
    """Squared residuals of a run, relative to the start of the run for FedAvg, and of each round for NTK-FL.

    Attributes:
        theorem: Theorem 1 or 2 of NTK-FL, with the rate of its bound.
        at: Steps within a round of NTK-FL, one row for each round, or rounds of FedAvg.
        ratio: Squared residual at these steps or rounds over the squared residual at the start.
    """

    theorem: ft.theory.NtkTheorem
    at: Num[np.ndarray, "*rounds T"]
    ratio: Float64[np.ndarray, "*rounds T"]

    def over_bound(self, factor: float = 1.0) -> float:
        """Returns the largest ratio of the squared residual to a bound: the theorem's, with ``factor`` times its rate.

        The rate is the fall of the bound's logarithm in a step (NTK-FL) or a round (FedAvg).
        """
        return float(np.max(self.ratio / self.theorem.rate() ** (factor * self.at)))

    def late_slope(self) -> float:
        """Returns by how much the log squared residual falls in a round, over the second half of FedAvg's run."""
        late = len(self.at) // 2
        return float(np.log(self.ratio[late] / self.ratio[-1]) / (self.at[-1] - self.at[late]))


def _checks(scale: str, seed: int) -> list[ft.types.Verdict]:
    """Checks Theorems 1 and 2 of NTK-FL, the true rates of decay, and Remark 2, which compares NTK-FL and FedAvg."""
    sizes = (10_000, (50, 100, 200, 400, 800), 400), (40_000, (100, 1000, 3000), 1500)
    width, times, rounds = of_scale(scale, *sizes)
    case = _allowed_run(seed, width)
    evolved, averaged = _ntk_fl_decay(case, times), _fed_avg_decay(case, rounds)
    return [
        _bounded(evolved, f"N = 2 of 2 clients, n = {width}, every t of {times} in each of {ROUNDS} rounds"),
        _evolution_rate(case, evolved),
        _bounded(averaged, f"N = 2, M = 2, n = {width}, tau = {LOCAL_STEPS}, {rounds} rounds"),
        _averaging_rate(case, averaged),
        _remark_2(evolved, averaged),
    ]


def _allowed_run(seed: int, width: int) -> AllowedRun:
    """Builds a problem and a start, at this ``width``, that meet all assumptions of Theorems 1 and 2 of NTK-FL."""
    model, key = ft.models.two_layer_relu(2, width, seed=seed, dtype=jnp.float64), jax.random.key(seed)
    params = initial(model, key)
    slowest = np.linalg.eigh(ft.theory.expected_kernel(PAIR))[1][:, 0]
    residual = 1.5e-3 * slowest + 1e-5
    outputs = np.asarray(model.apply(params, jnp.asarray(PAIR)))[:, 0]
    start = Start(model, key, params, empirical_kernel(PAIR, params["v"]), residual)
    return AllowedRun(TwoLayerProblem(PAIR, outputs - residual, CLIENTS), start)


def _ntk_fl_decay(case: AllowedRun, times: tuple[int, ...]) -> Decay:
    """Simulates NTK-FL at Theorem 1's largest step, and measures how far a round reduces the squared residual.

    ``times`` are numbers of steps t. For each t and each round the result has the squared residual after t steps,
    divided by the one at the start of the round.
    """

    def theorem_at(step: float) -> ft.theory.NtkTheorem:
        return ft.theory.ntk_theorem_1(PAIR, case.start.residual, case.of_kernel, learning_rate=step, delta=DELTA)

    eta = 0.999 * largest_learning_rate(theorem_at(1e-3).constants)
    history = ntk_fl_run(case.task, case.start, eta, ft.Evolution(times=times, method="eigh"), ROUNDS)
    losses, before = (np.asarray(history.rounds[name])[:, 0] for name in ("losses", "loss_before"))
    return Decay(theorem_at(eta), np.broadcast_to(times, losses.shape), losses / before[:, None])


def _fed_avg_decay(case: AllowedRun, rounds: int) -> Decay:
    """Simulates FedAvg at the largest step size that Theorem 2 of NTK-FL allows, and measures how the residual decays.

    The result has the squared residual at about 20 evaluated rounds, divided by the one before training.
    """

    def theorem_at(step: float) -> ft.theory.NtkTheorem:
        pair = PAIR, case.start.residual, CLIENTS, case.of_kernel
        return ft.theory.ntk_theorem_2(*pair, learning_rate=step, local_steps=LOCAL_STEPS, delta=DELTA)

    eta = 0.999 * largest_learning_rate(theorem_at(1e-3).constants)
    at, squared, _ = fed_avg_run(case.task, case.start, eta, LOCAL_STEPS, rounds, max(rounds // 20, 1))
    return Decay(theorem_at(eta), at[1:], squared[1:] / squared[0])


def _bounded(decay: Decay, where: str) -> ft.types.Verdict:
    """Checks that the residual is below the theorem's bound and that all its assumptions hold.

    The control is a faster bound, which the residual must exceed. ``where`` names the run in the text.
    """
    theorem, ratio, wrong = decay.theorem, decay.over_bound(), decay.over_bound(TOO_FAST)
    noticed = next((f for f in np.arange(1.0, TOO_FAST + 0.1, 0.05) if decay.over_bound(f) > 1), np.inf)
    statement = f"squared residual / bound, largest; assumptions that fail: {', '.join(theorem.failing) or 'none'}"
    sizes = f"{where}, eta = {theorem.constants.learning_rate:.3g} (the largest allowed)"
    return Claim(f"NTK-FL {theorem.name}", statement, sizes).judged(
        (f"{ratio:.4f}", "<= 1, no assumption fails", ratio <= 1 and not theorem.failing),
        (f"{TOO_FAST:g} times the rate; the true one is 4 times", f"{wrong:.3g}", wrong > 1),
        f"rate x {noticed:.3g}",
    )


def _rate(claim: Claim, ratio: float, control: str, wrong: float, band: float = RATE_BAND) -> ft.types.Verdict:
    """Checks that a measured rate over the predicted rate is 1 up to ``band``; ``wrong`` is the control's ratio."""
    notices = f"rate x {ratio / (1 - band) if ratio <= 1 else ratio / (1 + band):.4f}"
    return claim.near(ratio, (control, wrong), band, notices, formats=(".5f", ".4f"))


def _evolution_rate(case: AllowedRun, decay: Decay) -> ft.types.Verdict:
    """Checks the decay of NTK-FL's residual against its eq. (9a); the bound of its eq. (14) has a quarter of this rate.

    The verdict is on the worst of all numbers of steps and rounds. The squared residual of the slowest mode falls in a
    step by the factor ``(1 - eta lambda_min(H) / N)^2``: H is the kernel, eta the step size and N the number of
    examples.
    """
    least = float(np.linalg.eigvalsh(case.start.kernel)[0])
    step = -2 * np.log1p(-decay.theorem.constants.learning_rate * least / 2)
    rates = -np.log(decay.ratio) / decay.at / step
    worst = float(rates.flat[int(np.argmax(np.abs(rates - 1)))])
    statement = "decay per step of the squared residual's logarithm / (9a)'s, farthest from 1 over all t and rounds"
    sizes = f"N = 2 of 2 clients, n = {decay.theorem.constants.width}, {ROUNDS} rounds"
    claim = Claim("NTK-FL eq. (9a)", statement, sizes)
    return _rate(claim, worst, "without the square: eta lambda / N a step", 2 * worst)


def _averaging_rate(case: AllowedRun, decay: Decay) -> ft.types.Verdict:
    """Checks how fast FedAvg's residual decays in the second half of the rounds against the rate of NTK-FL's eq. (58).

    The bound in eq. (15) has a quarter of this rate.
    """
    eta, diagonal = decay.theorem.constants.learning_rate, np.diag(case.start.kernel)

    def slowest(num_clients: int) -> float:
        # a client of one example multiplies its residual by (1 - eta h_m / N)^tau, h_m its diagonal entry of H
        moved = (1 - (1 - eta * diagonal / 2) ** LOCAL_STEPS) / diagonal
        return float(np.linalg.eigvals(np.eye(2) - case.start.kernel * moved / num_clients).real.max())

    right, wrong = (float(decay.late_slope() / (-2 * np.log(slowest(num_clients)))) for num_clients in (2, 1))
    statement = "late decay per round of the squared residual's logarithm / (58)'s"
    sizes = f"N = 2, M = 2, n = {decay.theorem.constants.width}, tau = {LOCAL_STEPS}, {decay.at[-1]} rounds"
    return _rate(Claim("NTK-FL Theorem 2, (58)", statement, sizes), right, "without the 1/M of (58)", wrong)


def _remark_2(evolved: Decay, averaged: Decay) -> ft.types.Verdict:
    """Checks eq. (16) of NTK-FL, which compares how fast residuals decay in a round of NTK-FL and in a round of FedAvg.

    To first order in the steps NTK-FL is ``eta_1 t M / (eta_2 tau)`` times as fast. NTK-FL takes t steps of
    size eta_1 in a round, and each of M clients of FedAvg takes tau steps of size eta_2. Compared are NTK-FL's first
    round at the least t, and FedAvg's late rounds.
    """
    one, two, t = evolved.theorem.constants, averaged.theorem.constants, int(evolved.at[0, 0])
    faster = -np.log(evolved.ratio[0, 0]) / averaged.late_slope()
    predicted = one.learning_rate * t * two.num_clients / (two.learning_rate * two.local_steps)
    statement = (
        f"decay of a round's logarithm, NTK-FL's over FedAvg's ({faster:.4g}), over eta_1 t M / (eta_2 tau) of (16)"
    )
    steps = f"{one.learning_rate:.3g} and {two.learning_rate:.3g}"
    sizes = f"t = {t}, tau = {two.local_steps}, M = 2, both steps the largest allowed: {steps}"
    claim = Claim("NTK-FL Remark 2", statement, sizes)
    return _rate(claim, float(faster / predicted), "M forgotten", float(2 * faster / predicted), REMARK_BAND)


ENTRIES = (
    TheoremEntry(
        "ntk_fl.convergence",
        "rates of NTK-FL and of FedAvg, as recipes, on the two-layer ReLU network",
        _checks,
        papers=("yue2022",),
        statement="Theorems 1 and 2, Remark 2 of NTK-FL",
        functions=(ft.theory.ntk_theorem_1, ft.theory.ntk_theorem_2),
        figures=("ntk_fl.theorem1", "ntk_fl.theorem2"),
        is_quick=True,
    ),
)
