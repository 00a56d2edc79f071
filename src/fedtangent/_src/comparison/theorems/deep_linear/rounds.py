"""Eq. (6) to (17) of DeepLin: a round of FedAvg, the four terms of its residual, and its modes as the width grows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from jaxtyping import Float64

from fedtangent._src.comparison.statistics import relative_distance, width_slope
from fedtangent._src.comparison.theorems import Claim, TheoremEntry, of_scale
from fedtangent._src.comparison.theorems.deep_linear.runs import Size, problem, run_of, work_of
from fedtangent._src.comparison.verdicts import SLOPE, SLOPE_MARGIN, Verdict, judged, slope_rival
from fedtangent._src.theory.deep_linear.gram import products
from fedtangent._src.theory.deep_linear.rounds import FullBatchWork, averaged, local_paths, residual_terms
from fedtangent._src.theory.deep_linear.theorem import deep_linear_limit, stable_learning_rate

SIZES = Size(4, 5, 6, 2, 48, 5, 4), Size(8, 10, 20, 5, 200, 10, 6)
MODES = Size(4, 5, 6, 4, 0, 5, 8, 2), Size(8, 10, 20, 5, 0, 10, 12)
WIDTHS = (64, 256, 1024, 4096), (64, 128, 256, 512, 1024)
DRAWS = 32, 32  # networks of each width
SPREAD = 0.4  # the least singular value of X (the largest is 1)
STEP = 0.1  # the learning rate, as a fraction of the largest stable one
Coefficients = Float64[np.ndarray, "rounds r C"]  # of residuals, by round, mode and output


def _one_round(size: Size, seed: int) -> list[Verdict]:
    """Checks that a simulated round equals eq. (6) to (8), and its residual the sum of the four terms of eq. (17)."""
    x, y = problem(size, seed, SPREAD)
    work = work_of(size, x, y, 1.0)
    work = work._replace(learning_rate=4 * STEP * stable_learning_rate(work, size.depth))
    path = run_of(size, x, y, work.learning_rate, seed, 1).weights
    sizes = f"{size}, {size.rounds} rounds"

    def error(work: FullBatchWork) -> float:
        """Returns the worst round's distance of eq. (8) from the simulation, relative to the weights' movement."""
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
        terms = residual_terms(path[0], path[r], work)
        off = max(off, relative_distance(terms.total, after))
        for name, term in terms._asdict().items():
            if r > 0 or name != "second":  # in the first round P has moved only within the local steps
                without[name] = min(without[name], relative_distance(terms.total - term, after))
    missing = {f"without the {name} term": value for name, value in without.items()}
    claim = Claim("DeepLin eq. (16), (17)", "residual after a round = its four terms", sizes)
    return [steps, claim.exact(off, missing)]


def _moved(before: list[np.ndarray], after: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([(b - a).ravel() for a, b in zip(before, after, strict=True)])


def _modes(size: Size, widths: tuple[int, ...], draws: int, seed: int) -> list[Verdict]:
    """Checks that wide networks approach FedAvg of the linear model in every mode of the limit of P(0)."""
    x, y = problem(size, seed, SPREAD)
    work = work_of(size, x, y, 1.0)
    work = work._replace(learning_rate=STEP * stable_learning_rate(work, size.depth))
    basis, singular, _ = np.linalg.svd(x, full_matrices=False)
    eigenvalues = size.depth * singular**2 / size.outputs  # of L/C X X'
    limit, one_step = (deep_linear_limit(w, size.depth) for w in (work, work._replace(local_steps=1)))
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
    """Returns each network's error over all rounds: the root mean square over modes, each relative to its movement."""

    def norm(coefficients: np.ndarray) -> np.ndarray:
        return np.asarray(np.sqrt(np.sum(coefficients**2, axis=(0, 2))))

    networks = zip(measured, predicted, right, strict=True)
    return np.array([np.sqrt(np.mean((norm(m - p) / norm(t - t[0])) ** 2)) for m, p, t in networks])


def _checks(scale: str, seed: int) -> list[Verdict]:
    """Checks a round and its terms exactly, and its modes by width."""
    widths, draws = of_scale(scale, *WIDTHS), of_scale(scale, *DRAWS)
    return [*_one_round(of_scale(scale, *SIZES), seed), *_modes(of_scale(scale, *MODES), widths, draws, seed)]


ENTRIES = (
    TheoremEntry(
        "deep_linear.rounds",
        "a round of FedAvg on deep linear networks, the four terms of its residual, its modes by width",
        _checks,
        papers=("liu_deep_linear",),
        statement="eq. (6) to (8), (16) and (17) of DeepLin",
        functions=(deep_linear_limit, residual_terms),
        figures=("deep_linear.theorem",),
    ),
)
