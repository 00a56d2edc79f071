"""Checks of the DeepLin paper on simulated runs: FedAvg on a deep linear network, in the paper's notation.

"deep_linear.convergence": Theorem IV.2, a bound on the loss by round, with the induction hypotheses and the lemmas of
its proof. The run meets the theorem's conditions.

"deep_linear.rounds": eq. (6) to (17), which describe a round of FedAvg and the four terms of its residual. The
residual's modes are compared with a linear model's as the width grows.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float64

import fedtangent as ft
from fedtangent._src.comparison.statistics import relative_distance, width_slope
from fedtangent._src.comparison.theorems import Claim, TheoremEntry, of_scale
from fedtangent._src.comparison.verdicts import EXACT, SLOPE, SLOPE_MARGIN, bounded_verdict, judged, slope_rival
from fedtangent._src.data.partition.given import consecutive
from fedtangent._src.engine import Devices, Evaluation, simulate
from fedtangent._src.theory.checks import Assumption
from fedtangent._src.theory.deep_linear.gram import dense, products
from fedtangent._src.theory.deep_linear.rounds import LocalPath, averaged, local_paths
from fedtangent._src.theory.deep_linear.theorem import stable_learning_rate
from fedtangent._src.types import Algorithm, Partition, PyTree


class Size(NamedTuple):
    """Sizes of a problem and its network: N clients with ``held`` examples each, and ``depth`` layers of width m."""

    clients: int  # N
    held: int  # number of examples of a client
    dimension: int  # d
    outputs: int
    width: int  # m
    local_steps: int  # K
    rounds: int
    depth: int = 3

    def __str__(self) -> str:
        """Returns the sizes as text, "N = 7, K = 2, L = 3, m = 1100": clients, local steps, layers and width."""
        return f"N = {self.clients}, K = {self.local_steps}, L = {self.depth}, m = {self.width}"

    @property
    def partition(self) -> Partition:
        """The partition in which each client has consecutive examples."""
        return consecutive([self.held] * self.clients)


def problem(size: Size, seed: int, spread: float, truth: float = 0.5) -> tuple[np.ndarray, np.ndarray]:
    """Draws inputs X [n, d] and targets ``X W*`` [n, C].

    Args:
        size: Sizes of the problem.
        seed: Seed of the draw.
        spread: Least singular value of X; the largest is 1.
        truth: Spectral norm of the true weights W* [d, C].
    """
    rng = np.random.default_rng([seed, size.dimension])
    columns = np.linalg.qr(rng.standard_normal((size.clients * size.held, size.dimension)))[0]
    rows = np.linalg.qr(rng.standard_normal((size.dimension, size.dimension)))[0]
    x = columns * np.linspace(1, spread, size.dimension) @ rows
    star = rng.standard_normal((size.dimension, size.outputs))
    return x, x @ (truth * star / np.linalg.norm(star, 2))


def work_of(size: Size, x: np.ndarray, y: np.ndarray, learning_rate: float) -> ft.theory.FullBatchWork:
    """Returns the clients' data and local steps, as ``run_of`` trains with them, in the form that theory needs.

    Args:
        size: Sizes of the problem.
        x: Inputs, [n, d].
        y: Targets, [n, C].
        learning_rate: Learning rate of the clients.
    """
    return ft.theory.full_batch_work(x, y, size.partition, learning_rate, size.local_steps)


@functools.lru_cache(maxsize=32)
def fed_avg_of(size: Size, learning_rate: float, dtype: str = "float64") -> Algorithm:
    """Builds FedAvg with full batches, the sum of squared errors as loss, and an unweighted mean of the clients.

    The algorithm is cached, so that the runs of all seeds share one compiled program.

    Args:
        size: Sizes of the network and of a round.
        learning_rate: Learning rate of the clients.
        dtype: Type of the parameters.
    """
    return ft.fed_avg(
        ft.models.deep_linear(size.dimension, size.outputs, size.width, size.depth, jnp.dtype(dtype)),
        ft.schedules.all_clients(size.clients),
        client_learning_rate=learning_rate,
        loss="squared_error_sum",
        work=ft.Work(steps=size.local_steps, batch_size=None),
        averaging=ft.Averaging(weighting="uniform"),
    )


class Run(NamedTuple):
    """The recorded models and weights of a run of FedAvg; built by ``run_of``.

    ``models`` are the network as one matrix, the scaled product of its layers' weights, at the start and after every
    round, [R + 1, d, C]. ``weights`` maps each recorded round, a multiple of the argument ``every`` of ``run_of``, to
    the layers' weights W^1 .. W^L, [fan_out, fan_in] each.
    """

    models: np.ndarray  # [R + 1, d, C], the network as one matrix after every round
    weights: dict[int, list[np.ndarray]]  # W^1 .. W^L at recorded rounds, [fan_out, fan_in] as in the paper


def run_of(size: Size, x: np.ndarray, y: np.ndarray, learning_rate: float, seed: int, every: int) -> Run:
    """Simulates ``size.rounds`` rounds of FedAvg.

    Args:
        size: Sizes of the problem and the network.
        x: Inputs, [n, d].
        y: Targets, [n, C].
        learning_rate: Learning rate of the clients.
        seed: Seed of the initial weights.
        every: Rounds between records of the weights.
    """
    algorithm, count = fed_avg_of(size, learning_rate), itertools.count()
    read, weights = algorithm.params, dict[int, list[np.ndarray]]()
    assert read is not None  # FedAvg has a global model
    scale = (size.width ** (size.depth - 1) * size.outputs) ** -0.5

    def look(_: Algorithm, state: PyTree) -> dict[str, np.ndarray]:
        layers, r = [np.asarray(layer[0][0]) for layer in read(state)[::2]], next(count)
        if r % every == 0:
            weights[r] = [layer.T.copy() for layer in layers]
        product = layers[-1]
        for layer in layers[-2::-1]:
            product = layer @ product
        return {"model": scale * product}

    data = ft.data.federated_data(x, y, size.partition, dtype=jnp.float64)
    run = simulate(
        algorithm, data, num_rounds=size.rounds, seed=seed, evaluation=Evaluation(1, look), devices=Devices("scan")
    )
    return Run(np.array([e.metrics["model"] for e in run.history.evaluations]), weights)


CONVERGENCE_SIZES = Size(7, 1, 2, 1, 1100, 2, 400), Size(8, 1, 2, 2, 3200, 2, 800)
CONVERGENCE_SPREAD = 0.95  # the least singular value of X (the largest is 1); the required width grows as kappa^4
DELTA = 0.2  # probability with which the theorem may fail
LOOKS = 6  # how often the weights are recorded along the run
NARROW = 4  # width of networks that violate the conditions: the controls
NARROW_DRAWS = 20
NARROW_ROUNDS = 50
ALL_NARROW = f"width {NARROW}, the worst of {NARROW_DRAWS}"
HYPOTHESES = {  # the measured quantity of each
    "C": "distance of a layer from its start / R",
    "B, largest": "largest singular value / 1.25 of the limit's",
    "B, least": "0.75 of the limit's / least singular value",
    "B, between": "norm of inner layers' products / 2 (L m^count)^1/2",
}


class Observed(NamedTuple):
    """A run of FedAvg with DeepLin's Theorem IV.2, a bound on the loss by round, evaluated on it.

    ``losses`` [R + 1] are relative to the initial loss. ``weights`` maps recorded rounds to the layers' weights, as in
    ``Run``.
    """

    size: Size
    work: ft.theory.FullBatchWork
    theorem: ft.theory.DeepLinearTheorem
    losses: Float64[np.ndarray, "rounds"]  # over the initial one
    weights: dict[int, list[np.ndarray]]  # of the recorded rounds

    @property
    def last(self) -> list[np.ndarray]:
        """The weights at the last recorded round."""
        return self.weights[max(self.weights)]

    def _bounded(self, place: str, statement: str, ratio: float, control: str, wrong: float) -> ft.types.Verdict:
        """Checks that a measured value is at most its bound (``ratio`` <= 1) and above a wrong bound (``wrong`` > 1).

        ``place`` is the number of the lemma or equation, and ``control`` names the wrong bound.
        """
        unmet = f"; not met: {', '.join(self.theorem.failing)}" if self.theorem.failing else ""
        sizes = f"{self.size}, {self.size.rounds} rounds{unmet}"
        return bounded_verdict(f"DeepLin {place}", statement, sizes, ratio, control, wrong)

    def narrow_networks(self) -> list[tuple[ft.theory.DeepLinearTheorem, list[np.ndarray]]]:
        """Draws 20 untrained networks of width 4 (``NARROW``), and evaluates DeepLin's Theorem IV.2 on each.

        They are controls, too narrow for the theorem. Returns pairs of the evaluated theorem and the network's weights.
        """
        sizes = (self.size.dimension, *[NARROW] * (self.size.depth - 1), self.size.outputs)
        networks = []
        for draw in range(NARROW_DRAWS):
            rng = np.random.default_rng([draw, 1])
            weights = [rng.standard_normal((b, a)) for a, b in itertools.pairwise(sizes)]
            networks.append((ft.theory.deep_linear_theorem(weights, self.work, DELTA), weights))
        return networks


def _observe(size: Size, seed: int) -> Observed:
    """Simulates FedAvg at the largest learning rate that DeepLin's Theorem IV.2 allows, and evaluates the theorem."""
    x, y = problem(size, seed, CONVERGENCE_SPREAD)
    largest = np.linalg.norm(x, 2) ** 2
    kappa = largest / np.linalg.svd(x, compute_uv=False)[-1] ** 2
    rate = size.outputs / (50 * size.depth * kappa * size.local_steps * largest) * (1 - 1e-9)
    run, work = run_of(size, x, y, rate, seed, size.rounds // LOOKS), work_of(size, x, y, rate)
    losses = np.sum((x @ run.models - y) ** 2, axis=(1, 2))
    return Observed(
        size, work, ft.theory.deep_linear_theorem(run.weights[0], work, DELTA), losses / losses[0], run.weights
    )


def _bound_18(run: Observed) -> ft.types.Verdict:
    """Checks that the loss is below DeepLin's bound, eq. (18), after every round.

    The control is the same bound without the number N of clients, which the loss must violate.
    """
    rounds, constants = np.arange(len(run.losses)), run.theorem.constants
    rates = (c.rate() for c in (constants, constants._replace(num_clients=1)))
    ratio, wrong = (float((run.losses / rate**rounds)[1:].max()) for rate in rates)
    return run._bounded("Theorem IV.2", "loss / bound (18), the worst round", ratio, "N forgotten", wrong)


def _hypotheses(run: Observed) -> list[ft.types.Verdict]:
    """Checks the hypotheses B and C of DeepLin's proof at every recorded round; hypothesis A is the bound (18).

    B bounds the singular values of the layers' products, and C bounds the layers' distance from the start.
    """
    looks = [run.theorem.hypotheses(weights, float(run.losses[r]), r) for r, weights in run.weights.items()]
    worst = _largest_ratios(looks)
    narrow = _largest_ratios([theorem.hypotheses(weights, 1.0, 0) for theorem, weights in run.narrow_networks()])
    narrow["C"] = max(float(np.linalg.norm(w)) for w in run.last) / run.theorem.constants.radius()
    narrow["B, between"] = 2 * worst["B, between"]
    controls = dict.fromkeys(worst, ALL_NARROW) | {"C": "distance from 0", "B, between": "layers twice as large"}
    return [
        run._bounded(f"hypothesis {name}", f"{HYPOTHESES[name]}, every look", ratio, controls[name], narrow[name])
        for name, ratio in worst.items()
        if name != "A"
    ]


def _largest_ratios(looks: Sequence[Sequence[Assumption]]) -> dict[str, float]:
    """Returns for each assumption the largest ratio of measured to required value over ``looks``, by name.

    Each of ``looks`` holds the assumptions as measured at one time or on one network. If an assumption requires a least
    value, the ratio is inverted. So every assumption fails if its ratio is above 1.
    """
    ratios = dict[str, float]()
    for one in itertools.chain.from_iterable(looks):
        if one.relation == "<=":
            ratio = one.measured / one.required
        else:
            ratio = one.required / one.measured if one.measured > 0 else np.inf
        ratios[one.name] = max(ratios.get(one.name, 0.0), ratio)
    return ratios


def _lemma_1(run: Observed) -> ft.types.Verdict:
    """Checks DeepLin's Lemma VII.1 on the least and the largest singular value of products of layers at the start.

    They are between 0.8 and 1.2 times their values at infinite width.
    """

    def worst(theorem: ft.theory.DeepLinearTheorem, weights: Sequence[np.ndarray]) -> float:
        low, high = theorem.singular_values(weights)
        return max(high / 1.2, 0.8 / low if low > 0 else np.inf)

    narrow = max(worst(theorem, weights) for theorem, weights in run.narrow_networks())
    ratio = worst(run.theorem, run.weights[0])
    return run._bounded("Lemma VII.1", "initial singular values / their bounds", ratio, ALL_NARROW, narrow)


def _local_lemmas(run: Observed) -> list[ft.types.Verdict]:
    """Checks Lemmas VII.2 to VII.7 of DeepLin in the round that starts at the run's last recorded weights.

    They bound each client's loss, weights and outputs after every local step, the change of the kernel since the start
    of the run, and matrix norms.
    """
    paths, c, work = local_paths(run.last, run.work), run.theorem.constants, run.work
    decays, faster, drifts, moves, from_zero = ratios = tuple(list[float]() for _ in range(5))
    for client, path in enumerate(paths):
        x, y = work.of_client(client)
        singular, start = np.linalg.svd(x, compute_uv=False), path.residuals[0]
        size, after = np.linalg.norm(start), [*path.residuals[1:], products(path.weights, x).outputs - y]
        step = c.learning_rate * c.depth * singular[-1] ** 2 / c.outputs
        local = c._replace(largest=float(singular[0]))
        radius = 24 * c.outputs**0.5 * singular[0] * size / (c.depth * singular[-1] ** 2)
        for k, residual in enumerate(after, start=1):
            square = float(np.sum(residual**2)) / size**2
            decays.append(float(square / (1 - step / 4) ** k))
            faster.append(float(square / (1 - 4 * step) ** k))
            drifts.append(float(np.linalg.norm(residual - start) / size / local.drift_bound(k)))
        moves += [_norm(w - w0) / radius for w, w0 in zip(path.weights, run.last, strict=True)]
        from_zero += [_norm(w) / radius for w in path.weights]
    decay, fast, drift, moved, total = map(max, ratios)
    blocks = _kernels(run.theorem.initial, run.last, paths, work)
    joint, changes = ([_norm(block[i]) for block in blocks] for i in (0, 1))
    ends = work.y.shape[1] * np.cumsum(np.asarray(work.partition.sizes))[:-1]  # of the clients' columns
    parts = [[_norm(part) for part in np.split(block, ends, axis=1)] for block, _ in blocks]
    root = max(whole / np.sqrt(np.sum(np.square(part))) for whole, part in zip(joint, parts, strict=True))
    largest = max(whole / max(part) for whole, part in zip(joint, parts, strict=True))
    narrow = max(_narrow_drift(theorem, weights, work) for theorem, weights in run.narrow_networks())
    below = products(run.last, work.x).below
    a, b = (below[i] @ below[i].T for i in (1, 0))  # P consists of Kronecker products of this kind
    kron = _norm(np.kron(a, b))
    exact, frobenius = (abs(kron / (norm * _norm(b)) - 1) / EXACT for norm in (_norm(a), float(np.linalg.norm(a))))
    after_rounds, changed = f"{ALL_NARROW} after {NARROW_ROUNDS} rounds", max(changes) / c.kernel_bound()

    def row(number: str, statement: str, ratio: float, control: str, wrong: float) -> ft.types.Verdict:
        return run._bounded(f"Lemma {number}", statement, ratio, control, wrong)

    return [
        row("VII.2", "|[P_1 .. P_N]| / (sum |P_c|^2)^1/2", float(root), "the largest |P_c|", float(largest)),
        row("VII.3", f"||A (x) B| / (|A| |B|) - 1| / {EXACT:g}", exact, "Frobenius norm of A", frobenius),
        row("VII.4, VII.6", "local loss / its bound, every client and step", decay, "4 in place of 1/4", fast),
        row("VII.5", "|P(t, k) - P(0)| / its bound, last recorded round", changed, after_rounds, narrow),
        row("VII.6", "distance of a client's layer from the server's / R", moved, "distance from 0", total),
        row(
            "VII.7",
            "drift of a client's outputs / its bound, with the L of (33)",
            drift,
            "57/100 in place of 57/10",
            10 * drift,
        ),
    ]


def _kernels(
    initial: Sequence[np.ndarray],
    weights: Sequence[np.ndarray],
    paths: Sequence[LocalPath],
    work: ft.theory.FullBatchWork,
) -> list[tuple[Float64[np.ndarray, "nC nC"], Float64[np.ndarray, "nC nC"]]]:
    """Computes the kernel P(t, k) and its change P(t, k) - P(0) at every local step k of round t.

    Rows belong to the server's weights of round t, and each block of columns to a client's local weights. ``initial``
    are the weights at the start of the run, and ``weights`` and ``paths`` are the weights and the clients' local steps
    of round t.
    """
    now, begin = products(weights, work.x), products(initial, work.x)
    first = np.hstack([dense(begin, products(initial, work.of_client(c)[0])) for c in range(work.num_clients)])
    every = [np.hstack([dense(now, path.before[k]) for path in paths]) for k in range(work.local_steps)]
    return [(p, p - first) for p in every]


def _narrow_drift(
    theorem: ft.theory.DeepLinearTheorem, weights: list[np.ndarray], work: ft.theory.FullBatchWork
) -> float:
    """Trains a narrow network for 50 rounds, and returns its kernel's change over the bound of DeepLin's Lemma VII.5.

    The change is the largest one since the start, over the local steps of the next round. A narrow network is a
    control: the ratio must be above 1.

    Args:
        theorem: Theorem IV.2, evaluated on the network.
        weights: Initial weights of the layers.
        work: The clients' data and local steps.
    """
    trained: list[np.ndarray] = weights
    for _ in range(NARROW_ROUNDS):
        trained = averaged(local_paths(trained, work))
    blocks = _kernels(weights, trained, local_paths(trained, work), work)
    return max(_norm(drift) for _, drift in blocks) / theorem.constants.kernel_bound()


def _norm(matrix: np.ndarray) -> float:
    return float(np.linalg.norm(matrix, 2))


def _check_convergence(scale: str, seed: int) -> list[ft.types.Verdict]:
    """Checks DeepLin's Theorem IV.2, a bound on the loss by round, and its proof's hypotheses and lemmas."""
    run = _observe(of_scale(scale, *CONVERGENCE_SIZES), seed)
    return [_bound_18(run), *_hypotheses(run), _lemma_1(run), *_local_lemmas(run)]


ROUND_SIZES = Size(4, 5, 6, 2, 48, 5, 4), Size(8, 10, 20, 5, 200, 10, 6)
MODES = Size(4, 5, 6, 4, 0, 5, 8, 2), Size(8, 10, 20, 5, 0, 10, 12)
WIDTHS = (64, 256, 1024, 4096), (64, 128, 256, 512, 1024)
DRAWS = 32, 32  # networks of each width
ROUND_SPREAD = 0.4  # the least singular value of X (the largest is 1)
STEP = 0.1  # the learning rate, as a fraction of the largest stable one
Coefficients = Float64[np.ndarray, "rounds r C"]  # of residuals, by round, mode and output


def _one_round(size: Size, seed: int) -> list[ft.types.Verdict]:
    """Checks every simulated round of FedAvg (DeepLin, eq. 6 to 8), and its residual against the terms of eq. (17).

    Each round is predicted from the simulated weights before it.
    """
    x, y = problem(size, seed, ROUND_SPREAD)
    work = work_of(size, x, y, 1.0)
    work = work._replace(learning_rate=4 * STEP * stable_learning_rate(work, size.depth))
    path = run_of(size, x, y, work.learning_rate, seed, 1).weights
    sizes = f"{size}, {size.rounds} rounds"

    def error(work: ft.theory.FullBatchWork) -> float:
        """Returns the largest error over rounds of the weights that DeepLin's eq. (8) predicts from the round's start.

        It is relative to how far the simulated round moves the weights.
        """
        moves = (
            (_moved(path[r], averaged(local_paths(path[r], work))), _moved(path[r], path[r + 1]))
            for r in range(size.rounds)
        )
        return max(relative_distance(predicted, move) for predicted, move in moves)

    others = np.roll(work.partition.indices, 1)
    moves = [_moved(path[r], path[r + 1]) for r in range(size.rounds)]
    controls = {
        "one local step less": error(work._replace(local_steps=size.local_steps - 1)),
        "a mean instead of the sum": error(work._replace(learning_rate=work.learning_rate / size.held)),
        "examples of another client": error(work._replace(partition=work.partition._replace(indices=others))),
        "N forgotten": max(relative_distance(size.clients * move, move) for move in moves),
    }
    statement = "simulated round = local steps on the sum of squares, plain mean"
    steps = Claim("DeepLin eq. (6)-(8)", statement, sizes).exact(error(work), controls)
    off, without = 0.0, dict.fromkeys(("first", "second", "third", "fourth"), np.inf)
    for r in range(size.rounds):
        after = products(path[r + 1], x).outputs - y
        terms = ft.theory.residual_terms(path[0], path[r], work)
        off = max(off, relative_distance(terms.total, after))
        for name, term in terms._asdict().items():
            if r > 0 or name != "second":  # in the first round P has moved only within the local steps
                without[name] = min(without[name], relative_distance(terms.total - term, after))
    missing = {f"without the {name} term": value for name, value in without.items()}
    claim = Claim("DeepLin eq. (16), (17)", "residual after a round = its four terms", sizes)
    return [steps, claim.exact(off, missing)]


def _moved(before: list[np.ndarray], after: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([(b - a).ravel() for a, b in zip(before, after, strict=True)])


def _modes(size: Size, widths: tuple[int, ...], draws: int, seed: int) -> list[ft.types.Verdict]:
    """Checks that the distance of networks' residuals from a linear model's falls as width^-1/2.

    Both are trained by FedAvg. The distance is over all rounds, mode by mode of the infinite-width kernel
    (``_by_mode``). Each wrong theory is the control of a verdict.
    """
    x, y = problem(size, seed, ROUND_SPREAD)
    work = work_of(size, x, y, 1.0)
    work = work._replace(learning_rate=STEP * stable_learning_rate(work, size.depth))
    basis, singular, _ = np.linalg.svd(x, full_matrices=False)
    eigenvalues = size.depth * singular**2 / size.outputs  # of L/C X X'
    limit, one_step = (ft.theory.deep_linear_limit(w, size.depth) for w in (work, work._replace(local_steps=1)))
    pace = 1 - work.learning_rate * size.local_steps * eigenvalues.max() / size.clients
    rounds = np.arange(size.rounds + 1)

    def of(models: np.ndarray) -> Coefficients:
        return np.asarray(np.einsum("nr,tnc->trc", basis, x @ models - y))

    def without_n(start: np.ndarray) -> np.ndarray:
        path = [start]
        for _ in range(size.rounds):
            path.append(path[-1] + size.clients * (limit.models(1, path[-1])[1] - path[-1]))
        return np.array(path)

    theories: dict[str, Callable[[np.ndarray], Coefficients]] = {
        "": lambda start: of(limit.models(size.rounds, start)),
        "lambda_max in place of lambda": lambda start: of(start[None]) * pace ** rounds[:, None, None],
        "K forgotten": lambda start: of(one_step.models(size.rounds, start)),
        "N forgotten": lambda start: of(without_n(start)),
    }
    errors, floors = (dict[str, list[np.ndarray]]((name, []) for name in theories) for _ in range(2))
    for width in widths:
        seeds = range(1000 * seed, 1000 * seed + draws)
        network = size._replace(width=width)
        runs = [run_of(network, x, y, work.learning_rate, draw, size.rounds + 1).models for draw in seeds]
        measured = [of(models) for models in runs]
        right = [theories[""](models[0]) for models in runs]
        for name, theory in theories.items():
            predicted = [theory(models[0]) for models in runs]
            errors[name].append(_by_mode(measured, predicted, right))
            floors[name].append(_by_mode(right, predicted, right))
    estimate, right_errors = [width_slope(widths, errors[""])], errors.pop("")
    rivals = [slope_rival(name, widths, right_errors, errors[name], floors[name]) for name in errors]
    theorem = "DeepLin eq. (16), mode by mode"
    statement = "distance of each network's residual, by mode of P(0), from the linear model's: slope against width"
    sizes = f"{size._replace(width=widths[-1])}, {draws} networks of {len(widths)} widths"
    verdicts = [judged(theorem, statement, SLOPE, SLOPE_MARGIN, estimate, [rival]) for rival in rivals]
    return [verdict._replace(sizes=sizes) for verdict in verdicts]


def _by_mode(
    measured: list[Coefficients], predicted: list[Coefficients], right: list[Coefficients]
) -> Float64[np.ndarray, "E"]:
    """Returns the error of each of E networks over all rounds, from coefficients by round, mode and output.

    It is the root mean square over modes of the error in a mode relative to the mode's movement under the right theory.

    Args:
        measured: Coefficients of each network's residual.
        predicted: Coefficients by the theory that is tested.
        right: Coefficients by the right theory.
    """

    def norm(coefficients: np.ndarray) -> np.ndarray:
        return np.asarray(np.sqrt(np.sum(coefficients**2, axis=(0, 2))))

    networks = zip(measured, predicted, right, strict=True)
    return np.array([np.sqrt(np.mean((norm(m - p) / norm(t - t[0])) ** 2)) for m, p, t in networks])


def _check_rounds(scale: str, seed: int) -> list[ft.types.Verdict]:
    """Checks each round of FedAvg and the four terms of its residual, and how the residual's modes vary with width."""
    widths, draws = of_scale(scale, *WIDTHS), of_scale(scale, *DRAWS)
    return [*_one_round(of_scale(scale, *ROUND_SIZES), seed), *_modes(of_scale(scale, *MODES), widths, draws, seed)]


ENTRIES = (
    TheoremEntry(
        "deep_linear.convergence",
        "FedAvg on a deep linear network decays at the theorem's rate, and what the proof assumes of the run",
        _check_convergence,
        papers=("liu_deep_linear",),
        statement="Theorem IV.2, hypotheses A to C and Lemmas VII.1 to VII.7 of DeepLin",
        functions=(ft.theory.deep_linear_theorem,),
        figures=tuple(f"deep_linear.{name}" for name in ("theorem", "fig2", "fig3", "fig4", "regime_map")),
    ),
    TheoremEntry(
        "deep_linear.rounds",
        "a round of FedAvg on deep linear networks, the four terms of its residual, its modes by width",
        _check_rounds,
        papers=("liu_deep_linear",),
        statement="eq. (6) to (8), (16) and (17) of DeepLin",
        functions=(ft.theory.deep_linear_limit, ft.theory.residual_terms),
        figures=("deep_linear.theorem",),
        is_quick=True,
    ),
)
