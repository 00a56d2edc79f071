"""Options of NTK-FL's evolution: what is allowed, and which method is the cheapest."""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedtangent.checks import MAX_INDEX, is_whole
from fedtangent.federated.ntk_fl.chebyshev import chebyshev_degree
from fedtangent.federated.ntk_fl.losses import LOSSES, OUTPUT_LOSSES
from fedtangent.federated.ntk_fl.spectral import LANCZOS_STEPS
from fedtangent.federated.ntk_fl.tangent import Linearise
from fedtangent.federated.ntk_fl.time import CRITERIA
from fedtangent.federated.rates import check_number
from fedtangent.types import Array, Model

KERNELS = ("averaged", "exact")
METHODS = ("auto", "eigh", "chebyshev", "iterate")
UNSTABLE = ("stop", "clip", "allow")

LARGEST_FULL_KERNEL = 4096  # n C up to which "auto" holds the whole kernel
KERNEL_BYTES = 4 * 2**30

# Measured in float64 on 2 cores: seconds per m^3 of an eigendecomposition, per matrix entry of a product with a few
# columns (memory bound), and per multiplication of a pass through the network.
EIGH_SECONDS, PRODUCT_SECONDS, PASS_SECONDS = 1e-9, 4e-10, 2e-11


class Settings(NamedTuple):
    """Static options of one evolution, see ``ntk_evolve``."""

    times: tuple[int, ...]
    kernel: str = "averaged"
    method: str = "auto"
    linearise: Linearise | None = None
    criterion: str = "loss"
    patience: int | None = None
    unstable: str = "stop"
    loss: str = "squared_error"
    kernel_bytes: int = KERNEL_BYTES


class Plan(NamedTuple):
    """Which method "auto" takes, and the estimated seconds of each that is possible."""

    method: str
    seconds: dict[str, float]

    def __str__(self) -> str:
        each = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in self.seconds.items())
        return f"{self.method} (estimated: {each})"


def evolution_plan(
    num_params: int, num_examples: int, num_outputs: int, times: tuple[int, ...], kernel: str = "averaged",
    kernel_bytes: int = KERNEL_BYTES, loss: str = "squared_error",
) -> Plan:  # fmt: skip
    """The cheapest method for n pooled examples (with padding) and the grid ``times``, from measured costs.

    The cross entropy has but one, "iterate".

    The kernel itself, which every method needs, does not count, but the whole kernel [n C, n C] does.
    """
    passes = 4 * num_examples * num_params * PASS_SECONDS  # of one derivative forward and one backward
    held = 8 * num_examples**2 <= kernel_bytes
    if kernel == "averaged":
        size, product = num_examples, PRODUCT_SECONDS * num_examples**2 if held else num_outputs**2 * passes
    else:
        size, product = num_examples * num_outputs, passes
        held = size <= LARGEST_FULL_KERNEL and 8 * size**2 <= kernel_bytes
    seconds = {"eigh": EIGH_SECONDS * size**3} if held else {}
    seconds["chebyshev"] = (LANCZOS_STEPS + chebyshev_degree(max(times))) * product
    seconds["iterate"] = (LANCZOS_STEPS + max(times)) * product
    seconds = seconds if loss == "squared_error" else {"iterate": seconds["iterate"]}
    return Plan(min(seconds, key=lambda name: seconds[name]), seconds)


def check_times(times: Any) -> tuple[int, ...]:
    """The candidate numbers of steps; raises ``ValueError`` unless there is one, and they increase from 1 or more."""
    given = tuple(times) if np.ndim(times) == 1 else ()
    if not given or not all(map(_is_count, given)) or any(a >= b for a, b in itertools.pairwise(given)):
        raise ValueError(
            f"times: got {given or times!r}, must be one or more increasing positive whole numbers of steps below 2**31"
        )
    return tuple(int(t) for t in given)


def _is_count(value: Any) -> bool:
    """Whether a number is whole, and from 1 to 2^31 - 1: rounds of a loop are counted in 32 bits."""
    return np.asarray(value).dtype.kind in "iuf" and 1 <= value <= MAX_INDEX and int(value) == value


def check_settings(s: Settings) -> Settings:
    """The settings, with whole times; raises ``ValueError`` for one that is not allowed."""
    times = check_times(s.times)
    for name, allowed in (
        ("kernel", KERNELS), ("method", METHODS), ("criterion", CRITERIA), ("unstable", UNSTABLE), ("loss", LOSSES),
    ):  # fmt: skip
        if getattr(s, name) not in allowed:
            raise ValueError(f"{name}: got {getattr(s, name)!r}, allowed are {', '.join(allowed)}")
    if s.loss == "cross_entropy" and s.method in ("eigh", "chebyshev"):
        raise ValueError(
            f"method: got {s.method!r}, but the evolution of the cross entropy is not linear: use auto or iterate"
        )
    if s.patience is not None and not (is_whole(s.patience) and s.patience >= 1):
        raise ValueError(f"patience: got {s.patience!r}, must be None or a whole number of at least 1")
    if not (is_whole(s.kernel_bytes) and s.kernel_bytes >= 0):
        raise ValueError(f"kernel_bytes: got {s.kernel_bytes!r}, must be a whole number of at least 0")
    return s._replace(times=times)


