"""What ``train`` lets travel, and in what form: projection with a shared secret seed, and which options go together."""

from __future__ import annotations

import math
import os
from pathlib import Path

from fedtangent.cli.options import TrainOptions
from fedtangent.data import Dataset
from fedtangent.data.projection import projected
from fedtangent.federated.wire.key_server import KeyFile, generate_keys, hand_out, open_key_file, with_key_exchange
from fedtangent.federated.wire.secure_aggregation import sum_only
from fedtangent.federated.wire.sparsify import check_sparsity
from fedtangent.federated.wire.subsample import check_beta
from fedtangent.types import Algorithm

JACOBIANS = ("ntk_fl", "cp_ntk_fl")
KEY_FILE = "FEDTANGENT_KEY_FILE"


def check_wire(o: TrainOptions) -> None:
    """Raise ``ValueError`` for options of the wire that are out of range or do not go together; touches no file."""
    check_beta(o.beta)
    check_sparsity(o.sparsity)
    if o.secure_aggregation and o.algorithm in (*JACOBIANS, "centralised"):
        raise sum_only(o.algorithm, "Jacobians" if o.algorithm in JACOBIANS else "examples")
    if o.algorithm in (*JACOBIANS, "centralised") and o.max_update_norm is not None and o.max_update_norm < math.inf:
        raise ValueError(
            f"max_update_norm: is a bound on updates, of which {o.algorithm} has none: give inf, to reject what is not "
            "finite"
        )
    if o.sparsity > 0 and o.channel != "lossless":
        raise ValueError(f"sparsity: sends by top_k, but channel is {o.channel!r}: give one of the two")
    if o.projection is None:
        if o.key_file is not None:
            raise ValueError("key_file: is used with projection only")
        return
    if o.projection < 1:
        raise ValueError(f"projection: got {o.projection}, must be at least 1")
    if o.model == "cnn":
        raise ValueError("projection: gives vectors, but the model cnn needs images")
    path = key_path(o)
    if o.resume and not path.exists():
        raise ValueError(f"key_file: there is no {path}, but a resumed run needs the seed that it began with")


def key_path(o: TrainOptions) -> Path:
    """Where the projection's seed is kept; raises ``ValueError`` if nothing says so."""
    named = o.key_file or os.environ.get(KEY_FILE)
    if not named:
        raise ValueError(f"projection: needs key_file (or ${KEY_FILE}), where its secret seed is kept: made if absent")
    return Path(named)


def seed_digest(o: TrainOptions) -> str | None:
    """Tells one projection's seed from another without telling it; None without a projection."""
    return None if o.projection is None else open_key_file(key_path(o)).digest


def project(o: TrainOptions, loaded: Dataset, num_clients: int) -> Dataset:
    """``loaded`` as clients see it that were handed the seed by the key server: each opens its own box."""
    if o.projection is None:
        return loaded
    inputs = loaded.x_train[0].size
    if o.projection > inputs:
        raise ValueError(f"projection: got {o.projection}, larger than the {inputs} numbers of an example")
    kept: KeyFile = open_key_file(key_path(o))
    opened = hand_out(kept.seed, (generate_keys() for _ in range(num_clients)))
    if any(seed != kept.seed for seed in opened):
        raise AssertionError("a client was handed another seed")
    return projected(loaded, o.projection, opened[0].reveal())


def exchanged(o: TrainOptions, algorithm: Algorithm, num_clients: int) -> Algorithm:
    """``algorithm`` whose ledger has the seeds that were handed out before the first round."""
    return algorithm if o.projection is None else with_key_exchange(algorithm, num_clients)
