"""Records the numbers of a list of runs of the command line, and compares two recordings.

``python tests/same_numbers.py record FOLDER`` runs ``python -m fedtangent`` once for each run of the list, into
FOLDER/<name of the run>. A run that is recorded already is skipped, so that a recording can be interrupted and taken
up again; a recording is of one version of the package, and another version is refused.
``python tests/same_numbers.py compare BEFORE AFTER`` compares metrics.csv, result.json and exit codes, but no times. It
exits with 1 if a number differs by more than 1e-12 relative, a text differs or a run is missing. Record both on one
machine, side by side in one folder: other processors round differently, and the runs share a key file beside FOLDER.

A number that is a rounding error itself, such as the error of an exact law, has no digits that could stay the same.
Where it changes it is listed as a rounding error, with both values, and does not count as a difference.
"""

from __future__ import annotations

import argparse
import csv
import fnmatch
import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

# Words of the list that the command line no longer takes, such as a renamed option, and what it takes in their place.
RENAMED: dict[str, str] = {}

DIGITS = "--dataset digits --num-train 200 --num-test 100"
SINE = "--dataset sine --num-users 8 --test-points 40 --client-learning-rate 0.1"
TOKENS = "--dataset tokens.npz"
TRAIN = "train --num-rounds 3 --evaluate-every 1 --checkpoint-every 0"
NETWORK = f"{TRAIN} {DIGITS} --num-clients 6 --widths 16"
STEPS = "--local-steps 3"
SMALL_RATE = "--client-learning-rate 0.1"

