"""Numbers and tables as people read them."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from fedtangent.compare.table import MethodRow
from fedtangent.compare.verdicts import Verdict
from fedtangent.output.tables import comparison_table, console, number, text_table, verdict_table


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0.0, "0.000"),
        (7, "7"),
        (123456, "123456"),
        (0.5, "0.500"),
        (-2.0, "-2.000"),
        (1e-3, "0.001"),
        (9.9e-4, "9.9e-04"),
        (99999.0, "99999.000"),
        (1e5, "1.0e+05"),
        (float("inf"), "inf"),
        (float("nan"), "nan"),
    ],
)
def test_number(value: float | None, text: str) -> None:
    assert number(value) == text


def test_digits_of_a_number() -> None:
    assert number(1 / 3, 1) == "0.3"
    assert number(3, 1) == "3"


def table_of(verdicts: list[Verdict]) -> str:
    return shown(verdict_table(verdicts, "agree?"))


def shown(table: object) -> str:
    screen = io.StringIO()
    Console(file=screen, width=250).print(table)
    return screen.getvalue()


def verdict(comparison: str, holds: bool = True, fails: bool = True, measured: str = "1.0") -> Verdict:
    return Verdict("sine", comparison, measured, "1 +- 3 x 0.1", holds, "untrained", "9.0", fails)


def test_rounds_are_folded_into_one_line_that_shows_the_last() -> None:
    text = table_of([verdict(f"mean = flow, round {r}", measured=f"measured {r}") for r in (5, 10, 15)])
    assert text.count("mean = flow") == 1
    assert "mean = flow, round 15 (all 3 rounds)" in text
    assert "measured 15" in text
    assert "measured 5" not in text
    assert "holds" in text
    assert "FAILS" not in text


def test_a_failing_round_is_the_one_that_is_shown() -> None:
    rows = [verdict(f"mean = flow, round {r}", holds=r != 10, measured=f"measured {r}") for r in (5, 10, 15)]
    text = table_of(rows)
    assert "measured 10" in text
    assert "FAILS" in text


def test_a_control_that_passes_is_shown() -> None:
    text = table_of([verdict("mean = flow, round 5", fails=False), verdict("mean = flow, round 10")])
    assert "PASSES" in text
    assert "fails, as it must" not in text


def test_what_is_undecided_and_what_is_noticed_are_shown() -> None:
    open_ = verdict("mean = flow")._replace(holds=None, control_fails=None, notices="0.02")
    text = table_of([open_, verdict("variance = flow")])
    assert text.count("undecided") == 2 and "notices" in text and "0.02" in text
    assert "notices" not in table_of([verdict("mean = flow")])


def test_settings_and_comparisons_are_not_folded_into_each_other() -> None:
    rows = [verdict("mean = flow, round 5"), verdict("variance = flow, round 5"), verdict("mean = flow, round 5")]
    rows[2] = rows[2]._replace(subject="digits")
    text = table_of(rows)
    assert text.count("round 5") == 3
    assert "all" not in text


def row(**changes: object) -> MethodRow:
    plain = MethodRow("digits", "Fed-ensemble, width 64", 0.5, 0.91, 1.2, 0.95, 0.8, 1.01, 0.05, 10, 3.5, 1.25)
    return plain._replace(**changes)


def test_the_table_has_a_line_for_each_method_and_leaves_accuracy_out_of_a_regression() -> None:
    text = shown(comparison_table([row(), row(method="GP limit (Theorem 2)", flow_error=None, rounds=None)]))
    assert "accuracy" in text
    assert "0.910" in text
    assert "GP limit (Theorem 2)" in text
    assert " - " in text
    regression = shown(comparison_table([row(accuracy=None)]))
    assert "accuracy" not in regression


def test_columns_of_words_stand_to_the_left() -> None:
    table = text_table("t", ("a", "b", "c"), (("x", "1.5 +- .1", "holds"), ("y", "", "2 of 3")))
    assert [column.justify for column in table.columns] == ["left", "right", "left"]


def test_a_redirected_console_is_wide_enough_for_the_tables() -> None:
    assert console().width == 200
