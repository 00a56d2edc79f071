"""A small project of one's own, as the guide to continuous integration has it: right, at fault, undecided, broken."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import NamedTuple

import pytest

from . import documents

ROOT = documents.ROOT
GUIDE = (ROOT / "docs" / "guides" / "continuous_integration.md").read_text()
MINE, TEST = documents.example("def heavy_ball("), documents.example("from mine import heavy_ball")
CLAIMS = GUIDE.split("```toml\n")[1].split("```")[0]
RIGHT = 'tree.add_scale(mean, momentum, state["velocity"])'
FAULTS = {
    "dampened": 'tree.add_scale(tree.scale(1 - momentum, mean), momentum, state["velocity"])',
    "forgotten": "mean",
}


class Ended(NamedTuple):
    code: int
    out: str
    seconds: float
    processor: float  # seconds

    def __str__(self) -> str:
        return f"exit status {self.code}, {self.seconds:.0f} s, {self.processor:.0f} s of processor time"


def processor_time() -> float:
    """Seconds of all processes that have ended, of which this one waited for the end."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


class Project(NamedTuple):
    """A folder with an algorithm, its claims and its test."""

    folder: Path
    environment: dict[str, str]

    def run(self, *words: str) -> Ended:
        """Run a module of this Python there, without the suite's quick compilation."""
        begun, used = time.perf_counter(), processor_time()
        done = subprocess.run(
            [sys.executable, "-m", *words], cwd=self.folder, env=self.environment, capture_output=True, text=True
        )
        return Ended(done.returncode, done.stdout + done.stderr, time.perf_counter() - begun, processor_time() - used)

    def outcomes(self, name: str) -> dict[str, str]:
        """Outcome of each test case of a file of JUnit XML: the name of its element, or passed."""
        found = {}
        for case in ElementTree.parse(self.folder / name).getroot().iter("testcase"):
            tags = {child.tag for child in case} & {"failure", "error", "skipped"}
            found[case.get("name", "")] = tags.pop() if tags else "passed"
        return found


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    folder = tmp_path_factory.mktemp("project")
    (folder / "mine.py").write_text(MINE)
    (folder / "claims.toml").write_text(CLAIMS)
    (folder / "test_theory.py").write_text(TEST)
    kept = ("PATH", "HOME", "LANG", "TMPDIR", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    environment = {name: os.environ[name] for name in kept if name in os.environ}
    environment |= {"PYTHONPATH": str(ROOT / "src"), "FEDTANGENT_CACHE": str(folder / "cache"), "JAX_PLATFORMS": "cpu"}
    return Project(folder, environment)


@pytest.mark.slow
def test_each_outcome_has_its_exit_status(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    check = ("fedtangent", "check", "--strict", "--junit", "report.xml")
    ends = {}
    for warmth in ("cold", "warm"):
        right = project.run(*check)
        assert right.code == 0, right.out
        ends[f"right, {warmth}"] = right
        assert set(project.outcomes("report.xml").values()) == {"passed"} and len(project.outcomes("report.xml")) == 3
    for name, fault in FAULTS.items():
        assert RIGHT in MINE
        (project.folder / "mine.py").write_text(MINE.replace(RIGHT, fault))
        wrong = project.run(*check)
        assert wrong.code == 1 and "DISAGREE" in wrong.out, wrong.out
        ends[name] = wrong
        exact = [outcome for case, outcome in project.outcomes("report.xml").items() if "linearised" in case]
        assert exact == ["failure"]
    (project.folder / "mine.py").write_text(MINE)
    (project.folder / "claims.toml").write_text("\n".join(CLAIMS.splitlines()[:-2]))  # every verdict is claimed
    unclear = project.run(*check)
    assert unclear.code == 3 and unclear.out.strip().splitlines()[-1].startswith("fedtangent: undecided: "), unclear.out
    assert "failure" in project.outcomes("report.xml").values()
    ends["undecided, strict"] = unclear
    lenient = project.run("fedtangent", "check", "--junit", "report.xml")
    assert lenient.code == 0 and set(project.outcomes("report.xml").values()) == {"passed", "skipped"}, lenient.out
    (project.folder / "mine.py").write_text(MINE.replace("velocity = ", "velocity = missing + "))
    (project.folder / "claims.toml").write_text(CLAIMS)
    broken = project.run(*check)
    assert broken.code == 2 and "NameError: name 'missing' is not defined" in broken.out, broken.out
    assert project.outcomes("report.xml") == {"the comparison runs": "error"}
    ends["error"] = broken
    (project.folder / "mine.py").write_text(MINE)
    with capsys.disabled():
        print("", *(f"{name}: {ended}" for name, ended in ends.items()), sep="\n")


@pytest.mark.slow
def test_the_same_in_pytest(project: Project) -> None:
    command = ("pytest", "-q", "-p", "no:cacheprovider", "--junitxml=pytest.xml", "test_theory.py")
    right = project.run(*command)
    assert right.code == 0 and "1 passed" in right.out, right.out
    (project.folder / "mine.py").write_text(MINE.replace(RIGHT, FAULTS["dampened"]))
    wrong = project.run(*command)
    assert wrong.code == 1 and "comparisons with theory fail" in wrong.out, wrong.out
    assert list(project.outcomes("pytest.xml").values()) == ["failure"]
    (project.folder / "mine.py").write_text(MINE)
    (project.folder / "test_theory.py").write_text(
        TEST.replace('["linearised network", "law of the model"]', '["slope"]')
    )
    unclear = project.run(*command, "-W", "error::fedtangent.testing.UndecidedWarning")
    assert unclear.code == 1 and "UndecidedWarning" in unclear.out, unclear.out
