"""Theorem 1 of FE-2024 (9.1 of FE-2021) on linear models, and the second-order expansions behind its proof.

"fed_ensemble.second_order": Lemmas 9.2 and 9.3 and eq. (13) and (14) of FE-2021. Slopes of errors against the step size
show the order of each error.

"fed_ensemble.convergence": the theorem's bounds beside the measured decay of linear models that meet its assumptions
(the file ``networks`` checks networks). An age is the number of rounds in which every client trains each model once.
The bounds hold for all initial residuals, so the worst one is measured: the operator norm of one age's effect on the
residual, computed client by client (``RandomFederation.true_age``). With the steps that the theorem allows the residual
takes thousands to millions of ages to fall. Operator norms are submultiplicative, so the norm of one
age bounds them all.

The proof lets the network's empirical kernel differ from the infinite-width kernel by a third of the least eigenvalue,
which the factor 1/3 in the exponent allows for. The models here have such a kernel: the infinite-width kernel with its
least eigenvalue reduced by a third. A constant kernel can come no nearer to the bound: it decays with twice the bound's
exponent.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import scipy
from jaxtyping import Float64, Int

from fedtangent._src.comparison.statistics import log_slope
from fedtangent._src.comparison.theorems import Claim, TheoremEntry, of_scale
from fedtangent._src.comparison.verdicts import Verdict
from fedtangent._src.kernels.gram import KernelBlocks
from fedtangent._src.theory.fed_ensemble import second_order as theory
from fedtangent._src.theory.fed_ensemble.convergence import Curvature, Networks, Theorem1, theorem_1
from fedtangent._src.theory.flow.rules import Rule
from fedtangent._src.types import Cohort, Partition

STEP_SIZES = np.array([1e-2, 5e-3, 2.5e-3, 1.25e-3])
BAND = 0.1  # of a fitted slope
AGE_MODELS, NUM_FEATURES = 3, 40  # of ``_federation``
Operators = list[np.ndarray]  # [n, n], one for each of STEP_SIZES


class RandomFederation(NamedTuple):
    """A kernel, clients with unequal sizes and local steps, and the model of each client in the K rounds of an age.

    In an age every client trains each model once: client i trains the model ``model[r, i]`` in round r. ``rows`` are
    the kernel's rows of each client, and ``steps`` its local steps.
    """

    theta: Float64[np.ndarray, "n n"]
    rows: tuple[Int[np.ndarray, "_"], ...]  # kernel rows of each client
    model: Int[np.ndarray, "K N"]  # which model client i trains in round r
    steps: Int[np.ndarray, "N"]

    @property
    def partition(self) -> Partition:
        """The kernel rows of each client as a ``Partition``."""
        offsets = np.cumsum([0] + [len(r) for r in self.rows]).astype(np.int32)
        return Partition(np.concatenate(self.rows).astype(np.int32), offsets)

    @property
    def cohorts(self) -> Cohort:
        """The cohorts of an age's K rounds: all clients in every round, weighted by examples."""
        sizes = np.array([len(r) for r in self.rows], float)
        client = np.broadcast_to(np.arange(len(self.rows)), self.model.shape)
        return Cohort(client, self.model, np.broadcast_to(sizes, self.model.shape))  # type: ignore[arg-type]

    @property
    def constants(self) -> Curvature:
        """The constants of FE-2021 Theorem 9.1; C_2 is the sum over clients of ``C_i = sqrt(trace Theta_ii)``.

        Theta_ii is the kernel at the examples of client i.
        """
        return Curvature(float(sum(np.sqrt(np.trace(self.theta[np.ix_(r, r)])) for r in self.rows)))

    def true_age(
        self, rate: float, dynamics: str = "gradient_descent", trained_model: int = 0
    ) -> Float64[np.ndarray, "n n"]:
        """Computes the matrix that takes a model's residual from the start to the end of an age, [n, n].

        An age is the K rounds in which every client trains every model once. The matrix is the product of the rounds'
        matrices. A round's matrix is computed client by client, without functions of ``theory``.

        Args:
            rate: Learning rate of the clients.
            dynamics: "gradient_descent" or "gradient_flow".
            trained_model: Index of the model.
        """
        n = len(self.theta)
        product = np.eye(n)
        for models in self.model:
            cohort = [i for i, k in enumerate(models) if k == trained_model]
            total = sum(len(self.rows[i]) for i in cohort)
            round_ = np.zeros((n, n)) if cohort else np.eye(n)
            for i in cohort:
                gram, tau = np.zeros((n, n)), int(self.steps[i])
                gram[:, self.rows[i]] = self.theta[:, self.rows[i]] / len(self.rows[i])
                if dynamics == "gradient_flow":
                    trained = scipy.linalg.expm(-rate * tau * gram)
                else:
                    trained = np.linalg.matrix_power(np.eye(n) - rate * gram, tau)
                round_ += len(self.rows[i]) / total * trained
            product = round_ @ product
        return product


