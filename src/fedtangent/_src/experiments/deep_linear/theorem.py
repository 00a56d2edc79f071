"""Theorem IV.2 of DeepLin along runs that meet its conditions: its bound, its hypotheses, the terms of its proof.

There are few examples with well-conditioned inputs, and targets that a matrix fits, so that a network of a thousand
units is wide enough for the theorem. The loss is compared with bound (18) of DeepLin and with exact federated flows: of
the network's initial kernel P(0), and of infinite width, mode by mode in the eigenbasis of P(0). During training the
proof's hypotheses, its four terms of a round (eq. (17)), and the balance of the layers are measured.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from operator import methodcaller

import numpy as np

import fedtangent as ft
from fedtangent._src.comparison.theorems.deep_linear import Size, problem, work_of
from fedtangent._src.comparison.verdicts import Verdict, bounded_verdict
from fedtangent._src.experiments import lab
from fedtangent._src.experiments.deep_linear.followed import CONTROL, DRAWS, FLOWS, FollowedNetwork, check_width, follow
from fedtangent._src.experiments.lab.runner import Study, by_scale, experiment, within
from fedtangent._src.output.line_plots import BoundedPanel, bounded
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
TERMS_TITLE = "eq. (17), norms over the residual's in units of eta K lambda_min / N: worst over the proof's share"
TERMS_COLUMNS = "term: {term}: {what} | share: {share:.3f} | worst / share: {ratio:.3g} | control: {wrong:.3g}"
# What the proof allows each term, in units of eta K lambda_min / N times the residual.
SHARES = {"second": 0.109 / 0.8**4, "third": 1 / 5, "fourth": 1 / 10}
REMARKS = (
    "(18) bounds the squared norm; its proof bounds the norm by rho, so the square by rho^2: both are followed",
    "to first order in eta the square falls by 1 - 2 eta K lambda_min / N: (18) has a quarter of that rate",
    "R of hypothesis C with the 16 of its proof (erratum `deep_linear.radius`); B's O(sqrt(L)) as 2 sqrt(L); width's "
    "constant as 1",
    "for the third term's share eta has to be smaller by L (erratum `deep_linear.33`); measured is whether it is kept",
    "the limit: infinite width, from the network's own function; balance: W'W of a layer less WW' of that below it",
    lab.NOT_OWED,
)


@dataclass(frozen=True)
class TheoremSettings:
    """Settings of the study of DeepLin's Theorem IV.2: examples, clients and networks.

    The learning rate is ``step_factor`` times the largest rate that DeepLin's theorem allows.
    """

    num_clients: int = within(4, least=2)
    held: int = 1  # examples of a client; (27) needs as many dimensions as examples of all
    outputs: int = 2
    spread: float = within(0.95, above=0, at_most=1)  # least singular value of X; the largest is 1
    truth: float = within(0.8, above=0)  # |W*|
    local_steps: int = within(4, least=2)
    depth: int = within(3, least=2)
    widths: tuple[int, ...] = within((64, 256, 1024), count=3, increasing=True)
    step_factor: float = within(0.9, above=0)
    delta: float = within(0.15, above=0, below=1)  # probability with which the theorem may fail
    num_rounds: int = within(40, least=4)
    draws: int = within(1, most=DRAWS)  # networks of a seed at each width; looks are at the first
    looks: int = within(4, least=2)  # rounds at which the hypotheses and terms of the proof are computed
    control_width: int = 4
    control_factor: float = within(100.0, above=1)  # times the step, for a network outside the theorem

    def size(self, width: int, rounds: int | None = None) -> Size:
        """Returns the sizes of a run, with as many input dimensions as examples.

        Args:
            width: Width of the network.
            rounds: Number of rounds; None for ``num_rounds``.
        """
        shape = self.num_clients, self.held, self.num_clients * self.held, self.outputs, width
        return Size(*shape, self.local_steps, rounds or self.num_rounds, self.depth)

    def most_factor(self) -> float:
        """Computes the step factor at which training diverges on a client that has all examples.

        A step factor is a learning rate divided by the largest rate that DeepLin's theorem allows.
        """
        return 2 * STEP * self.local_steps / self.spread**2


def _task(settings: TheoremSettings, seed: int, factor: float) -> ft.theory.FullBatchWork:
    """Builds the clients' training of one seed, at ``factor`` times the largest rate that DeepLin's theorem allows."""
    size = settings.size(settings.widths[0])
    x, y = problem(size, seed, settings.spread, settings.truth)
    return work_of(
        size, x, y, factor * settings.outputs * settings.spread**2 / (STEP * settings.depth * settings.local_steps)
    )


def check(study: Study) -> None:
    """Raises ``ValueError`` for networks too narrow for an invertible kernel, or rates at which training diverges."""
    settings, most = study.settings, study.settings.most_factor()
    for name, width in (("widths", settings.widths[0]), ("control_width", settings.control_width)):
        check_width(name, width, settings.outputs, settings.num_clients * settings.held)
    for name, factor, limit in (
        ("step_factor", settings.step_factor, most),
        ("control_factor", settings.control_factor, most / settings.step_factor),
    ):
        if factor >= limit:
            raise ValueError(f"{name}: got {factor:g}, must be below {limit:g}, else local descent diverges")


def run(study: Study) -> lab.Outcome:
    """Trains networks of every seed and width, several of each, by FedAvg; judges DeepLin's Theorem IV.2 on them.

    For each seed the control is a narrow network with far too large steps.
    """
    settings, networks, wrong = study.settings, list[FollowedNetwork](), list[FollowedNetwork]()
    for seed in study.each_seed():
        work = _task(settings, seed, settings.step_factor)
        for width, draw in itertools.product(settings.widths, range(settings.draws)):
            networks.append(follow(settings.size(width), work, (seed, draw), settings.looks, settings.delta))
            name, loss = f"deep_linear width={width} draw={draw}", networks[-1].loss
            study.keep(lab.metric_rows(name, seed, range(len(loss)), {"relative_loss": loss}))
        far = _task(settings, seed, settings.step_factor * settings.control_factor)
        wrong.append(
            follow(
                settings.size(settings.control_width, settings.looks), far, (seed, 0), settings.looks, settings.delta
            )
        )
    return _conclude(study, networks, wrong)


# ---- what comes out -----------------------------------------------------------------------------------------------


def _fallen(loss: np.ndarray) -> float:
    """Computes by how much ln ``loss`` decreases over the second half of the rounds."""
    return float(np.log(loss[len(loss) // 2] / loss[-1]))


def _conclude(study: Study, networks: list[FollowedNetwork], wrong: list[FollowedNetwork]) -> lab.Outcome:
    """Builds tables, figures, claims and verdicts on Theorem IV.2 of DeepLin.

    ``wrong`` are the control: narrow networks, trained with too large steps. Undecided verdicts do not fail the
    experiment.
    """
    settings = study.settings
    widest = [f for f in networks if f.width == settings.widths[-1]]
    looked_at = [f for f in widest if f.draw == 0]
    rates = {n: lab.log_slopes(networks, "width", methodcaller("error", n), "seed", "draw") for n in FLOWS}
    terms, theorems = _worst_terms(looked_at, wrong), [f.theorem for f in looked_at]
    columns = " | ".join(["flow: {flow}", *(f"m = {w}: {{w{w}:.3g}}" for w in settings.widths), "slope: {slope:.2f}"])
    title = "largest distance of residuals from the network's, over the start's"
    sheets = (
        lab.assumption_sheet(theorems, f"assumptions at width {settings.widths[-1]}, first seed's"),
        _rounds_sheet(looked_at[0]),
        _hypotheses_sheet(looked_at),
        lab.table(TERMS_TITLE, terms, TERMS_COLUMNS),
        lab.table(title, _error_rows(settings, networks, rates), columns),
        _modes_sheet(looked_at[0]),
    )
    _draw(study, looked_at[0])
    verdicts = _verdicts(settings, widest, terms, rates)
    diverged = () if all(np.isfinite(f.modes).all() for f in networks) else ("a network diverged",)
    failed = (*diverged, *lab.disagreeing([v for v in verdicts if v.holds is not None]))
    claims, rows = _claims(looked_at, widest, terms), [_row(f) for f in networks]
    return lab.Outcome(sheets, rows, claims, lab.theorem_details(theorems), REMARKS, failed, verdicts)


def _row(f: FollowedNetwork) -> lab.Row:
    """Builds the row of one network in result.json: its last relative loss, rates, and the flows' errors."""
    return {
        "seed": f.seed,
        "draw": f.draw,
        "width": f.width,
        "loss": f.loss[-1],
        "eigenvalues": f.eigenvalues,
        "rho": f.theorem.constants.rate(),
        "linear_rate": f.theorem.linear_rate,
        "errors": {name: f.error(name) for name in FLOWS},
        "looks": f.looks,
    }


