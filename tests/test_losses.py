"""Losses against NumPy; padding counts neither in the value nor in the gradient."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedtangent._src.losses import (
    LEAST_MARGIN,
    LOSSES,
    check_targets,
    cross_entropy,
    exponential,
    get_loss,
    logistic,
    mean_form,
    squared_error,
    summed,
    targets_of,
    words,
)
from fedtangent._src.types import Array

from .nightly import nightly

MASK = np.array([True, False, True, True, False])
REAL = np.flatnonzero(MASK)


def outputs() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(5, 3))


def regression() -> np.ndarray:
    return np.random.default_rng(1).normal(size=(5, 3))


LABELS = np.array([2, 0, 1, 1, 2])
SIGNS = np.array([[1, -1, -1], [-1, 1, 1], [1, 1, -1], [-1, -1, 1], [1, -1, 1]], float)


def squared_error_by_hand(f: np.ndarray, y: np.ndarray) -> float:
    return sum(0.5 * sum((a - b) ** 2 for a, b in zip(*row, strict=True)) for row in zip(f, y, strict=True)) / len(f)


def cross_entropy_by_hand(f: np.ndarray, y: np.ndarray) -> float:
    return float(np.mean([np.log(np.sum(np.exp(row))) - row[label] for row, label in zip(f, y, strict=True)]))


def of_margins(one: Callable[[float], float]) -> Callable[..., float]:
    """The mean over examples of a loss of each margin."""
    return lambda f, y: sum(one(a * b) for rows in zip(f, y, strict=True) for a, b in zip(*rows, strict=True)) / len(f)


MEANS = {
    "squared_error": (squared_error_by_hand, regression()),
    "cross_entropy": (cross_entropy_by_hand, LABELS),
    "exponential": (of_margins(lambda m: float(np.exp(-m))), SIGNS),
    "logistic": (of_margins(lambda m: float(np.log(1 + np.exp(-m)))), SIGNS),
}
SUMS = {
    f"{name}_sum": (lambda f, y, mean=by_hand: len(f) * mean(f, y), targets)
    for name, (by_hand, targets) in MEANS.items()
}
CASES = {name: (LOSSES[name], *case) for name, case in (MEANS | SUMS).items()}


def absolute(values: Array, targets: Array, mask: Array) -> Array:
    """A loss of one's own."""
    return jnp.sum(jnp.where(mask[:, None], jnp.sqrt(1 + (values - targets) ** 2), 0)) / jnp.maximum(jnp.sum(mask), 1)


def test_a_function_of_ones_own_is_a_loss_but_has_no_name() -> None:
    assert get_loss(absolute) is absolute
    check_targets(absolute, regression())  # nothing is known of them
    assert mean_form(absolute) is absolute and targets_of(absolute) == "own" and words(absolute) == "absolute"


def test_every_loss_has_a_case() -> None:
    assert set(CASES) == set(LOSSES)
    assert all(get_loss(name) is case[0] for name, case in CASES.items())
    assert {name: mean_form(name) for name in LOSSES} == {n: n for n in MEANS} | {f"{n}_sum": n for n in MEANS}


def test_what_each_loss_compares_outputs_with() -> None:
    assert [targets_of(name) for name in MEANS] == ["numbers", "classes", "signs", "signs"]
    assert all(targets_of(f"{name}_sum") == targets_of(name) for name in MEANS)


def test_a_sum_counts_the_real_examples_of_any_loss() -> None:
    """Negative controls: the mean in its place, and the number of all rows."""
    f, y, mask = jnp.asarray(outputs()), jnp.asarray(SIGNS), jnp.asarray(MASK)
    total, mean = summed(exponential)(f, y, mask), exponential(f, y, mask)
    assert float(total) == pytest.approx(float(np.exp(-SIGNS * outputs())[REAL].sum()), rel=1e-14)
    assert abs(total - mean) > 1 and abs(total - len(MASK) * mean) > 1


