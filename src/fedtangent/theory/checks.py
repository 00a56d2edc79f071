"""Checks of what the theory is given, before any work starts: one ValueError that names the argument."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedtangent.checks import finite, real_array, symmetric
from fedtangent.kernels.gram import KernelBlocks, check_covariance
from fedtangent.theory.precision import is_concrete
from fedtangent.types import Cohort, Partition

OUTPUTS = ("shared", "full")


def check_targets(y_train: Any) -> np.ndarray:
    """Targets as float64 [n, C]."""
    targets = real_array("y_train", y_train)
    if targets.ndim != 2 or 0 in targets.shape:
        raise ValueError(f"y_train must be [n, C] with n, C >= 1, got shape {targets.shape}")
    finite("y_train", targets)
    return targets


def check_blocks(k: KernelBlocks, target_shape: tuple[int, ...], outputs: str) -> KernelBlocks:
    """The blocks as float64, their shapes agreeing with the targets [n, C] and with each other."""
    if outputs not in OUTPUTS:
        raise ValueError(f"outputs must be one of {OUTPUTS}, got {outputs!r}")
    n = target_shape[0] * (target_shape[1] if outputs == "full" else 1)
    ntk_train = symmetric("ntk_train", k.ntk_train)
    if len(ntk_train) != n:
        raise ValueError(
            f'ntk_train must be [{n}, {n}] for y_train {target_shape} and outputs="{outputs}", got {ntk_train.shape}'
        )
    m = np.shape(k.ntk_test_train)[0] if np.ndim(k.ntk_test_train) == 2 else 0
    if outputs == "full" and m % target_shape[1]:
        raise ValueError(f"ntk_test_train must have a multiple of C = {target_shape[1]} rows, got {m}")
    shapes = {
        "ntk_test_train": (m, n),
        "nngp_train": (n, n),
        "nngp_test_train": (m, n),
        "nngp_test": (m, m),
        "ntk_test": (m, m),
    }
    checked: dict[str, np.ndarray | None] = {"ntk_train": ntk_train}
    for name, shape in shapes.items():
        block = getattr(k, name)
        if block is None and name != "ntk_test_train":
            checked[name] = None
            continue
        if np.shape(block) != shape or m == 0:
            raise ValueError(f"{name} must be [m, n] blocks of one k, here {shape} with m >= 1, got {np.shape(block)}")
        array = real_array(name, block)
        finite(name, array)
        checked[name] = symmetric(name, array) if name in ("nngp_train", "nngp_test", "ntk_test") else array
    blocks = KernelBlocks(**checked)  # type: ignore[arg-type]
    check_covariance(blocks)
    return blocks


def check_partition(partition: Partition, n: int) -> Partition:
    """Indices within the n training rows, offsets that cut them into clients; overlap between clients is allowed."""
    indices, offsets = np.asarray(partition.indices), np.asarray(partition.offsets)
    for name, array in (("indices", indices), ("offsets", offsets)):
        if not np.issubdtype(array.dtype, np.integer):
            raise ValueError(f"partition.{name} must be integers, got {array.dtype}")
    if indices.ndim != 1 or offsets.ndim != 1 or len(offsets) < 2:
        raise ValueError(f"partition must hold indices [m] and offsets [N + 1], got {indices.shape}, {offsets.shape}")
    if offsets[0] != 0 or offsets[-1] != len(indices) or np.any(np.diff(offsets) < 0):
        raise ValueError(f"partition.offsets must rise from 0 to len(indices) = {len(indices)}, got {offsets}")
    if len(indices) and (indices.min() < 0 or indices.max() >= n):
        raise ValueError(
            f"partition.indices must lie in 0..{n - 1} (the rows of y_train), got {indices.min()}..{indices.max()}"
        )
    return Partition(indices, offsets)


def check_cohorts(cohorts: Cohort, sizes: np.ndarray, num_models: int | None) -> tuple[np.ndarray, np.ndarray, int]:
    """Client and model of every slot [R, S] and the number of models, consistent with clients of these sizes.

    Empty slots (weight 0) may hold anything; they come back as client 0 and model 0.
    """
    client, model = np.asarray(cohorts.client), np.asarray(cohorts.model)
    shape = np.shape(cohorts.weight)
    if client.ndim != 2 or client.shape != model.shape or client.shape != shape:
        shapes = f"{client.shape}, {model.shape}, {shape}"
        raise ValueError(f"cohorts must hold client, model and weight of one shape [R, S], got {shapes}")
    if 0 in client.shape:
        raise ValueError(f"cohorts must hold at least one round of one slot, got [R, S] = {list(client.shape)}")
    for name, values in (("client", client), ("model", model)):
        if not np.issubdtype(values.dtype, np.integer):
            raise ValueError(f"cohorts.{name} must be integers, got {values.dtype}")
    present = present_slots(cohorts)
    if num_models is None:
        num_models = int(model[present].max()) + 1 if present.any() else 1
    if isinstance(num_models, bool) or not isinstance(num_models, (int, np.integer)) or num_models < 1:
        raise ValueError(f"num_models must be an integer >= 1, got {num_models!r}")
    num_models = int(num_models)
    for name, values, count in (("client", client, len(sizes)), ("model", model, num_models)):
        wrong = present & ((values < 0) | (values >= count))
        if wrong.any():
            r, s = (int(i) for i in np.argwhere(wrong)[0])
            raise ValueError(f"cohorts.{name} must lie in 0..{count - 1}, got {values[r, s]} in round {r}, slot {s}")
    client, model = np.where(present, client, 0), np.where(present, model, 0)
    empty = present & (sizes[client] == 0)
    if empty.any():
        r, s = (int(i) for i in np.argwhere(empty)[0])
        raise ValueError(f"client {client[r, s]} holds no examples but has a positive weight in round {r}, slot {s}")
    return client, model, num_models


def present_slots(cohorts: Cohort) -> np.ndarray:
    """Which slots hold a client, [R, S] bool; all of them where the weights are traced."""
    if not is_concrete(cohorts.weight):
        return np.ones(np.shape(cohorts.weight), bool)
    weight = real_array("cohorts.weight", cohorts.weight)
    if not np.all(np.isfinite(weight)) or np.any(weight < 0):
        raise ValueError("cohorts.weight must be finite and >= 0 (0 marks an empty slot)")
    return weight > 0


def check_steps(local_steps: Any, num_clients: int) -> np.ndarray:
    """Local steps of every client, [N] int64."""
    steps = np.asarray(local_steps)
    if steps.shape not in ((), (num_clients,)):
        raise ValueError(f"local_steps must be a number or one per client [{num_clients}], got shape {steps.shape}")
    if not np.issubdtype(steps.dtype, np.integer) or np.any(steps < 1):
        raise ValueError(f"local_steps must be integers >= 1, got {local_steps}")
    return np.broadcast_to(steps, (num_clients,)).astype(np.int64)


def check_rate(name: str, rate: Any, shapes: Sequence[tuple[int, ...]]) -> None:
    """A learning rate of an allowed shape, positive and finite where its value is known."""
    if is_concrete(rate):
        real_array(name, rate)
    if np.shape(rate) not in shapes:
        raise ValueError(f"{name} must have one of the shapes {list(shapes)}, got {np.shape(rate)}")
    if is_concrete(rate):
        value = np.asarray(rate, np.float64)
        if not np.all(np.isfinite(value)) or np.any(value <= 0):
            raise ValueError(f"{name} must be finite and > 0, got {rate}")


def check_rows(name: str, value: Any) -> np.ndarray:
    """Whole numbers as a flat array."""
    try:
        rows = np.asarray(value).reshape(-1)
    except ValueError as error:  # rows of different lengths
        raise ValueError(f"{name} must be training rows, got {value!r}") from error
    if len(rows) and not np.issubdtype(rows.dtype, np.integer):
        raise ValueError(f"{name} must be training rows, got {value!r}")
    return rows


def check_kind(name: str, value: Any, kind: type) -> None:
    """A value of the type that an argument is to have."""
    if not isinstance(value, kind):
        raise ValueError(f"{name} must be a {kind.__name__}, got {value!r:.60}")


def check_blocks_semidefinite(smallest: np.ndarray, largest: np.ndarray) -> None:
    """No client's own block of Theta has an eigenvalue below 0 by more than rounding."""
    for i in np.flatnonzero(smallest < -1e-6 * np.maximum(largest, np.abs(smallest).max(initial=0.0))):
        raise ValueError(
            f"ntk_train must be positive semidefinite, but the block of client {i} has eigenvalue {smallest[i]:.3g}"
        )
