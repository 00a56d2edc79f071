"""The papers behind each algorithm."""

from __future__ import annotations

import inspect
import re
import typing

import pytest

from fedtangent import cite
from fedtangent.federated import algorithms
from fedtangent.federated.local import Work
from fedtangent.federated.schedule import all_clients
from fedtangent.papers import BIBTEX, PAPERS, papers
from fedtangent.types import Algorithm

from .federated.toys import two_layer


def test_every_recipe_has_its_papers_and_every_paper_a_recipe() -> None:
    found = {
        name
        for name, function in vars(algorithms).items()
        if inspect.isfunction(function) and typing.get_type_hints(function).get("return") is Algorithm
    }
    assert found == set(PAPERS)
    assert {key for keys in PAPERS.values() for key in keys} == set(BIBTEX)


@pytest.mark.parametrize("key", BIBTEX)
def test_an_entry_is_whole(key: str) -> None:
    text = BIBTEX[key]
    assert re.match(rf"@(article|inproceedings|misc){{{key},\n", text)
    assert text.count("{") == text.count("}") and text.endswith("\n}")
    fields = re.findall(r"^  (\w+) = ", text, re.MULTILINE)
    assert {"title", "author"} <= set(fields) and len(set(fields)) == len(fields)


def test_an_algorithm_inside_another_is_cited_too() -> None:
    options = {"client_learning_rate": 0.1, "work": Work(steps=1)}
    dyn = algorithms.fed_ensemble(two_layer(), all_clients(6, 2), base=algorithms.fed_dyn, mu=0.1, **options)
    assert papers(dyn) == ("shi2024", "shi2021", "acar2021")
    assert cite(dyn).count("@") == 3
    assert cite(algorithms.fed_avg(two_layer(), all_clients(6), **options)) == BIBTEX["mcmahan2017"]


def test_an_unknown_algorithm() -> None:
    with pytest.raises(ValueError, match="cite: got the algorithm 'fed_magic', known are centralised,"):
        cite("fed_magic")