ALGORITHMS = {
    "centralised": f"{STEPS} --loss cross_entropy --client-optimizer momentum {SMALL_RATE}",
    "cp_ntk_fl": "--beta 0.5 --sparsity 0.3 --shuffle --ntk-times 10 50 100 --clients-per-round 3",
    "data_sharing": f"{STEPS} --shared-fraction 0.2 --base fed_prox --mu 0.2",
    "ditto": f"{STEPS} --mu 0.3 --client-test 0.3",
    "dp_fed_avg": f"{STEPS} --clip-norm 0.5 --noise-multiplier 0.3 --delta 1e-4 --schedule poisson",
    "fed_adagrad": "--local-epochs 1 --tau 0.01 --server-learning-rate 0.1",
    "fed_adam": f"{STEPS} --beta-1 0.8 --beta-2 0.95 --server-learning-rate 0.05 --channel qsgd:4 --error-feedback",
    "fed_async": f"{STEPS} --delay 2 --mu 0.1 --server-learning-rate 0.6 --clients-per-round 1 --num-rounds 5",
    "fed_avg": f"{STEPS} --seeds 0:3 --decay 0.9 --decay-every 2 --beta 0.7 --shuffle",
    "fed_avg_m": f"{STEPS} --momentum 0.7 --dropout 0.3",
    "fed_be": f"{STEPS} --num-samples 3 --server-examples 40",
    "fed_be_no_distillation": f"{STEPS} --posterior dirichlet --num-samples 3",
    "fed_com": f"{STEPS} --bits 4",
    "fed_dyn": f"{STEPS} --mu 0.2 --max-update-norm 5",
    "fed_ensemble": f"{STEPS} --base fed_prox --mu 0.2 --num-models 3",
    "fed_nova": f"--local-epochs 2 --mu 0.1 --client-optimizer momentum {SMALL_RATE}",
    "fed_paq": f"{STEPS} --bits 6 --weighting uniform --seeds 0,2",
    "fed_prox": f"{STEPS} --mu 0.5 --channel top_k:0.2 --error-feedback",
    "fed_sgd": "--secure-aggregation",
    "fed_yogi": f"{STEPS} --server-learning-rate 0.05 --keep-first 4 --completion-time exponential",
    "gossip": f"{STEPS} --graph torus",
    "lg_fed_avg": f"{STEPS} --private ^2/ --client-test 0.3",
    "local_only": f"{STEPS} --client-optimizer adam --client-learning-rate 0.01",
    "modified_local_gd": f"{STEPS} --first-index 1 --mu 0.1",
    "ntk_dfl": "--ntk-times 10 50 100 --graph erdos_renyi:0.5",
    "ntk_fl": "--ntk-times 10 50 100 --ntk-kernel exact --ntk-choose validation --server-examples 40",
    "random_walk": f"{STEPS} --base scaffold --graph erdos_renyi:0.9 --num-models 2",
    "scaffold": f"{STEPS} --clients-per-round 3 --num-rounds 4 --seeds 0,2",
}
OPTIONS = {  # further options of all averaging algorithms and of NTK-FL, and further bases
    "adam": f"{STEPS} --client-optimizer adam --client-learning-rate 0.01 --loss cross_entropy",
    "momentum": f"{STEPS} --client-optimizer momentum {SMALL_RATE} --dtype float32",
    "logistic_loss": f"{STEPS} --loss logistic",
    "exponential_loss": f"{STEPS} --loss exponential {SMALL_RATE}",
    "cross_entropy_sum": f"{STEPS} --loss cross_entropy_sum --client-learning-rate 0.05",
    "epochs": "--local-epochs 2 --batch-size 10 --test-fraction 0.3",
    "full_batch": f"{STEPS} --batch-size 0 --weighting uniform --server-learning-rate 0.5",
    "sparsity": f"{STEPS} --sparsity 0.5 --error-feedback",
    "random_k": f"{STEPS} --channel random_k:0.3",
    "quantise": f"{STEPS} --channel quantise:5",
    "top_k": f"{STEPS} --channel top_k:0.3 --max-update-norm inf",
    "masked": f"{STEPS} --secure-aggregation --dropout 0.2",
    "stragglers": f"{STEPS} --keep-first 3 --completion-spread 0.5 --decay 0.5 --decay-every 1",
    "client_test": f"{STEPS} --client-test 0.25 --seed 3",
    "projection": f"{STEPS} --projection 20 --key-file ../projection.key",
    "scan": f"{STEPS} --mapping scan --host-devices 1",
    "vmap": f"{STEPS} --mapping vmap --clients-per-round 4",
    "chunked": f"{STEPS} --mapping chunked:2",
    "kernel_diagnostics": f"{STEPS} --diagnostics kernel --diagnostics-examples 40",
    "laziness_diagnostics": f"{STEPS} --diagnostics laziness --diagnostics-examples 40",
    "checkpoints": f"{STEPS} --checkpoint-every 2",
    "fed_buff": f"--algorithm fed_async {STEPS} --buffered --delay 1 --discount hinge --grace 0 --clients-per-round 3",
    "ensemble_of_fed_avg_m": f"--algorithm fed_ensemble --base fed_avg_m {STEPS} --num-models 2 --seeds 0,1",
    "ensemble_of_fed_adam": f"--algorithm fed_ensemble --base fed_adam {STEPS} --server-learning-rate 0.05",
    "ensemble_of_scaffold": f"--algorithm fed_ensemble --base scaffold {STEPS} --num-models 3",
    "ensemble_of_fed_nova": f"--algorithm fed_ensemble --base fed_nova {STEPS} --num-models 3",
    "ensemble_of_fed_dyn": f"--algorithm fed_ensemble --base fed_dyn {STEPS} --num-models 3",
    "ntk_chebyshev": "--algorithm ntk_fl --ntk-times 10 50 100 --ntk-method chebyshev --ntk-criterion accuracy",
    "ntk_iterate": "--algorithm ntk_fl --ntk-times 10 20 40 --ntk-method iterate --ntk-patience 1",
    "ntk_multirate": "--algorithm ntk_fl --ntk-times 10 20 --ntk-method multirate --loss cross_entropy",
    "ntk_clipped": "--algorithm ntk_fl --ntk-times 10 50 --ntk-unstable clip --client-learning-rate 100",
}
MODELS = {  # of a measured choice, such as that of the convolution, one is named: measurements differ
    "cnn": f"{DIGITS} --num-clients 4 --convolution lax --filters 4 8 --hidden 16 --window 3",
    "deep_linear": f"{DIGITS} --num-clients 4 --width 20 --depth 3 {SMALL_RATE}",
    "linear": f"{DIGITS} --num-clients 4 --sigma 0.1 {SMALL_RATE}",
    "logistic": f"{DIGITS} --num-clients 4 --no-zero-init --loss cross_entropy",
    "lstm": f"{TOKENS} --embedding 3 --units 6 --layers 1 --loss cross_entropy",
    "mlp": f"{DIGITS} --num-clients 4 --widths 16 8 --activation gelu --parameterization standard --w-std 1 --b-std 0 "
    f"--last-w-std 0.1 --flatten {SMALL_RATE}",
    "mobilenet_v2": f"{DIGITS} --num-clients 2 --width 0.25 --blocks 1 1 {SMALL_RATE}",
    "rbf_linear": f"{SINE} --num-features 20 --bandwidth 0.1 --sigma 0.5",
    "resnet18": f"{DIGITS} --num-clients 2 --convolution lax --width 4 --blocks 1 1 {SMALL_RATE}",
    "resnet34": f"{DIGITS} --num-clients 2 --convolution lax --width 4 --blocks 2 1 {SMALL_RATE}",
    "ntk_cnn": f"{DIGITS} --num-clients 2 --width 4",
    "ntk_resnet": f"{DIGITS} --num-clients 2 --width 4 --blocks 1",
    "ntk_transformer": f"{DIGITS} --num-clients 2 --width 4",
    "shufflenet_v2": f"{DIGITS} --num-clients 2 --width 0.5 --blocks 1 1 {SMALL_RATE}",
}
PARTITIONS = {
    "by_user": f"{SINE} --widths 16 --activation erf",
    "classes": f"{DIGITS} --widths 16 --num-clients 6 --classes-per-client 3",
    "dirichlet": f"{DIGITS} --widths 16 --num-clients 6 --alpha 0.2 --min-client-size 8 --dirichlet-method hsu",
    "iid": f"{DIGITS} --widths 16 --num-clients 6",
    "majority": f"{DIGITS} --widths 16 --num-clients 6 --share 0.6",
    "quantity_skew": f"{DIGITS} --widths 16 --num-clients 6 --alpha 0.4 --min-client-size 5",
    "shards": f"{DIGITS} --widths 16 --num-clients 6 --shards-per-client 3",
}
SCHEDULES = {
    "all": "--algorithm fed_ensemble --num-models 2",
    "mixed": "--algorithm fed_ensemble --num-models 3",
    "neighbourhoods": "--algorithm ntk_dfl --ntk-times 10 50 --graph torus --dynamic",
    "own": "--algorithm local_only",
    "permutations": "--algorithm fed_ensemble --num-models 4",
    "poisson": "--clients-per-round 3",
    "random": "--algorithm fed_ensemble --num-models 3",
    "assigned_by_loss": "--algorithm fed_ensemble --num-models 2",
    "best_fitting": "--algorithm fed_ensemble --num-models 2",
    "gradient_norm": "--clients-per-round 2",
    "power_of_choice": "--candidates 3 --clients-per-round 2",
    "random_walk": "--algorithm random_walk --graph complete --num-models 3",
    "strata": "--algorithm fed_ensemble --num-models 3 --num-strata 3 --clients-per-stratum 1",
    "uniform": "--clients-per-round 2",
}
RULES = {  # algorithms that theory follows, with options that it follows
    "data_sharing": f"{STEPS} --shared-fraction 0.2 --base fed_prox --mu 0.2",
    "fed_avg": f"{STEPS} --decay 0.9 --decay-every 2",
    "fed_avg_m": f"{STEPS} --momentum 0.7 --dropout 0.3",
    "fed_dyn": f"{STEPS} --mu 0.2",
    "fed_ensemble": f"{STEPS} --base fed_prox --mu 0.2 --num-models 2",
    "fed_nova": "--local-epochs 1 --mu 0.1",
    "fed_prox": f"{STEPS} --mu 0.5 --keep-first 3",
    "fed_sgd": "--clients-per-round 3 --weighting uniform",
    "modified_local_gd": f"{STEPS} --first-index 1 --mu 0.1",
    "random_walk": f"{STEPS} --base scaffold --num-models 2",
    "scaffold": f"{STEPS} --clients-per-round 3",
}
PREDICTED = {  # further options of theory alone
    "cross_entropy": f"{DIGITS} --num-clients 6 --loss cross_entropy",
    "momentum": f"{DIGITS} --num-clients 6 --client-optimizer momentum {SMALL_RATE} --evaluate-every 3",
    "target": f"{DIGITS} --num-clients 6 --target 0.2 --batch-size 0 --num-rounds 6 --activation erf",
    "no_rates": f"{DIGITS} --num-clients 6 --no-rates --partition shards --seed 4",
    "deep_linear": f"{DIGITS} --num-clients 6 --model deep_linear --width 20 {SMALL_RATE}",
    "rbf_linear": f"{SINE} --model rbf_linear",
}
COMPARED = {  # further options of a run beside theory
    "cross_entropy": "--loss cross_entropy",
    "momentum": f"--client-optimizer momentum {SMALL_RATE} --hidden-layers 2",
}
CASES = ("sine", "digits")
EXPERIMENTS = (  # one or two of each paper
    "local_gd.fig1a",
    "local_gd.fig1d",
    "deep_linear.fig3",
    "fed_ensemble.corollary1",
    "fed_ensemble.stragglers",
    "ntk_fl.fig9",
)
THEOREMS = (
    "conformal.coverage",
    "deep_linear.convergence",
    "deep_linear.rounds",
    "fed_ensemble.bias_variance",
    "fed_ensemble.convergence",
    "fed_ensemble.ensemble_mean",
    "fed_ensemble.limit",
    "fed_ensemble.linearisation_gap",
    "fed_ensemble.networks",
    "fed_ensemble.second_order",
    "fed_ensemble.variational",
    "flow.centralised",
    "flow.exact",
    "flow.ledger",
    "local_gd.many_steps",
    "local_gd.max_margin",
    "local_gd.regression",
    "ntk_dfl.rounds",
    "ntk_fl.convergence",
    "ntk_fl.evolution",
    "ntk_fl.lemmas",
    "ntk_fl.weight_gap",
    "private.clipping",
    "private.law",
    "private.networks",
    "stale.rounds",
    "stale.stability",
)

