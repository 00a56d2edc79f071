"""Two runs in one folder, the second begun at a drawn instant; ``test_two_runs.py`` starts it.

python two_runs.py FOLDER TRIALS [real] [unlocked] [COMMAND ..]: TRIALS of every pair of commands (of those that are
named); prints a line for every pair, and exits with 1 if anything was mixed. The commands are the real ones, but that
what each computes is stood in for by a wait, files being written as the command writes them; or with ``real`` is
computed, at a small size. With ``unlocked`` the folder has no owner, so that the trials can be seen to tell.
"""

from __future__ import annotations

import collections
import contextlib
import csv
import functools
import itertools
import json
import os
import random
import re
import shutil
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fedtangent._src.cli import commands, main
from fedtangent._src.engine.checkpoints import files as checkpoint_files
from fedtangent._src.output import files

LONG = 0.3  # seconds that a stand-in works, about
TRAIN = "train --num-train 30 --num-clients 2 --num-rounds 2 --local-steps 1 --evaluate-every 1 --mapping scan"
SMALL = "--num-train 20 --num-clients 2 --num-rounds 2 --local-steps 1"
LINES = {
    "train": f"{TRAIN} --checkpoint-every 0",
    "train with checkpoints": f"{TRAIN} --checkpoint-every 1",
    "train of seeds": f"{TRAIN} --seeds 0:3",
    "train resumed": f"{TRAIN} --checkpoint-every 1 --resume",
    "train anew": f"{TRAIN} --overwrite",
    "compare": f"compare --algorithm fed_avg {SMALL} --widths 8 16 32 --draws 5",
    "predict": f"predict {SMALL} --no-rates --draws 2",
    "experiment": "experiment local_gd.fig1b --scale smoke",
    "check-theory": "check-theory --only fed_ensemble.second_order",
    "report": "report runs",
}


class Began(NamedTuple):
    """A run in a process of its own."""

    process: int
    who: str
    place: Path  # of what it tells


class Ended(NamedTuple):
    code: int
    error: str
    worked: tuple[float, float] | None  # from when to when, if it came to that


def watched(module: Any, place: Path, who: str, real: bool) -> None:
    """The command tells when it worked; unless it is the ``real`` one its work is to write files that say ``who``."""
    works, read, all_asked = module.run_job, commands.read, list[commands.ParsedLine]()

    def kept(*given: Any) -> commands.ParsedLine:
        all_asked.append(read(*given))
        return all_asked[0]

    def stand_in() -> files.Ended:
        asked = all_asked[0]
        folder, rows = files.output_folder(asked.values["output"]), list[files.Metric]()
        files.write_config(folder, asked.command.name, asked.values, who=who)
        for round_ in range(4):
            rows.append(files.Metric(round_, who, 0, "train", "mse", 0.0, 0, 0))
            files.write_metrics(folder, rows)
            time.sleep(random.random() * LONG / 5)
        (folder / "figures").mkdir(exist_ok=True)
        files.write_atomically(folder / "figures" / "all.png", who)
        files.write_result(folder, [{"who": who}])
        return files.Ended()

    def run_job(job: Any) -> files.Ended:
        begun = time.monotonic()
        ended: files.Ended = works(job) if real else stand_in()
        (place / "worked").write_text(f"{begun} {time.monotonic()}")
        return ended

    def prepare(**given: Any) -> None:
        time.sleep(random.random() * LONG / 5)

    commands.read, module.run_job = kept, run_job
    for name in ("prepare", "prepare_run"):
        if hasattr(module, name) and not real:
            setattr(module, name, functools.wraps(getattr(module, name))(prepare))


def begin(line: str, out: Path, place: Path, who: str, real: bool) -> Began:
    """Start the command in a process of its own."""
    place.mkdir()
    process = os.fork()
    if process == 0:
        random.seed(who)
        words = line.split()
        for number, name in ((1, "out"), (2, "error")):
            os.dup2(os.open(place / name, os.O_WRONLY | os.O_CREAT), number)
        try:
            watched(commands.find(*words).module, place, who, real)
            main.main([*words, "--output", str(out)])
        except SystemExit as end:
            sys.stdout.flush()
            os._exit(end.code if isinstance(end.code, int) else 3)
        except BaseException:
            traceback.print_exc()
        os._exit(3)
    return Began(process, who, place)


def end(run: Began) -> Ended:
    """Wait for it."""
    code = os.waitstatus_to_exitcode(os.waitpid(run.process, 0)[1])
    worked = run.place / "worked"
    start, stop = map(float, worked.read_text().split()) if worked.exists() else (0.0, 0.0)
    return Ended(code, (run.place / "error").read_text(), (start, stop) if worked.exists() else None)


