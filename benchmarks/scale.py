"""How far one machine goes: rounds a second of FedAvg for 10^4 to 10^8 clients, predicted, and checked against runs.

A round's seconds are predicted by a model of five terms, whose constants are measured here, each process on a core of
its own (``Constants``, ``predicted``):

    empty round + choice of the cohort + cohort x (client + steps x step) / devices + communication + evaluation share

Where more processes than cores run, each gets a share of a core: what every process computes takes longer accordingly.
Communication is what rounds of one client a process take beyond the other terms. Then whole runs that the fit has not
used are measured and compared with their prediction; each must be within ``--band``.
The control drops one term at a time: the named run must then be outside of the band. The last table predicts what was
not measured, with the memory that a process needs, and names the number of clients at which memory ends.

With ``--devices``, ``--steps-per-second``, ``--latency`` and ``--bandwidth`` the last table has a column for other
hardware. It is a prediction from these numbers and from nothing measured there.

    python benchmarks/scale.py --output results/bench
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

OUTPUTS, EXAMPLES, BATCH = 10, 4, 2  # of the network; of a client; of a local step
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
REPEATED = 3  # timings of which the least counts
SECONDS_OF_CHILD = 300


class Network(NamedTuple):
    """Sizes of the network that clients train."""

    features: int
    width: int  # 0: no hidden layer

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        hidden = self.width or self.features
        return (self.features + 1) * self.width + (hidden + 1) * OUTPUTS


SMALL, WIDE = Network(8, 0), Network(784, 512)


class Case(NamedTuple):
    """One measurement."""

    kind: str  # "round", "choice" or "evaluation"
    network: Network = SMALL
    clients: int = 10_000
    cohort: int = 100
    steps: int = 1
    processes: int = 1
    every: int = 0  # rounds between evaluations; 0 for none
    examples: int = 0  # that an evaluation reads
    rounds: int = 20
    algorithm: str = "fed_avg"

    def __str__(self) -> str:
        """Returns the case in a few words."""
        counts = f"{self.clients} clients, {self.cohort} a round, {self.steps} steps"
        return f"{self.kind}: {counts}, {self.network.parameters} parameters, {self.processes} processes"


class Training(NamedTuple):
    """Seconds of a round without communication and evaluation: of an empty round, of a client, of a local step."""

    round: float
    client: float
    step: float


class Merging(NamedTuple):
    """Cost of adding up the aggregate over processes: seconds of a round's collectives, bytes a second."""

    latency: float
    bandwidth: float


class Constants(NamedTuple):
    """Everything that the prediction reads."""

    cores: int
    training: dict[str, Training]  # by number of parameters
    permuted: float  # seconds for each client of all, where a permutation of all clients is drawn
    merging: dict[str, Merging]  # by number of processes
    evaluation: tuple[float, float]  # seconds of an evaluation, and of each example


class Hardware(NamedTuple):
    """Other hardware, from the command line."""

    devices: int
    steps_per_second: float  # of one device
    latency: float
    bandwidth: float


def predicted(constants: Constants, case: Case, without: str = "") -> float:
    """Returns the seconds of a round.

    Args:
        constants: Fitted constants.
        case: Run to predict.
        without: Name of a term that is left out, for the control: "choice", "training", "communication", "evaluation".
    """
    return sum(seconds for name, seconds in terms(constants, case).items() if name != without)