def check_evolution(s: Settings, model: Model, x: Array, y: Array, mask: Array, learning_rate: Any) -> Settings:
    """``check_settings``, and raise ``ValueError`` for examples, or a rate, that ``ntk_evolve`` cannot take."""
    if jax.dtypes.canonicalize_dtype(np.float64) != np.float64:
        raise ValueError("ntk_evolve: needs JAX's 64-bit mode, call fedtangent.enable_x64() first")
    s = check_settings(s)
    if not isinstance(learning_rate, jax.core.Tracer):
        check_number("learning_rate", learning_rate)
        if not (math.isfinite(learning_rate) and learning_rate > 0):
            raise ValueError(f"learning_rate: got {learning_rate}, must be finite and positive")
    if x.shape[0] == 0:
        raise ValueError(f"x: got shape {x.shape}, must hold at least one row (of padding, if there is no example)")
    if y.shape != (x.shape[0], model.output_size) or mask.shape != (x.shape[0],):
        raise ValueError(
            f"y and mask: got {y.shape} and {mask.shape}, but x {x.shape} and a model of {model.output_size} outputs "
            f"need {(x.shape[0], model.output_size)} and {(x.shape[0],)} ({OUTPUT_LOSSES[s.loss].labels})"
        )
    size = x.shape[0] * (model.output_size if s.kernel == "exact" else 1)
    if s.method == "eigh" and 8 * size**2 > s.kernel_bytes:
        raise ValueError(
            f"method: eigh holds a kernel of {8 * size**2} bytes [{size}, {size}], but kernel_bytes is "
            f"{s.kernel_bytes}: use auto, chebyshev or iterate"
        )
    return s


def probabilities(name: str, y: Array, num_classes: int, mask: Array | None = None) -> Array:
    """Targets of the cross entropy as probabilities [n, C], from those or from class labels [n].

    Raises ``ValueError`` for fewer than two classes and, where values are known, for rows that are not probabilities
    and labels that are not classes. Other shapes come back as they are.
    """
    if num_classes < 2:
        raise ValueError(f"loss: got 'cross_entropy', needs at least two outputs, but the model has {num_classes}")
    known = not any(isinstance(value, jax.core.Tracer) for value in (y, mask))
    fits = np.ndim(y) > 0 and (mask is None or np.shape(mask) == np.shape(y)[:1])
    rows = np.asarray(y)[slice(None) if mask is None else np.asarray(mask) != 0] if known and fits else np.empty(0)
    if np.ndim(y) == 1 and jnp.issubdtype(y.dtype, jnp.integer):
        if np.any((rows < 0) | (rows >= num_classes)):
            raise ValueError(f"{name}: class labels must be from 0 to {num_classes - 1}")
        return jax.nn.one_hot(y, num_classes, dtype=jnp.float64)
    if rows.ndim == 2 and not (np.all(rows >= 0) and np.allclose(rows.sum(axis=1), 1, atol=1e-6)):
        raise ValueError(
            f"{name}: loss is cross_entropy, so rows must be probabilities (one-hot targets without their mean), "
            "or class labels [n]"
        )
    return y


def validation_of(validation: Any, loss: str, num_classes: int) -> Any:
    """The validation examples, with the cross entropy's class labels as probabilities; others come back as they are."""
    if loss != "cross_entropy" or not isinstance(validation, tuple) or len(validation) != 2:
        return validation
    return jnp.asarray(validation[0]), probabilities("validation", jnp.asarray(validation[1]), num_classes)


def check_validation(validation: Any, model: Model, x: Any = None) -> None:
    """Raise ``ValueError`` for validation examples that are none, or of another shape than ``x``'s and the targets."""
    if validation is None:
        return
    if not isinstance(validation, tuple) or len(validation) != 2:
        raise ValueError("validation: must be None or the pair (x [m, ...], y [m, C])")
    given = tuple(validation[0].shape), tuple(validation[1].shape)
    wanted = (*given[0][:1], model.output_size)
    if not given[0] or given[0][0] < 1 or given[1] != wanted or (x is not None and given[0][1:] != x.shape[1:]):
        raise ValueError(
            f"validation: got x {given[0]} and y {given[1]}, must be x [m, ...] of at least one example"
            f"{'' if x is None else f' of shape {tuple(x.shape[1:])}'} and y [m, {model.output_size}]"
        )