def _federation(scale: str, seed: int) -> RandomFederation:
    """Draws clients of unequal sizes and local steps, and the kernel of ``NUM_FEATURES`` random features."""
    sizes = of_scale(scale, (3, 1, 5, 2, 3), (8, 3, 12, 6, 9, 2, 10))
    rng = np.random.default_rng(seed)
    n = sum(sizes)
    features = rng.standard_normal((n, NUM_FEATURES)) / np.sqrt(NUM_FEATURES)
    rows = tuple(np.split(rng.permutation(n), np.cumsum(sizes)[:-1]))
    orders = np.array([rng.permutation(AGE_MODELS) for _ in sizes])
    return RandomFederation(features @ features.T, rows, orders.T, rng.integers(2, 6, len(sizes)))


def _check_second_order(scale: str, seed: int) -> list[Verdict]:
    """Checks expansions of FE-2021 to second order in the step size: Lemmas 9.2 and 9.3, eq. (13) and (14)."""
    case = _federation(scale, seed)
    last, first = STEP_SIZES[-1], STEP_SIZES[0]
    where = f"n = {len(case.theta)}, {len(case.rows)} clients, K = {AGE_MODELS}, steps {last:g} .. {first:g}"
    return [*_lemmas(case, where, seed), *_ages(case, where)]


def least_noticed(notices: Callable[[float], bool]) -> float:
    """Finds the least relative error from 1e-9 to 1 for which ``notices`` is true; inf if ``notices(1.0)`` is false.

    The result is accurate to 2 %. It is found by bisection, so ``notices`` must be true for all larger errors.
    """
    low, high = 1e-9, 1.0
    if not notices(high):
        return np.inf
    while high > 1.02 * low:
        middle = float(np.sqrt(low * high))
        low, high = (low, middle) if notices(middle) else (middle, high)
    return high


class Orders(NamedTuple):
    """A matrix [n, n] at each of several step sizes, and its approximations.

    Attributes:
        true: The exact matrices.
        first, total: Approximations to first and to second order in the step size.
        wrong: Control: approximations with wrong second-order terms.
    """

    true: Operators
    first: Operators
    total: Operators
    wrong: Operators


def _row(claim: Claim, operators: Orders, control: str) -> Verdict:
    """Checks that the errors of ``operators.first`` and ``operators.total`` are of orders 2 and 3 in the step size.

    The error of ``operators.wrong``, whose mistake ``control`` names, must not be of order 3.
    """

    def slope(approximation: Operators) -> float:
        pairs = zip(operators.true, approximation, strict=True)
        return log_slope(STEP_SIZES, [float(np.linalg.norm(a - b)) for a, b in pairs])

    def notices(error: float) -> bool:
        pairs = zip(operators.total, operators.first, strict=True)
        return abs(slope([t + error * (t - f) for t, f in pairs]) - 3) >= BAND

    two, three, other = slope(operators.first), slope(operators.total), slope(operators.wrong)
    return claim.judged(
        (f"slopes {two:.3f}, {three:.3f}", f"2, 3 (+- {BAND:g})", abs(two - 2) < BAND and abs(three - 3) < BAND),
        (control, f"slope {other:.3f}", abs(other - 3) >= BAND),
        f"second-order terms x {1 + least_noticed(notices):.4f}",
    )


