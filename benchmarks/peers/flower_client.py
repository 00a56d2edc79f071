"""The client of the Flower measurement; imported, and its data read once, by every actor of the simulation."""

from __future__ import annotations

import functools
import os

import torch
import workloads
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch_models import Network, network, tensors

app = ClientApp()


@functools.cache
def _prepared(path: str, name: str, seed: int) -> tuple[Network, tuple[torch.Tensor, torch.Tensor], torch.Generator]:
    problem = workloads.read(path)
    generator = torch.Generator().manual_seed(hash((seed, os.getpid())))
    return network(name, problem.initial), tensors(name, problem), generator


@app.train()
def train(message: Message, context: Context) -> Message:
    """One visit: a pass over the client's examples in a fresh order, plain SGD."""
    config = message.content["config"]
    torch.set_num_threads(int(config["threads"]))
    workload = workloads.WORKLOADS[str(config["workload"])]
    model, (x, y), generator = _prepared(str(config["data"]), workload.name, int(config["seed"]))
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=workload.learning_rate)
    size = workload.examples_per_client
    start = int(context.node_config["partition-id"]) * size
    order = start + torch.randperm(size, generator=generator)
    before = model.steps
    for rows in order.split(workload.batch_size):
        optimizer.zero_grad()
        model.loss(x[rows], y[rows]).backward()
        optimizer.step()
    metrics = MetricRecord({"num-examples": size, "steps": model.steps - before})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=message)
