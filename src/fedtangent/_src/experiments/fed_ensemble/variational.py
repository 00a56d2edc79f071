"""Fed-ensemble as variational inference (FE-2021, 3.2 and 8): the evidence bound against K, and along a run.

On a Bayesian linear model the evidence ln p(D) is exact. It is compared with the evidence lower bound of a mixture of K
Gaussians, and with the papers' form of this bound, which takes the components as separated and can therefore exceed the
evidence. The verdicts are those of ``fedtangent check-theory``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedtangent._src.comparison.theorems.fed_ensemble.variational import RUN_MODELS, Measured, measure, verdicts
from fedtangent._src.experiments import lab
from fedtangent._src.experiments.lab.runner import Study, by_scale, experiment, within
from fedtangent._src.output.line_plots import BoundedPanel, bounded
from fedtangent._src.theory.fed_ensemble.variational import separated_entropy
from fedtangent.types import Verdict

ABOVE = "above ln p(D), with the entropy of separated components"


@dataclass(frozen=True)
class VariationalSettings:
    """Settings of the study of the evidence bound: numbers K of components of the mixtures that are fitted.

    K = 1 and the K of the run of Fed-ensemble are always added.
    """

    num_models: tuple[int, ...] = within((2, 8, 16), least=2)


def run(study: Study) -> lab.Outcome:
    """Computes the evidence lower bound of mixtures fitted to the exact posterior, and along a run of Fed-ensemble.

    It does so for every seed, and plots the bounds of the first one.
    """
    rows, judged = list[lab.Row](), list[Verdict]()
    for seed in study.each_seed():
        measured = measure(tuple(sorted({1, RUN_MODELS, *study.settings.num_models})), seed)
        for (k, one), gap, entropy in zip(
            measured.fitted.items(), measured.gaps, measured.of_fitted("entropy"), strict=True
        ):
            row = {"seed": seed, "num_models": k, "scale": float(one.mixture.scale), "divergence": one.divergence}
            row |= {"gap": gap, "error": float(one.bound.standard_error)}
            rows.append(row | {"papers": gap - float(separated_entropy(one.mixture)) + entropy})
        values = {"evidence_bound": measured.bounds, "standard_error": measured.errors, "entropy": measured.entropies}
        study.keep(lab.metric_rows(f"fed_ensemble K={RUN_MODELS}", seed, measured.rounds, values))
        judged += verdicts(measured)
        if seed == study.seeds[0]:
            _draw(study, measured, np.array([row["papers"] for row in rows]))
    columns = "seed: {seed} | K: {num_models} | sigma: {scale:.4f} | divergence by quadrature: {divergence:.4f} | "
    columns += "ln p(D) - bound: {gap:.4f} +- {error:.4f} | with separated components: {papers:+.4f}"
    sheet = lab.table("mixtures fitted by brute force, in nats", rows, columns)
    remark = "with separated components, as the papers approximate the entropy, the bound is above ln p(D): below 0"
    return lab.Outcome((sheet,), rows, (), {}, (remark,), lab.disagreeing(judged), tuple(judged))


def _draw(study: Study, measured: Measured, papers: np.ndarray) -> None:
    """Plots how far the bounds are below the evidence ln p(D), against the number of models and by round of the run.

    ``papers`` is ln p(D) minus the papers' form of the bound, for each fitted mixture.
    """
    along = measured.posterior.log_evidence - measured.bounds
    divergences = {k: one.divergence for k, one in measured.fitted.items()}
    exact, level = np.array(list(divergences.values())), np.full(len(along), divergences[RUN_MODELS])
    above = measured.separated - measured.entropies - along
    counts, title = np.array(list(divergences)), f"a run of K = {RUN_MODELS} models"
    panels = (
        BoundedPanel("fitted mixtures", counts, {"bound": measured.gaps}, {"by quadrature": exact}, {ABOVE: -papers}),
        BoundedPanel(title, measured.rounds, {"bound": along}, {"fitted mixture of as many": level}, {ABOVE: above}),
    )
    names, lowest = ("models K, or round", "ln p(D) - bound, nats"), float(exact.min()) / 3
    bounded(panels, "evidence lower bound (FE-2021, section 3.2)", names, lowest, study.figures.path("variational"))


SCALES = {"gaussian": by_scale(VariationalSettings(), paper=VariationalSettings((2, 8, 16, 32)))}
ENTRIES = (experiment(__name__, run, SCALES, ("shi2021", "shi2024"), exact=True),)