def _lemmas(case: RandomFederation, where: str, seed: int) -> list[Verdict]:
    """Checks the orders in the step of the errors of FE-2021's Lemmas 9.2 and 9.3, on random matrices.

    They are 2 for the lemmas' first-order terms, and 3 with the second-order terms (``_row``). The matrices have the
    kernel's size; ``where`` has the sizes as text.
    """
    rng, n = np.random.default_rng(seed), len(case.theta)
    several = rng.standard_normal((4, n, n)) / np.sqrt(n)
    weights = rng.dirichlet(np.ones(4))
    products, averages = [], []
    for h in STEP_SIZES:
        exponentials = [scipy.linalg.expm(-h * a) for a in several]
        products.append(functools.reduce(lambda whole, one: one @ whole, exponentials, np.eye(n)))
        averages.append(np.asarray(sum(p * one for p, one in zip(weights, exponentials, strict=True))))
    pair = [theory.exponential_product(several, h) for h in STEP_SIZES.tolist()]
    mean = [theory.exponential_average(several, weights, h) for h in STEP_SIZES.tolist()]
    other_sign = [p.first_order - p.second_order for p in pair]
    twice = [m.first_order + 2 * m.second_order for m in mean]
    sizes = f"4 random operators, {where}"
    product = "product of exponentials - exponential of the sum: slope in the step, then with the commutators"
    average = "average of exponentials - exponential of the average: slope in the step, then with Var"
    rows = {
        Claim("FE-2021 Lemma 9.2", product, sizes): (pair, products, other_sign, "commutators of the other sign"),
        Claim("FE-2021 Lemma 9.3", average, sizes): (mean, averages, twice, "without the factor 1/2"),
    }
    return [
        _row(claim, Orders(true, [t.first_order for t in terms], [t.total for t in terms], wrong), control)
        for claim, (terms, true, wrong, control) in rows.items()
    ]


def _ages(case: RandomFederation, where: str) -> list[Verdict]:
    """Checks expansions to second order in the step of an age's map on model 0's residual (FE-2021, section 9.2).

    They are eq. (13) and (14); in an age every client trains each model once. Errors must be of order 2 for the
    first-order terms, and of order 3 with the second-order terms (``_row``). A last verdict compares the second-order
    terms with the error of the first-order ones. ``where`` has the sizes as text.
    """
    kinds = "gradient_flow", "gradient_descent"
    flow, descent = ([case.true_age(h, dynamics) for h in STEP_SIZES.tolist()] for dynamics in kinds)
    ages: list[theory.Age] = [
        theory.age_operators(case.theta, case.partition, case.cohorts, case.steps, h) for h in STEP_SIZES.tolist()
    ]  # of model 0
    by_flow, by_descent = ([theory.expansion(age, dynamics) for age in ages] for dynamics in kinds)
    first, total = [e.first_order for e in by_flow], [e.total for e in by_flow]
    no_variance = [f + 0.5 * theory.commutator_sum(list(age.means)) for f, age in zip(first, ages, strict=True)]
    product, printed = ([theory.equation_13(age, order=order) for age in ages] for order in ("acting", "printed"))
    errors = "one age - first-order exponential: slope in the step, then with Var and commutators"
    discrete = f"{errors} and -eta^2 tau E[Pi^2] / 2"
    one_var = "first-order exponential, then the product with one Var at a time"
    rows = [
        ("section 9.2", f"gradient flow, {errors}", "Var dropped", Orders(flow, first, total, no_variance)),
        (
            "section 9.2",
            f"gradient descent, {discrete}",
            "gradient flow's terms",
            Orders(descent, first, [e.total for e in by_descent], total),
        ),
        ("eq. (13)", one_var, "order of factors as printed", Orders(flow, first, product, printed)),
        (
            "eq. (14)",
            "first-order exponential, then U",
            "U without its second-order terms",
            Orders(flow, first, [theory.operator_u(age) for age in ages], first),
        ),
    ]
    verdicts = [
        _row(Claim(f"FE-2021 {place}", statement, where), orders, control) for place, statement, control, orders in rows
    ]
    measured = [t - f for t, f in zip(flow, first, strict=True)]
    without = [w - f for w, f in zip(no_variance, first, strict=True)]
    return [*verdicts, _predicted_error(where, measured, [e.second_order for e in by_flow], without)]