RELATIVE = 1e-12  # the largest relative difference that counts as the same number
ROUNDING = 1e-12  # numbers that are both at most this large are rounding errors: the program computes in float64
ULPS = 1e-15  # a few units in the last place of a number near 1, from which a small number may have been computed
RECORD = "recorded.json"  # written last: a run without it is not recorded
VALUES = ("value", "uplink_bytes", "downlink_bytes")
NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")


def listed_runs() -> dict[str, str]:
    """Returns the command of each run under its name, whose first word is its group; the fastest groups come first.

    Of an option that a command has twice, the last one counts.
    """
    predict = "predict --num-rounds 3 --draws 4"
    compare = "compare --dataset digits --num-train 100 --num-test 50 --num-rounds 3 --num-clients 4 --draws 5"
    compare += " --widths 8 16 32"
    return {
        **{f"algorithm.{name}": f"{NETWORK} --algorithm {name} {more}" for name, more in ALGORITHMS.items()},
        **{f"option.{name}": f"{NETWORK} {more}" for name, more in OPTIONS.items()},
        **{f"model.{name}": f"{TRAIN} {STEPS} --model {name} {more}" for name, more in MODELS.items()},
        **{f"partition.{name}": f"{TRAIN} {STEPS} --partition {name} {more}" for name, more in PARTITIONS.items()},
        **{f"schedule.{name}": f"{NETWORK} {STEPS} --schedule {name} {more}" for name, more in SCHEDULES.items()},
        **{
            f"predict.{name}": f"{predict} {DIGITS} --num-clients 6 --algorithm {name} {more}"
            for name, more in RULES.items()
        },
        **{f"predict.{name}": f"{predict} {STEPS} {more}" for name, more in PREDICTED.items()},
        **{f"experiment.{name}": f"experiment {name} --scale smoke --seeds 0:2" for name in EXPERIMENTS},
        **{f"case.{c}.{seed}": f"compare --scale smoke --case {c} --seed {seed}" for c in CASES for seed in range(3)},
        **{f"compare.{name}": f"{compare} --algorithm {name} {more}" for name, more in RULES.items()},
        **{f"compare.{name}": f"{compare} {STEPS} --algorithm fed_avg {more}" for name, more in COMPARED.items()},
        **{f"check-theory.{name}": f"check-theory --only {name}" for name in THEOREMS},
    }


