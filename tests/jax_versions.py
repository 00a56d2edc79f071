"""Install fedtangent as its users do, under the oldest supported and the newest installable JAX, and test it there.

``python tests/jax_versions.py`` builds the wheel and makes a virtual environment for each JAX under
``.venv-versions/``, by uv and without TensorFlow, as README.md says. In each it takes the first steps of a newcomer,
from an empty folder with an empty home: import, commands, the README's example, and a type check of a script of one's
own, which must find a mistake too. Then it runs, with warnings as errors, the tests of neural-tangents
(``tests/kernels/test_neural_tangents*.py``), of the public API, of the mappings, of the laws of every algorithm and of
the harness of the other simulators, or those named by ``--tests``. It prints a table and exits with 1 if anything
failed. Packages are downloaded once, into uv's own cache.

Under Python 3.11 the newest JAX that can be installed is 0.10.2; newer ones want Python 3.12 or later. The oldest JAX
runs under this Python and the newest under the newest interpreter on PATH; with ``--python``, both under each given.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENTS = ROOT / ".venv-versions"
OLDEST = "0.8.0"
INTERPRETERS = ("python3.14", "python3.13", "python3.12", "python3.11")
# A user's script, and the same with a mistake that the type checker must find.
TYPED = """
import fedtangent as ft

digits = ft.data.load("digits")
clients: ft.types.Partition = ft.partition.dirichlet(digits.y_train, num_clients=4, alpha=0.5, seed=0)
model = ft.models.mlp(64, 10)
"""
MISTYPED = TYPED.replace("num_clients=4", "num_clients='4'")


class Outcome(NamedTuple):
    """What failed of a newcomer's first steps, and what the tests did, in one environment."""

    jax: str
    python: str
    steps: str
    passed: int
    failed: int