def _predicted_error(where: str, measured: Operators, terms: Operators, wrong: Operators) -> Verdict:
    """Checks that second-order terms approach the measured error of the first-order approximation.

    Their relative difference must fall in proportion to the step size. ``measured``, ``terms`` and the control's terms
    ``wrong`` are matrices [n, n], one for each step size.
    """

    def errors(terms: Operators, factor: float = 1.0) -> list[float]:
        pairs = zip(terms, measured, strict=True)
        return [float(np.linalg.norm(factor * t - m) / np.linalg.norm(m)) for t, m in pairs]

    def slope(errors: list[float]) -> float:
        return log_slope(STEP_SIZES, errors)

    right, other = errors(terms), errors(wrong)
    noticed = least_noticed(lambda error: abs(slope(errors(terms, 1 + error)) - 1) >= BAND)
    measured_error = f"{right[-1]:.1e} at step {STEP_SIZES[-1]:g}, slope {slope(right):.3f}"
    return Claim(
        "FE-2021 section 9.2",
        "second-order terms against the measured difference: relative error and its slope in the step",
        where,
    ).judged(
        (measured_error, f"slope 1 (+- {BAND:g})", abs(slope(right) - 1) < BAND),
        ("Var dropped", f"{other[-1]:.2f}, slope {slope(other):.3f}", abs(slope(other) - 1) >= BAND),
        f"second-order terms x {1 + noticed:.4f}",
    )


INSIDE = 0.999  # the fraction used of what an assumption allows
SIZES = (1, 2, 3, 3, 3, 3)  # of the clients
GROUP = np.array([0, 0, 1, 2, 3, 4])  # clients that train together: three examples in every round of every model
NUM_MODELS = 5
STEPS = 4  # tau
UNEQUAL_STEPS = (3, 4, 2, 4, 5, 4)
FALLING_STEPS = np.array([0.02, 0.01, 0.005, 0.0025])  # eta_0 tau
WHAT = "decay of the log residual per age / exponent u / 3, worst initial residual, least over models"
FEDERATION = f"n = {sum(SIZES)}, {len(SIZES)} clients of 1 to 3, K = {NUM_MODELS}, nbar = 3"
WHERE = f"{FEDERATION}, kernel lambda_m / 3 off"


class EdgeCase(NamedTuple):
    """Clients that take turns at the models, with a kernel as far from infinite width as Theorem 9.1 of FE-2021 allows.

    Attributes:
        limit: The clients, with the infinite-width kernel.
        empirical: The same clients, with the kernel of a model of finite width.
    """

    limit: RandomFederation  # with the limiting kernel Theta
    empirical: RandomFederation  # with the model's empirical Theta_0

    def theorem(self, rates: list[float], repeats: int = 1) -> Theorem1:
        """Evaluates Theorem 1 of FE-2024 for a run of several ages; in an age every client trains each model once.

        Args:
            rates: Learning rates, each for ``repeats`` successive ages; all clients have the same rate.
            repeats: Number of ages at each learning rate.
        """
        length, ages = len(self.limit.model), len(rates) * repeats
        cohorts = Cohort(*(np.tile(np.asarray(part), (ages, 1)) for part in self.limit.cohorts))  # type: ignore[arg-type]
        theta = self.limit.theta
        return theorem_1(
            KernelBlocks(theta, theta[:1]),
            np.ones((len(theta), 1)),
            self.limit.partition,
            cohorts,
            Rule(self.limit.steps, np.repeat(rates, repeats * length)),
            num_models=int(self.limit.model.max()) + 1,
            networks=Networks(initial_kernel=self.empirical.theta),
        )

    def decay(self, rates: list[float], exponent: Float64[np.ndarray, "ages"]) -> float:
        """Computes how fast residuals decay, as a multiple of the decay that Theorem 1 of FE-2024 guarantees.

        An age, in which every client trains each model once, multiplies a model's residual by a matrix. Minus the log
        of its spectral norm is the decay from the worst initial residual. It is divided by the fall of the bound's log
        in this age. The result is the smallest ratio of all models and ages; it is at least 1 if the theorem holds.

        Args:
            rates: Learning rate of each of A ages.
            exponent: Fall of the bound's log after 0, 1, .., A ages, [A + 1], as ``Theorem1.exponent`` returns it.
        """
        least = np.inf
        for rate, fallen in zip(rates, np.diff(exponent), strict=True):
            for k in range(int(self.empirical.model.max()) + 1):
                age = self.empirical.true_age(rate, trained_model=k)
                least = np.minimum(least, -np.log(np.linalg.norm(age, 2)) / fallen)
        return float(least)


