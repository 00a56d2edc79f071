"""Every theorem's check is found by its entry, with its papers, and is chosen by its name or its paper's."""

from __future__ import annotations

import inspect
import sys
from types import ModuleType

import pytest

from fedtangent._src.comparison.theorems import TheoremEntry, of_scale, wanted
from fedtangent._src.entries import catalogue
from fedtangent._src.papers import PAPERS


def test_every_entry_says_what_it_checks_and_where_it_stands() -> None:
    entries = catalogue("theorems")
    assert {"fed_ensemble", "flow", "local_gd", "ntk_fl"} <= {name.split(".")[0] for name in entries}
    for name, entry in entries.items():
        assert isinstance(entry, TheoremEntry)
        place = f"fedtangent._src.comparison.theorems.{name.split('.')[0]}"  # of its paper
        assert entry.build.__module__.startswith(place)
        assert entry.summary and entry.statement and set(entry.papers) <= set(PAPERS) and entry.papers


def test_every_entry_names_functions_that_its_check_uses_and_experiments_that_there_are() -> None:
    for name, entry in catalogue("theorems").items():
        used = "".join(text.partition("\nENTRIES = ")[0] for text in sources(sys.modules[entry.build.__module__]))
        for function in entry.functions:
            assert function.__module__.startswith("fedtangent._src.theory."), name
            assert f"{function.__name__}(" in used, (name, function.__name__)
        assert entry.functions and set(entry.figures) <= set(catalogue("experiments")), name


def sources(module: ModuleType) -> list[str]:
    """The text of a module, and of every module of ``compare`` that it takes functions from."""
    found, left = set[str](), [module.__name__]
    while left:
        found.add(name := left.pop())
        values = vars(sys.modules[name]).values()
        taken = {
            v.__name__ if inspect.ismodule(v) else v.__module__
            for v in values
            if inspect.ismodule(v) or inspect.isfunction(v)
        }
        left += [other for other in taken - found if other.startswith("fedtangent._src.comparison.")]
    return [inspect.getsource(sys.modules[name]) for name in sorted(found)]


def test_checks_are_chosen_by_name_or_paper_each_once() -> None:
    assert list(wanted(())) == list(catalogue("theorems"))
    assert list(wanted(("ntk_fl.convergence", "ntk_fl"))) == [
        "ntk_fl.convergence", "ntk_fl.evolution", "ntk_fl.lemmas", "ntk_fl.weight_gap",
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r"only: got 'x', allowed are conformal\.coverage, "):
        wanted(("flow", "x"))


def test_a_scale_is_smoke_default_or_paper() -> None:
    assert [of_scale(scale, 1, 2) for scale in ("smoke", "default", "paper")] == [1, 1, 2]
    with pytest.raises(ValueError, match="scale: got 'huge', allowed are smoke, default, paper"):
        of_scale("huge", 1, 2)
