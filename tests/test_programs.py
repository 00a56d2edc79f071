"""Compiled programs are kept between runs, within a bound; whatever is wrong with their folder changes no result."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import zlib
from pathlib import Path

import pytest

from fedtangent._src import programs
from fedtangent._src.cli import main

SOURCE = Path(__file__).parents[1] / "src"
# Prints a result, the programs that were read and those that were compiled and written.
RUN = """
{first}
import collections, fedtangent.types, jax
events = collections.Counter()
jax.monitoring.register_event_listener(lambda event, **_: events.update([event.rpartition("/")[2]]))
print(jax.jit(lambda x: jax.numpy.sin(x @ x.T).sum())(jax.numpy.arange(9.0).reshape(3, 3)).tolist())
print(events["cache_hits"], events["cache_misses"])
{last}
"""
KILLED = "import os; sys.stdout.flush(); os._exit(0)"  # nothing is done at exit
FULL = "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
FULL += "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))"  # no file gets longer than this


def started(cache: Path, first: str = "", last: str = "", **variables: str) -> subprocess.Popen[str]:
    inherited = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    environment = inherited | {"PYTHONPATH": str(SOURCE), "FEDTANGENT_CACHE": str(cache)}
    environment |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", **variables}
    command = [sys.executable, "-c", "import sys\n" + RUN.format(first=first, last=last)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def ended(process: subprocess.Popen[str]) -> tuple[str, int, int]:
    """The result, and how many programs were read and how many compiled and written."""
    out, error = process.communicate(timeout=300)
    assert (process.returncode, error) == (0, "")
    result, counts = out.splitlines()
    read, written = map(int, counts.split())
    return result, read, written


def kept(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*-cache"))


def test_the_second_process_compiles_nothing(tmp_path: Path):
    result, read, written = ended(started(tmp_path))
    assert read == 0 and len(kept(tmp_path / "programs")) == written > 1
    assert ended(started(tmp_path)) == (result, written, 0)


@pytest.mark.parametrize(
    ("first", "variables"),
    [
        pytest.param("", {"JAX_ENABLE_COMPILATION_CACHE": "false"}, marks=pytest.mark.slow),
        ("from fedtangent._src import programs; import fedtangent.types; programs.keep('off')", {}),
        pytest.param(
            "import jax; jax.config.update('jax_compilation_cache_dir', '{users}')", {}, marks=pytest.mark.slow
        ),
        ("", {"JAX_COMPILATION_CACHE_DIR": "{users}"}),
    ],
)
def test_switched_off_or_set_up_by_the_user_nothing_is_kept_here(tmp_path: Path, first: str, variables: dict[str, str]):
    users = tmp_path / "users"
    variables = {name: value.format(users=users) for name, value in variables.items()}
    _, read, written = ended(started(tmp_path / "cache", first.format(users=users), **variables))
    assert read == 0 and not (tmp_path / "cache").exists()
    assert len(kept(users)) == written and bool(written) == ("users" in f"{first}{variables}")


def test_programs_cut_short_are_compiled_again_and_replaced(tmp_path: Path):
    result, _, written = ended(started(tmp_path, FULL, KILLED))
    assert {path.stat().st_size for path in kept(tmp_path)} == {100}
    assert ended(started(tmp_path)) == (result, 0, written)
    assert not kept(tmp_path)  # they were removed at exit
    assert ended(started(tmp_path)) == (result, 0, written) and len(kept(tmp_path)) == written
    assert ended(started(tmp_path)) == (result, written, 0)


@pytest.mark.slow
@pytest.mark.parametrize("most", [1, 4])
def test_kill_9_while_programs_are_written_loses_and_changes_nothing(tmp_path: Path, most: int):
    killed = started(tmp_path / "killed")
    while len(kept(tmp_path / "killed")) < most and killed.poll() is None:
        time.sleep(0.001)
    killed.kill()
    killed.communicate()
    result, _, written = ended(started(tmp_path / "whole"))
    # the first removes a program that was cut short, the second writes it
    assert {ended(started(tmp_path / "killed"))[0] for _ in range(2)} == {result}
    assert ended(started(tmp_path / "killed")) == (result, written, 0)


@pytest.mark.slow
def test_two_processes_at_once_keep_the_same_programs(tmp_path: Path):
    (first, *_), (second, *_) = [ended(process) for process in [started(tmp_path), started(tmp_path)]]
    assert first == second and len(kept(tmp_path)) > 1
    assert all(zlib.decompress(path.read_bytes()) for path in kept(tmp_path))


def test_without_a_folder_that_can_be_written_to_everything_is_compiled(tmp_path: Path):
    (tmp_path / "file").write_text("no folder")
    assert ended(started(tmp_path / "file" / "cache"))[1] == 0
    assert not kept(tmp_path)


def test_another_version_processor_or_number_of_cores_has_its_own_folder(monkeypatch: pytest.MonkeyPatch):
    folder = programs.folder_of_machine(Path())
    assert programs.folder_of_machine(Path()) == folder
    for name in ("jax.__version__", "jaxlib.__version__"):
        with monkeypatch.context() as patch:
            patch.setattr(f"{programs.__name__}.{name}", "0.99.0")
            assert programs.folder_of_machine(Path()) != folder
    monkeypatch.setenv("NPROC", "99")
    assert programs.folder_of_machine(Path()) != folder


def test_incomplete_programs_and_those_not_used_for_longest_are_removed(tmp_path: Path):
    whole = zlib.compress(os.urandom(100))
    for age, name in enumerate(["jax-new", "jax-cut", "jax-old", "jax-older"]):
        path = tmp_path / name / f"{name}-cache"
        path.parent.mkdir()
        path.write_bytes(whole[:-1] if name == "jax-cut" else whole)
        os.utime(path, (1e9 - age, 1e9 - age))
    (tmp_path / "not ours").write_bytes(bytes(1000))
    programs.tidy(tmp_path / "jax-cut", 2 * len(whole))
    assert [path.parent.name for path in kept(tmp_path)] == ["jax-new", "jax-old"]
    assert (tmp_path / "not ours").exists()
    programs.tidy(tmp_path / "jax-cut", 0)  # nothing was written since
    assert len(kept(tmp_path)) == 2
    programs.tidy(tmp_path / "jax-none" / "nothing here", 0)


def test_a_jax_that_reads_its_programs_badly_keeps_none(tmp_path: Path):
    assert ended(started(tmp_path, "import jaxlib; jaxlib.__version__ = '0.10.1'"))[1:] == (0, 0)
    assert not kept(tmp_path)


def test_the_command_line_moves_them_or_keeps_none(monkeypatch: pytest.MonkeyPatch):
    folders: list[str | None] = []
    monkeypatch.setattr(programs, "keep", lambda root=None: folders.append(root))
    for words in (["--programs", "off"], ["--programs", "elsewhere"], []):
        assert main.run(["train", *words, "--num-rounds", "-1"]) == 2
    assert [folder for folder in folders if folder is not None] == ["off", "elsewhere"]