def _edge_case(
    seed: int,
    sizes: tuple[int, ...] = SIZES,
    group: Int[np.ndarray, "N"] = GROUP,
    steps: int | tuple[int, ...] = STEPS,
    scale: float = 1.0,
) -> EdgeCase:
    """Draws clients and kernels for ``EdgeCase``.

    Args:
        seed: Seed of the draw.
        sizes: Number of examples of each client.
        group: Group of each client; there are as many groups as models, and the groups take turns at the models.
        steps: Local steps of all clients, or of each; if unequal, the features of the client with fewest are halved.
        scale: Size of the kernel's random features.
    """
    rng, n, num_models = np.random.default_rng(seed), sum(sizes), int(group.max()) + 1
    features = scale * rng.standard_normal((n, 10 * n)) / np.sqrt(10 * n)
    rows = tuple(np.split(rng.permutation(n), np.cumsum(sizes)[:-1]))
    local_steps = np.broadcast_to(np.asarray(steps), (len(sizes),))
    if np.ptp(local_steps):  # the client with the fewest steps gets a quarter of its kernel
        features[rows[int(np.argmin(local_steps))]] /= 2
    theta = features @ features.T
    values, vectors = np.linalg.eigh(theta)
    empirical = theta - INSIDE / 3 * values[0] * np.outer(vectors[:, 0], vectors[:, 0])
    limit = RandomFederation(theta, rows, (group + np.arange(num_models)[:, None]) % num_models, local_steps)
    return EdgeCase(limit, limit._replace(theta=empirical))


def _check_convergence(scale: str, seed: int) -> list[Verdict]:
    """Checks Theorem 1 of FE-2024: bounds on the decay of the residual and on the movement of the weights."""
    parts = _as_proved, _as_stated, _unequal_steps, _rate, _growth, _movement
    return [part(seed) for part in parts]


def _decay(claim: Claim, decay: float, note: str, control: str, factor: float, applies: bool = True) -> Verdict:
    """Checks that ``decay`` is at least 1: the fall of the log residual over the fall that a bound guarantees.

    The control is a faster bound, with ``factor`` times the exponent, which the residual must violate. ``note`` follows
    the measured number in the text. If ``applies`` is False (an assumption does not hold) the check fails.
    """
    right = f"{decay:.3f} {note}", ">= 1", applies and decay >= 1
    return claim.judged(right, (control, f"{decay / factor:.3f}", decay / factor < 1), f"rate x {decay:.3f}")


def _as_proved(seed: int) -> Verdict:
    """Checks FE-2021 Theorem 9.1's bound on the residual where its assumptions and its proof's assumptions hold.

    Residuals are of linear models, from the worst initial residual, after an age at each of two learning rates.
    """
    case = _edge_case(seed)
    curvature = case.limit.constants.kappa_3(1.0, len(SIZES))
    progress = INSIDE * float(np.linalg.eigvalsh(case.limit.theta)[0]) / 2 / (6 * 3 * curvature)  # of the smaller step
    rates = [progress / STEPS, progress / STEPS / 2]  # kappa_3 <= u / 6
    theorem = case.theorem(rates)
    exponent = theorem.exponent()
    statement = f"all assumptions hold, also the proof's: {WHAT}"
    claim = Claim("FE-2021 Theorem 9.1, as proved", statement, f"{WHERE}, eta_0 tau = {progress:.1e} and half of it")
    note = f"(kappa_2 {theorem.constants.kappa_2:.1e}; fail: {', '.join(theorem.failing) or 'none'})"
    factor = theorem.exponent("first_order")[-1] / exponent[-1]
    return _decay(claim, case.decay(rates, exponent), note, "1 instead of 1/3", factor, not theorem.failing)