def terms(constants: Constants, case: Case) -> dict[str, float]:
    """Returns the seconds of each term of a round.

    Args:
        constants: Fitted constants.
        case: Run to predict.
    """
    training = constants.training[str(case.network.parameters)]
    devices, shared = min(case.processes, constants.cores), max(1.0, case.processes / constants.cores)
    fixed, each = constants.evaluation
    slots = -(-case.cohort // case.processes) * case.processes
    return {
        "empty round": training.round * shared,
        "choice": constants.permuted * case.clients * shared if is_permuted(case) else 0.0,
        "training": slots * (training.client + case.steps * training.step) / devices,
        "communication": communication(constants.merging, case),
        "evaluation": (fixed + each * case.examples) * shared / case.every if case.every else 0.0,
    }


def communication(merging: dict[str, Merging], case: Case) -> float:
    """Returns the seconds in which the processes add up a round's aggregate.

    Args:
        merging: Cost by number of processes.
        case: Run to predict.
    """
    if str(case.processes) not in merging:  # one process, or costs that are not fitted yet
        return 0.0
    cost = merging[str(case.processes)]
    return cost.latency + 4 * case.network.parameters / cost.bandwidth


def is_permuted(case: Case) -> bool:
    """Returns whether the schedule permutes all clients, as for cohorts of more than an eighth of them."""
    return 8 * case.cohort > case.clients


def on_other_hardware(constants: Constants, case: Case, hardware: Hardware) -> float:
    """Returns the seconds of a round on hardware that was not measured.

    Args:
        constants: Fitted constants, of which only the empty round and the choice are read.
        case: Run to predict.
        hardware: The hardware.
    """
    here = terms(constants, case._replace(processes=1))
    trained = case.cohort * case.steps / (hardware.steps_per_second * hardware.devices)
    merged = hardware.latency + 4 * case.network.parameters / hardware.bandwidth if hardware.devices > 1 else 0.0
    return here["empty round"] + here["choice"] + trained + merged


def data_bytes(network: Network, clients: int) -> int:
    """Returns the bytes of all clients' examples and of the partition on one device.

    Args:
        network: The network, which reads ``features`` numbers of each example.
        clients: Number of clients N.
    """
    return clients * EXAMPLES * 4 * (network.features + 2) + 4 * (clients + 1)


def state_bytes(network: Network, clients: int) -> int:
    """Returns the bytes of SCAFFOLD's control variates of all clients.

    Args:
        network: The network.
        clients: Number of clients N.
    """
    return 4 * network.parameters * clients


def memory_bytes(network: Network, clients: int, with_state: bool) -> int:
    """Returns the peak bytes that clients add to a process: data twice (as given and on the device), and states.

    Args:
        network: The network.
        clients: Number of clients N.
        with_state: Whether clients have states.
    """
    return 2 * data_bytes(network, clients) + (state_bytes(network, clients) if with_state else 0)


def most_clients(network: Network, memory: float, processes: int, with_state: bool) -> int:
    """Returns the largest number of clients whose data, and states if any, fit into memory.

    Args:
        network: The network.
        memory: Bytes of the machine.
        processes: Processes on the machine; each has a copy of its own.
        with_state: Whether clients have states.
    """
    each = memory_bytes(network, 10**6, with_state) / 10**6
    return min(int(memory / processes / each), (2**31 - 1) // EXAMPLES)  # rows are numbered in 32 bits


# ---- one measurement, in a process of its own ----


def algorithm_of(case: Case) -> Any:
    """Builds the algorithm of a case."""
    import fedtangent as ft

    widths = (case.network.width,) if case.network.width else ()
    model = ft.models.mlp(case.network.features, OUTPUTS, widths, parameterization="standard")
    schedule = ft.schedules.uniform_sampling(case.clients, case.cohort)
    work = ft.Work(steps=case.steps, batch_size=BATCH)
    return getattr(ft, case.algorithm)(model, schedule, client_learning_rate=0.05, work=work, loss="cross_entropy")


def data_of(case: Case) -> Any:
    """Builds the data of a case; every client has ``EXAMPLES`` examples."""
    import numpy as np

    import fedtangent as ft

    rng, n = np.random.default_rng(0), case.clients * EXAMPLES
    clients = ft.types.Partition(np.arange(n, dtype=np.int32), np.arange(0, n + 1, EXAMPLES, dtype=np.int32))
    x, y = rng.random((n, case.network.features), dtype=np.float32), rng.integers(0, OUTPUTS, n, dtype=np.int32)
    return ft.data.federated_data(x, y, clients)


def best(call: Callable[[], Any]) -> float:
    """Returns the least seconds of a few calls."""
    import jax

    seconds = []
    for _ in range(REPEATED):
        start = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def round_seconds(case: Case) -> float:
    """Measures a round of ``simulate``: the difference between a run of one round and a longer one, a round."""
    import jax
    import jax.numpy as jnp

    import fedtangent as ft

    algorithm, data = algorithm_of(case), data_of(case)
    x = jnp.ones((max(case.examples, 1), case.network.features))
    predict: Any = jax.jit(algorithm.predict)

    def measure(_: Any, state: Any) -> dict[str, Any]:
        return {"test": {"mean": float(predict(state, x).mean.mean())}}

    evaluation = ft.Evaluation(every=case.every, measure=measure) if case.every else ft.Evaluation()
    devices = ft.Devices("scan" if case.processes == 1 else "sharded:scan")

    def run(rounds: int) -> Any:
        return ft.simulate(algorithm, data, num_rounds=rounds, devices=devices, evaluation=evaluation).state

    jax.block_until_ready(run(1))
    return (best(lambda: run(1 + case.rounds)) - best(lambda: run(1))) / case.rounds


def choice_seconds(case: Case) -> float:
    """Measures the schedule's draw of a cohort."""
    import jax
    import jax.numpy as jnp

    schedule = algorithm_of(case).schedule

    @jax.jit
    def draws(key: Any) -> Any:
        def one(i: Any, total: Any) -> Any:
            return total + schedule.sample(key, (), i)[0].client[0]

        return jax.lax.fori_loop(0, case.rounds, one, jnp.int32(0))

    key = jax.random.key(0)
    draws(key).block_until_ready()
    return best(lambda: draws(key)) / case.rounds


def evaluation_seconds(case: Case) -> float:
    """Measures the predictions of the model at the examples of an evaluation."""
    import jax
    import jax.numpy as jnp

    algorithm = algorithm_of(case)
    state, x = algorithm.init(0, case.clients), jnp.ones((case.examples, case.network.features))
    predict: Any = jax.jit(algorithm.predict)
    float(predict(state, x).mean.mean())
    return best(lambda: [float(predict(state, x).mean.mean()) for _ in range(case.rounds)]) / case.rounds


KINDS = {"round": round_seconds, "choice": choice_seconds, "evaluation": evaluation_seconds}


def child(text: str) -> None:
    """Measures the case given as JSON, on one core, and prints its seconds and the process's peak of memory."""
    import resource

    options = json.loads(text)
    place = options.pop("place")
    case = Case(**options | {"network": Network(*options["network"])})
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, [sorted(os.sched_getaffinity(0))[place["id"] % CORES]])
    os.environ["JAX_PLATFORMS"] = "cpu"
    if case.processes > 1:
        from fedtangent._src.engine import processes

        processes.start(place["coordinator"], case.processes, place["id"])
    seconds = KINDS[case.kind](case)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"seconds": seconds, "peak_bytes": peak}))


