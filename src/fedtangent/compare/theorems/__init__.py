"""Every theorem against simulation, each beside a wrong theory that must not pass; modules are imported when run.

A check module holds ``checks(scale, seed) -> list[TheoremCheck]``. ``scale`` is "default" (some minutes a module on
two cores) or "large" (larger sizes, more seeds); ``seed`` sets every random draw.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import NamedTuple

MODULES = {
    "flow": "the exact federated flow: linear models equal it, networks come nearer to it with their width",
    "convergence": "Theorem 1 and Lemmas 9.1 to 9.3 of FE-2021: rates, bounds, second-order terms",
    "gp_limit": "Theorem 2: the law of K trained networks, entry by entry, on sine and on digits",
    "bias_variance": "Corollary 1 and the bias-variance decomposition of an ensemble",
    "ledger": "the residual ledger: simulated minus predicted residuals during training",
    "ntk_fl": "Theorems 1 and 2, Lemmas 1 and 2 of NTK-FL: rates of descent and of FedAvg, the gap of the weights",
}
SCALES = ("default", "large")


class TheoremCheck(NamedTuple):
    """One statement of the theory, measured, with a wrong theory beside it that has to fail.

    ``theorem`` names paper and number ("FE-2021 Theorem 2"), ``statement`` says what is checked, ``sizes`` on what,
    ``measured`` and ``predicted`` are numbers as text with their units or standard errors. ``control`` names the wrong
    theory and what it measured; ``control_failed`` is True if it did not pass, which is what is wanted.
    """

    theorem: str
    statement: str
    sizes: str
    measured: str
    predicted: str
    passed: bool
    control: str
    control_failed: bool

    @property
    def ok(self) -> bool:
        """Whether the theory passed and the wrong one did not."""
        return self.passed and self.control_failed


Checks = Callable[[str, int], list[TheoremCheck]]


def load(name: str) -> Checks:
    """The ``checks`` function of module ``name``; ``ValueError`` if it is not one of ``MODULES``."""
    if name not in MODULES:
        raise ValueError(f"only: got {name!r}, allowed are {', '.join(MODULES)}")
    checks: Checks = importlib.import_module(f"{__name__}.{name}").checks
    return checks
