"""Options of NTK-FL's evolution of the kernel, its losses, and checks of the arguments of ``ntk_evolve``."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedtangent._src.checks import MAX_INDEX, choice, class_labels, number, whole
from fedtangent._src.federated.ntk_fl.tangent import Examples, Linearise
from fedtangent._src.types import Array, Model

KERNELS = ("averaged", "exact")
METHODS = ("auto", "eigh", "chebyshev", "iterate", "multirate")
CRITERIA = ("loss", "accuracy")
UNSTABLE = ("stop", "clip", "allow")


class OutputLoss(NamedTuple):
    """A loss of outputs f [n, C] and targets y [n, C] whose derivative by f is ``predict(f) - y`` over a constant.

    Attributes:
        predict: Function from f to the prediction that is compared with y, [n, C].
        examples: Function from (f, y) to the loss of every example, [n], before averaging.
        averages_outputs: Whether the mean is over examples and outputs (n C), or over examples only (n).
        curvature: Largest second derivative of an example's loss by its outputs.
        stable: Text for "the largest stable learning rate times lambda_max of the kernel", such as "4 N".
        labels: Text for error messages: how to pass class labels.
        methods: Names of the methods that can compute gradient descent on this loss.
    """

    predict: Callable[[Array], Array]
    examples: Callable[[Array, Array], Array]
    averages_outputs: bool
    curvature: float
    stable: str
    labels: str
    methods: tuple[str, ...]

    def divisor(self, num_examples: Array | float, num_outputs: int) -> Array | float:
        """Returns the number by which the sum of the examples' losses is divided to give their mean.

        A learning rate is divided by it too, to give the step size in function space, by which the outputs move.

        Args:
            num_examples: Number of real examples.
            num_outputs: Outputs C.
        """
        return num_examples * (num_outputs if self.averages_outputs else 1)


def _cross_entropy(outputs: Array, y: Array) -> Array:
    # A probability that came out 0 where the target is 0 counts 0, not NaN.
    return -jnp.sum(jnp.where(y > 0, y * jax.nn.log_softmax(outputs, axis=1), 0), axis=1)


OUTPUT_LOSSES = {
    "squared_error": OutputLoss(
        predict=lambda outputs: outputs,
        examples=lambda outputs, y: jnp.sum((outputs - y) ** 2, axis=1) / 2,
        averages_outputs=True,
        curvature=1.0,
        stable="2 N C",
        labels="class labels: one-hot, as data.classification_targets makes them, or loss cross_entropy",
        methods=("auto", "eigh", "chebyshev", "iterate"),
    ),
    "cross_entropy": OutputLoss(
        predict=lambda outputs: jax.nn.softmax(outputs, axis=1),
        examples=_cross_entropy,
        averages_outputs=False,
        curvature=0.5,
        stable="4 N",
        labels="class labels: whole numbers [n]",
        methods=("auto", "iterate", "multirate"),
    ),
}
LOSSES = tuple(OUTPUT_LOSSES)


def probabilities(name: str, y: Array, num_classes: int, mask: Array | None = None) -> Array:
    """Returns the targets of the cross entropy as probabilities [n, C].

    Args:
        name: Name of the argument, for the error message.
        y: Class labels [n], or probabilities [n, C]; targets of another shape are returned unchanged.
        num_classes: Number of classes C.
        mask: Whether a row is a real example, [n]; None for all.

    Raises:
        ValueError: Fewer than two classes or, unless the values are traced, rows that are not probabilities or labels
            that are not classes.
    """
    if num_classes < 2:
        raise ValueError(f"loss: 'cross_entropy' needs a model with at least 2 outputs, but it has {num_classes}")
    is_concrete = not any(isinstance(value, jax.core.Tracer) for value in (y, mask))
    fits = np.ndim(y) > 0 and (mask is None or np.shape(mask) == np.shape(y)[:1])
    real = slice(None) if mask is None or not is_concrete else np.asarray(mask) != 0
    rows = np.asarray(y)[real] if is_concrete and fits else np.empty(0)
    if np.ndim(y) == 1 and jnp.issubdtype(y.dtype, jnp.integer):
        if rows.size:
            class_labels(name, rows, num_classes)
        return jax.nn.one_hot(y, num_classes, dtype=jnp.float64)
    if rows.ndim == 2 and not (np.all(rows >= 0) and np.allclose(rows.sum(axis=1), 1, atol=1e-6)):
        raise ValueError(
            f"{name}: got rows that are no probabilities, must be probabilities (one-hot, not centred) or class "
            "labels [n] for the loss cross_entropy"
        )
    return y


@dataclasses.dataclass(frozen=True)
class Evolution:
    """Options of training by the tangent kernel at NTK-FL's server; raises ``ValueError`` for values not allowed."""

    times: tuple[int, ...] = tuple(range(100, 2001, 100))
    """Candidate numbers of gradient steps. They increase; the one with the smallest loss is kept (eq. 11a)."""
    kernel: str = "averaged"
    """averaged (the paper's: outputs share one kernel) or exact. "averaged" evolves every
    output with the paper's ``H = 1/C sum_k Theta_kk`` [n, n]; "exact" with the whole kernel is the linearised network's
    gradient descent."""
    method: str = "auto"
    """auto (the cheapest by measured cost), eigh, chebyshev, iterate or multirate; all give the same result.

    "eigh" is one eigendecomposition for all times (of H, or of the [n C, n C] kernel); "chebyshev" a series of about
    ``sqrt(60 t)`` products with the kernel (with H, or with one forward and one backward derivative each); "iterate",
    the steps themselves, t products; "multirate", for the cross entropy, the steps with a part of low rank of the
    kernel and a few hundred products with the whole, equal to about 1e-8 of a unit of the outputs. The cross entropy
    has no "eigh" and no "chebyshev"."""
    linearise: Linearise | None = None
    """Function that linearises the network, such as ``sparse_linearise(0.9)`` (default: with the whole Jacobian)."""
    criterion: str = "loss"
    """Choose the number of steps by loss or accuracy. Ties of accuracies go to the earlier time."""
    patience: int | None = None
    """Stop the search after the loss rose at this many candidates in a row (default: try all)."""
    unstable: str = "stop"
    """Response to a step size above the largest stable one: stop, clip (to 0.9 of the largest) or allow.

    The largest stable step is ``2 N C / lambda_max`` of the kernel in use (with the cross entropy ``4 N /
    lambda_max``). "stop" raises ``ValueError`` or, if the values are traced, keeps the parameters with status 3; an
    allowed step diverges at large times. The averaged kernel's lambda_max is below the whole one's."""
    loss: str = "squared_error"
    """"squared_error", the paper's; or "cross_entropy", ``-1/N sum y log softmax(f)``, as in its authors' code
    (erratum `ntk_fl.loss`): a step moves f by ``eta / N Theta (y - softmax(f))``, which has no closed form."""
    kernel_bytes: int = 4 * 2**30
    """The most bytes of the averaged kernel [n, n] in memory; a larger one is never formed, and a product with it takes
    C^2 passes through the network."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "times", _times(self.times))
        allowed = {"kernel": KERNELS, "method": METHODS, "criterion": CRITERIA, "unstable": UNSTABLE, "loss": LOSSES}
        for name, values in allowed.items():
            choice(name, getattr(self, name), values)
        methods = OUTPUT_LOSSES[self.loss].methods
        if self.method not in methods:
            raise ValueError(f"method: got {self.method!r}, allowed are {', '.join(methods)} with the loss {self.loss}")
        if self.patience is not None:
            whole("patience", self.patience)
        whole("kernel_bytes", self.kernel_bytes, 0, 2**63 - 1)


def _times(times: Any) -> tuple[int, ...]:
    """Checks ``Evolution.times`` and returns it as ints; raises ``ValueError`` unless it increases from at least 1."""
    steps = tuple(times) if np.ndim(times) == 1 else ()
    if not steps or not all(map(_is_count, steps)) or any(a >= b for a, b in itertools.pairwise(steps)):
        raise ValueError(
            f"times: got {steps or times!r}, must be one or more increasing positive whole numbers of steps below 2**31"
        )
    return tuple(int(t) for t in steps)


def _is_count(value: Any) -> bool:
    """Returns whether a value is a whole number from 1 to 2^31 - 1, the most that a compiled loop can count."""
    return np.asarray(value).dtype.kind in "iuf" and 1 <= value <= MAX_INDEX and int(value) == value


def check_examples(evolution: Evolution, model: Model, examples: Examples, learning_rate: float | Array) -> None:
    """Raises ``ValueError`` for pooled examples or a learning rate that ``ntk_evolve`` cannot take.

    It raises if JAX is not in 64-bit mode, the rate is not positive, the inputs have no row, the shape of the targets
    or of the mask does not fit, or, with the method "eigh", the kernel has more than ``kernel_bytes``.

    Args:
        evolution: Options of the evolution.
        model: The network.
        examples: The pooled examples.
        learning_rate: Step size of gradient descent.
    """
    x, y, mask = examples
    if jax.dtypes.canonicalize_dtype(np.float64) != np.float64:
        raise ValueError("dtype: got float32, must be float64 for ntk_evolve: call fedtangent.enable_x64() first")
    number("learning_rate", learning_rate, above=0)
    if x.shape[0] == 0:
        raise ValueError(f"x: got shape {x.shape}, must hold at least one row (of padding, if there is no example)")
    if y.shape != (x.shape[0], model.output_size) or mask.shape != (x.shape[0],):
        raise ValueError(
            f"y and mask: got {y.shape} and {mask.shape}, must be {(x.shape[0], model.output_size)} and "
            f"{(x.shape[0],)} for x {x.shape} ({OUTPUT_LOSSES[evolution.loss].labels})"
        )
    size = x.shape[0] * (model.output_size if evolution.kernel == "exact" else 1)
    if evolution.method == "eigh" and 8 * size**2 > evolution.kernel_bytes:
        raise ValueError(
            f"method: got 'eigh', whose kernel [{size}, {size}] takes {8 * size**2} bytes, more than kernel_bytes "
            f"{evolution.kernel_bytes}: choose auto, chebyshev or iterate, or raise kernel_bytes"
        )


def held_out(validation: object, loss: str, model: Model, x: Array | None = None) -> tuple[Array, Array] | None:
    """Checks the server's validation examples and returns them; with the cross entropy, labels become probabilities.

    Args:
        validation: The pair (x [m, ...], y [m, C]), a tuple, or None, which is returned unchanged. With the cross
            entropy y may also be class numbers [m].
        loss: Name of the loss.
        model: The network.
        x: Pooled inputs, whose examples must have the same shape; None to skip this check.

    Raises:
        ValueError: ``validation`` is not a pair, has no example, or has another shape; or, with the cross entropy, its
            targets are neither class labels nor probabilities, or the network has one output.
    """
    if validation is None:
        return None
    if not isinstance(validation, tuple) or len(validation) != 2:
        of = f" of {len(validation)}" if isinstance(validation, tuple) else ""
        raise ValueError(
            f"validation: got a {type(validation).__name__}{of}, must be None or a tuple of two, (x [m, ...], y [m, C])"
        )
    inputs, y = jnp.asarray(validation[0]), jnp.asarray(validation[1])
    if loss == "cross_entropy":
        y = probabilities("validation", y, model.output_size)
    shape = (*inputs.shape[:1], model.output_size)
    if not shape[:-1] or shape[0] < 1 or y.shape != shape or (x is not None and inputs.shape[1:] != x.shape[1:]):
        raise ValueError(
            f"validation: got x {inputs.shape} and y {y.shape}, must be x [m, ...] of at least one example"
            f"{'' if x is None else f' of shape {tuple(x.shape[1:])}'} and y [m, {model.output_size}]"
        )
    return inputs, y