# ---- all of them ----


def measured(case: Case) -> dict[str, Any]:
    """Returns the seconds and the peak of memory of a case, from processes started for it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{probe.getsockname()[1]}"
    started = []
    for index in range(case.processes):
        job = json.dumps({**case._asdict(), "place": {"coordinator": coordinator, "id": index}})
        command = [sys.executable, __file__, "--child", job]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    try:
        printed = [process.communicate(timeout=SECONDS_OF_CHILD) for process in started]
    finally:
        for process in started:
            process.kill()
    for process, (_, error) in zip(started, printed, strict=True):
        if process.returncode:
            reason = error.strip().splitlines()[-1:] or [f"exit code {process.returncode}"]
            raise SystemExit(f"scale.py: {case} failed: {reason[0]}")
    found: dict[str, Any] = json.loads(printed[0][0].splitlines()[-1])
    return {**found, "case": case}


def fitting(processes: list[int]) -> Iterator[Case]:
    """Returns the measurements from which the constants are fitted."""
    for cohort, steps in ((100, 1), (1000, 1), (100, 20)):
        yield Case("round", clients=100_000, cohort=cohort, steps=steps, rounds=40)
    for cohort, steps in ((1, 1), (16, 1), (1, 20)):
        yield Case("round", WIDE, clients=1000, cohort=cohort, steps=steps, rounds=20)
    yield Case("choice", clients=200_000, cohort=50_000)
    for examples in (1000, 50_000):
        yield Case("evaluation", cohort=100, examples=examples)
    for count in processes:
        for network in (SMALL, WIDE):
            yield Case("round", network, clients=1000, cohort=count, processes=count, rounds=40)


def checking(processes: list[int], most: int) -> Iterator[Case]:
    """Returns the whole runs that the prediction is compared with; none of them is fitted."""
    for clients in (10_000, 1_000_000, 10_000_000):
        if clients <= most:
            yield Case("round", clients=clients, cohort=500, steps=5)
    yield Case("round", clients=10_000, cohort=2000, steps=2, rounds=10)
    yield Case("round", clients=1_000_000, cohort=130_000, rounds=2)
    yield Case("round", clients=100_000, cohort=200, every=2, examples=20_000)
    yield Case("round", WIDE, clients=2000, cohort=6, steps=4)
    for count in processes:
        yield Case("round", clients=min(most, 1_000_000), cohort=1000, steps=5, processes=count)
        yield Case("round", WIDE, clients=2000, cohort=16, steps=4, processes=count)
    yield Case("round", clients=100_000, cohort=500, steps=5, algorithm="scaffold")
    if most >= 1_000_000:
        yield Case("round", clients=1_000_000, cohort=500, steps=5, algorithm="scaffold")


def fitted(rows: list[dict[str, Any]]) -> Constants:
    """Returns the constants, from the seconds of the cases of ``fitting``.

    Args:
        rows: A row for each case, as ``measured`` returns it.
    """
    training: dict[str, Training] = {}
    rounds = [row for row in rows if row["case"].kind == "round"]
    for network in dict.fromkeys(row["case"].network for row in rounds):
        alone = [row for row in rounds if row["case"].network == network and row["case"].processes == 1]
        training[str(network.parameters)] = _training(alone)
    (choice,) = (row for row in rows if row["case"].kind == "choice")
    few, many = (row for row in rows if row["case"].kind == "evaluation")
    each = max(many["seconds"] - few["seconds"], 0.0) / (many["case"].examples - few["case"].examples)
    evaluation = max(few["seconds"] - each * few["case"].examples, 0.0), each
    constants = Constants(CORES, training, choice["seconds"] / choice["case"].clients, {}, evaluation)
    merging = {}
    for count in sorted({row["case"].processes for row in rounds} - {1}):
        pair = [row for row in rounds if row["case"].processes == count]
        merging[str(count)] = _merging(constants, pair)
    return constants._replace(merging=merging)


def _merging(constants: Constants, pair: list[dict[str, Any]]) -> Merging:
    """Returns what a small and a large network's rounds take beyond the other terms, as latency and bandwidth."""
    (few, small), (many, large) = (
        (4 * row["case"].network.parameters, max(row["seconds"] - _alone(constants, row["case"]), 0.0)) for row in pair
    )
    second = max(large - small, 1e-9) / (many - few)
    return Merging(max(small - few * second, 0.0), 1 / second)


