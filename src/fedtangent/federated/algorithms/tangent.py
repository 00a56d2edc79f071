"""NTK-FL: the server evolves the tangent kernel of the cohort's examples."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, TypedDict, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from fedtangent.checks import choice, instance, whole
from fedtangent.entries import option
from fedtangent.federated.aggregate import stack
from fedtangent.federated.algorithms.entry import Descent, Given, Hiding, Laws, entry_of, shared_arguments
from fedtangent.federated.compose import compose, sequentially
from fedtangent.federated.ntk_fl import Evolution, ntk_server, send_examples, sparse_linearise
from fedtangent.federated.ntk_fl.options import CRITERIA, KERNELS, METHODS, OUTPUT_LOSSES, UNSTABLE, probabilities
from fedtangent.federated.ntk_fl.tangent import Linearise
from fedtangent.federated.rates import Rate, check_rate
from fedtangent.federated.wire.channel import jacobians
from fedtangent.federated.wire.secure_aggregation import sum_only
from fedtangent.federated.wire.sparsify import check_sparsity
from fedtangent.federated.wire.subsample import largest_sample, subsampled
from fedtangent.types import Accept, Algorithm, Array, FederatedData, Model, Schedule


class TangentOptions(TypedDict, total=False):
    """Options of both recipes: the fields of ``ntk_fl.Evolution``, and what is pooled."""

    times: tuple[int, ...]
    kernel: str
    method: str
    linearise: Linearise | None
    criterion: str
    patience: int | None
    unstable: str
    loss: str
    kernel_bytes: int
    validation: tuple[Array, Array] | None  # examples that the server holds, to choose the time by
    pool_size: int | None  # the most examples that one model pools in a round
    slots_per_model: int | None  # the most clients that one model pools in a round, all slots by default
    accept: Accept | None  # which messages count


class Compression(NamedTuple):
    """The switches of CP-NTK-FL, all off."""

    beta: float = 1.0
    sparsity: float = 0.0
    value_bits: int | None = None
    shuffle: bool = False


def ntk_fl(model: Model, schedule: Schedule, *, learning_rate: Rate, **options: Unpack[TangentOptions]) -> Algorithm:
    """NTK-FL (Yue et al., ICML 2022, section 4.1): clients send Jacobians, the server evolves the tangent kernel.

    Args:
        learning_rate: eta of the halved squared error averaged over examples and outputs, or of the mean cross
            entropy (``loss="cross_entropy"``, on class labels).
        options: the fields of ``ntk_fl.Evolution`` (``times``, ``kernel``, ``loss``, ``unstable``, ..: a round whose
            learning rate is above the largest stable one keeps the model, and ``simulate`` says so in its status);
            ``validation``, examples x [m, ...] and y [m, C] that the server holds and chooses the time by, charged as
            sent up once, before the first round; ``pool_size``, which is the size of the kernel:
            ``subsample.largest_sample`` of the partition drops no example and leaves the padding out
            (``info["examples_dropped"]`` counts those beyond); ``slots_per_model`` (``info["dropped"]`` counts, per
            model, the clients beyond it); and ``accept``.

    Raises ``ValueError`` for an option that is not allowed.
    """
    return _evolving("ntk_fl", model, schedule, learning_rate, Compression(), options)


def cp_ntk_fl(
    model: Model,
    schedule: Schedule,
    *,
    learning_rate: Rate,
    beta: float = 1.0,
    sparsity: float = 0.0,
    value_bits: int | None = None,
    shuffle: bool = False,
    **options: Unpack[TangentOptions],
) -> Algorithm:
    """CP-NTK-FL (Yue et al., ICML 2022, section 4.2): NTK-FL with less on the wire, and less to be read from it.

    Each switch works by itself; with all of them off it is ``ntk_fl``. The random projection is the data's
    (``data.projection.projected``, with the seed that ``wire.key_server`` hands out): the model takes d1' inputs.

    Args:
        beta: share of its examples that a client uses in a round (``subsample.subsampled``), the paper's beta.
        sparsity: share of the numbers of each example's Jacobian that is set to zero, the smallest ones
            (``ntk_fl.sparse_linearise``); kernel and update are those of the sparsified Jacobians.
        value_bits: bits of a Jacobian's number on the wire, 10 to 32 (rounded so); by default those of the parameters.
        shuffle: a shuffling server permutes the rows of all clients' Jacobians, outputs and targets together.
        options: those of ``ntk_fl``, and so are the reports.

    The ledger charges, for each example in use, the kept numbers, their places (as indices or a bitmap, whichever is
    smaller), the outputs and the targets.

    Raises ``ValueError`` for a beta outside (0, 1], a sparsity outside [0, 1), value_bits outside 10 .. 32, and as
    ``ntk_fl`` does; and for ``linearise`` among the options, which sparsity decides.
    """
    if "linearise" in options:
        raise ValueError("linearise: is decided by sparsity in cp_ntk_fl: leave it out")
    compression = Compression(beta, sparsity, value_bits, shuffle)
    return _evolving("cp_ntk_fl", model, schedule, learning_rate, compression, options)


def _evolving(
    name: str, model: Model, schedule: Schedule, learning_rate: Rate, compression: Compression, options: TangentOptions
) -> Algorithm:
    """Clients whose examples' Jacobians a server pools and evolves."""
    instance("model", model, Model)
    own: dict[str, Any] = dict(options)
    if "secure_aggregation" in own:
        raise sum_only(name, "Jacobians")
    validation, pool_size, accept = (own.pop(part, None) for part in ("validation", "pool_size", "accept"))
    slots = own.pop("slots_per_model", None)
    beta, sparsity, value_bits, shuffle = compression
    check_rate("learning_rate", learning_rate)
    check_sparsity(sparsity)
    if sparsity > 0 or value_bits is not None:
        dtype = jnp.result_type(*jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0))))
        own["linearise"] = sparse_linearise(sparsity, value_bits=value_bits, dtype=dtype)
    evolution = Evolution(**own)
    slots = schedule.num_slots if slots is None else whole("slots_per_model", slots, 1, schedule.num_slots)

    def check(data: FederatedData) -> None:
        probabilities("data: targets", data.y, model.output_size)  # before a run starts: in a round values are traced

    return compose(
        name,
        model,
        subsampled(send_examples(), beta),
        ntk_server(model, learning_rate, evolution, validation=validation, pool_size=pool_size, shuffle=shuffle),
        schedule,
        aggregate=stack(slots),
        channel=jacobians(model.output_size, sparsity, value_bits),
        map_models=sequentially,
        accept=accept,
        once=(sum(np.asarray(leaf).nbytes for leaf in validation or ()), 0),
        check=check if evolution.loss == "cross_entropy" else None,
    )