def whose(out: Path) -> set[str]:
    """Which stand-ins wrote what is in the folder."""
    config = json.loads((out / "config.json").read_text())
    found = {config["who"]}
    found |= {row["algorithm"] for row in csv.DictReader((out / "metrics.csv").read_text().splitlines())}
    found |= {row["who"] for row in json.loads((out / "result.json").read_text())["rows"]}
    return found | {(out / "figures" / "all.png").read_text()}


def wrong(out: Path, runs: Mapping[str, Ended], alone: Mapping[str, Path] | None) -> list[str]:
    """What is wrong with two runs in the folder; ``alone``: of real ones, what each writes where it is alone."""
    found = []
    done = {who: run for who, run in runs.items() if run.code == 0}
    for who, run in runs.items():
        refused = re.fullmatch("fedtangent: error: output: .* (in use by another run|holds a).*\n", run.error)
        if run.code != 0 and not (run.code == 2 and refused and run.worked is None):
            found.append(f"{who} ended with {run.code}: {run.error}")
    if not done:
        return [*found, "none ran"]
    if len(done) == 2:
        (_, first), (begun, _) = sorted(run.worked or (0.0, 0.0) for run in done.values())
        found += ["both ran at once"] if begun < first else []
    litter = [path.name for path in out.rglob("*") if path.suffix in (".part", ".lock") or path.name == ".lock"]
    found += [f"left {', '.join(litter)}"] if litter else []
    if alone is None:
        last = max(done, key=lambda who: done[who].worked or (0.0, 0.0))
        mixed = whose(out) - {last}
        found += [f"{last} was last, and {', '.join(mixed)} in the folder"] if mixed else []
    elif all(contents(out) != contents(alone[who]) for who in done):
        found.append("the folder is that of no run alone")
    return found


def contents(out: Path) -> list[Any]:
    """The numbers of a real run: its command and options, metrics and result, but for seconds and places."""
    config = json.loads((out / "config.json").read_text())
    options = {k: v for k, v in config["options"].items() if k not in ("output", "kernel_dir", "overwrite", "resume")}
    result = json.loads((out / "result.json").read_text()) | {"seconds": None}
    text = (out / "metrics.csv").read_text() if (out / "metrics.csv").exists() else ""
    metrics = [row | {"seconds": None} for row in csv.DictReader(text.splitlines())]
    return [config["command"], options, result, metrics]


def tried(folder: Path, pair: tuple[str, str], trials: int, real: bool, alone: Mapping[str, Path] | None) -> str:
    """A line on the pair: how the trials ended, and what was wrong."""
    ended, found = collections.Counter[str](), list[str]()
    for trial in range(trials):
        out, runs = folder / "out", list[Began]()
        long = LONG * (100 if real else 1)
        for which, name in enumerate(pair):
            place = folder / f"{which}"
            shutil.rmtree(place, ignore_errors=True)
            runs.append(begin(LINES[name], out, place, f"{which} {name} {trial}", real))
            time.sleep(random.choice((0.0, random.random(), 2 * random.random())) * long if which == 0 else 0)
        done = {run.who: end(run) for run in runs}
        both = sum(run.code == 0 for run in done.values()) == 2
        refused = [run.error for run in done.values() if run.code]
        ended["one after the other" if both else "in use" if "in use" in "".join(refused) else "holds a run"] += 1
        names = dict(zip(done, (alone[name] for name in pair), strict=True)) if alone else None
        found += wrong(out, done, names)
        shutil.rmtree(out, ignore_errors=True)
    said = ", ".join(f"{number} {how}" for how, number in sorted(ended.items()))
    return f"{' and '.join(pair)}: {said}" + (f"; WRONG: {'; '.join(found)}" if found else "")


if __name__ == "__main__":
    folder, trials, *rest = Path(sys.argv[1]).absolute(), int(sys.argv[2]), *sys.argv[3:]
    real, names = "real" in rest, [name for name in LINES if name in rest] or list(LINES)
    if "unlocked" in rest:
        checkpoint_files.locked = lambda *given: contextlib.nullcontext()
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    for line in (LINES[name] for name in names):
        commands.find(*line.split())  # imports what each process would
    alone = {name: folder / f"alone {i}" for i, name in enumerate(names)} if real else None
    for name, out in (alone or {}).items():
        one = end(begin(LINES[name], out, folder / f"said {out.name}", name, real))
        assert one.code == 0, one.error
    lines = []
    for pair in itertools.combinations_with_replacement(names, 2):
        lines.append(tried(folder, pair, trials, real, alone))
        print(lines[-1], flush=True)
    sys.exit(any("WRONG" in line for line in lines))
