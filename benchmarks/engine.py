"""How well the engine uses a machine, in one table: the same meaning on a CPU, a GPU and a TPU.

The peak of products of matrices is measured once, at each precision. Every row is then a share of that peak: the
operations of the model's forward and backward passes (model FLOP utilisation), beside the share of the vendor's data
sheet, memory, and the seconds of compilation, which no rate contains. The tables:

- ``models``: small networks and those that people train, under several mappings, in float32 and bfloat16, beside a
  Python loop over a jitted client;
- ``devices``: a CNN on 1, 2, 4, .. and all devices (on a CPU as many as it has cores), and on two processes;
- ``precision``: NTK-FL's round and the kernel flow in float32, with their distance from float64;
- ``growth`` (clients, cohort, rounds, width) and ``million`` (a million clients), which take longer, by name only.

Every measurement is a process of its own, and this one uses no device. After each, ``engine.json`` holds the rows so
far.

    python benchmarks/engine.py --output results/bench
    python benchmarks/engine.py --tables growth million devices
    python benchmarks/engine.py --peaks results/bench/engine.json --models resnet18
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from machine.cases import DEFAULT_TABLES, MODELS, PRECISE, TABLES, Case, Machine, cases, environment, tiny
from machine.peaks import BATCH_SECONDS, BATCHES, METHOD, SIZES, data_sheet, peak_of
from rich import box
from rich.console import Console
from rich.table import Table

from fedtangent._src.storage import write_atomically

Row = dict[str, Any]
MOST_SECONDS = 600  # of one measurement
BUSY = 0.5  # load of a core from which other work makes the measured peak too low
SHORT = {"float32": "f32", "default": "def.", "bfloat16": "bf16", "float64": "f64"}
VARYING = {
    "growth": {"clients": "clients", "cohort": "a round", "width": "units", "rounds": "rounds"},
    "million": {"clients": "clients", "steps": "steps"},
}
FIRST = ("table", "model", "mapping", "precision", "batch", "devices")  # keys of a row, before its figures


# ---- processes ----


def run_all(commands: Sequence[tuple[list[str], dict[str, str]]]) -> Row:
    """Runs processes at the same time, and returns the JSON of the first one's last line; ``error`` if one failed."""
    processes = [
        subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for command, variables in commands
    ]
    try:
        written = [process.communicate(timeout=MOST_SECONDS) for process in processes]
    except subprocess.TimeoutExpired:
        return {"error": f"took longer than {MOST_SECONDS} s"}
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    for process, (_, error) in zip(processes, written, strict=True):
        if process.returncode:
            lines = error.strip().splitlines() or [""]
            return {"error": f"exit {process.returncode}: {lines[-1]}"}
    try:
        found: Row = json.loads(written[0][0].splitlines()[-1])
    except (IndexError, ValueError):
        return {"error": "the process printed no figures"}
    return found


