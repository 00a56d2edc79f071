"""The checks of arguments: what each lets through, what it refuses, and that it says so in the one wording."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedtangent._src import checks
from fedtangent._src.entries import choose


def test_what_is_allowed_comes_back():
    assert checks.number("x", np.float32(0.5), above=0, at_most=0.5) == 0.5
    assert checks.number("x", jnp.asarray(2), at_least=2, below=3) == 2.0
    assert checks.whole("n", np.int64(3), 3, 3) == 3 and type(checks.whole("n", np.int64(3))) is int
    assert checks.flag("f", np.bool_(False)) is False
    assert checks.choice("c", "a", ("a", "b")) == "a"
    assert checks.real_array("a", [[1, 2]]).dtype == np.float64
    assert checks.class_labels("y", [0, 2], 3).tolist() == [0, 2]
    np.testing.assert_array_equal(checks.symmetric("k", [[1, 2], [2, 1]]), [[1, 2], [2, 1]])
    checks.finite("a", np.full(3, 1e308))  # the sum overflows, the entries do not


def test_a_traced_number_has_no_value_to_look_at():
    assert jax.jit(lambda x: checks.number("x", x, above=0))(-1.0) == -1.0
    with pytest.raises(ValueError, match=r"x: got an array of shape \(2,\), must be one number"):
        jax.jit(lambda x: checks.number("x", x))(jnp.ones(2))


LABELS = "must be whole numbers [n], n >= 1"
REFUSED: dict[str, tuple[Any, str]] = {
    "text": (lambda: checks.number("x", "1"), "x: got '1', must be a number"),
    "bool": (lambda: checks.number("x", True), "x: got True, must be a number"),
    "none": (lambda: checks.number("x", None), "x: got None, must be a number"),
    "vector": (lambda: checks.number("x", [1.0]), "x: got an array of shape (1,), must be one number"),
    "nan": (lambda: checks.number("x", np.nan), "x: got nan, must be finite"),
    "inf": (lambda: checks.number("x", np.inf, above=0), "x: got inf, must be above 0 and finite"),
    "edge": (lambda: checks.number("x", 0, above=0), "x: got 0, must be above 0 and finite"),
    "at least": (lambda: checks.number("x", -0.1, at_least=0, below=1), "x: got -0.1, must be at least 0 and below 1"),
    "below": (lambda: checks.number("x", 1, at_least=0, below=1), "x: got 1, must be at least 0 and below 1"),
    "at most": (lambda: checks.number("x", 1.5, above=0, at_most=1), "x: got 1.5, must be above 0 and at most 1"),
    "half": (lambda: checks.whole("n", 0.5), "n: got 0.5, must be a whole number of at least 1"),
    "true": (lambda: checks.whole("n", True), "n: got True, must be a whole number of at least 1"),
    "few": (lambda: checks.whole("n", 1, 2), "n: got 1, must be a whole number of at least 2"),
    "many": (lambda: checks.whole("n", 4, 0, 3), "n: got 4, must be a whole number from 0 to 3"),
    "too many": (lambda: checks.whole("n", 2**31), "n: got 2147483648, must be a whole number from 1 to 2147483647"),
    "seed": (lambda: checks.seed("3"), "seed: got '3', must be a whole number from 0 to 4294967295"),
    "instance": (lambda: checks.instance("m", None, dict), "m: got None, must be a dict"),
    "flag": (lambda: checks.flag("f", 1), "f: got 1, must be True or False"),
    "choice": (lambda: checks.choice("c", "x", ("a", "b")), "c: got 'x', allowed are a, b"),
    "no choice": (lambda: checks.choice("c", None, ("a",)), "c: got None, allowed are a"),
    "ragged": (lambda: checks.real_array("a", [[1.0], 2.0]), "a: got [[1.0], 2.0], must be real numbers in one array"),
    "complex": (lambda: checks.real_array("a", 1j), "a: got 1j, must be a real number or an array of them"),
    "infinite": (
        lambda: checks.finite("a", np.array([0.0, -np.inf])),
        "a: got -inf at entry (1,) of shape (2,), must be finite",
    ),
    "square": (
        lambda: checks.symmetric("k", np.ones((2, 3))),
        "k: got shape (2, 3), must be a square matrix [n, n] with n >= 1",
    ),
    "symmetric": (
        lambda: checks.symmetric("k", np.tri(2)),
        "k: got a matrix up to 1 off its transpose, must be symmetric",
    ),
    "no labels": (lambda: checks.class_labels("y", []), f"y: got shape (0,), dtype float64, {LABELS}"),
    "labels": (lambda: checks.class_labels("y", [0, 3], 3), "y: got 3 at position 1 (1 such), must be from 0 to 2"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_one_wording(case: str) -> None:
    refused, message = REFUSED[case]
    with pytest.raises(ValueError, match=r"^\w+[.\w]*: got .*, (must be|allowed are|must never) .*$") as caught:
        refused()
    assert str(caught.value) == message


def test_a_name_that_is_nearly_right_is_suggested() -> None:
    names = ["logistic", "exponential"]
    with pytest.raises(ValueError, match=r"'logistics', allowed are logistic, exponential; did you mean logistic\?$"):
        checks.choice("loss", "logistics", names)
    with pytest.raises(ValueError, match=r"package\.module:function of your own; did you mean fed_avg\?$"):
        choose("algorithms", "fedavg")
    with pytest.raises(ValueError, match=r"^loss: got 'x', allowed are logistic, exponential$"):  # control
        checks.choice("loss", "x", names)
