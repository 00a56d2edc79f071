"""The repository itself: metadata, the lock, and a set-up that installs once and says clearly why it cannot."""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import fedtangent

from .jax_versions import selected

ROOT = Path(__file__).parents[1]


def read_config() -> configparser.ConfigParser:
    """setup.cfg."""
    config = configparser.ConfigParser(interpolation=None)
    config.read(ROOT / "setup.cfg")
    return config


def requirements(extra: str | None = None) -> list[Requirement]:
    """What setup.cfg requires at run time, or for an extra."""
    config = read_config()
    text = config["options.extras_require"][extra] if extra else config["options"]["install_requires"]
    return [Requirement(line) for line in text.split("\n") if line]


def read_lock(text: str) -> dict[str, Requirement]:
    """The lock's requirements by name; every one must be an exact version with at least one hash."""
    found = {}
    logical = text.replace("\\\n", " ").splitlines()
    for line in (line for line in logical if line.strip() and not line.startswith("#")):
        spec, *hashes = re.split(r"\s+--hash=", line)
        requirement = Requirement(spec.strip())
        assert re.fullmatch(r"==[^*,]+", str(requirement.specifier)), f"{line}: not an exact version"
        assert requirement.url is None and hashes, f"{line}: no hash"
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}\s*", h) for h in hashes), f"{line}: a malformed hash"
        name = canonicalize_name(requirement.name)
        assert name not in found, f"{name} is locked twice"
        found[name] = requirement
    return found


@pytest.fixture(scope="module")
def lock() -> dict[str, Requirement]:
    return read_lock((ROOT / "constraints.txt").read_text())


def unmet(wanted: list[Requirement], lock: dict[str, Requirement]) -> list[str]:
    """The requirements that the lock does not satisfy."""
    bad = []
    for requirement in wanted:
        pinned = lock.get(canonicalize_name(requirement.name))
        if pinned is None or not requirement.specifier.contains(str(pinned.specifier).removeprefix("==")):
            bad.append(str(requirement))
    return bad


def test_the_lock_satisfies_the_requirements(lock: dict[str, Requirement]):
    wanted = [r for extra in (None, "notebooks", "docs", "test", "dev") for r in requirements(extra)]
    assert len(wanted) > 20
    assert unmet(wanted, lock) == []


# What is imported under another name than the package's own; and what TensorFlow Datasets imports without asking for it
# on every platform.
IMPORTED_AS = {
    "dp-accounting": "dp_accounting",
    "orbax-checkpoint": "orbax",
    "pillow": "PIL",
    "pynacl": "nacl",
    "scikit-image": "skimage",
    "scikit-learn": "sklearn",
}
OF_TENSORFLOW_DATASETS = {"array-record", "importlib-resources"}


def idle(wanted: set[str], text: str) -> set[str]:
    """The packages of which ``text`` imports nothing."""
    return {
        name
        for name in wanted
        if not re.search(rf"^\s*(import|from) {IMPORTED_AS.get(name, name.replace('-', '_'))}\b", text, re.MULTILINE)
    }


def test_what_is_required_is_imported():
    wanted = {canonicalize_name(requirement.name) for requirement in requirements()}
    text = "\n".join(path.read_text() for path in sorted((ROOT / "src").rglob("*.py")))
    assert idle(wanted, text) == OF_TENSORFLOW_DATASETS | {"neural-tangents"}  # imported by name, with a patch
    assert idle({"numpy", "scikit-learn", "torch"}, "import numpy as np\nfrom scipy import linalg") == {
        *("scikit-learn", "torch")
    }


def test_an_unmet_requirement_is_found(lock: dict[str, Requirement]):
    assert unmet([Requirement("jax<0.8"), Requirement("no-such-package")], lock) == ["jax<0.8", "no-such-package"]


def test_the_lock_names_no_place_and_leaves_tensorflow_out(lock: dict[str, Requirement]):
    text = (ROOT / "constraints.txt").read_text()
    assert "://" not in text and not re.search(r"^--", text, re.MULTILINE)
    assert set(lock).isdisjoint({"tensorflow", "tf2jax", "keras", "tensorboard", "grpcio"})
    assert [r.name for r in requirements("tfds")] == ["tensorflow"]


