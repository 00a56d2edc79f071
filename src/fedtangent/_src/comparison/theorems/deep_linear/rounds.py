"""Eq. (6) to (17) of DeepLin: a round of FedAvg, the four terms of its residual, and its modes as the width grows."""

from __future__ import annotations

import numpy as np

from fedtangent._src.comparison.statistics import relative_distance, width_slope
from fedtangent._src.comparison.theorems import TheoremEntry, of_scale
from fedtangent._src.comparison.theorems.deep_linear.runs import Size, problem, run_of, work_of
from fedtangent._src.comparison.verdicts import EXACT, SLOPE, SLOPE_MARGIN, Verdict, exact_verdict, judged, slope_rival
from fedtangent._src.theory.deep_linear.gram import products
from fedtangent._src.theory.deep_linear.rounds import averaged, local_paths, residual_terms
from fedtangent._src.theory.deep_linear.theorem import deep_linear_limit, stable_learning_rate

SIZES = Size(4, 5, 6, 2, 48, 5, 4), Size(8, 10, 20, 5, 200, 10, 6)
MODES = Size(4, 5, 6, 4, 0, 5, 8, 2), Size(8, 10, 20, 5, 0, 10, 12)
WIDTHS = (64, 256, 1024, 4096), (64, 128, 256, 512, 1024)
DRAWS = 32, 32  # networks of each width
SPREAD = 0.4  # the least singular value of X (the largest is 1)
STEP = 0.1  # the learning rate, as a fraction of the largest stable one


def one_round(size: Size, seed: int) -> list[Verdict]:
    """Checks that a simulated round equals eq. (6) to (8), and its residual the sum of the four terms of eq. (17)."""
    x, y = problem(size, seed, SPREAD)
    work = work_of(size, x, y, 1.0)
    work = work._replace(learning_rate=4 * STEP * stable_learning_rate(work, size.depth))
    path = run_of(size, x, y, work.learning_rate, seed, 1).weights
    sizes = f"{size}, {size.rounds} rounds"

    def told(given: object) -> float:
        """Returns the worst round's distance of eq. (8) from the simulation, relative to the weights' movement."""
        return max(
            relative_distance(_moved(path[r], averaged(local_paths(path[r], given))), _moved(path[r], path[r + 1]))  # type: ignore[arg-type]
            for r in range(size.rounds)
        )

    others = np.roll(work.partition.indices, 1)
    wrong = {
        "a local step less": told(work._replace(local_steps=size.local_steps - 1)),
        "a mean in place of the sum": told(work._replace(learning_rate=work.learning_rate / size.held)),
        "examples of another client": told(work._replace(partition=work.partition._replace(indices=others))),
        "N forgotten": max(
            relative_distance(size.clients * _moved(path[r], path[r + 1]), _moved(path[r], path[r + 1]))
            for r in range(size.rounds)
        ),
    }
    steps = exact_verdict(
        "DeepLin eq. (6)-(8)",
        "simulated round = local steps on the sum of squares, plain mean",
        told(work),
        wrong,
        EXACT,
    )
    off, without = 0.0, dict.fromkeys(("first", "second", "third", "fourth"), np.inf)
    for r in range(size.rounds):
        after = products(path[r + 1], x).outputs - y
        terms = residual_terms(path[0], path[r], work)
        off = max(off, relative_distance(terms.total, after))
        for name, term in terms._asdict().items():
            if r > 0 or name != "second":  # in the first round P has moved only within the local steps
                without[name] = min(without[name], relative_distance(terms.total - term, after))
    missing = {f"without the {name} term": value for name, value in without.items()}
    identity = exact_verdict("DeepLin eq. (16), (17)", "residual after a round = its four terms", off, missing, EXACT)
    return [steps._replace(sizes=sizes), identity._replace(sizes=sizes)]


