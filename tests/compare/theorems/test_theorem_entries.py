"""Every theorem's check is found by its entry, with its papers, and is chosen by its name or its paper's."""

from __future__ import annotations

import pytest

from fedtangent.compare.theorems import TheoremEntry, of_scale, wanted
from fedtangent.entries import catalogue
from fedtangent.papers import PAPERS


def test_every_entry_says_what_it_checks_and_where_it_stands() -> None:
    entries = catalogue("theorems")
    assert {"fed_ensemble", "flow", "local_gd", "ntk_fl"} <= {name.split(".")[0] for name in entries}
    for name, entry in entries.items():
        assert isinstance(entry, TheoremEntry)
        assert entry.build.__module__ == f"fedtangent.compare.theorems.{name}"  # it stands in the file of its name
        assert entry.summary and entry.statement and set(entry.papers) <= set(PAPERS) and entry.papers


def test_checks_are_chosen_by_name_or_paper_each_once() -> None:
    assert list(wanted(())) == list(catalogue("theorems"))
    assert list(wanted(("ntk_fl.convergence", "ntk_fl"))) == [
        "ntk_fl.convergence", "ntk_fl.evolution", "ntk_fl.lemmas", "ntk_fl.weight_gap",
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r"only: got 'x', allowed are deep_linear\.convergence, "):
        wanted(("flow", "x"))


def test_a_scale_is_default_or_paper() -> None:
    assert (of_scale("default", 1, 2), of_scale("paper", 1, 2)) == (1, 2)
    with pytest.raises(ValueError, match="scale: got 'huge', allowed are default, paper"):
        of_scale("huge", 1, 2)