def _alone(constants: Constants, case: Case) -> float:
    """Returns the predicted seconds of a round of several processes without their communication."""
    return sum(seconds for name, seconds in terms(constants, case).items() if name != "communication")


def _training(rounds: list[dict[str, Any]]) -> Training:
    """Returns the seconds of round, client and step that three rows give: few clients, many clients, many steps."""
    few, many, long = rounds
    cohort, steps = few["case"].cohort, few["case"].steps
    step = max(long["seconds"] - few["seconds"], 0.0) / (cohort * (long["case"].steps - steps))
    client = max((many["seconds"] - few["seconds"]) / (many["case"].cohort - cohort) - steps * step, 0.0)
    return Training(max(few["seconds"] - cohort * (client + steps * step), 0.0), client, step)


CONTROLS = ("choice", "training", "communication", "evaluation")


def verdicts(constants: Constants, rows: list[dict[str, Any]], band: float) -> list[dict[str, Any]]:
    """Returns the checked rows with prediction and ratio, and the terms without which the prediction leaves the band.

    Args:
        constants: Fitted constants.
        rows: A row for each case of ``checking``.
        band: Largest factor between prediction and measurement.
    """
    judged = []
    for row in rows:
        ratios = {name: predicted(constants, row["case"], name) / row["seconds"] for name in ("", *CONTROLS)}
        inside = {name: 1 / band <= ratio <= band for name, ratio in ratios.items()}
        controls = [name for name in CONTROLS if inside[""] and not inside[name]]
        judged.append(
            {**row, "predicted": predicted(constants, row["case"]), "ratio": ratios[""], "controls": controls}
        )
    return judged


def gib(count: float) -> str:
    """Returns bytes as text of at most eight letters."""
    return f"{count / 2**30:.3g} GiB" if count >= 2**30 else f"{count / 2**20:.3g} MiB"


