"""Theorem IV.2 of DeepLin along runs that meet its conditions: its bound, its hypotheses, the terms of its proof.

A few examples of well-conditioned inputs and targets that a matrix fits, so that a network of a thousand units is wide
enough. Beside the loss stand the bound (18) and the exact federated flow, of the network's own kernel P(0) and of
infinite width, mode by mode in the eigenbasis of P(0). The proof's hypotheses and its four terms of a round (17) are
measured on the way, and how far the layers leave their balance.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedtangent._src.comparison.theorems.deep_linear.runs import Size, problem, work_of
from fedtangent._src.comparison.verdicts import Verdict, bounded_verdict
from fedtangent._src.experiments.deep_linear.followed import CONTROL, DRAWS, FLOWS, FollowedNetwork, check_width, follow
from fedtangent._src.experiments.lab.results import (
    NOT_OWED,
    NOT_SEEN,
    SEEN,
    Claim,
    MeanInterval,
    Outcome,
    Sheet,
    assumption_sheet,
    disagreeing,
    interval,
    log_slope,
    table,
    theorem_details,
)
from fedtangent._src.experiments.lab.runner import Study, by_scale, experiment, within
from fedtangent._src.output.files import Metric
from fedtangent._src.output.line_plots import BoundedPanel, bounded
from fedtangent._src.theory.deep_linear.rounds import FullBatchWork
from fedtangent._src.theory.deep_linear.theorem import STEP

SUBJECT = "DeepLin Theorem IV.2"
MARGIN = 0.25  # tolerance of a fitted slope
SLOPES = {"own": (-1.0, "lambda_max"), "infinite": (-0.5, "one_step")}  # of flows' errors; and a wrong flow as control
TERMS = {  # of eq. (17)
    "first": "1 less than the residual (23)",
    "second": "kernel has moved (24)",
    "third": "clients have drifted (25)",
    "fourth": "products of changes (26)",
}
# What the proof allows each term, in units of eta K lambda_min / N times the residual.
SHARES = {"second": 0.109 / 0.8**4, "third": 1 / 5, "fourth": 1 / 10}
REMARKS = (
    "(18) bounds the squared norm; its proof bounds the norm by rho, so the square by rho^2: both are followed",
    "to first order in eta the square falls by 1 - 2 eta K lambda_min / N: (18) has a quarter of that rate",
    "R of hypothesis C with the 16 of its proof (4 is printed); B's O(sqrt(L)) as 2 sqrt(L); width's constant as 1",
    "(33) has lost its L: for the third term's share eta has to be smaller by L; measured is whether it is kept",
    "the limit: infinite width, from the network's own function; balance: W'W of a layer less WW' of that below it",
    NOT_OWED,
)


@dataclass(frozen=True)
class TheoremSettings:
    """Examples, clients and networks; the step is the theorem's largest times ``step_factor``."""

    num_clients: int = within(4, least=2)
    held: int = 1  # examples of a client; (27) needs as many dimensions as examples of all
    outputs: int = 2
    spread: float = within(0.95, above=0, at_most=1)  # least singular value of X; the largest is 1
    truth: float = within(0.8, above=0)  # |W*|
    local_steps: int = within(4, least=2)
    depth: int = within(3, least=2)
    widths: tuple[int, ...] = within((64, 256, 1024), count=3, increasing=True)
    step_factor: float = within(0.9, above=0)
    delta: float = within(0.15, above=0, below=1)
    num_rounds: int = within(40, least=4)
    draws: int = within(1, most=DRAWS)  # networks of a seed at each width; looks are at the first
    looks: int = within(4, least=2)  # rounds at which the hypotheses and terms of the proof are computed
    control_width: int = 4
    control_factor: float = within(100.0, above=1)  # times the step, for a network outside the theorem

    def size(self, width: int, rounds: int | None = None) -> Size:
        """Returns the size of a run, with as many dimensions as examples."""
        examples = self.num_clients * self.held
        return Size(self.num_clients, self.held, examples, self.outputs, width, self.local_steps,
                    rounds or self.num_rounds, self.depth)  # fmt: skip

    def most_factor(self) -> float:
        """Computes the multiple of the theorem's step at which a client with all examples diverges."""
        return 2 * STEP * self.local_steps / self.spread**2


def task(s: TheoremSettings, seed: int, factor: float) -> FullBatchWork:
    """Builds the clients' work at ``factor`` times the theorem's step, which is the same for all seeds as |X| is 1."""
    size = s.size(s.widths[0])
    drawn = problem(size, seed, s.spread, s.truth)
    return work_of(size, *drawn, factor * s.outputs * s.spread**2 / (STEP * s.depth * s.local_steps))


