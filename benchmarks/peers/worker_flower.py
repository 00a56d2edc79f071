"""One measurement of Flower's simulation: FedAvg over Ray actors, PyTorch clients."""

from __future__ import annotations

import random
import time
from importlib.metadata import version
from typing import Any

import torch
import workloads
from flower_client import app as client_app
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord, RecordDict
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch_models import mean_loss, network, tensors
from workloads import WORKLOADS


def total_steps(replies: list[RecordDict], weighted_by: str) -> MetricRecord:
    """The client steps of a round's replies: what failed is not in it."""
    return MetricRecord({"steps": sum(int(reply["metrics"]["steps"]) for reply in replies)})


def serve(arguments: Any, grid: Grid) -> dict[str, Any]:
    """Warm-up rounds, then blocks of timed rounds until ``min_seconds`` are timed; the measurement."""
    workload = WORKLOADS[arguments.workload]
    problem = workloads.read(arguments.data)
    model, data = network(workload.name, problem.initial), tensors(workload.name, problem)
    before = mean_loss(model, *data)
    strategy = FedAvg(
        fraction_train=workload.clients_per_round / workload.num_clients,
        fraction_evaluate=0.0,
        min_train_nodes=workload.clients_per_round,
        min_available_nodes=workload.num_clients,
        train_metrics_aggr_fn=total_steps,
    )
    settings = {"workload": workload.name, "data": arguments.data, "seed": arguments.seed, "threads": arguments.threads}

    def rounds(arrays: ArrayRecord, count: int) -> tuple[ArrayRecord, int]:
        found = strategy.start(grid, arrays, num_rounds=count, train_config=ConfigRecord(dict(settings)))
        return found.arrays, sum(int(metrics["steps"]) for metrics in found.train_metrics_clientapp.values())

    arrays, _ = rounds(ArrayRecord(model.state_dict()), workload.warmup_rounds)
    seconds, timed, steps, final = 0.0, 0, 0, float("nan")
    while not timed or seconds < arguments.min_seconds:
        began = time.perf_counter()
        arrays, counted = rounds(arrays, arguments.rounds)
        seconds += time.perf_counter() - began
        timed, steps = timed + arguments.rounds, steps + counted
        if timed == arguments.rounds:
            model.load_state_dict(arrays.to_torch_state_dict())
            final = mean_loss(model, *data)
    versions = {name: version(name) for name in ("flwr", "ray", "torch")}
    return workloads.result(workload, timed, seconds, (before, final), steps, versions)


def main() -> None:
    arguments = workloads.worker_arguments()
    torch.set_num_threads(arguments.threads)
    random.seed(arguments.seed)  # Flower samples clients with it
    server_app = ServerApp()
    measured: list[dict[str, Any]] = []

    @server_app.main()
    def run(grid: Grid, context: Context) -> None:
        measured.append(serve(arguments, grid))

    run_simulation(
        server_app=server_app,
        client_app=client_app,
        num_supernodes=WORKLOADS[arguments.workload].num_clients,
        backend_config={
            "init_args": {"num_cpus": arguments.workers, "include_dashboard": False},
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        },
    )
    workloads.emit(measured[0])


if __name__ == "__main__":
    main()