CHOOSE = ("training", "validation")  # the examples that the number of steps is chosen by


@dataclasses.dataclass(frozen=True)
class NtkFlOptions(Descent):
    """Options of the evolution of a kernel at the server."""

    ntk_kernel: str = "averaged"
    """averaged (the paper's H for all outputs) or exact."""
    ntk_times: tuple[int, ...] = tuple(range(100, 2001, 100))
    """Candidate numbers of gradient steps."""
    ntk_method: str = "auto"
    """auto (the cheapest), eigh, chebyshev or iterate, of the cross entropy iterate or multirate; all give the same."""
    ntk_choose: str = "training"
    """The number of steps by the round's training examples, or by validation on --server-examples."""
    ntk_criterion: str = "loss"
    """Choose the number of steps by loss or accuracy."""
    ntk_patience: int | None = None
    """Stop looking once the criterion got worse so many candidates in a row (default: look at all)."""
    ntk_unstable: str = "stop"
    """A step size above the largest stable one: stop, clip (take 0.9 of that) or allow."""
    server_examples: int = option(100, used_with="ntk_choose")
    """Training examples that the server holds for validation, and no client does."""


@dataclasses.dataclass(frozen=True)
class CpNtkFlOptions(Hiding, NtkFlOptions):
    """Options of CP-NTK-FL."""

    sparsity: float = 0.0
    """Share of the numbers of each example's Jacobian that is set to zero, the smallest."""


