"""fedtangent beside Flower's simulation and pfl-research: the same work, one process a measurement, taking turns.

    python benchmarks/peers/run.py --output results/bench/peers

The first run makes a virtual environment for each peer (requirements-<tool>.txt, a gigabyte each). A full run takes
about a quarter of an hour, ``--smoke`` two minutes (fewer rounds, one repeat, no calibration). Writes ``result.json``.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import environments
import floor
import processes
import tables
import workloads
from processes import MeasurementError
from rich.console import Console
from workloads import WORKLOADS, Workload

HERE = Path(__file__).resolve().parent
TOOLS = ("fedtangent", "flower", "pfl")
TIMEOUT, CALIBRATION_TIMEOUT = 300.0, 60.0


class Setting(NamedTuple):
    """How a tool uses the cores: threads of each worker (process, actor or device), workers, fedtangent's mapping."""

    threads: int
    workers: int = 1
    mapping: str = "auto"

    def describe(self, tool: str) -> str:
        """As the table says it."""
        threads = f"{self.threads} thread" + "s" * (self.threads > 1)
        if tool == "fedtangent":
            devices = f"{self.workers} devices, " if self.workers > 1 else ""
            return f"{devices}{threads}, {self.mapping}"
        one, many = {"flower": ("Ray actor", "Ray actors"), "pfl": ("process", "processes")}[tool]
        return f"{self.workers} {many}, {threads} each" if self.workers > 1 else f"1 {one}, {threads}"


class Length(NamedTuple):
    """Rounds that are compared and timed; they are repeated until they last ``min_seconds``."""

    rounds: int
    min_seconds: float
    timeout: float


class Plan(NamedTuple):
    """What a run measures and how long."""

    workloads: tuple[str, ...]
    tools: tuple[str, ...]
    repeats: int
    smoke: bool
    seed: int
    output: Path
    environments: Path


def settings(tool: str, workload: Workload, cores: int) -> tuple[Setting, ...]:
    """What calibration tries; the first is what a smoke run takes."""
    if tool == "fedtangent":
        found = [Setting(1, 1, "scan"), Setting(cores, 1, "scan"), Setting(cores, 1, "auto")]
        mappings = ("scan", "chunked:64") if workload.clients_per_round >= 64 * cores else ("scan",)
        found += [Setting(cores, cores, f"sharded:{mapping}") for mapping in mappings] if cores > 1 else []
    elif tool == "flower":  # one CPU an actor, as many actors as CPUs
        found = [Setting(1, cores), Setting(cores, 1)]
    else:
        # every process draws the same cohort and takes its part: equal parts only
        parts = max(p for p in range(1, cores + 1) if workload.clients_per_round % p == 0)
        found = [Setting(1), Setting(cores), Setting(1, parts)]
    return tuple(dict.fromkeys(found))


def command(plan: Plan, tool: str, workload: Workload, setting: Setting, length: Length, seed: int) -> list[str]:
    """The command of one measurement."""
    python = str(environments.python_of(tool, plan.environments))
    launcher = [python]
    if tool == "pfl" and setting.workers > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={setting.workers}"]
    options = {
        "workload": workload.name,
        "data": plan.output / f"{workload.name}.npz",
        "rounds": length.rounds,
        "seed": seed,
        "min-seconds": length.min_seconds,
        "threads": setting.threads,
        "workers": setting.workers,
    }
    found = [*launcher, str(HERE / f"worker_{tool}.py"), *(f"--{key}={value}" for key, value in options.items())]
    if tool == "fedtangent":
        found += [f"--mapping={setting.mapping}"] + (["--spread"] if plan.repeats == 1 else [])
    return found


def measure(plan: Plan, tool: str, workload: Workload, setting: Setting, length: Length, seed: int) -> dict[str, Any]:
    """One measurement; raises ``MeasurementError`` if it gives none."""
    variables = environments.variables(tool, setting.threads, setting.workers, plan.output)
    found = processes.measure(command(plan, tool, workload, setting, length, seed), variables, length.timeout)
    described = {"tool": tool, "setting": setting.describe(tool), **setting._asdict(), "seed": seed}
    rate = found["client_steps_per_second"]
    print(f"{workload.name:9}{tool:11}{described['setting']:36}{rate:>12,.0f} steps/s", file=sys.stderr, flush=True)
    return described | found


def calibrate(plan: Plan, tool: str, workload: Workload, cores: int) -> tuple[Setting, list[dict[str, Any]]]:
    """The tool's quickest setting on short runs, and all that was tried."""
    tried: list[dict[str, Any]] = []
    quickest: list[tuple[float, Setting]] = []
    for setting in settings(tool, workload, cores):
        # a poor setting can be a hundred times slower; the first is never one
        length = Length(workload.smoke_rounds, 0.5, CALIBRATION_TIMEOUT if quickest else TIMEOUT)
        try:
            found = measure(plan, tool, workload, setting, length, plan.seed)
        except MeasurementError as error:
            found = {"tool": tool, "workload": workload.name, "setting": setting.describe(tool), "error": str(error)}
            print(f"{workload.name:9}{tool:11}{found['setting']:36} not available: {error}", file=sys.stderr)
        else:
            quickest.append((found["client_steps_per_second"], setting))
        tried.append(found)
    if not quickest:
        raise MeasurementError(tried[-1]["error"])
    return max(quickest, key=lambda pair: pair[0])[1], tried