def run(*command: str | Path) -> str:
    """Standard output of a command that must succeed."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


def make_environment(folder: Path, python: str, jax: str | None, wheel: Path) -> Path:
    """The interpreter of a new environment with the wheel, what it and its tests need, and JAX (None: the newest)."""
    uv = ENVIRONMENTS / "uv" / "bin" / "uv"
    if not uv.exists():
        run(sys.executable, "-m", "venv", ENVIRONMENTS / "uv")
        run(uv.with_name("python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "uv>=0.10")
    print(f"installing into {folder.relative_to(ROOT)} ...", flush=True)
    run(uv, "venv", "--quiet", "--clear", "--python", python, folder)
    interpreter, excludes = folder / "bin" / "python", wheel.with_name("excludes.txt")
    excludes.write_text("tensorflow\ntf2jax\n")
    wanted = [f"fedtangent[test] @ {wheel.as_uri()}", "mypy", *([] if jax is None else [f"jax=={jax}"])]
    run(uv, "pip", "install", "--quiet", "--python", interpreter, "--excludes", excludes, *wanted)
    return interpreter


def selected() -> list[Path]:
    """What is run: neural-tangents, the public API, the mappings, every algorithm's laws, the peers' harness."""
    found = sorted((ROOT / "tests" / "kernels").glob("test_neural_tangents*.py"))
    others = ("test_public_api.py", "engine/test_mapping.py", "federated/test_laws.py", "benchmarks")
    return found + [ROOT / "tests" / path for path in others]


def build_wheel(folder: Path) -> Path:
    """The wheel of the files as they are."""
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps")
    run(*pip, "--wheel-dir", folder, copy_of_sources(folder / "sources"))
    (wheel,) = folder.glob("*.whl")
    return wheel


def copy_of_sources(folder: Path) -> Path:
    """A copy of what a wheel is built from, so that the tree stays as it is."""
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("setup.cfg", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / name)
    return folder


def first_steps(interpreter: Path) -> list[str]:
    """What fails of the first steps of a newcomer, in an empty folder with an empty home."""
    program = interpreter.parent / "fedtangent"
    (example,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    installed = f"import fedtangent; assert fedtangent.__file__.startswith({str(interpreter.parents[1])!r})"
    run_options = ("--algorithm", "fed_avg", "--dataset", "digits", "--num-rounds", "2")
    steps: dict[str, tuple[str | Path, ...]] = {
        "import": (interpreter, "-c", installed),
        "list": (program, "list", "algorithms"),
        "train": (program, "train", *run_options, "--output", "trained"),
        "predict": (program, "predict", *run_options, "--num-train", "100", "--output", "predicted"),
        "example": (interpreter, "-c", example),
        "types": (interpreter, "-m", "mypy", "--strict", "typed.py", "mistyped.py"),
    }
    failed = []
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as home:
        environment = {"PATH": os.environ["PATH"], "HOME": home, "OPENBLAS_NUM_THREADS": "1"}
        Path(folder, "typed.py").write_text(TYPED)
        Path(folder, "mistyped.py").write_text(MISTYPED)
        for name, command in steps.items():
            done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
            told = f"{done.stdout}{done.stderr}"
            well = done.returncode == 0 and bool(told or name == "import") and "Warning" not in told
            if name == "types":  # the one mistake, and nothing else
                well = told.startswith("mistyped.py:") and "num_clients" in told and "Found 1 error in 1 file" in told
            if not well:
                print(f"{name} failed:\n{told}", flush=True)
                failed.append(name)
    return failed


def try_environment(interpreter: Path, folder: Path, tests: list[Path]) -> Outcome:
    """Take the first steps, run the tests and count; an error of collection counts as a failure."""
    report = folder / "report.xml"
    report.unlink(missing_ok=True)
    versions = "import jax, platform; print(jax.__version__, platform.python_version())"
    jax, python = run(interpreter, "-c", versions).split()
    print(f"jax {jax}, python {python}:", flush=True)
    steps = " ".join(first_steps(interpreter)) or "well"
    command = [interpreter, "-m", "pytest", "-q", "-m", "not slow", f"--junitxml={report}", "-p", "no:cacheprovider"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # what is installed
    code = subprocess.run([*command, *tests], cwd=ROOT, env=environment).returncode
    if not report.exists():
        return Outcome(jax, python, steps, 0, 1)
    suite = next(ElementTree.parse(report).getroot().iter("testsuite"))
    total, bad, skipped = (int(suite.get(key, 0)) for key in ("tests", "failures", "skipped"))
    bad += int(suite.get("errors", 0))
    return Outcome(jax, python, steps, total - bad - skipped, max(bad, int(code != 0)))


def interpreter_of(name: str) -> str:
    """The path of an interpreter that is named; raises ``ArgumentTypeError`` where there is none."""
    path = shutil.which(name)
    if path is None:
        raise argparse.ArgumentTypeError(f"got {name!r}, must be a Python that can be started")
    return path


def tests_in(name: str) -> Path:
    """A file or folder of tests below the project's; raises ``ArgumentTypeError`` where there is none."""
    if not (ROOT / name).exists():
        raise argparse.ArgumentTypeError(f"got {name!r}, must be a file or folder of tests")
    return Path(name)


def newest_python() -> str:
    """The newest interpreter on PATH that can start, at least the running one."""
    for name in INTERPRETERS:
        path = shutil.which(name)
        if path and subprocess.run([path, "-c", "import venv, ensurepip"], capture_output=True).returncode == 0:
            return path
    return sys.executable


def main() -> int:
    """Make the environments, test in each, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--python", nargs="+", type=interpreter_of, help="interpreters, each for the oldest and the newest JAX"
    )
    parser.add_argument(
        "--tests", nargs="+", type=tests_in, default=selected(), help="files of tests, in place of those"
    )
    arguments = parser.parse_args()
    wanted = [(python, jax) for python in arguments.python or () for jax in (OLDEST, None)]
    outcomes = []
    with tempfile.TemporaryDirectory() as built:
        wheel = build_wheel(Path(built))
        for python, jax in wanted or [(sys.executable, OLDEST), (newest_python(), None)]:
            version = run(python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])").strip()
            folder = ENVIRONMENTS / f"python-{version}-{'newest' if jax is None else 'oldest'}"
            interpreter = make_environment(folder, python, jax, wheel)
            outcomes.append(try_environment(interpreter, folder, arguments.tests))
    print(f"\n{'jax':<12}{'python':<10}{'first steps':<16}{'passed':>8}{'failed':>8}")
    for outcome in outcomes:
        print(f"{outcome.jax:<12}{outcome.python:<10}{outcome.steps:<16}{outcome.passed:>8}{outcome.failed:>8}")
    return int(any(outcome.failed or not outcome.passed or outcome.steps != "well" for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
