"""Corollaries and bias-variance decomposition of Fed-ensemble, checked on linear models that are trained many times.

"fed_ensemble.bias_variance": Corollary 1 and eq. (10) of FE-2024 on the sine toy. Ensembles are trained under many
schedules, from many initial functions under each (``simulated``), and compared with closed forms under the same
schedules (``laws_of``). Both share only the data, the learning rate and the keys of the schedules. The model is linear,
so theory is exact at its one width: estimates need no extrapolation in the width. Each output of a run is an
independent initialisation; estimates come from independent batches of them.

"fed_ensemble.ensemble_mean": Corollary 4.1 of FE-2021 (eq. 5), how often the mean of a trained ensemble is far from the
predicted mean after many rounds. For a linear model Theorem 4.2 of FE-2021 has no remainder. The outputs are
independent initialisations, which one run trains by one schedule on the same targets.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import scipy
from jaxtyping import Float, Float64

import fedtangent as ft
from fedtangent._src.comparison.settings import exact_arithmetic
from fedtangent._src.comparison.statistics import LEVEL, Interval, Slope, combined, weighted_line
from fedtangent._src.comparison.theorems import Claim, TheoremEntry, of_scale
from fedtangent._src.comparison.verdicts import EXACT, Rival, Verdict, judged
from fedtangent._src.data.partition.given import consecutive
from fedtangent._src.engine.run import predict
from fedtangent._src.theory.fed_ensemble.bias_variance import Decomposition, EnsembleLaw, Estimate
from fedtangent._src.theory.prior import prior_blocks

TEST_POINTS = 201
# Variances of the sine data (FE-2024, section V-A): of a client's amplitude, and of the noise.
AMPLITUDE, NOISE = 0.2**2, 0.2**2
ToyModel = Callable[[int], ft.types.Model]


class ToyProblem(NamedTuple):
    """The sine toy, a small regression on noisy sine data: examples, clients, their training, and a linear model.

    ``expected`` is the mean of the target at each point of the grid ``x_test``, and ``noise`` its variance, averaged
    over the grid. ``model`` is a function from a number of outputs to the model, whose outputs are independent;
    ``blocks`` are the model's kernels at the examples and the grid.
    """

    x: Float[np.ndarray, "n 1"]
    y: Float[np.ndarray, "n 1"]
    clients: ft.types.Partition
    x_test: Float[np.ndarray, "m 1"]  # an even grid
    expected: Float[np.ndarray, "m 1"]  # E[y | x] on the grid
    noise: float  # E_x Var[y | x] over the grid
    model: ToyModel  # number of outputs -> model
    blocks: ft.kernels.KernelBlocks
    learning_rate: float
    local_steps: int


def sine_problem(
    seed: int,
    *,
    local_steps: int,
    sigma: float = 1.0,
    gap: bool = False,
    num_clients: int = 50,
    points_per_client: int = 2,
) -> ToyProblem:
    """Builds the sine toy, noisy sine data on many clients (FE-2024, section V-A; FE-2021, section 5), in float64.

    The paper gives neither learning rate nor local steps. The rate here is ``1 / max_x Theta(x, x)``, half of the
    largest that is stable for any data, with Theta the tangent kernel. The model's 100 radial basis functions have the
    same centres for every ``seed``.

    Args:
        seed: Seed of the data.
        local_steps: Local steps of a round.
        sigma: Standard deviation of the initial weights.
        gap: Whether to use the data of section V-B, whose inputs leave out an interval.
        num_clients: Number of clients.
        points_per_client: Examples of each client.
    """
    toy = ft.data.load(
        "sine", seed=seed, num_users=num_clients, points_per_user=points_per_client, gap=gap, test_points=TEST_POINTS
    )

    def model(outputs: int) -> ft.types.Model:
        return ft.models.rbf_linear(100, 0.08, sigma, seed=0, output_size=outputs, dtype=jnp.float64)

    blocks = _blocks(model, toy.x_train, toy.x_test)
    assert blocks.ntk_test is not None
    expected = np.asarray(toy.y_test)
    return ToyProblem(
        np.asarray(toy.x_train),
        np.asarray(toy.y_train),
        ft.partition.by_user(np.asarray(toy.user_train)),
        np.asarray(toy.x_test),
        expected,
        float(np.mean(AMPLITUDE * expected**2 + NOISE)),
        model,
        blocks,
        1 / float(np.max(np.diag(blocks.ntk_test))),
        local_steps,
    )


def _blocks(model: ToyModel, x: np.ndarray, x_test: np.ndarray) -> ft.kernels.KernelBlocks:
    kernel = model(1).kernel
    assert kernel is not None
    return ft.kernels.kernel_blocks(kernel, x, x_test)


def spaced_problem(seed: int, local_steps: int) -> ToyProblem:
    """Builds the sine toy, noisy sine data, with eight examples on three unequal clients, and a gap in the inputs.

    The inputs are further apart than the width 0.08 of the radial basis functions. On the papers' examples the kernel
    is nearly singular, and no run comes near the limit of many rounds (FE-2024, Theorem 2). Here a hundred rounds
    suffice for any seed. The targets have noise, but no amplitude that varies by client; the field ``noise`` is the
    variance with both, as for ``sine_problem``.

    Args:
        seed: Seed of the data.
        local_steps: Local steps of a round.
    """
    rng, whole = np.random.default_rng(seed), sine_problem(seed, local_steps=local_steps, gap=True, num_clients=1)
    x = 0.5 + 0.13 * np.arange(4) + rng.uniform(0, 0.02, (2, 4))
    x = rng.permutation((x * [[-1], [1]]).ravel())[:, None]
    y = np.sin(2 * np.pi * x) + rng.normal(0, NOISE**0.5, x.shape)
    return whole._replace(x=x, y=y, clients=consecutive((1, 3, 4)), blocks=_blocks(whole.model, x, whole.x_test))


@functools.cache
def permutations(num_clients: int, num_models: int) -> ft.types.Schedule:
    """Builds ``schedules.per_client_permutations``: each client trains the models in another random order.

    It is cached, so that all runs of equal sizes share one compiled program.

    Args:
        num_clients: Clients N.
        num_models: Models K.
    """
    return ft.schedules.per_client_permutations(num_clients, num_models)


def seeds_of(num_models: int, count: int, first: int = 0) -> range:
    """Returns ``count`` seeds for runs of K models.

    Different K up to 64, or different ``first`` below 2^16, have no seed in common if ``count`` is at most 1000.

    Args:
        num_models: Number of models K.
        count: Number of seeds.
        first: Seed of the whole check.
    """
    start = (first * 2**16 + 1000 * num_models) % 2**32
    return range(start, start + count)


def laws_of(
    problem: ToyProblem, schedule: ft.types.Schedule, rounds: Sequence[int], seeds: Sequence[int]
) -> list[tuple[EnsembleLaw, ...]]:
    """Computes mean and variance of the ensemble after each of ``rounds`` in closed form, for each seed's schedule.

    Clients are weighted by their numbers of examples.

    Args:
        problem: Data, kernels and training.
        schedule: The schedule, drawn with each seed.
        rounds: Numbers of finished rounds.
        seeds: Seeds of the runs.

    Returns:
        A list with one entry for each seed: a tuple of mean and variance at each of ``rounds``.
    """
    last = max(rounds)
    longer = max(256, 1 << (last - 1).bit_length())  # one compiled program serves runs of many lengths
    runs = (ft.schedules.drawn_cohorts(schedule, problem.clients, longer, int(seed)) for seed in seeds)
    cohorts = [ft.types.Cohort(*(np.asarray(part)[:last] for part in run)) for run in runs]  # type: ignore[arg-type]
    rule = ft.theory.Rule(problem.local_steps, problem.learning_rate)
    return ft.theory.ensemble_laws(
        problem.blocks, problem.y, problem.clients, cohorts, rule, rounds, schedule.num_models
    )


def simulated(
    problem: ToyProblem, schedule: ft.types.Schedule, num_rounds: int, seeds: Sequence[int], draws: int
) -> Float[np.ndarray, "S J m 1"]:
    """Trains ensembles and returns the mean of their models at the test points, one run for each seed's schedule.

    The outputs of a linear model share no weights and, under squared loss, no gradients: each is an independent
    initialisation of the one-output model, trained by the same schedule on the same targets. For a network, whose
    outputs share layers, ``draws`` must be 1.

    Args:
        problem: Data, model and training.
        schedule: The schedule.
        num_rounds: Rounds R.
        seeds: Seeds of the S runs.
        draws: Outputs J of the model in each run.
    """
    rate, work = problem.learning_rate, ft.Work(steps=problem.local_steps, batch_size=None)
    algorithm = ft.fed_ensemble(problem.model(draws), schedule, client_learning_rate=rate, work=work)
    targets = np.tile(problem.y, (1, draws))
    examples = ft.data.federated_data(problem.x, targets, problem.clients, dtype=jnp.float64)
    x, predictions = jnp.asarray(problem.x_test), []
    for seed in seeds:
        run = ft.simulate(algorithm, examples, num_rounds=num_rounds, seed=int(seed), devices=ft.Devices("scan"))
        predictions.append(np.asarray(predict(algorithm, run.state, x).mean).T[:, :, None])
    return np.stack(predictions)


def power_law(variances: Mapping[int, Estimate]) -> Slope:
    """Fits the slope of log variance against log K, for ensembles of K models, weighted by relative standard errors.

    If a standard error is 0, all K weigh the same, and the slope's standard error is set to 0.

    Args:
        variances: Variance with its standard error, by ensemble size K.

    Raises:
        ValueError: There are fewer than two K, or a variance is not positive.
    """
    k, value = np.array(list(variances), float), np.array([v.value for v in variances.values()])
    if len(k) < 2 or not np.all(value > 0):
        raise ValueError(f"variances: got {dict(variances)}, must be positive, at two K or more")
    error = np.array([v.standard_error for v in variances.values()]) / value
    if np.all(error > 0):
        return weighted_line(np.log(k), np.log(value), 1 / error**2)
    return weighted_line(np.log(k), np.log(value), np.ones(len(k)))._replace(standard_error=0.0)


NUM_MODELS = (1, 2, 4, 8)
LAST = max(NUM_MODELS)
CLIENTS = 24
STEPS, LIMIT_STEPS = 2, 10  # local steps: few enough that their number matters; enough to reach the limit
BIAS_MARGIN, MARGIN, LIMIT_MARGIN = 0.15, 0.05, 0.1  # of the closed form
BATCHES = 64
SIZES = (8, 2048, 8), (32, 2048, 16)  # schedules, initialisations of each, rounds: of the decomposition
LIMIT_SIZES = (4, 1024, 16), (12, 1024, 60)  # of the corollary, rounds for each model
SOONER = 8  # the corollary's last round, over an earlier one that must not have reached the limit
DECOMPOSED, COROLLARY = "FE-2024 eq. (10), FE-2021 eq. (3)", "FE-2024 Corollary 1, eq. (11)"


def _check_bias_variance(scale: str, seed: int) -> list[Verdict]:
    """Checks an ensemble's variance after many rounds (FE-2024, Corollary 1) and its error's decomposition (eq. 10)."""
    with exact_arithmetic():
        return _corollary(seed, *of_scale(scale, *LIMIT_SIZES)) + _decomposition(seed, *of_scale(scale, *SIZES))


def _corollary(seed: int, schedules: int, draws: int, ages: int) -> list[Verdict]:
    """Checks Corollary 1 of FE-2024: after many rounds K models' mean has mean square distance k(x, x) / K from m(x).

    m and k are mean and covariance of the limit, and the points x are averaged. For each K, ensembles are trained under
    ``schedules`` schedules, from ``draws`` initialisations each. Training lasts ``ages * max(K, 4)`` rounds; in K
    rounds every client trains each model once. A second verdict compares the closed form at the last round with this
    limit.
    """
    problem = spaced_problem(seed, LIMIT_STEPS)
    clients = problem.clients.num_clients
    ratios: dict[int, np.ndarray] = {}
    late, early = 0.0, 0.0
    for k in NUM_MODELS:
        schedule, seeds = permutations(clients, k), seeds_of(k, schedules, seed)
        num_rounds = ages * max(k, 4)
        mean, variance = ft.theory.corollary_1(problem.blocks, problem.y, k)[:2]
        assert mean is not None and variance is not None
        limit = float(variance.mean())
        runs = simulated(problem, schedule, num_rounds, seeds, draws)
        ratios[k] = np.mean((runs - mean) ** 2, axis=(2, 3)).ravel() / limit
        for laws in laws_of(problem, schedule, (num_rounds // SOONER, num_rounds), seeds):
            off = [float(np.mean(law.variance + ((law.mean - mean) ** 2)[:, 0])) / limit - 1 for law in laws]
            early, late = np.maximum((early, late), np.abs(off))
    prior, cross, test = prior_blocks(problem.blocks)
    b = np.linalg.solve(problem.blocks.ntk_train, problem.blocks.ntk_test_train.T).T
    whole = np.trace(test + b @ prior @ b.T - 2 * b @ cross.T)
    wrong = {
        **{f"K - 1 instead of K = {k}": (k / (k - 1), k) for k in NUM_MODELS[1:]},
        "cross terms once": (float(np.trace(test + b @ prior @ b.T - b @ cross.T) / whole), 1),
        "the prior's variance": (float(np.trace(test) / whole), 1),
    }
    rivals = [Rival(name, abs(1 / by - 1), partial(_mean, ratios[k] / by)) for name, (by, k) in wrong.items()]
    sizes = (
        f"RBF-linear sine toy, n = {len(problem.x)} on {clients} unequal clients, "
        f"K = {', '.join(map(str, NUM_MODELS))}, round {ages * LAST} (of the largest K), "
        f"{schedules} schedules x {draws} initialisations"
    )
    close = 0.1 * LIMIT_MARGIN
    flow = "variance and bias of the exact flow's ensemble are the corollary's: relative distance, largest over K"
    reached = Claim(COROLLARY, flow, sizes).judged(
        (f"{late:.1e}", f"<= {close:g}", late <= close),
        (f"{SOONER} times sooner", f"{early:.1e}", early > close),
        f"{close:.0%}",
    )
    claim = Claim(COROLLARY, "squared distance of the ensemble from m(x) / (k(x, x) / K), the worst K", sizes)
    return [_judged(claim, LIMIT_MARGIN, list(ratios.values()), rivals), reached]


def _mean(values: np.ndarray) -> Interval:
    """Returns the mean of independent ``values`` [n] with its interval."""
    return combined((1,), (values,))


def _judged(claim: Claim, margin: float, values: list[np.ndarray], rivals: list[Rival]) -> Verdict:
    """Checks that the mean of each array in ``values`` is 1 up to ``margin``.

    ``rivals`` are wrong theories. The control is the least wrong one that is far enough off to fail.
    """
    estimates = [_mean(ratios) for ratios in values]
    verdict = judged(claim.theorem, claim.statement, 1.0, margin, estimates, rivals)
    return verdict._replace(sizes=claim.sizes, notices=f"{margin + max(e.length for e in estimates):.1%}")


def _decomposition(seed: int, schedules: int, draws: int, num_rounds: int) -> list[Verdict]:
    """Checks the terms of FE-2024, eq. (10): the error of an ensemble is noise plus bias plus variance.

    There is a verdict on the bias, on the part of the variance from initialisations, on the error, and on the part of
    the variance from schedules. The terms are measured on ensembles of eight models (``LAST``), under ``schedules``
    schedules and from ``draws`` initialisations each (the last term from models that start at 0), and compared with
    their closed forms for these schedules.
    """
    problem = sine_problem(seed, local_steps=STEPS, num_clients=CLIENTS)
    schedule, seeds = permutations(CLIENTS, LAST), seeds_of(LAST, schedules, seed)

    def law(problem: ToyProblem) -> Decomposition:
        laws = laws_of(problem, schedule, (num_rounds,), seeds)
        return ft.theory.decompose_laws([law[0] for law in laws], problem.expected, problem.noise)

    exact = law(problem)
    other = {f"{steps} local steps for {STEPS}": law(problem._replace(local_steps=steps)) for steps in (1, 3)}
    runs = simulated(problem, schedule, num_rounds, seeds, draws)
    batches = [
        ft.theory.decompose_runs(part, problem.expected, problem.noise)
        for part in np.array_split(runs, BATCHES, axis=1)
    ]
    sizes = (
        f"RBF-linear sine toy, N = {CLIENTS}, K = {LAST}, round {num_rounds}, {schedules} schedules x "
        f"{draws} initialisations"
    )

    def part(name: str, margin: float, more: Mapping[str, float]) -> Verdict:
        """Checks that the measured term ``name``, "bias" or "initialisation", is its closed form up to ``margin``.

        Controls are the terms for wrong numbers of local steps, and the wrong values ``more``, keyed by the mistake.
        """
        wrong = {mistake: getattr(terms, name).value for mistake, terms in other.items()} | dict(more)
        values, right = np.array([getattr(b, name).value for b in batches]), getattr(exact, name).value
        rivals = [Rival(mistake, abs(right / by - 1), partial(_mean, values / by)) for mistake, by in wrong.items()]
        claim = Claim(DECOMPOSED, f"{name} of the ensemble of {LAST} / its closed form", sizes)
        return _judged(claim, margin, [values / right], rivals)

    return [
        part("bias", BIAS_MARGIN, {"variance not subtracted": exact.bias.value + exact.variance.value}),
        part("initialisation", MARGIN, {"K - 1 instead of K": LAST / (LAST - 1) * exact.initialisation.value}),
        _error(problem, exact, runs, seed, sizes),
        _schedules(seed, schedules, num_rounds),
    ]


def _error(problem: ToyProblem, exact: Decomposition, runs: np.ndarray, seed: int, sizes: str) -> Verdict:
    """Checks that the mean squared error on new labels is noise plus bias plus variance (FE-2024, eq. 10).

    ``exact`` has the three terms in closed form, ``runs`` the predictions of the trained ensembles.
    """
    rng = np.random.default_rng(seed)
    amplitude, noise = rng.normal(1.0, 0.2, runs.shape), rng.normal(0.0, 0.2, runs.shape)
    errors = np.mean((amplitude * np.sin(2 * np.pi * problem.x_test) + noise - runs) ** 2, axis=(2, 3)).ravel()
    total, variance = exact.total.value, exact.variance.value
    wrong = {
        "bias of h, not of its mean, as FE-2024 prints": total + variance,
        "no data uncertainty": total - exact.noise,
        "no variance": total - variance,
    }
    rivals = [Rival(mistake, abs(total / by - 1), partial(_mean, errors / by)) for mistake, by in wrong.items()]
    statement = "mean squared error on fresh labels / (data uncertainty + bias (of the mean of h, FE-2021) + variance)"
    return _judged(Claim(DECOMPOSED, statement, sizes), MARGIN, [errors / total], rivals)


def _schedules(seed: int, schedules: int, num_rounds: int) -> Verdict:
    """Checks that the simulated variance over random schedules equals its closed form, up to rounding.

    All models start at the zero function, so that nothing but the schedule varies.
    """
    problem = sine_problem(seed, local_steps=STEPS, sigma=0.0, num_clients=CLIENTS)
    schedule, seeds = permutations(CLIENTS, LAST), seeds_of(LAST, schedules, seed)
    laws = laws_of(problem, schedule, (num_rounds,), seeds)
    runs = simulated(problem, schedule, num_rounds, seeds, 1)[:, 0]
    exact = ft.theory.decompose_laws([law[0] for law in laws], problem.expected).variance.value
    variance = ft.theory.decompose_runs(runs, problem.expected).variance.value
    biased = exact * (schedules - 1) / schedules
    return Claim(
        DECOMPOSED,
        "variance that the schedules alone add (all models start at 0): simulation = closed form to 1e-9",
        f"RBF-linear sine toy, N = {CLIENTS}, K = {LAST}, round {num_rounds}, {schedules} schedules",
    ).judged(
        (f"{variance:.6g}", f"{exact:.6g}", abs(variance - exact) <= EXACT * exact),
        ("divided by S instead of S - 1", f"{biased:.6g}", abs(variance - biased) > EXACT * exact),
        f"{EXACT:.0e}",
    )


CLIENT_SIZES = (1, 2, 4, 5)  # of the clients
MEAN_MODELS, NUM_POINTS, NUM_FEATURES = 4, 10, 40
NUM_ROUNDS, LOCAL_STEPS = 100, 20
FAR = 1.2  # standard deviations of the mean, where Chebyshev's inequality is nearest to a Gaussian's tails
SHARE_MARGIN = 0.05  # of the probability itself


def _check_ensemble_mean(scale: str, seed: int) -> list[Verdict]:
    """Checks how often the mean of four models is 1.2 standard deviations or more from the predicted mean at a point.

    FE-2021 eq. (5) bounds this probability, and a Gaussian limit gives its value.
    """
    draws = of_scale(scale, 2000, 20000)
    limit, means, residual = _trained(seed, draws)
    epsilon = FAR * np.sqrt(np.diag(limit.cov) / MEAN_MODELS)
    shares = np.mean(np.abs(means - limit.mean) >= epsilon[:, None], axis=0)  # of the points, [draws]
    error = float(scipy.stats.t.ppf(1 - LEVEL / 2, draws - 1) * shares.std(ddof=1) / np.sqrt(draws))
    share = Interval.about(float(shares.mean()), error)
    bound = float(np.mean(ft.theory.corollary_4_1(limit, MEAN_MODELS, epsilon)))
    where = (
        f"n = {sum(CLIENT_SIZES)}, {len(CLIENT_SIZES)} clients of 1 to 5, K = {MEAN_MODELS}, linear model, round "
        f"{NUM_ROUNDS} (residual {residual:.0e} of the first), {draws} ensembles, {NUM_POINTS} points"
    )
    exact, other = 2 * float(scipy.stats.norm.sf(FAR)), 2 * float(scipy.stats.norm.sf(FAR / 2**0.5))
    event = f"how often the ensemble's mean is {FAR:g} standard deviations or more from m(x)"
    chebyshev = Claim("FE-2021 Corollary 4.1, eq. (5)", f"{event}: at most k(x, x) / (K epsilon^2)", where)
    gaussian = Claim("FE-2021 Corollary 4.1, Theorem 4.2", f"{event}: a Gaussian's probability", where)
    return [
        chebyshev.judged(
            (str(share), f"<= {bound:.3f}", share.within(0, bound)),
            ("K^2 instead of K", f"above {bound / MEAN_MODELS:.3f}", share.outside(0, bound / MEAN_MODELS)),
            f"bound x {share.value / bound:.2g}",
        ),
        gaussian.judged(
            (str(share), f"{exact:.3f} +- {SHARE_MARGIN:g}", share.within(exact - SHARE_MARGIN, exact + SHARE_MARGIN)),
            ("half of the variance", f"not {other:.3f}", share.outside(other - SHARE_MARGIN, other + SHARE_MARGIN)),
            f"probability off by {SHARE_MARGIN + share.length:.2g}",
        ),
    ]


def _trained(seed: int, draws: int) -> tuple[ft.types.Gaussian, Float64[np.ndarray, "m draws"], float]:
    """Trains ``draws`` ensembles of four linear models in one run.

    Returns:
        Theorem 2's limit of many rounds, the ensembles' means at the test points, and the ratio of the last training
        residual to the first.
    """
    rng, n = np.random.default_rng(seed), sum(CLIENT_SIZES)
    points = rng.standard_normal((n + NUM_POINTS, NUM_FEATURES))
    x, y = points[:n], rng.standard_normal((n, 1))
    theta = points @ points.T / NUM_FEATURES  # of the model below, exactly: its weights are N(0, 1)
    train, cross, test = theta[:n, :n], theta[n:, :n], theta[n:, n:]
    limit = ft.theory.gp_limit(ft.kernels.KernelBlocks(train, cross, train, cross, test), y)
    clients = consecutive(CLIENT_SIZES)
    client_rows = map(clients.client, range(4))
    largest = max(np.linalg.eigvalsh(train[np.ix_(rows, rows)])[-1] / len(rows) for rows in client_rows)
    algorithm = ft.fed_ensemble(
        ft.models.mlp(NUM_FEATURES, draws, (), w_std=1.0, b_std=None, dtype=jnp.float64),
        ft.schedules.per_client_permutations(len(CLIENT_SIZES), MEAN_MODELS),
        client_learning_rate=float(1 / largest),
        work=ft.Work(steps=LOCAL_STEPS, batch_size=None),
    )
    data = ft.data.federated_data(x, np.tile(y, (1, draws)), clients, dtype=jnp.float64)
    start = np.asarray(predict(algorithm, algorithm.init(seed, len(CLIENT_SIZES)), jnp.asarray(x)).mean)
    state = ft.simulate(algorithm, data, num_rounds=NUM_ROUNDS, seed=seed, devices=ft.Devices("scan")).state
    means = np.asarray(predict(algorithm, state, jnp.asarray(points)).mean)
    return limit, means[n:], float(np.linalg.norm(means[:n] - y) / np.linalg.norm(start - y))


ENTRIES = (
    TheoremEntry(
        "fed_ensemble.bias_variance",
        "the variance of an ensemble against its size, and the decomposition of its error",
        _check_bias_variance,
        papers=("shi2024", "shi2021"),
        statement="Corollary 1 and eq. (10) of FE-2024 (4.1 and eq. 3 of FE-2021)",
        functions=(ft.theory.corollary_1, ft.theory.decompose_laws, ft.theory.decompose_runs),
        figures=("fed_ensemble.corollary1", "fed_ensemble.table1"),
    ),
    TheoremEntry(
        "fed_ensemble.ensemble_mean",
        "how often the mean of an ensemble is far from the limit's",
        _check_ensemble_mean,
        papers=("shi2021",),
        statement="Corollary 4.1, eq. (5) of FE-2021",
        functions=(ft.theory.corollary_4_1, ft.theory.gp_limit),
    ),
)