def _as_stated(seed: int) -> Verdict:
    """Checks FE-2024 Theorem 1's bound on the residual at the largest step that the theorem allows.

    There the bound must hold, although a condition that only the proof needs does not (erratum `fe2021.assumptions`).
    """
    case = _edge_case(seed)
    rate = INSIDE * case.limit.constants.largest_progress() / STEPS
    theorem = case.theorem([rate])
    exponent = theorem.exponent()
    statement = f"the largest step with kappa_2 < 1, where only kappa_3, of the proof's last line, is too large: {WHAT}"
    claim = Claim("FE-2024 Theorem 1 (FE-2021 4.1)", statement, f"{WHERE}, eta_0 tau = {STEPS * rate:.1e}")
    note = f"(kappa_2 {theorem.constants.kappa_2:.3f}; fail: {', '.join(theorem.failing)})"
    factor = theorem.exponent("informal")[-1] / exponent[-1]
    control, applies = (
        "4.1 as stated, t = rounds x local steps: K/6, not 1/3",
        set(theorem.failing) <= {"kappa_3_small"},
    )
    return _decay(claim, case.decay([rate], exponent), note, control, factor, applies)


def _unequal_steps(seed: int) -> Verdict:
    """Checks FE-2021 Theorem 9.1's bound on the residual for unequal local steps, a case outside its assumptions."""
    case, (least, most) = _edge_case(seed, steps=UNEQUAL_STEPS), (min(UNEQUAL_STEPS), max(UNEQUAL_STEPS))
    rate = INSIDE * case.limit.constants.largest_progress() / most
    theorem = case.theorem([rate])
    statement = (
        f"unequal local steps, {least} to {most}, which the theorem excludes; tau is the least, and kappa_2 < 1 "
        f"for the most: {WHAT}"
    )
    claim = Claim("FE-2021 Theorem 9.1, unequal steps", statement, f"{WHERE}, eta_0 = {rate:.1e}")
    note, decay = f"(fail: {', '.join(theorem.failing)})", case.decay([rate], theorem.exponent())
    return _decay(claim, decay, note, "the most steps instead of the least", most / least)


def _rate(seed: int) -> Verdict:
    """Checks eq. (27) of FE-2021: in an age, mode i of the kernel decays at the rate ``eta_0 tau lambda_i / nbar``.

    eta_0 is the step size, tau the local steps, lambda_i the eigenvalue, and nbar the number of examples that train a
    model in a round. The relative error must fall in proportion to the step size.
    """
    case = _edge_case(seed).limit
    values = np.linalg.eigvalsh(case.theta)
    rates = []
    for progress in FALLING_STEPS:
        multipliers = np.linalg.eigvals(case.true_age(float(progress) / STEPS)).real
        rates.append(np.sort(-np.log(multipliers)) / (progress * values))  # times nbar they are 1

    def slope(nbar: float) -> float:
        return log_slope(FALLING_STEPS, [float(np.linalg.norm(nbar * r - 1)) for r in rates])

    nbar, mean_size = 3.0, float(np.mean(SIZES))
    statement = "rates of an age's modes / (eta_0 tau lambda / nbar) - 1: slope in the step"
    sizes = f"{FEDERATION}, eta_0 tau = {FALLING_STEPS[-1]:g} .. {FALLING_STEPS[0]:g}"
    noticed = 1 + least_noticed(lambda error: abs(slope((1 + error) * nbar) - 1) >= 0.1)
    control = f"mean n_i = {mean_size:g} instead of nbar = {nbar:g}", slope(mean_size)
    return Claim("FE-2021 eq. (27)", statement, sizes).near(slope(nbar), control, 0.1, f"rate x {noticed:.5f}")


