"""One measurement of pfl-research: FederatedAveraging on the SimulatedBackend with a PyTorchModel.

With more than one worker it is started by ``torch.distributed.run``, pfl's own way to divide a cohort over processes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from importlib.metadata import version

import numpy as np
import torch
import workloads
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.hyperparam.base import NNTrainHyperParams
from pfl.internal.ops import pytorch_ops
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from torch_models import Network, mean_loss, network, tensors
from workloads import WORKLOADS, Workload

EVERLASTING = 10**9


class Watch(TrainingProcessCallback):
    """Times whole blocks of ``rounds`` rounds after the warm-up, until ``min_seconds`` are timed."""

    def __init__(self, workload: Workload, rounds: int, min_seconds: float, data: tuple[torch.Tensor, ...]) -> None:
        self.workload, self.rounds, self.min_seconds, self.data = workload, rounds, min_seconds, data
        self.seconds, self.timed, self.began, self.final_loss, self.steps = 0.0, 0, 0.0, math.nan, 0

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        done = central_iteration + 1 - self.workload.warmup_rounds
        if done == 0:
            self.steps = model.pytorch_model.steps
            self.began = time.perf_counter()
        if done <= 0 or done % self.rounds:
            return False, Metrics()
        self.seconds += time.perf_counter() - self.began
        self.timed += self.rounds
        if done == self.rounds:
            self.final_loss = mean_loss(model.pytorch_model, *self.data)
        # one decision for all processes, whose clocks differ
        total = pytorch_ops.distributed.all_reduce([torch.tensor([self.seconds])])[0].item()
        if total >= self.min_seconds * pytorch_ops.distributed.world_size:
            self.steps = model.pytorch_model.steps - self.steps
            return True, Metrics()
        self.began = time.perf_counter()
        return False, Metrics()


def cohorts(workload: Workload, seed: int) -> Iterator[int]:
    """Distinct clients, round after round; the same on every process."""
    rng = np.random.default_rng(seed)
    while True:
        yield from rng.permutation(workload.num_clients)[: workload.clients_per_round].tolist()


def clients(workload: Workload, data: tuple[torch.Tensor, ...], seed: int) -> FederatedDataset:
    """The federation; a visit sees the client's examples in a fresh order."""
    parts = [tuple(part) for part in zip(*(d.split(workload.examples_per_client) for d in data), strict=True)]
    generator = torch.Generator().manual_seed(seed + pytorch_ops.distributed.global_rank)
    stream = cohorts(workload, seed)

    def make(client: int) -> PyTorchTensorDataset:
        order = torch.randperm(workload.examples_per_client, generator=generator)
        return PyTorchTensorDataset(tuple(part[order] for part in parts[client]))

    return FederatedDataset(make, lambda: next(stream))


def train(workload: Workload, model: Network, backend: SimulatedBackend, watch: Watch) -> None:
    """Run FedAvg until the watch stops it."""
    wrapped = PyTorchModel(model, torch.optim.SGD, torch.optim.SGD(model.parameters(), lr=1.0))
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=EVERLASTING,
            evaluation_frequency=EVERLASTING,
            train_cohort_size=workload.clients_per_round,
            val_cohort_size=0,
        ),
        backend,
        wrapped,
        NNTrainHyperParams(
            local_num_epochs=1,
            local_learning_rate=workload.learning_rate,
            local_batch_size=workload.batch_size,
        ),
        callbacks=[watch],
        send_metrics_to_platform=False,
    )


def main() -> None:
    arguments = workloads.worker_arguments()
    torch.set_num_threads(arguments.threads)
    np.random.seed(arguments.seed)  # noqa: NPY002  (pfl's own draws: the same on every process)
    workload = WORKLOADS[arguments.workload]
    problem = workloads.read(arguments.data)
    data = tensors(workload.name, problem)
    model = network(workload.name, problem.initial)
    before = mean_loss(model, *data)
    federation = clients(workload, data, arguments.seed)
    backend = SimulatedBackend(federation, federation, postprocessors=[WeightByDatapoints()])
    watch = Watch(workload, arguments.rounds, arguments.min_seconds, data)
    train(workload, model, backend, watch)
    steps = int(pytorch_ops.distributed.all_reduce([torch.tensor([float(watch.steps)])])[0].item())
    if pytorch_ops.distributed.global_rank == 0:
        versions = {name: version(name) for name in ("pfl", "torch")}
        losses = (before, watch.final_loss)
        workloads.emit(workloads.result(workload, watch.timed, watch.seconds, losses, steps, versions))


if __name__ == "__main__":
    main()