@pytest.mark.parametrize("loss", [exponential, logistic, summed(exponential)])
@pytest.mark.parametrize("size", [60.0, 1e3, 1e12])
def test_losses_of_margins_are_finite_in_float32(loss: Callable[..., Array], size: float) -> None:
    f, y = jnp.array([[size], [-size]], jnp.float32), jnp.ones((2, 1), jnp.float32)
    value, slope = jax.value_and_grad(loss)(f, y, jnp.ones(2, bool))
    assert value.dtype == slope.dtype == jnp.float32
    assert np.isfinite(value) and np.all(np.isfinite(slope)) and slope[1, 0] < 0
    largest = jnp.finfo(jnp.float32).max
    slope = jax.grad(loss)(jnp.array([[largest], [-largest]]), y, jnp.ones(2, bool))
    assert np.all(np.isfinite(slope))
    plain = jax.grad(lambda f: jnp.sum(jnp.exp(-f)))(jnp.float32([-1e3]))
    assert not np.all(np.isfinite(plain))  # negative control: the formula itself


def test_exponential_is_the_formula_to_its_bound_and_then_the_line_that_touches_it() -> None:
    def at(margin: float) -> tuple[float, float]:
        f, y = jnp.full((1, 1), -margin), -jnp.ones((1, 1))
        value, slope = jax.value_and_grad(exponential)(f, y, jnp.ones(1, bool))
        return float(value), -float(slope[0, 0])

    for margin in (30.0, 0.0, -5.0, LEAST_MARGIN + 1e-9, LEAST_MARGIN):
        value, slope = at(margin)
        assert value == pytest.approx(np.exp(-margin), rel=1e-14)
        assert slope == pytest.approx(-np.exp(-margin), rel=1e-14)
    value, slope = at(LEAST_MARGIN - 2)
    assert value == pytest.approx(3 * np.exp(-LEAST_MARGIN), rel=1e-14)
    assert slope == pytest.approx(-np.exp(-LEAST_MARGIN), rel=1e-14)
    assert slope != pytest.approx(-np.exp(2 - LEAST_MARGIN), rel=1e-3)


def test_logistic_of_large_margins() -> None:
    f, y, mask = jnp.array([[800.0], [-800.0]]), jnp.ones((2, 1)), jnp.ones(2, bool)
    value, slope = jax.value_and_grad(logistic)(f, y, mask)
    assert float(value) == pytest.approx(400, rel=1e-14)
    np.testing.assert_allclose(slope, [[0.0], [-0.5]], atol=1e-300)


@pytest.mark.parametrize(
    "name", nightly(["exponential", "logistic", "exponential_sum", "logistic_sum"], ["exponential", "logistic_sum"])
)
def test_targets_of_margins_are_signs(name: str) -> None:
    check_targets(name, SIGNS)
    check_targets("squared_error", np.array([0.0, 2.0]))
    jax.jit(lambda y: check_targets(name, y))(np.zeros(3))  # traced: not looked at
    for wrong in ([[1.0], [0.0]], [[1.0], [np.nan]], [[2.0]]):
        with pytest.raises(ValueError, match=f"^y: got .*, must be -1 or 1 for the loss '{name}'$"):
            check_targets(name, np.array(wrong), "y")
    with pytest.raises(ValueError, match=r"^y: got True and False, must be numbers$"):
        check_targets("cross_entropy", SIGNS > 0, "y")


@pytest.mark.parametrize("name", CASES)
def test_mean_over_real_examples(name: str) -> None:
    loss, by_hand, targets = CASES[name]
    value = loss(jnp.asarray(outputs()), jnp.asarray(targets), jnp.asarray(MASK))
    assert value.shape == ()
    np.testing.assert_allclose(value, by_hand(outputs()[REAL], targets[REAL]), rtol=1e-14)
    assert abs(value - by_hand(outputs(), targets)) > 1e-3  # negative control: padding counted