def _worst_terms(networks: list[FollowedNetwork], wrong: list[FollowedNetwork]) -> list[lab.Row]:
    """Computes the largest ratio of each term of eq. (17) of DeepLin to the value that the proof allows.

    Eq. (17) splits the residual after a round into four terms. The ratio is the largest over the rounds in which they
    were computed, and seeds. The rows also have the ratios of the control networks ``wrong``. For the first term the
    proof grants a least decrease: its ratio is granted over measured, and its control grants the decrease of lambda_max
    instead of lambda_min.
    """

    def over(f: FollowedNetwork, name: str, unit: float = 1.0) -> float:
        terms = [look.terms[name] for look in f.looks]
        return unit / min(terms) if name == "first" else max(terms) / SHARES[name]

    rows = []
    for name, label in TERMS.items():
        if name == "first":
            constants = [f.theorem.constants for f in networks]
            units = [c.lambda_max / c.lambda_min for c in constants]
            control = "lambda_max instead of lambda_min", max(map(over, networks, [name] * len(networks), units))
        else:
            control = "narrow, step too large", max(over(f, name) for f in wrong)
        row = {
            "term": name,
            "what": label,
            "share": SHARES.get(name, 1.0),
            "ratio": max(over(f, name) for f in networks),
        }
        rows.append({**row, "control": control[0], "wrong": control[1]})
    return rows


