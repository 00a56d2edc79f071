"""NTK-FL: the server computes the tangent kernel of the cohort's examples and trains the model with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Num, Shaped

from fedtangent._src.checks import instance, whole
from fedtangent._src.federated.aggregate import stack
from fedtangent._src.federated.algorithms.entry import recipe
from fedtangent._src.federated.compose import Parts, compose, sequentially
from fedtangent._src.federated.ntk_fl import Evolution, ntk_server, send_examples, sparse_linearise
from fedtangent._src.federated.ntk_fl.options import probabilities
from fedtangent._src.federated.wire.channel import jacobians
from fedtangent._src.federated.wire.sparsify import check_sparsity
from fedtangent._src.federated.wire.subsample import subsampled
from fedtangent._src.optimizers import Rate, check_rate
from fedtangent._src.types import (
    Accept,
    Algorithm,
    AnyArray,
    Composition,
    FederatedData,
    Model,
    Schedule,
    Server,
    Training,
)

EVOLVES = "its server evolves a kernel (theory.ntk_evolution); nearest is fed_avg, with which `compare` compares it"


@dataclasses.dataclass(frozen=True)
class Pooling:
    """Options of NTK-FL's server: limits of its pool of examples, which messages count, and validation examples.

    By the loss on the validation examples the server chooses the number of gradient steps.
    """

    validation: tuple[Shaped[AnyArray, "m ..."], Num[AnyArray, "m ..."]] | None = None
    """Examples x [m, ...] and y [m, C] at the server by whose loss the number of gradient steps is chosen (default: by
    the loss on the pooled examples); charged once, as sent up."""
    pool_size: int | None = None
    """The most examples that one model pools in a round, which is the size of the kernel (default: no bound).
    ``info["examples_dropped"]`` counts the others."""
    slots_per_model: int | None = None
    """The most clients that one model pools in a round (default: all); ``info["dropped"]`` counts the others."""
    accept: Accept | None = None
    """Which messages the server counts (default: all)."""


@dataclasses.dataclass(frozen=True)
class Compression:
    """Options by which CP-NTK-FL sends and reveals less; each works without the others, and all are off by default."""

    beta: float = 1.0
    """Share of its examples that a client uses in a round."""
    sparsity: float = 0.0
    """Share of the numbers of each example's Jacobian, the smallest, that is set to zero."""
    value_bits: int | None = None
    """Bits of a Jacobian's number on the wire, 10 to 32 (default: those of the parameters)."""
    shuffle: bool = False
    """A shuffling server permutes the rows of all clients' Jacobians, outputs and targets together."""


@recipe(
    papers=("yue2022",),
    parts="Jacobians; pool; kernel evolution",
    sends="Jacobians",
    python_only=("kernel_bytes", "slots_per_model", "value_bits"),
)
def ntk_fl(
    model: Model,
    schedule: Schedule,
    learning_rate: Rate | None = None,
    loss: str | None = None,
    evolution: Evolution = Evolution(),
    pooling: Pooling = Pooling(),
) -> Algorithm:
    """Builds NTK-FL: clients send Jacobians, the server evolves the kernel (Yue et al., ICML 2022, section 4.1).

    From the Jacobians the server computes the tangent kernel of the pooled examples, and by it the weights that
    gradient descent of the linearised network reaches after several numbers of steps; it keeps the best
    (``ntk_fl.ntk_evolve``). If a round's learning rate is above the largest stable one, by default the model stays
    unchanged, and ``info["status"]`` says so (``Evolution.unstable``). ``subsample.largest_sample`` of the partition is
    a pool size that drops no example.

    Args:
        model: Network whose kernel is evolved.
        schedule: Which client sends its Jacobians to which model in which round.
        learning_rate: Step size of gradient descent on the linearised network, a number or a schedule of the round. The
            loss is half the squared error, averaged over examples and outputs, or the mean cross entropy of labels.
        loss: squared_error or cross_entropy (default: the loss of ``evolution``).
        evolution: Candidate numbers of gradient steps, which kernel, and how gradient descent is computed.
        pooling: Sizes of the pool, and the examples by whose loss the number of gradient steps is chosen.

    Raises:
        ValueError: No rate, or an argument of the wrong type or range. In a run: JAX is not in 64-bit mode
            (``enable_x64``).
    """
    return evolving("ntk_fl", model, schedule, learning_rate, of_loss(evolution, loss), pooling)