def chosen_runs(pattern: str) -> dict[str, str]:
    """Returns the listed runs whose name matches ``pattern``, as a shell matches the names of files."""
    return {name: command for name, command in listed_runs().items() if fnmatch.fnmatch(name, pattern)}


def words_of(command: str) -> list[str]:
    """Returns the words of a command as the command line takes them now: each option once, with its last values."""
    start, *options = re.split(r" (?=--)", command)
    last = {option.partition(" ")[0]: option for option in options}
    return [RENAMED.get(word, word) for word in shlex.split(" ".join([start, *last.values()]))]


# ---- recording ----


class Recorder(NamedTuple):
    """Where and how runs are recorded.

    Attributes:
        folder: Folder of the recording.
        variables: Environment of the runs.
        source: Digest of the package's source files when the recording began.
    """

    folder: Path
    variables: dict[str, str]
    source: str

    def record(self, name: str, command: str) -> bool:
        """Records one run, prints how it ended, and returns whether it left results, whatever its exit code."""
        words, began = words_of(command), time.monotonic()
        run = [sys.executable, "-m", "fedtangent", *words, "--output", name, "--overwrite"]
        result = self.folder / name / "result.json"
        result.unlink(missing_ok=True)  # of an interrupted recording
        ended = subprocess.run(run, cwd=self.folder, env=self.variables, capture_output=True, text=True)
        seconds = round(time.monotonic() - began, 1)
        _, source = find_source(self.folder, self.variables)
        if source != self.source:
            print(f"{name}: NOT RECORDED, the source of the package changed meanwhile", flush=True)
            return False
        if not result.is_file():
            print(f"{name}: NOT RECORDED, exit code {ended.returncode}: {ended.stderr.strip()[-500:]}", flush=True)
            return False
        result.with_name("output.txt").write_text(ended.stdout + ended.stderr)
        record = {"command": words, "exit_code": ended.returncode, "seconds": seconds, "source": source}
        result.with_name(RECORD).write_text(json.dumps(record, indent=2))
        print(f"{seconds:6.0f} s  {name}: exit code {ended.returncode}", flush=True)
        return True