def _pulling(seed: int) -> RandomFederation:
    """Draws clients with one example each, where the local step of client 0 raises the loss of client 1."""
    rng = np.random.default_rng(seed)
    features = 0.3 * np.eye(6, 8, k=1)
    features[0, 0], features[1, 0] = rng.uniform(8, 10), rng.uniform(18, 22)
    features[2:, 0] = 0.3 * rng.standard_normal(4)
    rows = tuple(np.array([i]) for i in range(6))
    return RandomFederation(features @ features.T, rows, np.array([[0, 1, 1, 1, 1, 1]]), np.full(6, STEPS))


def _growth(seed: int) -> Verdict:
    """Checks FE-2021 eq. (20), a bound on the worst residual's growth in an age, as corrected (erratum `fe2021.20`).

    The printed bound is the control, which the growth must exceed.
    """
    case, progress = _pulling(seed), 1e-6
    growth = float(np.linalg.norm(case.true_age(progress / STEPS), 2)) - 1
    c2, printed = case.constants.c2, case.constants.kappa_2(progress)
    right = float(np.expm1(np.log1p(printed) + progress * (c2**2 - c2)))
    return Claim(
        "FE-2021 eq. (20), (26)",
        "growth of the worst residual inside an age / kappa_2 with C_i^2 in place of C_i as the bound of ||Theta_i||",
        f"n = 6, 6 clients, K = 2, eta_0 tau = {progress:g}, kappa_2 = {printed:.1e}",
    ).bounded(growth / right, "kappa_2 as printed: ||Theta_i|| <= C_i", growth / printed)


def _movement(seed: int) -> Verdict:
    """Checks FE-2021 eq. (18), line 2, a bound on how far weights move, as corrected (erratum `fe2021.18movement`).

    The movement is that of a linear model from the worst initial residual, after 1, 2, 4, .. ages. The printed bound is
    the control, which the movement must exceed.
    """
    case, steps, ages = _edge_case(seed, (1, 1, 2), np.array([0, 0, 1]), 3, scale=0.1), 3, 2**15
    rate = 0.1 * case.limit.constants.largest_progress() / steps
    theorem = case.theorem([rate], ages)
    bound, printed = (
        theorem.movement_bound(form)[:, 0] / theorem.constants.r0[0] for form in ("summed", "equation_18")
    )
    values, vectors = np.linalg.eigh(case.empirical.theta)
    root, age, at, ratios, wrong = vectors / np.sqrt(values), case.empirical.true_age(rate), 1, [], []
    while at <= ages:
        # ages that take the residual g to A g move a linear model's weights by J' Theta^-1 (1 - A) g
        moved = float(np.linalg.norm(root.T @ (np.eye(len(age)) - age), 2))
        ratios.append(moved / bound[at])
        wrong.append(moved / printed[at])
        age, at = age @ age, 2 * at
    return Claim(
        "FE-2021 Theorem 9.1, eq. (18) second line",
        f"movement of the weights / bound summed over ages, worst initial residual; fail: {', '.join(theorem.failing)}",
        f"n = 4, 3 clients of 1 and 2, K = 2, nbar = 2, 1 to {ages} ages, kappa_2 = {theorem.constants.kappa_2:.2f}",
    ).bounded(float(np.max(ratios)), "as printed, 3 eta_0 nbar instead of 3", float(np.max(wrong)))


ENTRIES = (
    TheoremEntry(
        "fed_ensemble.second_order",
        "variance of the clients' operators and commutators: orders in the step size",
        _check_second_order,
        papers=("shi2021",),
        statement="Lemmas 9.2 and 9.3, eq. (13) and (14) of FE-2021",
        functions=(theory.expansion, theory.age_operators, theory.exponential_average, theory.exponential_product),
        is_quick=True,
    ),
    TheoremEntry(
        "fed_ensemble.convergence",
        "bounds on the residual and on the movement of the weights, beside the measured decay",
        _check_convergence,
        papers=("shi2024", "shi2021"),
        statement="Theorem 1 of FE-2024 (4.1 and 9.1, eq. 18, 20, 26 and 27 of FE-2021)",
        functions=(theorem_1,),
        figures=("fed_ensemble.theorem1",),
        is_quick=True,
    ),
)