@pytest.mark.parametrize("line", ["jax>=0.8 --hash=sha256:" + "0" * 64, "jax==0.8.0", "jax==0.8.* --hash=sha256:0"])
def test_a_loose_lock_is_found(line: str):
    with pytest.raises(AssertionError):
        read_lock(line)


def test_the_lock_is_closed_under_requirements(lock: dict[str, Requirement]):
    # Installed with --no-deps, so a package that the lock forgets would only be missed when it is imported.
    left_out = {"tensorflow", "tf2jax"}
    missing = set()
    for name, pinned in lock.items():
        if pinned.marker is not None and not pinned.marker.evaluate():
            continue
        for line in metadata.requires(name) or ():
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                missing |= {canonicalize_name(requirement.name)} - set(lock) - left_out
    assert missing == set()


def test_the_readme_names_the_locked_jax_and_the_number_of_packages(lock: dict[str, Requirement]):
    text = (ROOT / "README.md").read_text()
    assert f"jax[cuda12]{lock['jax'].specifier}" in text
    here = {"sys_platform": "linux", "platform_system": "Linux", "os_name": "posix", "implementation_name": "cpython"}
    installed = [r for r in lock.values() if r.marker is None or r.marker.evaluate(here)]
    assert f"downloads {len(installed)} packages" in text


# ---- the Makefile, with a stand-in for Python that records what it is asked and installs nothing ----

