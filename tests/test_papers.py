"""The papers behind each algorithm."""

from __future__ import annotations

import re

import pytest

from fedtangent import cite
from fedtangent._src.entries import catalogue
from fedtangent._src.federated import algorithms
from fedtangent._src.federated.local import Work
from fedtangent._src.federated.schedule import all_clients
from fedtangent._src.papers import PAPERS, papers_of

from .federated.toys import two_layer


def test_every_choice_names_papers_that_there_are_and_every_paper_is_named() -> None:
    named = [
        paper
        for kind in ("algorithms", "datasets", "schedules", "channels", "models", "experiments", "theorems")
        for e in catalogue(kind).values()
        for paper in e.papers
    ]
    assert all(entry.papers for entry in catalogue("algorithms").values())
    assert {paper for paper in named if not paper.startswith("@")} == set(PAPERS)


@pytest.mark.parametrize("key", PAPERS)
def test_an_entry_is_whole(key: str) -> None:
    text = PAPERS[key]
    assert re.match(rf"@(article|inproceedings|misc|techreport){{{key},\n", text)
    assert text.count("{") == text.count("}") and text.endswith("\n}")
    fields = re.findall(r"^  (\w+) = ", text, re.MULTILINE)
    assert {"title", "author"} <= set(fields) and len(set(fields)) == len(fields)


def test_an_algorithm_inside_another_is_cited_too() -> None:
    options = {"client_learning_rate": 0.1, "work": Work(steps=1, batch_size=None)}
    dyn = algorithms.fed_ensemble(two_layer(), all_clients(6, 2), base=algorithms.fed_dyn, mu=0.1, **options)
    assert papers_of(dyn) == ("shi2024", "shi2021", "acar2021")
    assert cite(dyn).count("@") == 3
    assert cite(algorithms.fed_avg(two_layer(), all_clients(6), **options)) == PAPERS["mcmahan2017"]


def test_an_unknown_algorithm() -> None:
    with pytest.raises(ValueError, match="algorithm: got 'fed_magic', allowed are centralised,"):
        cite("fed_magic")
