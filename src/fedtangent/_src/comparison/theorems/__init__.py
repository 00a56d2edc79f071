"""The theorems checked against simulation; every check also rejects a wrong theory, its negative control.

Each file below checks theorems of one paper and ends with its ``ENTRIES``. A check builds a problem, simulates it, and
measures how far the simulation is from theory. It repeats the measurement with a wrong theory, the control, and
``Claim`` turns both numbers into a ``Verdict``. To add a theorem, write its function in ``theory/``, its check with an
entry in a file here, and a test. The command line, ``fedtangent list theorems`` and the documentation's index read the
entries.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np

from fedtangent._src.checks import choice
from fedtangent._src.comparison.statistics import Interval
from fedtangent._src.comparison.verdicts import EXACT, Verdict, bounded_verdict, exact_verdict
from fedtangent._src.entries import Entry, catalogue

SCALES = ("smoke", "default", "paper")
Answer = bool | np.bool | None
Size = TypeVar("Size")


@runtime_checkable
class TheoryFunction(Protocol):
    """Type of a function of the package ``theory``; the documentation links to it by its ``__name__``."""

    @property
    def __name__(self) -> str: ...


@dataclasses.dataclass(frozen=True)
class TheoremEntry(Entry):
    """A check of one theorem: ``build(scale, seed)`` returns its verdicts, and needs JAX's 64-bit types.

    ``scale`` is one of ``SCALES``: "smoke" and "default" (a few minutes at most on two cores) or "paper" (larger sizes,
    more draws). ``seed`` sets every random draw.
    """

    statement: str = ""
    """Number of the theorem or equation in its papers."""
    functions: tuple[TheoryFunction, ...] = ()
    """The functions of ``theory`` that compute it."""
    figures: tuple[str, ...] = ()
    """The experiments whose figures show it."""
    is_quick: bool = False
    """Whether it takes a few seconds, so that scale "smoke" includes it; one check of each group at least does."""


def wanted(names: tuple[str, ...], scale: str = "default") -> dict[str, TheoremEntry]:
    """Returns the entries that ``names`` selects at a scale, keyed by name; without names, all entries.

    Args:
        names: Names of entries, or of groups (``ntk_fl``), which select all their entries.
        scale: "smoke", "default" or "paper"; "smoke" leaves out the entries that are not quick.

    Raises:
        ValueError: A name belongs to no entry and no group at this scale.
    """
    entries: Mapping[str, TheoremEntry] = catalogue("theorems")
    every = {name: entry for name, entry in entries.items() if entry.is_quick or scale != "smoke"}
    papers = dict.fromkeys(name.split(".")[0] for name in every)
    selected: dict[str, TheoremEntry] = {}
    for wish in names or tuple(every):
        matches = {name: entry for name, entry in every.items() if wish in (name, name.split(".")[0])}
        if not matches:
            raise ValueError(f"only: got {wish!r}, allowed are {', '.join(every)}, or a group: {', '.join(papers)}")
        selected |= matches
    return selected


def of_scale(scale: str, default: Size, paper: Size) -> Size:
    """Returns ``default`` or ``paper``, as ``scale`` says; raises ``ValueError`` for an unknown scale.

    Args:
        scale: "smoke", "default" or "paper".
        default: Value at the scales "smoke", which has fewer checks of the same sizes, and "default".
        paper: Value at the scale "paper".
    """
    return paper if choice("scale", scale, SCALES) == "paper" else default


class Claim(NamedTuple):
    """Three texts of a ``Verdict``: the theorem's name, the statement that is checked, and the sizes of the problem."""

    theorem: str
    statement: str
    sizes: str

    def judged(self, right: tuple[str, str, Answer], wrong: tuple[str, str, Answer], notices: str) -> Verdict:
        """Builds the verdict from a check's decision whether measurement and theory agree.

        Args:
            right: Measured value, expected value, and whether they agree; None: too few draws to tell.
            wrong: Name of the control (a wrong theory), its measured value, and whether it fails; None as for
                ``right``.
            notices: How large an error of the theory must be for the check to detect it, as text.
        """
        return Verdict.of(*self, right, wrong, notices)

    def exact(self, error: float, controls: dict[str, float]) -> Verdict:
        """Checks that ``error`` is at most ``EXACT`` (1e-9), and each wrong theory's error above 1000 times ``EXACT``.

        Args:
            error: Relative error of the theory.
            controls: Relative error of each wrong theory, by name.
        """
        return exact_verdict(self.theorem, self.statement, error, controls, EXACT)._replace(sizes=self.sizes)

    def bounded(self, ratio: float, control: str, wrong: float) -> Verdict:
        """Checks that a measured value is at most its bound, and more than a wrong bound.

        Args:
            ratio: Measured value divided by its bound.
            control: Name of the wrong bound.
            wrong: Measured value divided by the wrong bound.
        """
        return bounded_verdict(*self, ratio, control, wrong)

    def near(
        self,
        value: float,
        control: tuple[str, float],
        margin: float,
        notices: str,
        *,
        target: float = 1.0,
        formats: tuple[str, str] = (".3f", ".3f"),
        applies: bool = True,
    ) -> Verdict:
        """Checks that a number is within ``margin`` of its target, and the control's number is not.

        Args:
            value: Measured number.
            control: Name of the wrong theory, and its number.
            margin: Allowed deviation from the target.
            notices: How large an error of the theory must be for the check to detect it.
            target: Number that theory predicts.
            formats: Format specifications of the measured number and of the control's.
            applies: Whether the assumptions of the theorem hold; if not, the check fails.
        """
        name, wrong = control
        return self.judged(
            (format(value, formats[0]), f"{target:g} +- {margin:g}", applies and abs(value - target) <= margin),
            (name, format(wrong, formats[1]), abs(wrong - target) > margin),
            notices,
        )

    def between(
        self,
        estimate: Interval,
        control: tuple[str, Interval],
        limits: tuple[float, float],
        expected: str,
        notices: str,
    ) -> Verdict:
        """Checks that an interval lies within limits, and that the control's interval lies outside.

        An interval that lies only partly within the limits leaves the verdict undecided.

        Args:
            estimate: Measured number with its interval.
            control: Name of the wrong theory, and its number with its interval.
            limits: Least and largest number that theory allows.
            expected: The limits, as text.
            notices: How large an error of the theory must be for the check to detect it.
        """
        name, wrong = control
        right = str(estimate), expected, estimate.within(*limits)
        return self.judged(right, (name, str(wrong), wrong.outside(*limits)), notices)