def _error_rows(
    settings: TheoremSettings, networks: list[FollowedNetwork], rates: dict[str, lab.MeanInterval]
) -> list[lab.Row]:
    """Builds a row for each theory in FLOWS: how far its flow is from the networks' residuals, by width.

    A distance is the largest of any round, averaged over the networks of a width. ``rates`` has for each theory the
    slope of ln distance against ln width, which the row shows too.
    """
    rows = []
    for name, label in FLOWS.items():
        means = {f"w{w}": float(np.mean([f.error(name) for f in networks if f.width == w])) for w in settings.widths}
        rows.append({"flow": label, **means, "slope": rates[name]})
    return rows


def _rounds_sheet(f: FollowedNetwork) -> lab.Sheet:
    """Builds the table of one network's loss after selected rounds, with theory's flows and DeepLin's bounds for it."""
    curves = {name: np.sum(f.flows[name] ** 2, axis=1) for name in ("own", "infinite")}
    curves |= {"loss": f.loss, "b18": f.bounds()["(18)"], "proof": f.bounds()["its proof"]}
    at = np.unique(np.linspace(0, len(f.modes) - 1, 6).round().astype(int))
    rows = [{"round": t, **{name: values[t] for name, values in curves.items()}} for t in at]
    columns = f"round: {{round}} | network: {{loss:.4f}} | {FLOWS['own']}: {{own:.4f}} | "
    columns += f"{FLOWS['infinite']}: {{infinite:.4f}} | its proof: {{proof:.4f}} | (18): {{b18:.4f}}"
    return lab.table(f"loss over the start's, width {f.width}, first seed", rows, columns)