@recipe(
    papers=("yue2022",),
    parts="fewer, sparse Jacobians; shuffled pool; kernel evolution",
    sends="Jacobians",
    python_only=("kernel_bytes", "slots_per_model", "value_bits"),
)
def cp_ntk_fl(
    model: Model,
    schedule: Schedule,
    learning_rate: Rate | None = None,
    loss: str | None = None,
    evolution: Evolution = Evolution(),
    pooling: Pooling = Pooling(),
    compression: Compression = Compression(),
) -> Algorithm:
    """Builds CP-NTK-FL: NTK-FL that sends less and reveals less of the data (Yue et al., ICML 2022, section 4.2).

    With all options of ``compression`` off it is ``ntk_fl``. The paper's random projection is not part of it: project
    the data before (``data.projected``, with the seed of ``wire.key_server``) and build the model for the projected
    inputs. The wire ledger charges, for each example in use, the kept numbers of its Jacobian, their positions (as
    indices or a bitmap, whichever is smaller), the outputs and the targets.

    Args:
        model: Network whose kernel is evolved.
        schedule: Which client sends its Jacobians to which model in which round.
        learning_rate: Step size of gradient descent on the linearised network, a number or a schedule of the round.
        loss: squared_error or cross_entropy (default: the loss of ``evolution``).
        evolution: Candidate numbers of gradient steps, which kernel, and how gradient descent is computed. Its
            ``linearise`` must be None, because the sparsity decides it.
        pooling: Sizes of the pool, and the examples by whose loss the number of gradient steps is chosen.
        compression: Share of examples, sparsity, bits and shuffling.

    Raises:
        ValueError: A beta outside (0, 1], a sparsity outside [0, 1), value_bits outside 10 .. 32, a sparsity or
            value_bits for a model in half precision, an ``evolution`` with a ``linearise``, and as ``ntk_fl`` raises.
    """
    if evolution.linearise is not None:
        raise ValueError("linearise: got a function, must be None for cp_ntk_fl, whose sparsity decides it")
    return evolving("cp_ntk_fl", model, schedule, learning_rate, of_loss(evolution, loss), pooling, compression)


def of_loss(evolution: Evolution, loss: str | None) -> Evolution:
    """Returns ``evolution`` with its loss replaced by another.

    Args:
        evolution: Options of the evolution.
        loss: Name of the loss; None to keep the loss of ``evolution``.

    Raises:
        ValueError: An unknown loss, or one that the method of ``evolution`` cannot compute.
    """
    return evolution if loss is None else dataclasses.replace(evolution, loss=loss)


def _unchanged(server: Server, parts: Parts) -> tuple[Server, Parts]:
    return server, parts


def evolving(
    name: str,
    model: Model,
    schedule: Schedule,
    learning_rate: Rate | None,
    evolution: Evolution,
    pooling: Pooling,
    compression: Compression = Compression(),
    changed: Callable[[Server, Parts], tuple[Server, Parts]] = _unchanged,
) -> Algorithm:
    """Builds an algorithm whose server pools the Jacobians of the clients' examples and evolves their kernel.

    Args:
        name: Name of the algorithm.
        model: Network whose kernel is evolved.
        schedule: Which client sends its Jacobians to which model in which round.
        learning_rate: Step size of gradient descent, a number or a schedule of the round, not None.
        evolution: Options of the evolution.
        pooling: Sizes of the pool, and the examples by whose loss the number of gradient steps is chosen.
        compression: Share of examples, sparsity, bits and shuffling (``cp_ntk_fl``); by default all off.
        changed: ``(server, parts) -> (server, parts)``: changes the server, which updates one model at a time, and the
            further parts; by default nothing.

    Raises:
        ValueError: No learning rate, or an argument of the wrong type or range.
    """
    instance("model", model, Model)
    instance("schedule", schedule, Schedule)
    if learning_rate is None:
        raise ValueError("learning_rate: got none, must be a positive number or a schedule")
    check_rate("learning_rate", learning_rate)
    check_sparsity(compression.sparsity)
    if compression.sparsity > 0 or compression.value_bits is not None:
        dtype = jnp.result_type(*jax.tree.leaves(model.shapes))
        linearise = sparse_linearise(compression.sparsity, value_bits=compression.value_bits, dtype=dtype)
        evolution = dataclasses.replace(evolution, linearise=linearise)
    most, slots = schedule.num_slots, pooling.slots_per_model
    slots = schedule.largest_cohort if slots is None else whole("slots_per_model", slots, 1, most)

    def check(data: FederatedData) -> None:
        if evolution.loss == "cross_entropy":  # before a run starts: in a round values are traced
            probabilities("data: targets", data.y, model.output_size)

    server = ntk_server(
        model,
        learning_rate,
        evolution,
        validation=pooling.validation,
        pool_size=pooling.pool_size,
        shuffle=compression.shuffle,
    )
    once = sum(np.asarray(leaf).nbytes for leaf in pooling.validation or ())
    parts = Parts(
        aggregate=stack(slots),
        channel=jacobians(model.output_size, compression.sparsity, compression.value_bits),
        accept=pooling.accept,
        check=check,
        ledger=lambda cost, data: cost._replace(uplink_once=once),
    )
    training = Training(model, learning_rate, None, None, evolution.loss)
    local = subsampled(send_examples(), compression.beta)
    server, parts = changed(server._replace(map_models=sequentially), parts)
    return compose(name, model, local, server, schedule, parts, Composition(training, parts.weighting, EVOLVES))