def _moved(before: list[np.ndarray], after: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([(b - a).ravel() for a, b in zip(before, after, strict=True)])


def modes(size: Size, widths: tuple[int, ...], draws: int, seed: int) -> list[Verdict]:
    """Checks that the residual's modes approach FedAvg of the linear model as networks become wider.

    Modes are coefficients in the eigenbasis of the limit of P(0).

    Args:
        size: Sizes of the problem; its width is ignored.
        widths: Widths of the networks.
        draws: Number of networks of each width.
        seed: Seed of data and networks.
    """
    x, y = problem(size, seed, SPREAD)
    work = work_of(size, x, y, 1.0)
    work = work._replace(learning_rate=STEP * stable_learning_rate(work, size.depth))
    left, singular, _ = np.linalg.svd(x, full_matrices=False)
    eigenvalues = size.depth * singular**2 / size.outputs  # of L/C X X'
    limit, one_step = (deep_linear_limit(w, size.depth) for w in (work, work._replace(local_steps=1)))
    pace = 1 - work.learning_rate * size.local_steps * eigenvalues.max() / size.clients
    rounds = np.arange(size.rounds + 1)

    def of(models: np.ndarray) -> np.ndarray:
        """Returns the coefficients of residuals, [R + 1, r, C]."""
        return np.asarray(np.einsum("nr,tnc->trc", left, x @ models - y))

    def without_n(start: np.ndarray) -> np.ndarray:
        path = [start]
        for _ in range(size.rounds):
            path.append(path[-1] + size.clients * (limit.models(1, path[-1])[1] - path[-1]))
        return np.array(path)

    wrong = {
        "lambda_max in place of lambda": lambda start: of(start[None]) * pace ** rounds[:, None, None],
        "K forgotten": lambda start: of(one_step.models(size.rounds, start)),
        "N forgotten": lambda start: of(without_n(start)),
    }
    errors: list[np.ndarray] = []
    missed: dict[str, list[np.ndarray]] = {name: [] for name in wrong}
    floors: dict[str, list[np.ndarray]] = {name: [] for name in wrong}
    for width in widths:
        own = size._replace(width=width)
        paths = [
            run_of(own, x, y, work.learning_rate, 1000 * seed + draw, size.rounds + 1).models for draw in range(draws)
        ]
        seen, right = [of(path) for path in paths], [of(limit.models(size.rounds, path[0])) for path in paths]
        errors.append(_by_mode(seen, right, right))
        for name, theory in wrong.items():
            rival = [theory(path[0]) for path in paths]
            missed[name].append(_by_mode(seen, rival, right))
            floors[name].append(_by_mode(right, rival, right))
    statement = "residual by mode of P(0), each network to FedAvg of the linear model: slope against width"
    found = [width_slope(widths, errors)]
    rivals = [slope_rival(name, widths, errors, missed[name], floors[name]) for name in wrong]
    sizes = f"{size._replace(width=widths[-1])}, {draws} networks of {len(widths)} widths"
    return [
        judged("DeepLin eq. (16), mode by mode", statement, SLOPE, SLOPE_MARGIN, found, [rival])._replace(sizes=sizes)
        for rival in rivals
    ]


def _by_mode(seen: list[np.ndarray], predicted: list[np.ndarray], right: list[np.ndarray]) -> np.ndarray:
    """Returns the error of each network's prediction over all rounds, [E]: the root mean square over modes.

    The error of a mode is relative to how far the mode moves by the right theory. Arguments are lists of coefficients
    [R + 1, r, C], one entry for each network.
    """

    def norm(coefficients: np.ndarray) -> np.ndarray:
        return np.asarray(np.sqrt(np.sum(coefficients**2, axis=(0, 2))))

    pairs = zip(seen, predicted, right, strict=True)
    return np.array([np.sqrt(np.mean((norm(s - p) / norm(t - t[0])) ** 2)) for s, p, t in pairs])


def checks(scale: str, seed: int) -> list[Verdict]:
    """Checks a round and its terms exactly, and its modes by width."""
    widths, draws = of_scale(scale, *WIDTHS), of_scale(scale, *DRAWS)
    return [*one_round(of_scale(scale, *SIZES), seed), *modes(of_scale(scale, *MODES), widths, draws, seed)]


ENTRIES = (
    TheoremEntry(
        "deep_linear.rounds",
        "a round of FedAvg on deep linear networks, the four terms of its residual, its modes by width",
        checks,
        papers=("liu_deep_linear",),
        statement="eq. (6) to (8), (16) and (17) of DeepLin",
        functions=(deep_linear_limit, residual_terms),
        figures=("deep_linear.theorem",),
    ),
)
