"""Float64 for theory, checks of its arguments that raise ``ValueError``, and the record of a theorem's assumption."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, ParamSpec, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float64, Int

from fedtangent._src.checks import MAX_INDEX, choice, finite, real_array, shown, symmetric, whole
from fedtangent._src.data.partition import validate
from fedtangent._src.kernels import gram
from fedtangent._src.kernels.large import LargeKernel
from fedtangent._src.types import ArrayLike, Cohort, Partition, PyTree

Inputs = ParamSpec("Inputs")
Result = TypeVar("Result")


def in_float64(function: Callable[Inputs, Result]) -> Callable[Inputs, Result]:
    """Wraps ``function`` so that it computes with JAX's 64-bit types.

    If the program has enabled them (``jax_enable_x64``), the wrapper calls the function directly: it can be traced and
    differentiated and returns JAX arrays. Otherwise it runs the function in a 64-bit scope and returns JAX arrays as
    NumPy arrays, which later 32-bit JAX code can read. Inside a caller's jit or grad a 64-bit scope is impossible, and
    the wrapper raises ``ValueError``.
    """

    @functools.wraps(function)
    def wrapped(*args: Inputs.args, **kwargs: Inputs.kwargs) -> Result:
        if jnp.result_type(float) == np.float64:
            return function(*args, **kwargs)
        if not is_concrete(args, kwargs, jnp.zeros(())):  # inside a caller's jit the zero is traced
            require_float64(f" for {function.__name__} in jit, grad or vmap")
        with jax.enable_x64(True):
            result = function(*args, **kwargs)
        return cast(Result, jax.tree.map(lambda a: np.asarray(a) if isinstance(a, jax.Array) else a, result))

    return wrapped


def require_float64(where: str = "") -> None:
    """Raises ``ValueError`` unless the program has enabled JAX's 64-bit types.

    ``where`` is put into the message behind "must be True", for example " for predict in jit".
    """
    if jnp.result_type(float) != np.float64:
        raise ValueError(f"jax_enable_x64: got False, must be True{where}; call fedtangent.enable_x64() first")


def is_concrete(*values: PyTree) -> bool:
    """Returns whether no leaf of ``values`` is a tracer, so that their numbers can be read."""
    return not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(values))


def check_shape(name: str, value: ArrayLike, shape: tuple[int, ...]) -> None:
    """Raises ``ValueError`` unless a value has the required shape.

    Args:
        name: Name of the argument in the message.
        value: Array to check.
        shape: Required shape.
    """
    if np.shape(value) != shape:
        raise ValueError(f"{name}: got shape {np.shape(value)}, must be {shape}")


def check_known(name: str, *values: PyTree) -> None:
    """Raises ``ValueError`` if one of ``values`` is traced, so that its number cannot be read.

    ``name`` is the argument's name in the message.
    """
    if not is_concrete(*values):
        raise ValueError(f"{name}: got a traced value, must be known numbers, not arguments of a JAX transformation")


def check_rows(name: str, values: ArrayLike, axes: str) -> Float64[np.ndarray, "n C"]:
    """Checks an array with one row per example and returns it as float64.

    Args:
        name: Name of the argument in the message.
        values: Array to check; it must be two-dimensional, not empty, and finite.
        axes: Names of its two axes in the message, such as "n, C".
    """
    rows = real_array(name, values)
    if rows.ndim != 2 or 0 in rows.shape:
        raise ValueError(f"{name}: got shape {rows.shape}, must be [{axes}] with {axes} >= 1")
    finite(name, rows)
    return rows


def check_blocks(kernels: gram.KernelBlocks, target_shape: tuple[int, ...], outputs: str) -> gram.KernelBlocks:
    """Checks kernel blocks and returns them as float64.

    The shapes must agree with the targets, the numbers must be finite, and the square blocks symmetric. ``ntk_train``,
    and the nngp blocks (the prior kernel) together, must be positive semidefinite; of large ones a sample is checked. A
    tangent kernel of a lower precision than float64, such as float32, loses the eigenvalues that are rounding errors,
    with their eigenvectors.

    Args:
        kernels: Kernel blocks to check.
        target_shape: Shape (n, C) of the targets.
        outputs: "shared", one kernel for all outputs, or "full", kernel blocks of [n C, n C].

    Raises:
        ValueError: One of these conditions does not hold.
    """
    choice("outputs", outputs, ("shared", "full"))
    per_example = target_shape[1] if outputs == "full" else 1
    n = target_shape[0] * per_example
    ntk_train = symmetric("ntk_train", kernels.ntk_train)
    check_shape("ntk_train", ntk_train, (n, n))
    m = np.shape(kernels.ntk_test_train)[0] if np.ndim(kernels.ntk_test_train) == 2 else 0
    if m == 0 or m % per_example:
        got = np.shape(kernels.ntk_test_train)
        raise ValueError(f"ntk_test_train: got shape {got}, must be [m, {n}], m a multiple of {per_example}")
    shapes = {"ntk_test_train": (m, n), "nngp_train": (n, n), "nngp_test_train": (m, n), "nngp_test": (m, m)}
    shapes["ntk_test"] = m, m
    checked: dict[str, np.ndarray | None] = {"ntk_train": ntk_train}
    for name, shape in shapes.items():
        if (block := getattr(kernels, name)) is None:
            checked[name] = None
            continue
        check_shape(name, block, shape)
        array = real_array(name, block)
        finite(name, array)
        checked[name] = array if name.endswith("test_train") else symmetric(name, array)
    _check_semidefinite(ntk_train)
    # rounding of float32 adds eigenvalues that float64 would keep
    if gram.rounding(kernels.ntk_train) > gram.rounding(ntk_train):
        values, vectors = gram.known_modes(kernels.ntk_train)
        root, projection = vectors * np.sqrt(np.maximum(values, 0.0)), vectors @ vectors.T
        checked |= {"ntk_train": root @ root.T, "ntk_test_train": np.asarray(checked["ntk_test_train"]) @ projection}
    blocks = gram.KernelBlocks(**checked)  # type: ignore[arg-type]
    gram.check_covariance(blocks)
    return blocks


def check_large(kernels: LargeKernel, n: int, outputs: str, dynamics: str = "gradient_descent") -> LargeKernel:
    """Returns a large kernel; raises ``ValueError`` if it does not fit the targets, the outputs or the dynamics.

    Args:
        kernels: Large kernel to check.
        n: Number of training points.
        outputs: Must be "shared".
        dynamics: Must be "gradient_descent".
    """
    choice("outputs", outputs, ("shared",))
    choice("dynamics", dynamics, ("gradient_descent",))
    if len(kernels) != n:
        raise ValueError(f"kernels: got a LargeKernel of {len(kernels)} training points, must be of {n}")
    return kernels


def check_partition(partition: Partition, n: int, *, exact: bool = False, occupied: bool = False) -> Partition:
    """Returns a partition as NumPy arrays; raises ``ValueError`` if it does not fit n training rows.

    Args:
        partition: Partition to check.
        n: Number of training rows.
        exact: Whether every row must belong to exactly one client.
        occupied: Whether every client must have a row.
    """
    validate(partition, n, exact)
    clients = Partition(np.asarray(partition.indices), np.asarray(partition.offsets))
    if occupied and not clients.sizes.all():
        empty = int(np.argmin(clients.sizes))
        raise ValueError(f"partition: got client {empty} without examples, must be one or more each")
    return clients


def check_cohorts(
    cohorts: Cohort, sizes: Int[np.ndarray, "N"], num_models: int | None
) -> tuple[Int[np.ndarray, "R S"], Int[np.ndarray, "R S"], int]:
    """Checks cohorts; returns client and model of every slot, [R, S] each, and the number of models.

    A slot is a place for a client in a round; each of R rounds has S of them. Empty slots (weight 0) may contain any
    number; the result has client 0 and model 0 there. Raises ``ValueError`` for wrong shapes or types, indices out of
    range, and clients without examples.

    Args:
        cohorts: Cohorts to check.
        sizes: Number of examples of each client [N].
        num_models: Number of models; None for one more than the largest model index in use.
    """
    client, model = np.asarray(cohorts.client), np.asarray(cohorts.model)
    shapes = client.shape, model.shape, np.shape(cohorts.weight)
    if client.ndim != 2 or len(set(shapes)) > 1 or client.size == 0:
        got = f"client, model and weight of shapes {', '.join(map(str, shapes))}"
        raise ValueError(f"cohorts: got {got}, must be of one shape [R, S] with R, S >= 1")
    for name, values in (("client", client), ("model", model)):
        if not np.issubdtype(values.dtype, np.integer):
            raise ValueError(f"cohorts.{name}: got {values.dtype}, must be integers")
    present = present_slots(cohorts)
    if num_models is None:
        num_models = int(model[present].max()) + 1 if present.any() else 1
    num_models = whole("num_models", num_models)

    def refuse(name: str, values: np.ndarray, wrong: np.ndarray, allowed: str) -> None:
        if wrong.any():
            r, slot = (int(i) for i in np.argwhere(wrong)[0])
            raise ValueError(f"cohorts.{name}: got {values[r, slot]} in round {r}, slot {slot}, must be {allowed}")

    for name, values, count in (("client", client, len(sizes)), ("model", model, num_models)):
        refuse(name, values, present & ((values < 0) | (values >= count)), f"from 0 to {count - 1}")
    client, model = np.where(present, client, 0), np.where(present, model, 0)
    refuse("client", client, present & (sizes[client] == 0), "a client with examples")
    return client, model, num_models


def present_slots(cohorts: Cohort) -> Bool[np.ndarray, "R S"]:
    """Returns whether each slot (place for a client in a round) has a client, [R, S] bool; all True if traced.

    Raises ``ValueError`` unless every known weight is 0 (an empty slot) or from 1e-100 to 1e100.
    """
    if not is_concrete(cohorts.weight):
        return np.ones(np.shape(cohorts.weight), bool)
    weight = real_array("cohorts.weight", cohorts.weight)
    finite("cohorts.weight", weight)
    if np.any(weight < 0):
        raise ValueError(f"cohorts.weight: got {weight.min():g}, must be at least 0 (0 marks an empty slot)")
    if (strange := weight[(weight > 0) & ((weight < 1e-100) | (weight > 1e100))]).size:  # sums and shares are exact
        raise ValueError(f"cohorts.weight: got {strange[0]:g}, must be 0, or from 1e-100 to 1e+100")
    return weight > 0


def check_steps(local_steps: ArrayLike, num_clients: int) -> Int[np.ndarray, "N"]:
    """Returns the number of local steps of each client, [N] int64; raises ``ValueError`` unless all are at least 1.

    Args:
        local_steps: One number for all clients, or one for each [N].
        num_clients: Number N of clients.
    """
    steps = np.asarray(local_steps)
    if steps.shape not in ((), (num_clients,)):
        raise ValueError(f"local_steps: got shape {steps.shape}, must be a number or one per client [{num_clients}]")
    if not np.issubdtype(steps.dtype, np.integer) or np.any(steps < 1):
        raise ValueError(f"local_steps: got {shown(steps.tolist())}, must be whole numbers of at least 1")
    if np.any(steps > MAX_INDEX):
        raise ValueError(f"local_steps: got {steps.max()}, must be whole numbers from 1 to {MAX_INDEX}")
    return np.broadcast_to(steps, (num_clients,)).astype(np.int64)


def check_rate(name: str, rate: ArrayLike, num_rounds: int) -> None:
    """Raises ``ValueError`` unless a learning rate is finite and above 0; a rate of one round may also be 0.

    Args:
        name: Name of the argument in the message.
        rate: A number, or one per round [R]; a traced rate is not checked.
        num_rounds: Number R of rounds.
    """
    value = _each_round(name, rate, num_rounds)
    if value is not None and not (np.all(np.isfinite(value)) and (np.all(value >= 0) if value.ndim else value > 0)):
        raise ValueError(f"{name}: got {shown(value.tolist())}, must be above 0 (in a round: 0 or more) and finite")


def check_shares(name: str, share: ArrayLike, num_rounds: int) -> None:
    """Raises ``ValueError`` unless a share is from 0 to 1 or traced.

    Args:
        name: Name of the argument in the message.
        share: A number, or one per round [R].
        num_rounds: Number R of rounds.
    """
    value = _each_round(name, share, num_rounds)
    if value is not None and not (np.all(value >= 0) and np.all(value <= 1)):
        raise ValueError(f"{name}: got {shown(value.tolist())}, must be from 0 to 1")


def _each_round(name: str, numbers: ArrayLike, num_rounds: int) -> np.ndarray | None:
    """Returns ``numbers``, one number or one per round [R], as an array; None if they are traced.

    Raises ``ValueError`` for another shape.
    """
    value = real_array(name, numbers) if is_concrete(numbers) else None
    shape = np.shape(numbers) if value is None else value.shape
    if shape not in ((), (num_rounds,)):
        raise ValueError(f"{name}: got shape {shape}, must be a number or one per round [{num_rounds}]")
    return value


def _check_semidefinite(ntk_train: Float64[np.ndarray, "n n"]) -> None:
    """Raises ``ValueError`` if the kernel has an eigenvalue too negative for a rounding error of float32.

    Of more than ``gram.MOST_CHECKED`` rows it checks a sample, evenly spaced.
    """
    rows = gram.spaced(len(ntk_train), gram.MOST_CHECKED)  # of a large kernel a sample, evenly spaced
    matrix = ntk_train[np.ix_(rows, rows)]
    largest = float(np.max(np.sum(np.abs(matrix), axis=1)))  # no eigenvalue is beyond it
    if not gram.is_semidefinite(matrix, 1e-6 * largest):
        least = np.linalg.eigvalsh(matrix)[0]
        raise ValueError(f"ntk_train: got a smallest eigenvalue of {least:.3g}, must be positive semidefinite")


def check_own_blocks(smallest: Float64[np.ndarray, "N"], largest: Float64[np.ndarray, "N"]) -> None:
    """Raises ``ValueError`` if a client's block of the kernel has an eigenvalue too negative for a rounding error.

    Args:
        smallest: Least eigenvalue of each client's block [N], at most 0.
        largest: Largest eigenvalue of each client's block [N].
    """
    for i in np.flatnonzero(smallest < -1e-6 * np.maximum(largest, np.abs(smallest).max(initial=0.0))):
        block = f"eigenvalue {smallest[i]:.3g} of client {i}'s block"
        raise ValueError(f"ntk_train: got {block}, must be positive semidefinite")


ROUNDING = 1e-12  # of inputs that were scaled to norm 1


class Assumption(NamedTuple):
    """One assumption of a theorem; it holds if ``measured relation required``, such as ``0.1 < 2``.

    ``statement`` says in words what was measured; ``assumption`` builds the record.
    """

    name: str
    statement: str  # meaning of the measured value
    holds: bool
    measured: float
    relation: str  # "<", "<=" or ">"
    required: float

    def __str__(self) -> str:
        """Returns the assumption as one line of a report."""
        word = "holds" if self.holds else "FAILS"
        return f"{self.name}: {word}, {self.measured:.3g} {self.relation} {self.required:.3g} ({self.statement})"


def assumption(
    name: str, statement: str, measured: float | np.number, relation: str, required: float | np.number
) -> Assumption:
    """Builds an assumption and compares its measured value with the required one; a measured NaN fails.

    Args:
        name: Short name of the assumption.
        statement: Meaning of the measured value, for the report.
        measured: Value on the data.
        relation: "<", "<=" or ">".
        required: Value that the theorem requires.
    """
    holds = {"<": measured < required, "<=": measured <= required, ">": measured > required}[relation]
    return Assumption(name, statement, bool(holds), float(measured), relation, float(required))


def failing(assumptions: Sequence[Assumption]) -> tuple[str, ...]:
    """Returns the names of the assumptions that do not hold."""
    return tuple(a.name for a in assumptions if not a.holds)


def report(title: str, assumptions: Sequence[Assumption]) -> str:
    """Returns ``title`` and one line for each assumption.

    Args:
        title: First line.
        assumptions: Assumptions of a theorem.
    """
    return "\n  ".join([title, *map(str, assumptions)])