def _hypotheses_sheet(networks: list[FollowedNetwork]) -> lab.Sheet:
    """Builds a table of the hypotheses in the proof of DeepLin's Theorem IV.2.

    Each hypothesis is shown in the round and for the network where it is nearest to failing.
    """
    rows = []
    for i, first in enumerate(networks[0].looks[0].hypotheses):
        along = [look.hypotheses[i] for f in networks for look in f.looks]
        nearest = max(along, key=lambda a: a.required / a.measured if a.relation == ">" else a.measured / a.required)
        counts = {"held": sum(a.holds for a in along), "looks": len(along)}
        rows.append({**nearest._asdict(), "name": first.name, **counts})
    columns = "hypothesis: {name} | what: {statement} | measured: {measured:.4g} | "
    columns += "required: {relation} {required:.4g} | holds: {held} of {looks}"
    return lab.table("hypotheses of the proof along the runs, where nearest to failing", rows, columns)


def _modes_sheet(f: FollowedNetwork) -> lab.Sheet:
    """Builds the table of how much of the initial residual is left after the last round, as a share.

    It has a row for each mode, which is an eigenvector of the initial kernel P(0).
    """
    shares = {name: np.abs(values[-1] / values[0]) for name, values in (("network", f.modes), *f.flows.items())}
    rows = [{"value": value, **{name: v[j] for name, v in shares.items()}} for j, value in enumerate(f.eigenvalues)]
    columns = f"eigenvalue: {{value:.4f}} | network: {{network:.4f}} | {FLOWS['own']}: {{own:.4f}} | "
    columns += f"{FLOWS['infinite']}: {{infinite:.4f}} | {FLOWS['one_step']}: {{one_step:.4f}}"
    title = f"modes of P(0): what {len(f.modes) - 1} rounds leave, width {f.width}, first seed"
    return lab.table(title, rows, columns)


def _claims(
    looked_at: list[FollowedNetwork], widest: list[FollowedNetwork], terms: list[lab.Row]
) -> tuple[lab.Claim, ...]:
    """Judges the claims on Theorem IV.2, on its proof and on the rate of decay.

    ``widest`` are the networks of the largest width, ``looked_at`` the first network of each seed among them, in which
    the quantities of the proof were computed; ``terms`` are the rows of ``_worst_terms``.
    """
    over_18, over_proof = (
        lab.interval(_fallen(f.loss) / _fallen(f.bounds()[bound]) for f in looked_at) for bound in ("(18)", "its proof")
    )
    wide = [_fallen(np.sum(f.flows["infinite"] ** 2, axis=1)) for f in widest]
    to_flow = lab.interval(abs(_fallen(f.loss) / flow - 1) for f, flow in zip(widest, wide, strict=True))
    hypotheses = [a.holds for f in looked_at for look in f.looks for a in look.hypotheses]
    balance = lab.interval(f.looks[-1].unbalanced / f.looks[-1].moved for f in looked_at)
    most = max((t for t in terms if t["term"] != "first"), key=lambda t: t["ratio"])
    of_hypotheses = f"{sum(hypotheses)} of {len(hypotheses)}", lab.SEEN if all(hypotheses) else lab.NOT_SEEN
    of_terms = f"most: {most['term']}, {most['ratio']:.2g} of it", lab.SEEN if most["ratio"] <= 1 else lab.NOT_SEEN
    return (
        over_18.claim_above("Theorem IV.2: the loss falls at least as (18)", "{:.2f} times its rate", 1),
        over_proof.claim_above("its proof's rho^2, twice the rate of (18), holds", "{:.2f} times", 1),
        over_18.claim_above("ours: (18) has a quarter of the rate, or less", "{:.2f} times", 4 * (1 - MARGIN)),
        to_flow.claim_below("ours: the rate is that of infinite width to 5 %", "off by {:.3f}", 0.05),
        lab.Claim("A, B and C hold along the runs", *of_hypotheses),
        lab.Claim("no term of (17) takes its share", *of_terms),
        balance.claim_below("layers keep their balance to 1 % of their motion", "{:.1e}", 0.01),
    )


