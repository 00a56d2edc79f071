"""The table of errata: its rows are those that docstrings name, and what shows a row is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import numpy as np
import pytest

from fedtangent._src.entries import catalogue
from fedtangent._src.errata import ERRATA, Erratum
from fedtangent._src.optimizers import staircase_decay
from fedtangent._src.theory.fed_ensemble.second_order import condition_15

from .documents import ROOT
from .theory.test_second_order import Toy

SOURCE = ROOT / "src" / "fedtangent" / "_src"
NAMED = re.compile(r"[Ee]rrat(?:um|a) ((?:`[\w.]+`(?:, and |, | and )?)+)")
# Phrases by which a docstring or comment tells that the paper has it otherwise.
TELLING = re.compile(
    r"as printed|(?:paper|page|eq\. \(\d+\)) (?:prints(?! neither)|writes|leaves out)|\bmisprint|\bslips?\b"
)


def named(text: str) -> set[str]:
    """The keys that a text names."""
    return {key for found in NAMED.findall(" ".join(text.split())) for key in re.findall(r"`([\w.]+)`", found)}


def sources() -> dict[str, str]:
    """The text of every file of the package by its path, except for the table."""
    files = (path for path in SOURCE.rglob("*.py") if path.name != "errata.py")
    return {path.relative_to(SOURCE).as_posix(): path.read_text() for path in files}


def unnamed(files: dict[str, str]) -> list[str]:
    """Files that tell of an erratum and name no row."""
    return [name for name, text in files.items() if TELLING.search(text) and not named(text)]


def is_there(shown: str) -> bool:
    """Whether a check, or a test, exists."""
    file, _, test = shown.partition("::")
    if not test:
        return file in catalogue("theorems")
    path = ROOT / file
    functions = ast.parse(path.read_text()).body if path.exists() else []
    return test in {node.name for node in functions if isinstance(node, ast.FunctionDef)}


# ---- the table ----


def test_docstrings_and_the_table_name_the_same_rows() -> None:
    keys = [row.key for row in ERRATA]
    assert len(keys) == len(set(keys)) > 40
    assert {key for text in sources().values() for key in named(text)} == set(keys)


def test_a_docstring_that_tells_of_an_erratum_names_its_row() -> None:
    assert unnamed(sources()) == []
    assert unnamed({"theory/new.py": "The factor 2 is missing from (7) as printed."}) == ["theory/new.py"]
    assert unnamed({"theory/new.py": "(7), as printed (erratum `ntk_fl.12`)."}) == []
    assert named("errata `a.1`,\n  `b.2` and `c.3`, and `d`") == {"a.1", "b.2", "c.3", "d"}


@pytest.mark.parametrize("row", ERRATA, ids=lambda row: row.key)
def test_a_row_is_whole_and_what_shows_it_exists(row: Erratum) -> None:
    assert all((row.paper, row.place, row.printed, row.right)) and row.printed != row.right
    assert is_there(row.shown), row.shown
    assert "|" not in row.key


def test_what_does_not_exist_is_noticed() -> None:
    assert not is_there("flow.inexact") and not is_there("tests/test_none.py::test_it")
    assert not is_there(f"tests/{Path(__file__).name}::test_nothing")


# ---- rows that no other test shows ----


def test_the_decomposition_has_the_mean_prediction_in_its_bias() -> None:
    """Over a finite set of runs all expectations are sums, so that both sides are exact."""
    rng = np.random.default_rng(0)
    truth, h, noise = rng.standard_normal(5), rng.standard_normal((7, 5)), np.array([-0.3, 0.3])
    mean = h.mean(axis=0)
    whole = np.mean((truth + noise[:, None, None] - h) ** 2)
    variance = np.mean((h - mean) ** 2)
    assert whole == pytest.approx(np.mean(noise**2) + np.mean((truth - mean) ** 2) + variance, rel=1e-12)
    printed = np.mean(noise**2) + np.mean((truth - h) ** 2) + variance
    assert printed - whole == pytest.approx(variance, rel=1e-12)


def test_condition_15_is_met_up_to_the_step_with_the_square() -> None:
    """At a small multiple c of the step, (15) is ``1 + c^2 B_1/2 - c lambda + (c lambda)^2/2 < 1`` to leading order."""
    found = condition_15([Toy().age(1e-3, model=1, rounds=None)])
    decay, b1 = 0.02, 0.9  # numbers for which the two limits differ, small enough for the leading order
    right, printed = 2 * decay / (decay**2 + b1), 2 * decay / (decay + b1)

    def left(c: float) -> float:
        return float((1 + c**2 * b1 / 2) * np.exp(-c * decay))

    edge = next(c for c in np.arange(1e-5, 1, 1e-5) if left(c) >= 1)
    assert abs(edge / right - 1) < 2e-3 < 2e-2 < abs(edge / printed - 1)
    assert found.largest_factor == pytest.approx(2 * found.decay / (found.decay**2 + found.b1), rel=1e-12)


def test_the_rate_decays_after_every_ten_rounds() -> None:
    rates = [float(staircase_decay(1.0)(r)) for r in (0, 9, 10, 19, 20, 30)]
    assert rates == pytest.approx([1, 1, 0.99, 0.99, 0.99**2, 0.99**3], rel=1e-6)  # once only: .99 from round 10 on


def test_the_traffic_of_table_1_is_in_mebibytes() -> None:
    sent = 284 * 20 * 4 * (784 * 100 + 100 + 100 * 10 + 10)  # rounds, clients, float32, an MLP 784-100-10
    assert round(sent / 2**20, -1) == 1720 and round(sent / 1e6, -1) != 1720


def test_least_eigenvalues_are_ordered_for_few_examples_only() -> None:
    """Columns are examples, as in the paper: 4 clients of 2 in 10 dimensions, and of 5 in 3."""
    rng = np.random.default_rng(1)
    for d, held, ordered in ((10, 2, True), (3, 5, False)):
        x = rng.standard_normal((d, 4 * held))
        whole = np.linalg.svd(x, compute_uv=False).min() ** 2
        parts = [np.linalg.svd(x[:, i * held : (i + 1) * held], compute_uv=False).min() ** 2 for i in range(4)]
        assert bool(whole <= min(parts)) is ordered