def compare(plan: Plan, workload: Workload, cores: int) -> dict[str, Any]:
    """All tools on one workload: calibration, then ``repeats`` turns of one measurement a tool."""
    workloads.write(workload, plan.seed, plan.output / f"{workload.name}.npz")
    chosen: dict[str, Setting] = {}
    calibration: list[dict[str, Any]] = []
    failures: dict[str, str] = {}
    measured: dict[str, list[dict[str, Any]]] = {tool: [] for tool in plan.tools}
    for tool in plan.tools:
        try:
            if plan.smoke:
                chosen[tool] = settings(tool, workload, cores)[0]
            else:
                chosen[tool], tried = calibrate(plan, tool, workload, cores)
                calibration += tried
        except MeasurementError as error:
            failures[tool] = str(error)
    length = Length(workload.smoke_rounds, 0.3, TIMEOUT) if plan.smoke else Length(workload.rounds, 2.0, TIMEOUT)
    for turn in range(plan.repeats):
        for tool in [tool for tool in plan.tools if tool not in failures]:
            try:
                seed = plan.seed + 1 + turn
                measured[tool].append(measure(plan, tool, workload, chosen[tool], length, seed))
            except MeasurementError as error:
                failures[tool] = str(error)
    whole = {tool: runs for tool, runs in measured.items() if tool not in failures}
    return {
        "workload": workload.name,
        "rows": tables.summary_rows(workload.name, whole) if whole else [],
        "failures": failures,
        "calibration": calibration,
        "measurements": [m for runs in measured.values() for m in runs],
    }


def floors(plan: Plan, cores: int) -> dict[str, tuple[floor.Floor, floor.Floor]]:
    """Floors of each workload: one stream of work (on one thread or on all), and one stream on every core at once."""

    def streams(threads: int, count: int) -> list[dict[str, Any]]:
        line = [sys.executable, str(HERE / "floor.py"), "--workloads", *plan.workloads]
        variables = environments.variables("fedtangent", threads, 1, plan.output)
        with concurrent.futures.ThreadPoolExecutor(count) as pool:
            return list(pool.map(lambda _: processes.measure(line, variables, TIMEOUT), range(count)))

    more = cores > 1 and not plan.smoke
    alone, wide, busy = streams(1, 1), streams(cores, 1) if more else [], streams(1, cores) if more else []
    found = {}
    for name in plan.workloads:
        workload = WORKLOADS[name]
        one = floor.lowest([floor.floor(workload, measured) for measured in alone + wide])
        slowest = [max((floor.floor(workload, m, cores) for m in busy), key=lambda f: f.seconds)] if busy else []
        found[name] = (one, floor.lowest([one, *slowest]))
    return found


def run(plan: Plan) -> dict[str, Any]:
    """Everything ``plan`` asks for; what ``result.json`` holds."""
    plan.output.mkdir(parents=True, exist_ok=True)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for tool in plan.tools:
        environments.python_of(tool, plan.environments)
    print(f"{cores} cores, load {os.getloadavg()[0]:.1f}", file=sys.stderr)
    compared = [compare(plan, WORKLOADS[name], cores) for name in plan.workloads]
    rows = [row for one in compared for row in one["rows"]]
    floor_rows = []
    own = {row["workload"]: row["client_steps_per_second"]["median"] for row in rows if row["tool"] == tables.REFERENCE}
    if own:
        print("measuring the machine's floor", file=sys.stderr, flush=True)
        limits = floors(plan, cores)
        floor_rows = [tables.floor_row(name, rate, *limits[name]) for name, rate in own.items()]
    machine = {"cores": cores, "machine": platform.machine(), "system": platform.platform(), "load": os.getloadavg()}
    asked = {**plan._asdict(), "output": str(plan.output), "environments": str(plan.environments)}
    return {"plan": asked, "machine": machine, "rows": rows, "floor": floor_rows, "compared": compared}


def parse(arguments: Sequence[str] | None = None) -> Plan:
    """The command line; exits with one clear line for what it cannot mean."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("results/bench/peers"))
    parser.add_argument("--workloads", nargs="+", choices=tuple(WORKLOADS), default=tuple(WORKLOADS))
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=TOOLS)
    parser.add_argument("--repeats", type=int, help="turns of every tool (default 3; 1 with --smoke)")
    parser.add_argument("--smoke", action="store_true", help="show that everything works; rates mean little")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--environments", type=Path, default=Path(".venv-peers"), help="where the peers are installed")
    found = parser.parse_args(arguments)
    repeats = found.repeats if found.repeats is not None else (1 if found.smoke else 3)
    if repeats < 1:
        parser.error(f"argument --repeats: got {repeats}, must be at least 1")
    if found.seed < 0:
        parser.error(f"argument --seed: got {found.seed}, must be at least 0")
    places = found.output.resolve(), found.environments.resolve()
    names = tuple(dict.fromkeys(found.workloads)), tuple(dict.fromkeys(found.tools))
    return Plan(*names, repeats, found.smoke, found.seed, *places)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the tables, write ``result.json``; 1 if a tool failed or did other work."""
    plan = parse(arguments)
    try:
        result = run(plan)
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    (plan.output / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    console = Console(width=None if sys.stdout.isatty() else 200)
    console.print(tables.peers_table(result["rows"]))
    if result["floor"]:
        console.print(tables.floor_table(result["floor"]))
    console.print(tables.LEGEND, highlight=False)
    failures = [(one["workload"], *pair) for one in result["compared"] for pair in one["failures"].items()]
    for failure in failures:
        console.print("failed: {}, {}: {}".format(*failure), highlight=False)
    console.print(f"written: {plan.output / 'result.json'}", highlight=False)
    return 1 if failures or any(row["flags"] for row in result["rows"]) else 0


if __name__ == "__main__":
    sys.exit(main())
