"""Numbers and tables as people read them."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from fedtangent._src.comparison.table import MethodRow
from fedtangent._src.comparison.verdicts import Verdict
from fedtangent._src.output.tables import TextTable, comparison_table, console, number, show_verdicts


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


def table_of(verdicts: list[Verdict], width: int = 250) -> str:
    screen = io.StringIO()
    show_verdicts(Console(file=screen, width=width), verdicts, "agree?")
    return screen.getvalue().partition("measured: by simulation")[0]


def shown(table: object, width: int = 250) -> str:
    screen = io.StringIO()
    Console(file=screen, width=width).print(table)
    return screen.getvalue()


def verdict(comparison: str, holds: bool = True, fails: bool = True, measured: str = "1.0") -> Verdict:
    return Verdict("sine", comparison, measured, "1 +- 3 x 0.1", holds, "untrained", "9.0", fails)


def test_a_control_that_passes_is_shown() -> None:
    text = table_of([verdict("mean = flow, round 5", fails=False), verdict("mean = flow, round 10")])
    assert "PASSES" in text and "fails, as it must" in text


def test_what_is_undecided_and_what_is_noticed_are_shown() -> None:
    open_ = verdict("mean = flow")._replace(holds=None, control_fails=None, notices="0.02")
    text = table_of([open_, verdict("variance = flow")])
    assert text.count("undecided") == 2 and "notices" in text and "0.02" in text
    assert "notices" not in table_of([verdict("mean = flow")])


def test_a_narrow_screen_has_a_paragraph_for_each_verdict() -> None:
    rows = [verdict("mean = flow")._replace(sizes="n = 4", notices="0.02"), verdict("variance = flow", holds=False)]
    lines = table_of([*rows, verdict("mean = flow, round 5")._replace(sizes="n = 4")], width=80).splitlines()
    assert max(map(len, lines)) <= 80
    text = [line.strip() for line in lines]
    assert text.count("sine") == 1 and text.count("n = 4") == 2  # each time that it is another
    assert text.count("control: untrained: 9.0, fails, as it must") == 3 and text.count("notices 0.02") == 1
    assert text.count("measured 1.0, expected 1 +- 3 x 0.1") == 3
    marks = [line.partition("  ")[0] for line in lines if not line.startswith(" ") and "=" in line]
    assert marks == ["holds", "FAILS", "holds"]


def row(**changes: object) -> MethodRow:
    plain = MethodRow("digits", "Fed-ensemble, width 64", 0.5, 0.91, 1.2, 0.95, 0.8, 1.01, 0.05, 10, 3.5, 1.25)
    return plain._replace(**changes)


def test_the_table_has_a_line_for_each_method_and_leaves_accuracy_out_of_a_regression() -> None:
    text = shown(comparison_table([row(), row(method="GP limit (Theorem 2)", flow_error=None, rounds=None)]), 250)
    assert "accuracy" in text
    assert "0.910" in text
    assert "GP limit (Theorem 2)" in text
    assert " - " in text
    regression = shown(comparison_table([row(accuracy=None)]), 250)
    assert "accuracy" not in regression
    narrow = shown(comparison_table([row()]), 80)
    assert narrow.count("Fed-ensemble, width 64") == 2 and all(n in narrow for n in ("0.910", "0.95", "3.5", "1.25"))


def test_columns_of_words_stand_to_the_left() -> None:
    text = shown(TextTable("t", ("a", "number", "words"), (("x", "1.5", "so"), ("y", "12.5", "2 of 3"))))
    first, second = (line for line in text.splitlines() if "5" in line)
    assert first.index("1.5") == second.index("12.5") + 1 and first.index("so") == second.index("2 of 3")


def test_what_does_not_fit_stands_below_and_nothing_is_lost() -> None:
    names = [f"column {i}" for i in range(9)]
    said = "a claim of a paper whose words are more than a screen has room for beside all that was measured of it"
    text = shown(TextTable("t", ("claim", *names), [(said, *("0.123 +- 0.456" for _ in names))]), 80)
    assert text.count("0.123 +- 0.456") == 9 and max(map(len, text.splitlines())) <= 80
    assert all(word in text for word in said.split())
    wide = shown(TextTable("t", ("claim", *names), [(said, *("0.1" for _ in names))]), 250)
    assert said in wide and wide.count("claim") == 2


def test_a_redirected_console_is_wide_enough_for_the_tables() -> None:
    assert console().width == 200


@pytest.mark.parametrize("width", [40, 60, 80, 100])
def test_numbers_below_headings_of_several_words_stand_whole_beside_their_names(width: int) -> None:
    names = ("clients", "N", "rounds to 0.2", "excess at end", "of the flow", "ln error", "its limit", "1 - rho")
    rows = [(f"{c} classes", str(c), *(f"{c}.{place}25e-03" for place in range(6))) for c in (2, 5)]
    text = shown(TextTable("t", names, rows), width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text and all(word in text for name in names for word in name.split())
    for row in rows:
        own = [line for line in text.splitlines() if line.strip().startswith(row[0])]
        assert [cell for line in own for cell in line.split()[2:]] == list(row[1:])
