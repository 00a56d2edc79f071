"""``train --diagnostics kernel``: what is measured, what the table shows of it, its figure."""

from __future__ import annotations

from pathlib import Path

from fedtangent.cli.job import Job
from fedtangent.engine.history import Run
from fedtangent.kernels.measures import spectrum
from fedtangent.measures.tangent_kernels import METRICS, KernelDiagnostics, kernel_diagnostics
from fedtangent.output.files import Metric

KERNEL = "kernel"  # the split that its metrics are filed under
KERNEL_SHOWN = ("drift", "commutator_relative")


def kernel_watch(job: Job, seed: int) -> KernelDiagnostics | None:
    """What measures the kernels of the run of ``seed``, if that was asked for; examples are those of ``--seed``."""
    if job.watched is None:
        return None
    o = job.options
    return kernel_diagnostics(job.algorithm, job.watched, job.data, seed, o.diagnostics_examples, o.seed)


def draw_kernels(job: Job, watch: KernelDiagnostics, run: Run, metrics: list[Metric], folder: Path) -> None:
    """figures/kernel.png: metrics of all seeds along the run, spectra of the first seed's models at its two ends."""
    from fedtangent.output.run_plots import kernel_figure

    mine = [m for m in metrics if m.split == KERNEL]
    series: dict[str, dict[int, list[float]]] = {name: {} for name in METRICS}
    for m in mine:
        name, _, model = m.metric.partition("_model_")
        if model or len(watch.initial) == 1:  # the models' own values, of which the others are means
            series[name].setdefault(m.round, []).append(m.value)
    spectra = [
        [spectrum(theta).eigenvalues for theta in kernels] for kernels in (watch.initial, watch.kernels(run.state))
    ]
    title = (
        f"{job.algorithm.name} on {job.options.dataset}: tangent kernels on {len(watch.watched.rows)} training examples"
    )
    kernel_figure(series, spectra[0], spectra[1], mine[-1].round, title, folder / "figures" / "kernel.png")