def _arguments(o: NtkFlOptions, given: Given) -> dict[str, Any]:
    """Arguments of the recipes that evolve a kernel."""
    _check(o)
    slots = min(given.schedule.num_slots, given.schedule.num_clients)
    beta = o.beta if isinstance(o, CpNtkFlOptions) else 1.0
    shared = shared_arguments(o)
    return {
        "learning_rate": shared["client_learning_rate"],
        **{
            name: getattr(o, f"ntk_{name}")
            for name in ("times", "kernel", "method", "criterion", "patience", "unstable")
        },
        "validation": given.validation,
        "loss": o.loss,
        "pool_size": None if given.clients is None else largest_sample(given.clients, slots, beta),
        "accept": shared["accept"],
        "slots_per_model": slots,
    }


def _check(o: NtkFlOptions) -> None:
    """Raise ``ValueError`` with the name of the option for one that the evolution does not have."""
    allowed = {"ntk_kernel": KERNELS, "ntk_method": METHODS, "ntk_choose": CHOOSE, "ntk_criterion": CRITERIA}
    for name, names in {**allowed, "ntk_unstable": UNSTABLE}.items():
        choice(name, getattr(o, name), names)
    methods = OUTPUT_LOSSES[o.loss].methods if o.loss in OUTPUT_LOSSES else METHODS
    if o.ntk_method not in methods:
        raise ValueError(f"ntk_method: got {o.ntk_method!r}, allowed are {', '.join(methods)} with the loss {o.loss}")
    for time, later in zip((0, *o.ntk_times), o.ntk_times or (0,), strict=False):
        if later <= time:
            raise ValueError(f"ntk_times: got {o.ntk_times}, must be one or more increasing numbers of steps from 1")


def _build_ntk_fl(o: NtkFlOptions, given: Given) -> Algorithm:
    return ntk_fl(given.model, given.schedule, **_arguments(o, given))


def _build_cp_ntk_fl(o: CpNtkFlOptions, given: Given) -> Algorithm:
    own: dict[str, Any] = {"beta": o.beta, "sparsity": o.sparsity, "shuffle": o.shuffle}
    return cp_ntk_fl(given.model, given.schedule, **_arguments(o, given), **own)


_EVOLUTION: dict[str, Any] = {"learning_rate": 0.3, "times": (1, 4, 9)}

_EVOLVES = "its server evolves a kernel (theory.ntk_evolution); nearest is fed_avg, beside which `compare` runs it"

ENTRIES = (
    entry_of(
        ntk_fl,
        "clients send Jacobians, the server evolves the kernel (NTK-FL, 2022)",
        NtkFlOptions,
        build=_build_ntk_fl,
        papers=("yue2022",),
        parts="its Jacobians; pool; kernel evolution",
        rule=_EVOLVES,
        needs=("validation", "clients"),
        sends="Jacobians",
        laws=Laws({**_EVOLUTION, "kernel": "averaged"}, doubled="examples"),
    ),
    entry_of(
        cp_ntk_fl,
        "NTK-FL on --beta of the examples, Jacobians of --sparsity, --shuffle (CP-NTK-FL, 2022)",
        CpNtkFlOptions,
        build=_build_cp_ntk_fl,
        papers=("yue2022",),
        parts="its Jacobians, fewer and sparse; pool, shuffled; kernel evolution",
        rule=_EVOLVES,
        needs=("validation", "clients"),
        sends="Jacobians",
        laws=Laws(
            {**_EVOLUTION, "beta": 0.6, "sparsity": 0.5, "shuffle": True},
            exact={"beta": 1.0},
            doubled="examples",
        ),
    ),
)