def check(study: Study) -> None:
    """Raises ``ValueError`` for networks whose kernel is singular, and steps at which local work diverges."""
    s, most = study.settings, study.settings.most_factor()
    for name, width in (("widths", s.widths[0]), ("control_width", s.control_width)):
        check_width(name, width, s.outputs, s.num_clients * s.held)
    for name, given in (("step_factor", s.step_factor), ("control_factor", s.step_factor * s.control_factor)):
        if given >= most:
            raise ValueError(f"{name}: got a step of {given:g} times the theorem's, must be below {most:g}, else local "
                             "descent diverges")  # fmt: skip


def run(study: Study) -> Outcome:
    """Follows every network, and for each seed the control: a narrow network at a step far too large."""
    s, found, wrong = study.settings, list[FollowedNetwork](), list[FollowedNetwork]()
    for seed in study.each_seed():
        work = task(s, seed, s.step_factor)
        own = [
            follow(s.size(width), work, (seed, draw), s.looks, s.delta)
            for width in s.widths for draw in range(s.draws)
        ]  # fmt: skip
        found += own
        far = task(s, seed, s.step_factor * s.control_factor)
        wrong.append(follow(s.size(s.control_width, s.looks), far, (seed, 0), s.looks, s.delta))
        study.keep([
            Metric(t, f"deep_linear width={f.width} draw={f.draw}", seed, "train", "relative_loss", float(value), 0, 0)
            for f in own for t, value in enumerate(f.loss)
        ])  # fmt: skip
    return conclude(study, found, wrong)


# ---- what comes out -----------------------------------------------------------------------------------------------


def slope(s: TheoremSettings, found: list[FollowedNetwork], name: str) -> MeanInterval:
    """Computes the slope of ln error against ln width of the flow ``name``: its interval over seeds and draws."""
    own = {(f.seed, f.draw, f.width): f.error(name) for f in found}
    places = sorted({(f.seed, f.draw) for f in found})
    return interval([log_slope(s.widths, [own[*place, width] for width in s.widths]) for place in places])