def find_source(folder: Path, variables: dict[str, str]) -> tuple[Path, str]:
    """Returns the folder of the package that runs in ``folder`` import, and a digest of its source files."""
    find = "import importlib.util; print(importlib.util.find_spec('fedtangent').origin)"
    origin = subprocess.check_output([sys.executable, "-c", find], cwd=folder, env=variables, text=True)
    package, digest = Path(origin.strip()).parent, hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(str(path.relative_to(package)).encode() + path.read_bytes())
    return package, digest.hexdigest()[:16]


def read_records(folder: Path, names: list[str]) -> dict[str, dict[str, Any]]:
    """Returns command, exit code, seconds and source of those runs that are recorded in ``folder``."""
    paths = {name: folder / name / RECORD for name in names}
    return {name: json.loads(path.read_text()) for name, path in paths.items() if path.is_file()}


def write_tokens(path: Path) -> None:
    """Writes a data set of texts in which four users count, each in steps of its own, for networks that read tokens."""
    import numpy as np

    users, starts = np.divmod(np.arange(64), 16)
    texts = (starts[:, None] + (1 + users[:, None]) * np.arange(9)) % 11
    np.savez(path, x=texts[:, :-1], y=texts[:, -1], users=users)


def record(folder: Path, pattern: str, jobs: int, programs: Path | None) -> int:
    """Records the chosen runs that are not recorded yet, and returns the exit code: 1 if one was not recorded.

    Raises:
        SystemExit: The recording in ``folder`` is of another version of the package.
    """
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    write_tokens(folder / "tokens.npz")
    programs = (programs or folder.parent / "programs").resolve()
    variables = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(programs),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.01",
        "FEDTANGENT_CACHE": str(programs / "fedtangent"),
        "JAX_PLATFORMS": "cpu",
        "OPENBLAS_NUM_THREADS": "1",
        "MPLBACKEND": "Agg",
        "COLUMNS": "200",
    }
    package, source = find_source(folder, variables)
    others = {run["source"] for run in read_records(folder, list(listed_runs())).values()} - {source}
    if others:
        raise SystemExit(f"folder: got {folder}, which was recorded with another version than {package}")
    runs = chosen_runs(pattern)
    todo = {name: command for name, command in runs.items() if not read_records(folder, [name])}
    print(f"{package}, source {source}: {len(runs)} runs, {len(runs) - len(todo)} recorded before", flush=True)
    recorder = Recorder(folder, variables, source)
    with ThreadPoolExecutor(jobs) as pool:
        recorded = list(pool.map(recorder.record, todo, todo.values()))
    seconds: Counter[str] = Counter()
    for name, run in read_records(folder, list(runs)).items():
        seconds[name.partition(".")[0]] += run["seconds"]
    print("seconds of each group:", ", ".join(f"{group} {sum_:.0f}" for group, sum_ in seconds.items()))
    return int(not all(recorded))