def power(count: int) -> str:
    """Returns a number of clients, as a power of ten if it is one."""
    return f"10^{len(str(count)) - 1}" if str(count).strip("0") == "1" and count >= 1000 else f"{count:,}"


def checked_table(rows: list[dict[str, Any]]) -> Any:
    """Returns the table of the checked runs."""
    from rich import box
    from rich.table import Table

    title = "checked: ms a round, predicted and measured"
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("clients", "cohort", "steps", "params", "proc.", "pred.", "meas.", "ratio"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("fails without")
    for row in rows:
        case = row["case"]
        notes = ["SCAFFOLD"] if case.algorithm == "scaffold" else []
        notes += row["controls"]
        counts = power(case.clients), f"{case.cohort:,}", str(case.steps), str(case.network.parameters)
        seconds = f"{1e3 * row['predicted']:.3g}", f"{1e3 * row['seconds']:.3g}", f"{row['ratio']:.2f}"
        table.add_row(*counts, str(case.processes), *seconds, ", ".join(notes))
    return table


def predicted_rows(
    constants: Constants, processes: list[int], memory: float, hardware: Hardware | None
) -> list[dict[str, Any]]:
    """Returns the rows of the predicted table.

    Args:
        constants: Fitted constants.
        processes: Numbers of processes, besides 1.
        memory: Bytes of this machine.
        hardware: Other hardware, or None.
    """
    rows: list[dict[str, Any]] = []
    for clients in (10**4, 10**5, 10**6, 10**7, 10**8):
        for cohort in (100, 1000, 10_000):
            row: dict[str, Any] = {"clients": clients, "cohort": cohort, "data_bytes": data_bytes(SMALL, clients)}
            row["state_bytes"] = state_bytes(SMALL, clients)
            for count in (1, *processes):
                case = Case("round", clients=clients, cohort=cohort, steps=5, processes=count)
                fits = clients <= most_clients(SMALL, memory, count, False)
                row[f"rounds_per_second_{count}"] = 1 / predicted(constants, case) if fits else None
            if hardware is not None:
                case = Case("round", clients=clients, cohort=cohort, steps=5)
                row["rounds_per_second_elsewhere"] = 1 / on_other_hardware(constants, case, hardware)
            rows.append(row)
    return rows


def memory_rows(checked: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns predicted and measured memory of the runs of one process, beyond that of the run of fewest clients.

    Args:
        checked: Rows of the checked runs.
    """
    alone = [row for row in checked if row["case"].network == SMALL and row["case"].processes == 1]
    least = min(row["peak_bytes"] for row in alone)
    rows = []
    for row in alone:
        case = row["case"]
        if case.clients >= 10**6:
            predicted_bytes = memory_bytes(SMALL, case.clients, case.algorithm == "scaffold")
            rows.append(
                {
                    "clients": case.clients,
                    "algorithm": case.algorithm,
                    "predicted_bytes": predicted_bytes,
                    "measured_bytes": row["peak_bytes"] - least,
                }
            )
    return rows


def predicted_table(rows: list[dict[str, Any]], processes: list[int], hardware: Hardware | None) -> Any:
    """Returns the table of predictions."""
    from rich import box
    from rich.table import Table

    title = "predicted: rounds a second of 5 steps; memory: more than this machine has"
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    columns = {f"rounds_per_second_{count}": f"{count} proc." for count in (1, *processes)}
    if hardware is not None:
        columns["rounds_per_second_elsewhere"] = f"{hardware.devices} dev.*"
    for name in ("clients", "cohort", *columns.values(), "data", "SCAFFOLD"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        rates = ["memory" if row[name] is None else f"{row[name]:,.3g}" for name in columns]
        sizes = gib(row["data_bytes"]), gib(row["state_bytes"])
        table.add_row(power(row["clients"]), f"{row['cohort']:,}", *rates, *sizes)
    return table


def described(constants: Constants) -> str:
    """Returns the fitted constants as text."""
    lines = [
        f"{size} parameters: empty round {1e6 * cost.round:.0f} us, client {1e6 * cost.client:.1f} us, step "
        f"{1e6 * cost.step:.2f} us"
        for size, cost in constants.training.items()
    ]
    lines += [
        f"{count} processes: latency {1e6 * m.latency:.0f} us a round, {m.bandwidth / 1e6:.0f} MB/s"
        for count, m in constants.merging.items()
    ]
    fixed, each = constants.evaluation
    lines.append(f"permutation {1e9 * constants.permuted:.0f} ns a client")
    lines.append(f"evaluation {1e6 * fixed:.0f} us, and {1e9 * each:.0f} ns an example; {constants.cores} cores")
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("results/bench"), help="folder for scale.json")
    parser.add_argument("--processes", type=int, nargs="*", default=[2, 4], help="numbers of processes, besides 1")
    parser.add_argument(
        "--most-clients", type=int, default=10_000_000, help="clients of the largest run that is checked"
    )
    parser.add_argument("--band", type=float, default=1.5, help="largest factor between prediction and measurement")
    other = parser.add_argument_group("other hardware, predicted from these numbers alone")
    other.add_argument("--devices", type=int, default=8)
    other.add_argument("--steps-per-second", type=float, help="local steps a second of one device")
    other.add_argument("--latency", type=float, default=30e-6, help="seconds of a round's collectives")
    other.add_argument("--bandwidth", type=float, default=10e9, help="bytes a second of the all-reduce")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is None and (options.band <= 1 or min(options.processes, default=2) < 2):
        parser.error(
            f"got --band {options.band} and --processes {options.processes}, must be above 1, and at least 2 each"
        )
    return options


def main() -> None:
    """Measures, fits, checks, prints three parts, and writes ``scale.json``."""
    options = parse()
    if options.child:
        child(options.child)
        return
    from rich.console import Console

    from fedtangent._src.storage import replacing

    memory = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    to_fit, to_check = list(fitting(options.processes)), list(checking(options.processes, options.most_clients))
    rows = []
    for number, case in enumerate([*to_fit, *to_check], 1):
        rows.append(measured(case))
        text = f"{number}/{len(to_fit) + len(to_check)} {case}: {1e3 * rows[-1]['seconds']:.3g} ms"
        print(text, file=sys.stderr, flush=True)
    constants = fitted(rows[: len(to_fit)])
    checked = verdicts(constants, rows[len(to_fit) :], options.band)
    hardware = None
    if options.steps_per_second:
        hardware = Hardware(options.devices, options.steps_per_second, options.latency, options.bandwidth)
    table = predicted_rows(constants, options.processes, memory, hardware)
    console = Console(width=None if sys.stdout.isatty() else 80)
    print(described(constants))
    console.print(checked_table(checked))
    console.print(predicted_table(table, options.processes, hardware))
    if hardware is not None:
        print("* predicted from --devices, --steps-per-second, --latency and --bandwidth; not measured")
    limits = {
        f"{name}, {count} processes": most_clients(SMALL, memory, count, with_state)
        for name, with_state in (("FedAvg", False), ("SCAFFOLD", True))
        for count in (1, *options.processes)
    }
    for row in memory_rows(checked):
        sizes = gib(row["predicted_bytes"]), gib(row["measured_bytes"])
        print(f"{power(row['clients'])} clients, {row['algorithm']}: memory predicted {sizes[0]}, measured {sizes[1]}")
    print(f"memory of {gib(memory)} ends at so many clients:")
    print("\n".join(f"  {name}: {count:.3g}" for name, count in limits.items()))
    result = {
        "constants": constants._asdict(),
        "fitted": rows[: len(to_fit)],
        "checked": checked,
        "predicted": table,
        "most_clients": limits,
        "memory": memory_rows(checked),
        "band": options.band,
        "memory_bytes": memory,
    }
    options.output.mkdir(parents=True, exist_ok=True)
    with replacing(options.output / "scale.json") as path:
        path.write_text(json.dumps(result, indent=1, default=str) + "\n")
    outside = [str(row["case"]) for row in checked if not 1 / options.band <= row["ratio"] <= options.band]
    powerless = (
        [] if any("communication" in row["controls"] for row in checked) else ["no run fails without communication"]
    )
    if outside or (options.processes and powerless):
        sys.exit("scale.py: " + "; ".join([*(f"outside the band: {text}" for text in outside), *powerless]))


if __name__ == "__main__":
    main()
