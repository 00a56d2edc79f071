"""The command line as a user meets it: in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fedtangent.cli import command_line

SOURCE = Path(__file__).parents[2] / "src"


def fedtangent(folder: Path, *arguments: str, program: str = "from fedtangent.cli.command_line import main; main()"):
    """The command's outcome in ``folder``, cut off from the user's data and caches."""
    names = ("FEDTANGENT_DATA", "PYTHONPATH", "JAX_ENABLE_X64")
    environment = {k: v for k, v in os.environ.items() if k not in names}
    environment |= {"PYTHONPATH": str(SOURCE), "FEDTANGENT_CACHE": str(folder / "cache")}
    return subprocess.run(
        [sys.executable, "-c", program, *arguments], cwd=folder, env=environment, capture_output=True, text=True
    )


SMALL = ["--num-train", "60", "--num-clients", "3", "--widths", "4", "--num-rounds", "1", "--output", "out"]


def test_bad_input_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    ended = fedtangent(tmp_path, "train", *SMALL, "--alpha", "0")
    assert ended.returncode == 2
    assert ended.stderr == "fedtangent: error: alpha must be finite and above 0; got 0.0\n"
    assert ended.stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_a_good_run_imports_no_tensorflow_and_leaves_standard_error_clean(tmp_path: Path) -> None:
    program = (
        "import sys\nfrom fedtangent.cli.command_line import _main\ncode = _main(None)\n"
        "print('TENSORFLOW', 'tensorflow' in sys.modules)\nsys.exit(code)"
    )
    ended = fedtangent(tmp_path, "train", *SMALL, program=program)
    assert ended.returncode == 0, ended.stderr
    assert "TENSORFLOW False" in ended.stdout
    assert "Traceback" not in ended.stderr
    assert (tmp_path / "out" / "result.json").is_file()


@pytest.mark.slow
def test_a_comparison_imports_no_tensorflow(tmp_path: Path) -> None:
    program = (
        "import sys\nfrom fedtangent.cli.command_line import _main\ncode = _main(None)\n"
        "print('TENSORFLOW', 'tensorflow' in sys.modules)\nsys.exit(code)"
    )
    arguments = ("compare", "--case", "sine", "--scale", "smoke", "--output", "out")
    ended = fedtangent(tmp_path, *arguments, program=program)
    assert "TENSORFLOW False" in ended.stdout, ended.stderr
    assert ended.returncode == 0, ended.stdout


@pytest.mark.parametrize("command", ["", "train", "compare", "experiment", "list"])
def test_help_is_printed(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command_line.main([*command.split(), "--help"])
    assert ended.value.code == 0
    assert "usage: fedtangent" in capsys.readouterr().out


def test_an_interrupted_run_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from fedtangent.cli import train

    def interrupted(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "simulate", interrupted)
    with pytest.raises(SystemExit) as ended:
        command_line.main(["train", *SMALL[:-1], str(tmp_path / "out")])
    assert ended.value.code == 130
    assert capsys.readouterr().err.startswith("fedtangent: interrupted")
