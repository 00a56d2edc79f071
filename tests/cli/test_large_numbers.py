"""No number is too large for a clear answer: every option of every entry, in one line, before any work."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedtangent._src import entries
from fedtangent._src.cli import commands, main
from fedtangent._src.cli.arguments import Option
from fedtangent._src.engine import description
from fedtangent._src.experiments.lab import runner

LARGE = {int: ("100000000000000000000", "-1" + 30 * "0"), float: ("100000000000000000000", "-1e308", "nan")}
COMMANDS = [commands.find("train"), commands.find("predict"), commands.find("compare"), commands.find("check-theory")]


def numeric(one: Option) -> type | None:
    """Whether an option is of whole numbers, or of others."""
    kinds = {*typing.get_args(one.type), one.type}
    return next((kind for kind in (int, float) if kind in kinds), None)


def numbers() -> Iterator[tuple[str, str, Any]]:
    """What decides on an option, the option and a number, of every option that there is."""
    told = set()
    for what, kind in description.CHOICES.items():
        for name, entry in entries.catalogue(kind).items():
            if what == "base":
                continue
            if kind == "datasets" and entry.published is not None:
                continue  # their files are not here
            for option in commands.options_by_name({name: entry.options}).values():
                if (number := numeric(option)) and (name, option.name) not in told:
                    told.add((name, option.name))
                    yield from ((f"--{what} {name}", option.name, number(text)) for text in LARGE[number])


def test_every_option_of_every_choice() -> None:
    given = list(numbers())
    assert len(given) > 700
    for chosen, name, value in given:
        what, _, entry = chosen.removeprefix("--").partition(" ")
        options = entries.catalogue(description.CHOICES[what])[entry].options
        default = getattr(options(), name)
        one: Any = (value,) if isinstance(default, tuple) else value
        with pytest.raises(ValueError, match=rf"^{name}: got .*, must be a number of at most \d"):
            entries.check_limits(dataclasses.replace(options(), **{name: one}))
        entries.check_limits(options())  # its own defaults are fine


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_every_option_of_a_command(command: commands.Command, capsys: pytest.CaptureFixture[str]) -> None:
    options = commands.options_by_name(commands.groups_of(command, {}))
    for one in options.values():
        if number := numeric(one):
            for text in LARGE[number]:
                assert main.run([command.name, f"--{one.name.replace('_', '-')}={text}"]) == 2, (one.name, text)
                said = capsys.readouterr().err
                assert said.count("\n") == 1 and said.startswith(f"fedtangent: error: {one.name}: "), said


@pytest.mark.parametrize("name", entries.catalogue("experiments"))
def test_every_setting_of_an_experiment(name: str) -> None:
    entry = entries.catalogue("experiments")[name]
    dataset, scales = next(iter(entry.scales.items()))
    for field in dataclasses.fields(scales["smoke"]):
        like = getattr(scales["smoke"], field.name)
        like = like[0] if isinstance(like, tuple) else like
        if isinstance(like, bool) or not isinstance(like, int | float):
            continue
        for text in (*LARGE[type(like)], "inf", "text"):
            request = runner.Request("smoke", tuple(range(5)), dataset, changes=(f"{field.name}={text}",))
            with pytest.raises(ValueError, match=f"^{field.name}: got .*, must be"):
                runner.prepare_study(entry, request)


def test_theory_of_a_run_that_leaves_float64_ends_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def unstable(job: Any) -> int:
        raise FloatingPointError("learning_rate: got one at which the run is not stable")

    monkeypatch.setattr(commands.find("check-theory").module, "run_job", unstable)
    assert main.run(["check-theory", "--output", str(tmp_path / "out")]) == 1
    assert capsys.readouterr().err == "fedtangent: error: learning_rate: got one at which the run is not stable\n"
