"""Corollary 4.1 of FE-2021 (eq. 5): how often the mean of trained ensembles is far from the limit's mean.

The model is linear, so that Theorem 4.2 has no remainder. Its outputs are independent initialisations, which one run
trains by one schedule on the same targets.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import scipy
from jaxtyping import Float64

import fedtangent as ft
from fedtangent._src.comparison.statistics import LEVEL, Interval
from fedtangent._src.comparison.theorems import entries, of_scale
from fedtangent._src.comparison.theorems.claims import Claim
from fedtangent._src.comparison.verdicts import Verdict
from fedtangent._src.data.partition.given import consecutive
from fedtangent._src.engine.run import predict
from fedtangent._src.types import Gaussian

SIZES = (1, 2, 4, 5)  # of the clients
NUM_MODELS, NUM_POINTS, NUM_FEATURES = 4, 10, 40
NUM_ROUNDS, LOCAL_STEPS = 100, 20
FAR = 1.2  # standard deviations of the mean, where Chebyshev's inequality is nearest to a Gaussian's tails
MARGIN = 0.05  # of the probability itself


def _checks(scale: str, seed: int) -> list[Verdict]:
    """Checks eq. (5), and the probability that it bounds, which is known for a Gaussian limit."""
    draws = of_scale(scale, 2000, 20000)
    limit, means, residual = _trained(seed, draws)
    epsilon = FAR * np.sqrt(np.diag(limit.cov) / NUM_MODELS)
    shares = np.mean(np.abs(means - limit.mean) >= epsilon[:, None], axis=0)  # of the points, [draws]
    error = float(scipy.stats.t.ppf(1 - LEVEL / 2, draws - 1) * shares.std(ddof=1) / np.sqrt(draws))
    share = Interval.about(float(shares.mean()), error)
    bound = float(np.mean(ft.theory.corollary_4_1(limit, NUM_MODELS, epsilon)))
    where = (
        f"n = {sum(SIZES)}, {len(SIZES)} clients of 1 to 5, K = {NUM_MODELS}, linear model, round {NUM_ROUNDS} "
        f"(residual {residual:.0e} of the first), {draws} ensembles, {NUM_POINTS} points"
    )
    exact, other = 2 * float(scipy.stats.norm.sf(FAR)), 2 * float(scipy.stats.norm.sf(FAR / 2**0.5))
    event = f"how often the ensemble's mean is {FAR:g} standard deviations or more from m(x)"
    chebyshev = Claim("FE-2021 Corollary 4.1, eq. (5)", f"{event}: at most k(x, x) / (K epsilon^2)", where)
    gaussian = Claim("FE-2021 Corollary 4.1, Theorem 4.2", f"{event}: a Gaussian's probability", where)
    return [
        chebyshev.judged(
            (str(share), f"<= {bound:.3f}", share.within(0, bound)),
            ("K^2 instead of K", f"above {bound / NUM_MODELS:.3f}", share.outside(0, bound / NUM_MODELS)),
            f"bound x {share.value / bound:.2g}",
        ),
        gaussian.judged(
            (str(share), f"{exact:.3f} +- {MARGIN:g}", share.within(exact - MARGIN, exact + MARGIN)),
            ("half of the variance", f"not {other:.3f}", share.outside(other - MARGIN, other + MARGIN)),
            f"probability off by {MARGIN + share.length:.2g}",
        ),
    ]


def _trained(seed: int, draws: int) -> tuple[Gaussian, Float64[np.ndarray, "m draws"], float]:
    """Trains ``draws`` ensembles in one run; returns limit, test means, and last over first training residual."""
    rng, n = np.random.default_rng(seed), sum(SIZES)
    points = rng.standard_normal((n + NUM_POINTS, NUM_FEATURES))
    x, y = points[:n], rng.standard_normal((n, 1))
    theta = points @ points.T / NUM_FEATURES  # of the model below, exactly: its weights are N(0, 1)
    train, cross, test = theta[:n, :n], theta[n:, :n], theta[n:, n:]
    limit = ft.theory.gp_limit(ft.kernels.KernelBlocks(train, cross, train, cross, test), y)
    clients = consecutive(SIZES)
    client_rows = map(clients.client, range(4))
    largest = max(np.linalg.eigvalsh(train[np.ix_(rows, rows)])[-1] / len(rows) for rows in client_rows)
    algorithm = ft.fed_ensemble(
        ft.models.mlp(NUM_FEATURES, draws, (), w_std=1.0, b_std=None, dtype=jnp.float64),
        ft.schedules.per_client_permutations(len(SIZES), NUM_MODELS),
        client_learning_rate=float(1 / largest),
        work=ft.Work(steps=LOCAL_STEPS, batch_size=None),
    )
    data = ft.data.federated_data(x, np.tile(y, (1, draws)), clients, dtype=jnp.float64)
    start = np.asarray(predict(algorithm, algorithm.init(seed, len(SIZES)), jnp.asarray(x)).mean)
    state = ft.simulate(algorithm, data, num_rounds=NUM_ROUNDS, seed=seed, devices=ft.Devices("scan")).state
    means = np.asarray(predict(algorithm, state, jnp.asarray(points)).mean)
    return limit, means[n:], float(np.linalg.norm(means[:n] - y) / np.linalg.norm(start - y))


ENTRIES = entries(
    _checks,
    "how often the mean of an ensemble is far from the limit's",
    papers=("shi2021",),
    statement="Corollary 4.1, eq. (5) of FE-2021",
    functions=(ft.theory.corollary_4_1, ft.theory.gp_limit),
)