def fallen(loss: np.ndarray) -> float:
    """Computes the fall of ln ``loss`` over the second half of the rounds."""
    return float(np.log(loss[len(loss) // 2] / loss[-1]))


def conclude(study: Study, found: list[FollowedNetwork], wrong: list[FollowedNetwork]) -> Outcome:
    """Builds tables, figures, claims and verdicts."""
    s = study.settings
    widest = [f for f in found if f.width == s.widths[-1]]
    looked_at = [f for f in widest if f.draw == 0]
    rates = {name: slope(s, found, name) for name in FLOWS}
    terms = worst_terms(looked_at, wrong)
    theorems = [f.theorem for f in looked_at]
    errors = _error_rows(s, found, rates)
    sheets = (
        assumption_sheet(theorems, f"assumptions at width {s.widths[-1]}, first seed's"),
        _rounds_sheet(looked_at[0]), _hypotheses_sheet(looked_at), _terms_sheet(terms),
        table("largest distance of residuals from the network's, over the start's", errors,
              {"flow": "{flow}"} | {f"m = {w}": f"{{w{w}:.3g}}" for w in s.widths} | {"slope": "{slope:.2f}"}),
        _modes_sheet(looked_at[0]),
    )  # fmt: skip
    _draw(study, looked_at[0])
    verdicts = _verdicts(s, widest, terms, rates)
    rows = [
        {"seed": f.seed, "draw": f.draw, "width": f.width, "loss": f.loss[-1], "eigenvalues": f.eigenvalues,
         "rho": f.theorem.constants.rate(), "linear_rate": f.theorem.linear_rate,
         "errors": {name: f.error(name) for name in FLOWS}, "looks": f.looks}
        for f in found
    ]  # fmt: skip
    diverged = () if all(np.isfinite(f.modes).all() for f in found) else ("a network diverged",)
    failed = (*diverged, *disagreeing([v for v in verdicts if v.holds is not None]))
    claims = _claims(looked_at, widest, terms)
    return Outcome(sheets, rows, claims, theorem_details(theorems), REMARKS, failed, verdicts)


def worst_terms(found: list[FollowedNetwork], wrong: list[FollowedNetwork]) -> list[dict[str, Any]]:
    """Computes each term over its share, the largest over all looks and seeds, and the same for its control."""

    def over(f: FollowedNetwork, name: str, unit: float = 1.0) -> float:
        seen = [look.terms[name] for look in f.looks]
        return unit / min(seen) if name == "first" else max(seen) / SHARES[name]

    rows = []
    for name, label in TERMS.items():
        if name == "first":
            spread = [over(f, name, f.theorem.constants.lambda_max / f.theorem.constants.lambda_min) for f in found]
            control = "lambda_max for lambda_min", max(spread)
        else:
            control = "narrow, step too large", max(over(f, name) for f in wrong)
        ratio = max(over(f, name) for f in found)
        rows.append({"term": name, "what": label, "share": SHARES.get(name, 1.0), "ratio": ratio,
                     "control": control[0], "wrong": control[1]})  # fmt: skip
    return rows


def _error_rows(
    s: TheoremSettings, found: list[FollowedNetwork], rates: dict[str, MeanInterval]
) -> list[dict[str, Any]]:
    """Computes the mean error of every flow by width, and its slope."""
    rows = []
    for name, label in FLOWS.items():
        means = {f"w{w}": float(np.mean([f.error(name) for f in found if f.width == w])) for w in s.widths}
        rows.append({"flow": label, **means, "slope": rates[name]})
    return rows


def _rounds_sheet(f: FollowedNetwork) -> Sheet:
    """Builds the table of one network's loss by round, with its bounds and flows."""
    squares = {name: np.sum(f.flows[name] ** 2, axis=1) for name in ("own", "infinite")}
    at = np.unique(np.linspace(0, len(f.modes) - 1, 6).round().astype(int))
    rows = [
        {"round": t, "loss": f.loss[t], **{name: values[t] for name, values in squares.items()},
         "b18": f.bounds()["(18)"][t], "proof": f.bounds()["its proof"][t]}
        for t in at
    ]  # fmt: skip
    return table(f"loss over the start's, width {f.width}, first seed", rows, {
        "round": "{round}", "network": "{loss:.4f}", FLOWS["own"]: "{own:.4f}", FLOWS["infinite"]: "{infinite:.4f}",
        "its proof": "{proof:.4f}", "(18)": "{b18:.4f}",
    })  # fmt: skip


def _hypotheses_sheet(found: list[FollowedNetwork]) -> Sheet:
    """Builds the table of hypotheses, each at the round where it is nearest to failing, or fails most."""
    rows = []
    for i, first in enumerate(found[0].looks[0].hypotheses):
        told = [look.hypotheses[i] for f in found for look in f.looks]
        nearest = max(told, key=lambda a: a.required / a.measured if a.relation == ">" else a.measured / a.required)
        rows.append({**nearest._asdict(), "name": first.name, "held": sum(a.holds for a in told), "looks": len(told)})
    return table("hypotheses of the proof along the runs, where nearest to failing", rows, {
        "hypothesis": "{name}", "what": "{statement}", "measured": "{measured:.4g}",
        "required": "{relation} {required:.4g}", "holds": "{held} of {looks}",
    })  # fmt: skip


def _terms_sheet(terms: list[dict[str, Any]]) -> Sheet:
    title = "eq. (17), norms over the residual's in units of eta K lambda_min / N: worst over the proof's share"
    return table(title, terms, {
        "term": "{term}: {what}", "share": "{share:.3f}", "worst / share": "{ratio:.3g}", "control": "{wrong:.3g}",
    })  # fmt: skip


def _modes_sheet(f: FollowedNetwork) -> Sheet:
    """Builds the table of the share of every mode of one network that remains after the last round."""
    left = {name: values[-1] / values[0] for name, values in (("network", f.modes), *f.flows.items())}
    rows = [
        {"value": value, **{name: np.abs(values[j]) for name, values in left.items()}}
        for j, value in enumerate(f.eigenvalues)
    ]
    return table(f"modes of P(0): what {len(f.modes) - 1} rounds leave, width {f.width}, first seed", rows, {
        "eigenvalue": "{value:.4f}", "network": "{network:.4f}", FLOWS["own"]: "{own:.4f}",
        FLOWS["infinite"]: "{infinite:.4f}", FLOWS["one_step"]: "{one_step:.4f}",
    })  # fmt: skip


def _claims(
    looked_at: list[FollowedNetwork], widest: list[FollowedNetwork], terms: list[dict[str, Any]]
) -> tuple[Claim, ...]:
    def ratio(of: Callable[[FollowedNetwork], float]) -> MeanInterval:
        return interval([fallen(f.loss) / of(f) for f in looked_at])

    over_18, over_proof = (ratio(lambda f, b=b: fallen(f.bounds()[b])) for b in ("(18)", "its proof"))  # type: ignore[misc]
    to_flow = interval([abs(fallen(f.loss) / fallen(np.sum(f.flows["infinite"] ** 2, axis=1)) - 1) for f in widest])
    told = [a for f in looked_at for look in f.looks for a in look.hypotheses]
    held, balance = (
        sum(a.holds for a in told),
        interval([f.looks[-1].unbalanced / f.looks[-1].moved for f in looked_at]),
    )
    most = max((t for t in terms if t["term"] != "first"), key=lambda t: t["ratio"])
    return (
        Claim("Theorem IV.2: the loss falls at least as (18)", f"{over_18:.2f} times its rate", over_18.above(1)),
        Claim("its proof's rho^2, twice the rate of (18), holds", f"{over_proof:.2f} times", over_proof.above(1)),
        Claim("ours: (18) has a quarter of the rate, or less", f"{over_18:.2f} times", over_18.above(4 * (1 - MARGIN))),
        Claim("ours: the rate is that of infinite width to 5 %", f"off by {to_flow:.3f}", to_flow.below(0.05)),
        Claim("A, B and C hold along the runs", f"{held} of {len(told)}", SEEN if held == len(told) else NOT_SEEN),
        Claim("no term of (17) takes its share", f"most: {most['term']}, {most['ratio']:.2g} of it",
              SEEN if most["ratio"] <= 1 else NOT_SEEN),
        Claim("layers keep their balance to 1 % of their motion", f"{balance:.1e}", balance.below(0.01)),
    )  # fmt: skip


def _verdicts(
    s: TheoremSettings, widest: list[FollowedNetwork], terms: list[dict[str, Any]], rates: dict[str, MeanInterval]
) -> tuple[Verdict, ...]:
    sizes = f"width {s.widths[-1]}, {s.num_rounds} rounds, {len(widest)} networks"
    found = []
    for name in ("(18)", "its proof"):
        over, control = ([float((f.loss / f.bounds()[b])[1:].max()) for f in widest] for b in (name, CONTROL))
        found.append(bounded_verdict(SUBJECT, f"loss / bound, {name}", sizes, max(over), CONTROL, max(control)))
    for t in terms:
        statement = f"eq. (17), {t['term']} term / its share"
        found.append(bounded_verdict(SUBJECT, statement, sizes, t["ratio"], t["control"], t["wrong"]))
    for name, (target, other) in SLOPES.items():
        own, wrong = rates[name], rates[other]
        fails = abs(wrong.mean - target) > MARGIN
        found.append(Verdict.of(
            SUBJECT, f"modes beside the {FLOWS[name]}: slope of the error against width", f"{len(widest)} networks",
            (f"{own:.2f}", f"{target:g} +- {MARGIN:g}", own.within(target, MARGIN)),
            (FLOWS[other], f"{wrong:.2f}", fails),
        ))  # fmt: skip
    return tuple(found)


def _draw(study: Study, f: FollowedNetwork) -> None:
    """Draws two figures of the first seed and largest width: decay, and the quantities of the proof."""
    s = study.settings
    at = np.unique(np.linspace(0, len(f.modes) - 1, 21).round().astype(int))
    bounds = {name: values[at] for name, values in f.bounds().items()}
    squares = {name: np.sum(f.flows[name][at] ** 2, axis=1) for name in ("own", "infinite")}
    shown = np.unique(np.linspace(0, f.modes.shape[1] - 1, 4).round().astype(int))
    title = f"DeepLin, depth {s.depth}, width {f.width}, N = {s.num_clients}, K = {s.local_steps}"
    loss = BoundedPanel(
        "loss / initial loss", at, {"network": f.loss[None, at]},
        {"(18)": bounds["(18)"], "its proof": bounds["its proof"], FLOWS["infinite"]: squares["infinite"]},
        {CONTROL: bounds[CONTROL]}, {FLOWS["own"]: squares["own"][None]},
    )  # fmt: skip
    modes = BoundedPanel(
        "modes of P(0), over the initial residual", at,
        {f"eigenvalue {f.eigenvalues[j]:.3f}": np.abs(f.modes[None, at, j]) for j in shown}, {},
        {FLOWS["one_step"]: np.abs(f.flows["one_step"][at, shown[-1]])},
        {FLOWS["own"]: np.abs(f.flows["own"][at][:, shown]).T},
    )  # fmt: skip
    bounded([loss, modes], title, ("round", "over that at the start"), None, study.figures.path("decay"))
    at = np.array([look.round for look in f.looks])
    shares = {f"proof grants {share:.3g}": np.full(len(at), share) for share in SHARES.values()}
    terms = {f"{name}: {TERMS[name]}": np.array([look.terms[name] for look in f.looks]) for name in SHARES}
    both = {"W'W and WW'": [look.moved for look in f.looks], "their difference": [look.unbalanced for look in f.looks]}
    kept = [
        BoundedPanel("eq. (17): terms, in eta K lambda_min / N of the residual", at, terms, shares),
        BoundedPanel("layers' balance: relative motion", at, {name: np.array(v) for name, v in both.items()}, {}),
    ]
    bounded(kept, title, ("round", "ratio"), None, study.figures.path("proof"))


DEFAULT = TheoremSettings(num_rounds=150, draws=3, looks=10)
PAPER = TheoremSettings(num_clients=6, widths=(256, 1024, 4096), num_rounds=600, draws=4, looks=20)
SCALES = {"gaussian": by_scale(TheoremSettings(), DEFAULT, PAPER)}
ENTRIES = (experiment(__name__, run, SCALES, ("liu_deep_linear",), check=check, least_seeds=2, exact=True),)