def launched(case: Case, machine: Machine, folder: Path) -> Row:
    """Returns the figures of a case, from a process (or several) started for it; ``error`` if it failed.

    Args:
        case: The case.
        machine: The machine.
        folder: Folder of the caches and results that the processes of this benchmark share.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    commands = []
    for index in range(case.processes):
        options: Row = {**case._asdict(), "folder": str(folder)}
        if case.processes > 1:
            options["place"] = {"coordinator": address, "id": index}
        command = [sys.executable, __file__, "--child", json.dumps(options)]
        commands.append((command, environment(case, machine, index, str(folder / "cache"))))
    return run_all(commands)


def described(folder: Path, is_tiny: bool) -> Row:
    """Returns the device, the versions and the measured peaks, from a process started for them; raises on failure."""
    sizes, seconds = ((64, 128), 0.001) if is_tiny else (SIZES, BATCH_SECONDS)
    command = [sys.executable, __file__, "--child", json.dumps({"sizes": sizes, "batch_seconds": seconds})]
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None  # before the measurement, which is a load itself
    found = run_all([(command, environment(Case("peaks", devices=0), Machine("", 0, 0), 0, str(folder)))])
    if "error" in found:
        raise SystemExit(f"the peak could not be measured: {found['error']}")
    return found | {
        "load": load,
        "method": METHOD.format(batches=BATCHES, seconds=seconds, sizes=", ".join(map(str, sizes))),
    }


# ---- rows ----


def finished(case: Case, found: Row, description: Row) -> Row:
    """Returns the row of a case: what it is, its rates as shares of the peaks, and its other figures.

    Args:
        case: The case.
        found: Figures of its process.
        description: Device and peaks, as ``described`` returns them.
    """
    row: Row = {name: getattr(case, name) for name in FIRST}
    if "flop/s" in found:
        row |= shares(found, case, description)
    first = [name for name in ("MiB", "compile s") if name in found]
    return row | {name: found[name] for name in (*first, *found)} | case._asdict()


def shares(found: Row, case: Case, description: Row) -> Row:
    """Returns the operations a second of a row, and which share of the measured and of the stated peak they are."""
    row: Row = {"steps/s": found["steps/s"], "GFLOP/s": None, "share of peak": None, "share of data sheet": None}
    if found["flop/s"] is None:
        return row
    device = description["device"]
    number = max(1, found.get("devices used", case.devices))
    stated = data_sheet(device["kind"]).get(case.precision)
    measured = description["peaks"][case.precision]["flops_per_second"]
    row["GFLOP/s"] = found["flop/s"] / 1e9
    row["share of peak"] = found["flop/s"] / peak_of(measured, number, device["platform"])
    if stated is not None:
        row["share of data sheet"] = found["flop/s"] / peak_of(stated, number, device["platform"])
    return row


def with_errors(rows: list[Row]) -> list[Row]:
    """Returns the rows; those in float32 of which float64 was measured too have their distance from it."""
    apart = {row["model"]: row["float32's error"] for row in rows if "float32's error" in row}
    return [
        row | {"distance": apart[row["model"]]} if row["precision"] == "float32" and row["model"] in apart else row
        for row in rows
    ]


def peak_rows(description: Row) -> list[Row]:
    """Returns a row for each precision: the measured peak, its matrices, and what the data sheet states."""
    stated = data_sheet(description["device"]["kind"])
    return [
        {
            "precision": name,
            "GFLOP/s": peak["flops_per_second"] / 1e9,
            "size": peak["size"],
            "data sheet GFLOP/s": stated[name] / 1e9 if name in stated else None,
            "by size": peak["by_size"],
        }
        for name, peak in description["peaks"].items()
    ]


def write(path: Path, description: Row, rows: list[Row], seconds: float) -> None:
    """Writes all figures to a file, which at no time holds a part of them.

    Args:
        path: The file.
        description: Device, versions and peaks.
        rows: The rows so far.
        seconds: Seconds that the benchmark has taken.
    """
    others = {name: description.get(name) for name in ("device", "versions", "peaks", "method", "load")}
    found = {**others, "seconds": seconds, "measured peaks": peak_rows(description), "rows": with_errors(rows)}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(found, indent=1) + "\n")


# ---- the table ----


def label(row: Row) -> str:
    """Returns what a row is about, in few letters."""
    if row["model"] in PRECISE:
        return f"{PRECISE[row['model']]}, n {row['examples']}"
    if row["table"] in VARYING:
        return ", ".join(f"{row[name]} {noun}" for name, noun in VARYING[row["table"]].items() if row[name] is not None)
    if row["table"] == "devices":
        count, noun = (row["processes"], "process") if row["processes"] > 1 else (row["devices"], "device")
        return f"{row['model']}, {count} {noun}{'' if count == 1 else 'es' if noun == 'process' else 's'}"
    width = f" {row['width']}" if row["model"] == "mlp" and row["width"] != Case._field_defaults["width"] else ""
    return f"{row['model']}{width} b{row['batch']}"


def figure(value: float | None, percent: bool = False) -> str:
    """Returns a number in few letters (12.3k is 12,300), or as a percentage; empty for None."""
    if value is None:
        return ""
    if percent:
        return f"{100 * value:.3g}%" if value < 0.1 else f"{100 * value:.0f}%"
    if value >= 1e4:
        return f"{value / 1e6:.3g}M" if value >= 1e6 else f"{value / 1e3:.3g}k"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def way(row: Row) -> str:
    """Returns how a row was computed: its mapping, what ``auto`` chose, or the distance from float64."""
    if "distance" in row:
        return f"off {row['distance']:.0e}"
    return f"auto={row['chosen']}" if "chosen" in row else row["mapping"]


def table_of(description: Row, rows: Iterable[Row]) -> Table:
    """Builds the table of all rows, with a section for each table of cases; it fits into 80 columns."""
    device, stated = description["device"], data_sheet(description["device"]["kind"])
    machine = f"{device['devices']} x {device['kind']}"
    if device["platform"] == "cpu":
        machine = f"CPU, {device['cores']} cores"
    table = Table(
        title=f"{machine}, JAX {description['versions']['jax']}",
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=0,
    )
    for name in ("", "mapping", "in"):
        table.add_column(name, no_wrap=name != "", overflow="fold")
    figures = ("a second", "GFLOP/s", "of peak", *["of sheet"] * bool(stated), "MiB", "compile s")
    for name in figures:
        table.add_column(name.replace(" ", "\n"), justify="right", no_wrap=True)
    before = None
    for row in with_errors(list(rows)):
        if row["table"] != before:
            table.add_section()
            before = row["table"]
        if "error" in row:
            table.add_row(label(row), row["mapping"], SHORT[row["precision"]], "[red]failed[/red]")
            continue
        rate = row["rounds/s"] if row["model"] in PRECISE else row["steps/s"]
        cells = [figure(rate), figure(row["GFLOP/s"]), figure(row["share of peak"], percent=True)]
        cells += [figure(row["share of data sheet"], percent=True)] * bool(stated)
        cells += [figure(row.get("MiB")), figure(row["compile s"])]
        table.add_row(label(row), way(row), SHORT[row["precision"]], *cells)
    return table


def legend(description: Row, rows: Sequence[Row]) -> str:
    """Returns the meaning of the columns, with the peaks."""
    peaks = ", ".join(
        f"{SHORT[row['precision']]} {figure(row['GFLOP/s'])}"
        + (f" (data sheet {figure(row['data sheet GFLOP/s'])})" if row["data sheet GFLOP/s"] else "")
        for row in peak_rows(description)
    )
    device = description["device"]
    of = {row["MiB of"] for row in rows if "MiB of" in row}
    memory = {
        frozenset({"device"}): "in use on the fullest device, by its own figures",
        frozenset({"process"}): "resident in the whole process, JAX included: the device has no figures of its own",
    }.get(frozenset(of), "of the device where it has figures of its own, else of the process")
    lines = [f"{label(row)}, {row['mapping']}, {row['precision']}: {row['error']}" for row in rows if "error" in row]
    lines += [
        f"Peaks measured, GFLOP/s of one device: {peaks}. def.: products of float32 numbers by the device's default "
        "(TF32, or bfloat16 on a TPU).",
        "b10: batches of 10. a second: local steps; of NTK-FL and the flow, rounds. GFLOP/s: products of the model's "
        "forward and backward passes (of NTK-FL, those of its kernel; few of the flow's operations are products). of "
        "peak, of sheet: share of the measured peak and of the data sheet's, of all devices in use.",
        f"MiB: peak {memory}. compile: tracing, lowering and compiling, contained in no rate. off: distance of float32 "
        "from float64, relative to the whole change.",
    ]
    if device["platform"] == "cpu" and (description.get("load") or 0) > BUSY * device["cores"]:
        lines.append(f"Other work ran when the peak was measured (load {description['load']:.1f}): it is too low.")
    others = {row["device kind"] for row in rows if "device kind" in row} - {device["kind"]}
    if others:
        lines.append(f"The peaks are of another device than the rows, which ran on {', '.join(sorted(others))}.")
    return "\n".join(lines)


def show(console: Console, description: Row, rows: Sequence[Row]) -> None:
    """Prints the table and its legend."""
    console.print(table_of(description, rows))
    console.print(legend(description, rows), style="dim", highlight=False)


# ---- the command ----


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("results/bench"), help="folder for engine.json")
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=list(DEFAULT_TABLES))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--most-clients", type=int, default=10_000, help="of the table growth")
    parser.add_argument("--peaks", type=Path, help="an engine.json whose device and peaks are taken, not measured")
    parser.add_argument("--tiny", action="store_true", help="smallest sizes: figures without meaning, for tests")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def progress(done: int, planned: Sequence[Case], began: float) -> None:
    """Prints a line about the case that is measured next, and how much time is left."""
    seconds = time.monotonic() - began
    left = f", {seconds / done * (len(planned) - done):.0f} s left" if done else ""
    case = planned[done]
    name = f"{label(case._asdict())}, {case.mapping}, {case.precision}"
    print(f"{done + 1} of {len(planned)}: {name}; {seconds:.0f} s{left}", file=sys.stderr, flush=True)


def stopped(number: int, _: FrameType | None) -> None:
    """Ends the benchmark as Ctrl-C does, at another signal."""
    raise KeyboardInterrupt(number)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures every case, writes ``engine.json`` after each, and prints the table; returns the exit status."""
    options = parse(arguments)
    if options.child:
        from machine.child import main as measure

        measure(options.child)
        return 0
    signal.signal(signal.SIGTERM, stopped)
    began, rows, status = time.monotonic(), list[Row](), 0
    with tempfile.TemporaryDirectory(prefix="fedtangent-bench-") as name:
        folder = Path(name)
        try:
            print("the peak of products of matrices", file=sys.stderr, flush=True)
            description = json.loads(options.peaks.read_text()) if options.peaks else described(folder, options.tiny)
            device = description["device"]
            machine = Machine(device["platform"], device["devices"], os.cpu_count() or 1)
            planned = list(cases(options.tables, options.models, machine, options.most_clients))
            planned = [tiny(case) for case in planned] if options.tiny else planned
            for done, case in enumerate(planned):
                progress(done, planned, began)
                rows.append(finished(case, launched(case, machine, folder), description))
                write(options.output / "engine.json", description, rows, time.monotonic() - began)
        except KeyboardInterrupt:
            status = 130
            print("stopped; the rows so far are kept", file=sys.stderr)
    if rows:
        show(Console(), description, rows)
        print(f"numbers in {options.output / 'engine.json'}")
    return status or int(any("error" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