# ---- comparing ----


class Difference(NamedTuple):
    """A place where two recordings of a run differ.

    Attributes:
        place: File and field.
        before: Text of the first recording.
        after: Text of the second recording.
        relative: The largest relative difference between their numbers, infinite for other words.
        rounding: Whether numbers differ by more than RELATIVE, but are no more than rounding errors.
    """

    place: str
    before: str
    after: str
    relative: float
    rounding: bool = False

    @property
    def off(self) -> bool:
        """Whether this is more than rounding."""
        return self.relative > RELATIVE and not self.rounding


def is_time(name: str) -> bool:
    """Returns whether a field or a metric of this name is a time, which no two runs share."""
    return "seconds" in name


def fields_of(content: Any, place: str) -> Iterator[tuple[str, str]]:
    """Yields place and text of each value in the ``content`` of a JSON file, except times."""
    if isinstance(content, dict):
        for name, value in content.items():
            if not is_time(name):
                yield from fields_of(value, f"{place}.{name}")
    elif isinstance(content, list):
        for index, value in enumerate(content):
            yield from fields_of(value, f"{place}[{index}]")
    else:
        yield place, json.dumps(content)


def read_fields(folder: Path) -> dict[str, str]:
    """Returns the text of each value of a recorded run under its place, in the order of the files.

    The place of a row of metrics.csv is its round, algorithm, seed, split and metric, and its number among equal ones.
    """
    fields = {"exit code": str(json.loads((folder / RECORD).read_text())["exit_code"])}
    fields |= fields_of(json.loads((folder / "result.json").read_text()), "result.json")
    if not (folder / "metrics.csv").is_file():
        return fields
    occurrences: Counter[str] = Counter()
    with (folder / "metrics.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            if not is_time(row["metric"]):
                key = ", ".join(text for name, text in row.items() if name not in VALUES and not is_time(name))
                occurrences[key] += 1
                number = f" ({occurrences[key]})" if occurrences[key] > 1 else ""
                fields |= {f"metrics.csv: {key}{number}: {name}": row[name] for name in VALUES}
    return fields


def compare_texts(place: str, before: str, after: str) -> Difference | None:
    """Returns how two texts differ in their numbers or words, or None if they are the same to the letter."""
    if before == after:
        return None
    if NUMBER.sub("#", before) != NUMBER.sub("#", after):
        return Difference(place, before, after, float("inf"))
    pairs = zip(map(float, NUMBER.findall(before)), map(float, NUMBER.findall(after)), strict=True)
    sizes = [(abs(a - b), max(abs(a), abs(b))) for a, b in pairs if a != b]
    relative = max((gap / size for gap, size in sizes), default=0.0)
    small = all(gap <= max(RELATIVE * size, ULPS) or size <= ROUNDING for gap, size in sizes)
    return Difference(place, before, after, relative, small and relative > RELATIVE)


def compare_runs(before: Path, after: Path) -> list[Difference]:
    """Returns all differences between two recordings of a run; a value that only one of them has is an infinite one."""
    first, second = read_fields(before), read_fields(after)
    differences = []
    for place in first | second:
        if place in first and place in second:
            differences.append(compare_texts(place, first[place], second[place]))
        else:
            texts = first.get(place, "missing"), second.get(place, "missing")
            differences.append(Difference(place, *texts, float("inf")))
    if first.keys() == second.keys() and list(first) != list(second):
        differences.append(Difference("order of rows or fields", "one", "another", 0.0))
    return [difference for difference in differences if difference]


def describe(differences: list[Difference]) -> str:
    """Returns one line on the differences of a run."""
    if not differences:
        return "identical bit for bit"
    off = [difference for difference in differences if difference.off]
    largest = max((d.relative for d in off or differences if not d.rounding), default=0.0)
    rounding = sum(difference.rounding for difference in differences)
    line = f"{len(off)} DIFFER, largest relative difference {largest:.1e}" if off else f"the same to {largest:.1e}"
    return line + (f"; {rounding} rounding errors differ" if rounding else "")


def compare(before: Path, after: Path, pattern: str, lines: int) -> int:
    """Prints how two recordings differ, run by run, and returns the exit code: 1 if a number changed or is missing."""
    counts: Counter[str] = Counter()
    for name in chosen_runs(pattern):
        absent = [str(folder) for folder in (before, after) if not read_records(folder, [name])]
        if absent:
            counts["missing"] += 1
            print(f"{name}: MISSING in {' and in '.join(absent)}")
            continue
        differences = compare_runs(before / name, after / name)
        counts["off" if any(d.off for d in differences) else "close" if differences else "identical"] += 1
        print(f"{name}: {describe(differences)}")
        ranked = sorted(differences, key=lambda d: (not d.off, not d.rounding, -d.relative))
        for difference in ranked[:lines]:
            kind = "rounding error" if difference.rounding else f"{difference.relative:.1e}"
            print(f"    {kind}: {difference.place}: {difference.before} -> {difference.after}")
        if len(ranked) > lines:
            print(f"    and {len(ranked) - lines} more (--lines)")
    print(
        f"{counts['identical']} runs identical bit for bit, {counts['close']} the same to {RELATIVE:.0e} except for "
        f"rounding errors, {counts['off']} differ, {counts['missing']} missing"
    )
    return int(bool(counts["off"] or counts["missing"]))


def main(words: list[str] | None = None) -> int:
    """Records or compares, and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="run the list, each run into a folder below FOLDER")
    recording.add_argument("folder", type=Path)
    recording.add_argument("--jobs", type=int, default=1, help="how many runs at a time (default: %(default)s)")
    recording.add_argument("--programs", type=Path, help="folder of compiled programs (default: FOLDER/../programs)")
    comparing = commands.add_parser("compare", help="compare two recordings")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    comparing.add_argument("--lines", type=int, default=8, help="differences shown of each run (default: %(default)s)")
    for command in (recording, comparing):
        command.add_argument("--only", default="*", metavar="PATTERN", help="names of runs, such as 'predict.*'")
    arguments = parser.parse_args(words)
    if not chosen_runs(arguments.only):
        parser.error(f"--only: got {arguments.only!r}, which is the name of no run")
    if arguments.command == "record":
        return record(arguments.folder, arguments.only, arguments.jobs, arguments.programs)
    return compare(arguments.before, arguments.after, arguments.only, arguments.lines)


if __name__ == "__main__":
    sys.exit(main())
