"""Experiments: one small file for each table, figure or claim of the papers, run by ``fedtangent experiment``.

An experiment's name is its module below this package: ``fed_ensemble.versus_fed_avg`` is ``EXPERIMENT`` in
``experiments/fed_ensemble/versus_fed_avg.py``. A new one is a new file, and a name in ``NAMES``.
"""

from __future__ import annotations

import importlib

from fedtangent.experiments.lab.contract import Experiment

NAMES = (
    "fed_ensemble.corollary1",
    "fed_ensemble.fig1",
    "fed_ensemble.fig2",
    "fed_ensemble.fig3",
    "fed_ensemble.table1",
    "fed_ensemble.theorem1",
    "fed_ensemble.theorem2",
    "fed_ensemble.versus_fed_avg",
    "ntk_fl.fig3",
    "ntk_fl.fig4a",
    "ntk_fl.fig4b",
    "ntk_fl.fig4c",
    "ntk_fl.fig5",
    "ntk_fl.fig6",
    "ntk_fl.fig7",
    "ntk_fl.fig8",
    "ntk_fl.fig9",
    "ntk_fl.table1",
    "ntk_fl.theorem1",
    "ntk_fl.theorem2",
)


def get(name: str) -> Experiment:
    """The experiment called ``name``; raises ``ValueError`` with the allowed names."""
    if name not in NAMES:
        raise ValueError(f"experiment: got {name!r}, allowed are {', '.join(NAMES)}")
    found: Experiment = importlib.import_module(f"{__name__}.{name}").EXPERIMENT
    return found


def available() -> dict[str, str]:
    """Names of the experiments, each with a one-line description."""
    return {name: get(name).description for name in NAMES}
