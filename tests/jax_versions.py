"""Run the neural-tangents tests, and every algorithm, under the oldest supported and the newest installable JAX.

``python tests/jax_versions.py`` makes a virtual environment for each under ``.venv-versions/``, installs what setup.cfg
asks for (neural-tangents without TensorFlow), and runs in each, with warnings as errors, the tests of neural-tangents
(``tests/kernels/test_neural_tangents*.py``), of the mappings, of the laws of every algorithm and of the harness of the
other simulators. It prints a table and exits with 1 if anything failed. A second run re-uses the environments while
setup.cfg asks for the same; remove them to look for a newer JAX.

Under Python 3.11 the newest JAX that can be installed is 0.10.2; newer ones want Python 3.12 or later. The newest
interpreter found on PATH is used for the newest JAX, or the one given by ``--python``.
"""

from __future__ import annotations

import argparse
import configparser
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENTS = ROOT / ".venv-versions"
OLDEST = "0.8.0"
NEEDS_TENSORFLOW = {"tensorflow", "tf2jax"}
INTERPRETERS = ("python3.14", "python3.13", "python3.12", "python3.11")
# prints a line for each requirement of neural-tangents, as pip would read them
REQUIREMENTS = "import importlib.metadata as m; print('\\n'.join(m.requires('neural-tangents') or []))"


class Outcome(NamedTuple):
    """What the tests did in one environment."""

    jax: str
    python: str
    passed: int
    failed: int


def requirement_name(requirement: str) -> str:
    """The normalised name of the package in a requirement such as ``jax>=0.8,<0.13``."""
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    return re.sub(r"[-_.]+", "-", found.group()).lower() if found else ""


def read_requirements() -> dict[str, str]:
    """The requirements of setup.cfg, the tests' ones included, by name of the package."""
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    text = parser["options"]["install_requires"] + parser["options.extras_require"]["test"]
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("#")]
    return {requirement_name(line): line for line in lines}


def run(*command: str | Path) -> str:
    """Standard output of a command that must succeed."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


def make_environment(folder: Path, python: str, jax: str | None) -> Path:
    """The interpreter of a virtual environment with the project's requirements and JAX ``jax`` (None: the newest)."""
    interpreter = folder / "bin" / "python"
    installed = folder / "installed"
    wanted = read_requirements()
    asked = "\n".join([python, f"jax {jax}", *wanted.values()])
    if installed.exists() and installed.read_text() == asked:
        return interpreter
    print(f"installing into {folder.relative_to(ROOT)} ...", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    run(python, "-m", "venv", folder)
    pip = (interpreter, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    run(*pip, "--no-deps", wanted.pop("neural-tangents"))
    more = run(interpreter, "-c", REQUIREMENTS).split("\n")
    wanted = {requirement_name(line): line for line in more if line.strip()} | wanted
    if jax is not None:
        wanted |= {"jax": f"jax=={jax}", "jaxlib": f"jaxlib=={jax}"}
    run(*pip, *(line for name, line in wanted.items() if name not in NEEDS_TENSORFLOW))
    installed.write_text(asked)
    return interpreter


def selected() -> list[Path]:
    """What is run: neural-tangents, the mappings, the laws of every algorithm of the catalogue, the peers' harness."""
    found = sorted((ROOT / "tests" / "kernels").glob("test_neural_tangents*.py"))
    return found + [
        ROOT / "tests" / path for path in ("engine/test_mapping.py", "federated/test_laws.py", "benchmarks")
    ]


def run_tests(interpreter: Path, folder: Path) -> Outcome:
    """Run the tests and count; an error of collection counts as a failure."""
    report = folder / "report.xml"
    report.unlink(missing_ok=True)
    versions = "import jax, platform; print(jax.__version__, platform.python_version())"
    jax, python = run(interpreter, "-c", versions).split()
    print(f"jax {jax}, python {python}:", flush=True)
    command = [interpreter, "-m", "pytest", "-q", "-m", "not slow", f"--junitxml={report}", "-p", "no:cacheprovider"]
    command += selected()
    code = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT / "src")}).returncode
    if not report.exists():
        return Outcome(jax, python, 0, 1)
    suite = next(ElementTree.parse(report).getroot().iter("testsuite"))
    total, bad, skipped = (int(suite.get(key, 0)) for key in ("tests", "failures", "skipped"))
    bad += int(suite.get("errors", 0))
    return Outcome(jax, python, total - bad - skipped, max(bad, int(code != 0)))


def newest_python() -> str:
    """The newest interpreter on PATH that can start, at least the running one."""
    for name in INTERPRETERS:
        path = shutil.which(name)
        if path and subprocess.run([path, "-c", "import venv, ensurepip"], capture_output=True).returncode == 0:
            return path
    return sys.executable


def main() -> int:
    """Make both environments, test in each, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=newest_python(), help="for the newest JAX (default: %(default)s)")
    parser.add_argument("--oldest-python", default=sys.executable, help="for the oldest JAX (default: %(default)s)")
    arguments = parser.parse_args()
    outcomes = []
    for name, python, jax in (("oldest", arguments.oldest_python, OLDEST), ("newest", arguments.python, None)):
        folder = ENVIRONMENTS / name
        outcomes.append(run_tests(make_environment(folder, python, jax), folder))
    print(f"\n{'jax':<12}{'python':<10}{'passed':>8}{'failed':>8}")
    for outcome in outcomes:
        print(f"{outcome.jax:<12}{outcome.python:<10}{outcome.passed:>8}{outcome.failed:>8}")
    return int(any(outcome.failed or not outcome.passed for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