STAND_IN = """#!/bin/bash
echo "$*" >> "$CALLS"
if [[ "$1" == -c ]]; then exit "${PYTHON_TOO_OLD:-0}"; fi
if [[ "$1 $2" == "-m venv" ]]; then mkdir -p "${@: -1}/bin"; cp "$0" "${@: -1}/bin/python"; fi
if [[ "$*" == *" install "*"-r constraints.txt"* ]]; then exit "${PIP_FAILS:-0}"; fi
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of what `make` reads, beside a stand-in for Python."""
    for name in ("Makefile", "setup.cfg", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    stand_in = tmp_path / "python-stand-in"
    stand_in.write_text(STAND_IN)
    stand_in.chmod(0o755)
    return tmp_path


def make(tree: Path, *arguments: str, **environment: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run make in ``tree`` with the stand-in; the finished process, and the stand-in's calls."""
    calls = tree / "calls.txt"
    calls.write_text("")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS", "PYTEST_", "COV_CORE", "CI"))}
    command = ["make", "PYTHON=./python-stand-in", *arguments]
    done = subprocess.run(
        command, cwd=tree, env=clean | {"CALLS": str(calls)} | environment, capture_output=True, text=True, check=False
    )
    return done, calls.read_text().splitlines()


def installs(calls: list[str]) -> int:
    """How many of the calls install something."""
    return sum(" install " in call for call in calls)


@pytest.mark.parametrize("target", ["test", "check-theory"])
def test_a_second_call_installs_nothing(tree: Path, target: str):
    first, calls = make(tree, target)
    assert first.returncode == 0, first.stderr
    assert installs(calls) == 3 and sum("-m venv" in call for call in calls) == 1
    every = ["-m (slow or theory) and not versions", "tests/federated/test_laws.py", "fedtangent check-theory"]
    commands = every if target == "check-theory" else ["pytest"]
    assert all(command in call for command, call in zip(commands, calls[-len(commands) :], strict=True))
    second, calls = make(tree, target)
    assert second.returncode == 0
    assert len(calls) == len(commands)
    assert all(command in call for command, call in zip(commands, calls, strict=True))


@pytest.mark.parametrize("failing", ["pytest", "check-theory"])
def test_the_table_of_theorems_comes_last_and_either_part_may_fail(tree: Path, failing: str):
    stand_in = tree / "python-stand-in"
    stand_in.write_text(STAND_IN + f'if [[ "$*" == *{failing}* ]]; then exit 1; fi\n')
    ended, calls = make(tree, "check-theory")
    assert ended.returncode != 0
    assert "pytest" in calls[-2] and "fedtangent check-theory" in calls[-1]


@pytest.mark.parametrize("environment", [{}, {"CI": "true"}])
def test_coverage_is_measured_in_ci_only(tree: Path, environment: dict[str, str]):
    _, calls = make(tree, "test", **environment)
    assert ("--cov" in calls[-1]) == bool(environment)
    _, calls = make(tree, "test", "PYTEST_ARGS=tests/test_imports.py", **environment)
    assert "--cov" not in calls[-1] and calls[-1].endswith(" tests/test_imports.py")


@pytest.mark.parametrize("name", ["constraints.txt", "setup.cfg"])
def test_a_changed_lock_or_setup_is_installed(tree: Path, name: str):
    make(tree, "install")
    stamp = (tree / ".venv" / ".installed").stat().st_mtime
    os.utime(tree / name, (stamp + 10, stamp + 10))
    _, calls = make(tree, "install")
    assert installs(calls) == 3 and not any("-m venv" in call for call in calls)


def test_an_install_that_fails_leaves_no_stamp(tree: Path):
    failed, _ = make(tree, "test", PIP_FAILS="1")
    assert failed.returncode != 0
    assert not (tree / ".venv" / ".installed").exists()
    again, calls = make(tree, "test")
    assert again.returncode == 0 and installs(calls) == 3


def test_the_lock_is_installed_without_dependencies(tree: Path):
    _, calls = make(tree, "install")
    assert all("--no-deps" in call for call in calls if " install " in call)
    assert any("-r constraints.txt" in call and "--require-hashes" in call for call in calls)
    assert "setuptools==" in (tree / ".venv" / "setuptools.txt").read_text()


def test_an_unusable_python_is_one_clear_message(tree: Path):
    failed, calls = make(tree, "test", PYTHON_TOO_OLD="1")
    assert failed.returncode != 0 and not (tree / ".venv").exists() and installs(calls) == 0
    assert "needs Python 3.11 to 3.14" in failed.stderr and "./python-stand-in" in failed.stderr
    assert failed.stdout == ""


@pytest.mark.parametrize(
    ("version", "usable"), [((3, 10, 9), False), ((3, 11, 0), True), ((3, 14, 2), True), ((3, 15, 0), False)]
)
def test_the_version_check(tree: Path, version: tuple[int, int, int], usable: bool):
    _, calls = make(tree, "install")
    (check,) = (call.removeprefix("-c ") for call in calls if call.startswith("-c "))
    check = f"import sys; sys.version_info = {version}; {check}"
    assert (subprocess.run([sys.executable, "-c", check], check=False).returncode == 0) == usable


def test_help_lists_every_target(tree: Path):
    shown, calls = make(tree)
    assert calls == [] and not (tree / ".venv").exists()
    listed = re.findall(r"^make ([a-z-]+) ", shown.stdout, re.MULTILINE)
    phony = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert listed == [name for line in phony for name in line.split()]


@pytest.mark.slow
def test_a_notebook_that_raises_fails_and_keeps_the_one_executed_before(tree: Path):
    make(tree, "install")
    for name in ("python", "jupytext", "jupyter-execute"):
        program = tree / ".venv" / "bin" / name
        program.unlink(missing_ok=True)
        program.symlink_to(Path(sys.executable).with_name(name))
    (tree / "notebooks").mkdir()
    for name, code in {"1_ends": "print(6 * 7)", "2_raises": "raise ValueError", "3_after": "print(1)"}.items():
        (tree / "notebooks" / f"{name}.py").write_text(f"# # A title\n\n{code}\n")
        (tree / "notebooks" / f"{name}.ipynb").write_text("before")
    failed, _ = make(tree, "notebooks")
    assert failed.returncode != 0 and "ValueError" in failed.stderr
    written = {path.stem: path.read_text() for path in (tree / "notebooks").glob("*.ipynb")}
    assert '"42\\n"' in written["1_ends"]
    assert written["2_raises"] == written["3_after"] == "before"


def test_what_the_versions_of_jax_are_tested_with_is_there():
    assert len(selected()) > 5 and all(path.exists() for path in selected())


@pytest.mark.parametrize(
    ("option", "said"), [("--python", "must be a Python that can be started"), ("--tests", "must be a file or folder")]
)
def test_what_there_is_not_is_refused_before_anything_is_installed(option: str, said: str, tmp_path: Path):
    command = [sys.executable, ROOT / "tests" / "jax_versions.py", option, "nonsense"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and f"error: argument {option}: got 'nonsense', {said}" in done.stderr


def test_the_version_is_said_alike_everywhere():
    version = read_config()["metadata"]["version"]
    assert fedtangent.__version__ == version
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {version}\n" in (ROOT / "CHANGELOG.md").read_text()