@pytest.mark.parametrize("name", CASES)
def test_gradient_is_that_of_the_real_examples(name: str) -> None:
    loss, by_hand, targets = CASES[name]
    gradient = np.asarray(jax.grad(loss)(jnp.asarray(outputs()), jnp.asarray(targets), jnp.asarray(MASK)))
    assert np.all(gradient[~MASK] == 0)
    for j, c in np.ndindex(5, 3):
        up, down = outputs(), outputs()
        up[j, c] += 1e-6
        down[j, c] -= 1e-6
        slope = (by_hand(up[REAL], targets[REAL]) - by_hand(down[REAL], targets[REAL])) / 2e-6
        assert abs(gradient[j, c] - slope) < 1e-9  # central differences: step^2 and eps / step


@pytest.mark.parametrize("name", CASES)
def test_nothing_real_is_zero_and_padding_may_be_nan(name: str) -> None:
    loss, _, targets = CASES[name]
    f = jnp.where(jnp.asarray(MASK)[:, None], jnp.asarray(outputs()), jnp.nan)
    assert np.isfinite(loss(f, jnp.asarray(targets), jnp.asarray(MASK)))
    assert float(loss(f, jnp.asarray(targets), jnp.zeros(5, bool))) == 0


def test_cross_entropy_of_confident_outputs_is_finite() -> None:
    f, labels, mask = jnp.array([[1e4, 0.0], [1e4, 0.0]]), jnp.array([0, 1]), jnp.ones(2, bool)
    assert float(cross_entropy(f, labels, mask)) == pytest.approx(5e3)
    assert np.all(np.isfinite(jax.grad(cross_entropy)(f, labels, mask)))


@pytest.mark.parametrize("loss", [squared_error, cross_entropy])
def test_float32_stays_float32(loss: Callable[..., Array]) -> None:
    targets = regression().astype(np.float32) if loss is squared_error else LABELS
    assert loss(jnp.asarray(outputs(), jnp.float32), jnp.asarray(targets), jnp.asarray(MASK)).dtype == jnp.float32


@pytest.mark.parametrize("shape", [(5, 1), (1, 3), (5,)])
def test_targets_of_another_shape_are_not_broadcast(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"targets: got .*, must be \(5, 3\), the shape of the outputs"):
        squared_error(jnp.asarray(outputs()), jnp.zeros(shape), jnp.asarray(MASK))


def test_unknown_loss() -> None:
    with pytest.raises(ValueError, match="loss: got 'hinge', allowed are squared_error, cross_entropy"):
        get_loss("hinge")


@pytest.mark.parametrize("dtype", nightly([jnp.bfloat16, jnp.float16], [jnp.bfloat16]))
@pytest.mark.parametrize("name", nightly(LOSSES, [*MEANS, "logistic_sum"]))
def test_losses_of_outputs_in_half_precision_are_computed_in_float32(name: str, dtype: object) -> None:
    """Of 3,000 examples, which bfloat16 would count as 256; by day the means and a sum, in this coarser one."""
    rng, mask = np.random.default_rng(0), jnp.arange(3100) < 3000
    outputs = jnp.asarray(rng.normal(size=(3100, 2)), dtype)
    numbers = jnp.asarray(np.sign(rng.normal(size=(3100, 2))), dtype)
    targets = jnp.asarray(rng.integers(0, 2, 3100)) if targets_of(name) == "classes" else numbers
    value = LOSSES[name](outputs, targets, mask)
    wide = LOSSES[name](outputs.astype(jnp.float32), targets, mask)
    assert value.dtype == jnp.float32 and float(value) == float(wide)
    exact = LOSSES[name](outputs.astype(jnp.float64), targets, mask)
    assert float(value) == pytest.approx(float(exact), rel=1e-6)
    assert float(exact.astype(dtype)) != float(exact)  # the control: half precision shows
