"""The workloads' networks in PyTorch, for the peers, from the same initial parameters."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from workloads import CLASSES, EMBEDDING, EVALUATION_BATCH, HIDDEN, LOGISTIC_INPUTS, SIDE, VOCABULARY, Problem


class LastOutput(nn.Module):
    """Embedding, two LSTM layers, and a dense layer on the last output."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, EMBEDDING)
        self.lstm = nn.LSTM(EMBEDDING, HIDDEN, num_layers=2, batch_first=True)
        self.dense0 = nn.Linear(HIDDEN, VOCABULARY)
        for layer in range(2):  # PyTorch has two biases a gate; one of them trained is the model of the others
            getattr(self.lstm, f"bias_hh_l{layer}").requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dense0(self.lstm(self.embedding(x))[0][:, -1])


def _network(name: str) -> nn.Module:
    if name == "logistic":
        return nn.ModuleDict({"dense0": nn.Linear(LOGISTIC_INPUTS, CLASSES)})
    if name == "mlp":
        return nn.ModuleDict({"dense0": nn.Linear(SIDE * SIDE, 100), "dense1": nn.Linear(100, CLASSES)})
    if name == "cnn":
        return nn.ModuleDict(
            {
                "conv0": nn.Conv2d(1, 32, 5, padding=2),
                "conv1": nn.Conv2d(32, 64, 5, padding=2),
                "dense0": nn.Linear((SIDE // 4) ** 2 * 64, 128),
                "dense1": nn.Linear(128, CLASSES),
            }
        )
    return LastOutput()


class Network(nn.Module):
    """A workload's network; ``loss`` and ``metrics`` are what pfl asks for."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.layers = _network(name)
        self.steps = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layers = self.layers
        if self.name == "logistic":
            return layers["dense0"](x)
        if self.name == "mlp":
            return layers["dense1"](torch.relu(layers["dense0"](x)))
        if self.name == "cnn":
            h = nn.functional.max_pool2d(torch.relu(layers["conv0"](x)), 2)
            h = nn.functional.max_pool2d(torch.relu(layers["conv1"](h)), 2)
            return layers["dense1"](torch.relu(layers["dense0"](h.flatten(1))))
        return layers(x)

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        return nn.functional.cross_entropy(self(x), y)

    def metrics(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, float]:
        return {}


def _recurrent(layers: nn.Module, start: dict[str, np.ndarray]) -> None:
    layers.embedding.weight.copy_(torch.as_tensor(start["embedding"]))
    for i in range(2):
        getattr(layers.lstm, f"weight_ih_l{i}").copy_(torch.as_tensor(start[f"lstm{i}.input"].T.copy()))
        getattr(layers.lstm, f"weight_hh_l{i}").copy_(torch.as_tensor(start[f"lstm{i}.recurrent"].T.copy()))
        getattr(layers.lstm, f"bias_ih_l{i}").copy_(torch.as_tensor(start[f"lstm{i}.bias"]))
        getattr(layers.lstm, f"bias_hh_l{i}").zero_()


@torch.no_grad()
def network(name: str, start: dict[str, np.ndarray]) -> Network:
    """The network of workload ``name`` with the initial parameters ``start``."""
    made = Network(name)
    if name == "lstm":
        _recurrent(made.layers, start)
    for key, value in start.items():
        layer, _, part = key.partition(".")
        if layer.startswith("conv") and part == "kernel":
            made.layers[layer].weight.copy_(torch.as_tensor(value.transpose(3, 2, 0, 1).copy()))
        elif layer.startswith("dense") and part == "kernel":
            kernel = value
            if name == "cnn" and layer == "dense0":  # rows in the order of channels-first images
                side = SIDE // 4
                kernel = value.reshape(side, side, 64, -1).transpose(2, 0, 1, 3).reshape(value.shape)
            owner = made.layers.dense0 if name == "lstm" else made.layers[layer]
            owner.weight.copy_(torch.as_tensor(kernel.T.copy()))
        elif part == "bias" and not layer.startswith("lstm"):
            owner = made.layers.dense0 if name == "lstm" else made.layers[layer]
            owner.bias.copy_(torch.as_tensor(value))
    return made


def tensors(name: str, problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """The data as PyTorch wants it: channels first, 64-bit symbols and labels."""
    x = torch.as_tensor(problem.x)
    if name == "cnn":
        x = x.permute(0, 3, 1, 2).contiguous()
    if name == "lstm":
        x = x.long()
    return x, torch.as_tensor(problem.y).long()


@torch.no_grad()
def mean_loss(model: Network, x: torch.Tensor, y: torch.Tensor) -> float:
    """Mean cross entropy over all the data."""
    total = 0.0
    for at in range(0, len(x), EVALUATION_BATCH):
        rows = slice(at, at + EVALUATION_BATCH)
        total += float(nn.functional.cross_entropy(model(x[rows]), y[rows], reduction="sum"))
    return total / len(x)