def _verdicts(
    settings: TheoremSettings, widest: list[FollowedNetwork], terms: list[lab.Row], rates: dict[str, lab.MeanInterval]
) -> tuple[Verdict, ...]:
    sizes = f"width {settings.widths[-1]}, {settings.num_rounds} rounds, {len(widest)} networks"
    verdicts = []
    for name in ("(18)", "its proof"):
        largest, above = (max(float((f.loss / f.bounds()[b])[1:].max()) for f in widest) for b in (name, CONTROL))
        verdicts.append(bounded_verdict(SUBJECT, f"loss / bound, {name}", sizes, largest, CONTROL, above))
    for t in terms:
        statement = f"eq. (17), {t['term']} term / its share"
        verdicts.append(bounded_verdict(SUBJECT, statement, sizes, t["ratio"], t["control"], t["wrong"]))
    for name, (target, other) in SLOPES.items():
        rate, control = rates[name], rates[other]
        right = f"{rate:.2f}", f"{target:g} +- {MARGIN:g}", rate.within(target, MARGIN)
        wrong = FLOWS[other], f"{control:.2f}", abs(control.mean - target) > MARGIN
        statement = f"modes beside the {FLOWS[name]}: slope of the error against width"
        verdicts.append(Verdict.of(SUBJECT, statement, f"{len(widest)} networks", right, wrong))
    return tuple(verdicts)


def _draw(study: Study, f: FollowedNetwork) -> None:
    """Plots two figures of one network: the decay of loss and modes, and the quantities of the proof."""
    settings = study.settings
    at = np.unique(np.linspace(0, len(f.modes) - 1, 21).round().astype(int))
    bounds = {name: values[at] for name, values in f.bounds().items()}
    flow, wide = (np.sum(f.flows[name][at] ** 2, axis=1) for name in ("own", "infinite"))
    right = {"(18)": bounds["(18)"], "its proof": bounds["its proof"], FLOWS["infinite"]: wide}
    network, wrong, predicted = {"network": f.loss[None, at]}, {CONTROL: bounds[CONTROL]}, {FLOWS["own"]: flow[None]}
    loss = BoundedPanel("loss / initial loss", at, network, right, wrong, predicted)
    places = np.unique(np.linspace(0, f.modes.shape[1] - 1, 4).round().astype(int))
    measured = {f"eigenvalue {f.eigenvalues[j]:.3f}": np.abs(f.modes[None, at, j]) for j in places}
    wrong = {FLOWS["one_step"]: np.abs(f.flows["one_step"][at, places[-1]])}
    predicted = {FLOWS["own"]: np.abs(f.flows["own"][at][:, places]).T}
    modes = BoundedPanel("modes of P(0), over the initial residual", at, measured, {}, wrong, predicted)
    title = f"DeepLin, depth {settings.depth}, width {f.width}, N = {settings.num_clients}, K = {settings.local_steps}"
    bounded([loss, modes], title, ("round", "over that at the start"), None, study.figures.path("decay"))
    at = np.array([look.round for look in f.looks])
    shares = {f"proof grants {share:.3g}": np.full(len(at), share) for share in SHARES.values()}
    terms = {f"{name}: {TERMS[name]}": np.array([look.terms[name] for look in f.looks]) for name in SHARES}
    motion = {"W'W and WW'": np.array([look.moved for look in f.looks])}
    motion["their difference"] = np.array([look.unbalanced for look in f.looks])
    panels = [
        BoundedPanel("eq. (17): terms, in eta K lambda_min / N of the residual", at, terms, shares),
        BoundedPanel("layers' balance: relative motion", at, motion, {}),
    ]
    bounded(panels, title, ("round", "ratio"), None, study.figures.path("proof"))


DEFAULT = TheoremSettings(num_rounds=150, draws=3, looks=10)
PAPER = TheoremSettings(num_clients=6, widths=(256, 1024, 4096), num_rounds=600, draws=4, looks=20)
SCALES = {"gaussian": by_scale(TheoremSettings(), DEFAULT, PAPER)}
ENTRIES = (experiment(__name__, run, SCALES, ("liu_deep_linear",), check=check, least_seeds=2, exact=True),)
