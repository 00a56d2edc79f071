"""Arrays are of the shapes that annotations say: the contracts of ``contracts.py`` are on, and see what is wrong."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import fedtangent as ft
from fedtangent._src import losses

from . import contracts
from .contracts import BrokenContract

MODULE = """
from __future__ import annotations
import functools
from typing import TYPE_CHECKING, Any, NamedTuple
import jax
import numpy as np
from jaxtyping import Float
if TYPE_CHECKING:
    from fractions import Fraction

def scaled(a: Float[np.ndarray, "n m"], b: Float[np.ndarray, "m"]) -> Float[np.ndarray, "n m"]:
    return a * b

def wrong_result(a: Float[np.ndarray, "n m"]) -> Float[np.ndarray, "m n"]:
    return a

def later(record: Record) -> None: ...
def same(x: Fraction) -> Fraction: return x

class Record(NamedTuple):
    size: int
    @property
    def root(self) -> float: return self.size ** 0.5
    def next(self, *more: int, **named: float) -> Record: return self

def refusing(n: int) -> int:
    if not isinstance(n, int):
        raise ValueError("n: must be a whole number")
    return n

def made(n: int):
    def inner(x: str) -> str: return x * n
    return inner

@functools.partial(jax.jit, static_argnames="n")
def compiled(x: Float[jax.Array, "n"], n: int) -> Float[jax.Array, ""]:
    return (n * x).sum()
"""
WIDE = np.ones((2, 3))


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A module of its own, whose functions are checked."""
    (tmp_path / "checked_module.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.delitem(sys.modules, "checked_module", raising=False)
    contracts.install("checked_module")
    return importlib.import_module("checked_module")


def test_the_package_is_checked() -> None:
    """Each of these would pass without its contract."""
    outputs, mask = jnp.ones((4, 2)), jnp.ones(4, bool)
    assert losses.squared_error(outputs, outputs, mask) == 0
    for wrong in (mask[:, None], mask[:1], mask.astype(int)):
        with pytest.raises(BrokenContract, match=r"losses.masked_mean: mask: .*Bool"):
            losses.squared_error(outputs, outputs, wrong)


def test_the_packages_own_errors_come_first() -> None:
    with pytest.raises(ValueError, match="members: got shape"):
        ft.measures.accuracy(jnp.ones((4, 2)), jnp.zeros(4, int))
    with pytest.raises(TypeError, match=r"accuracy\(\) got an unexpected keyword argument 'member'"):
        ft.measures.accuracy(member=1)  # type: ignore[call-arg]


def test_an_axis_has_one_size_in_a_call(module) -> None:
    assert module.scaled(WIDE, WIDE[0]).shape == (2, 3)
    with pytest.raises(BrokenContract, match=r"checked_module.scaled: b: .*'m'"):
        module.scaled(WIDE, WIDE[0, :1])
    with pytest.raises(ValueError, match="broadcast") as caught:
        module.scaled(WIDE, WIDE[0, :2])
    assert "checked_module.scaled: b: " in caught.value.__notes__[0]
    with pytest.raises(BrokenContract, match="wrong_result: the result"):
        module.wrong_result(WIDE)
    assert module.wrong_result(np.ones((2, 2))).shape == (2, 2)


def test_names_are_looked_up_late(module) -> None:
    """As jaxtyping's hook does not: it lets these pass unchecked."""
    module.later(module.Record(2))
    with pytest.raises(BrokenContract, match="later: record"):
        module.later((2,))
    with pytest.raises(BrokenContract, match="same: x"):
        module.same("1")


def test_methods_closures_and_compiled_functions_are_checked(module) -> None:
    assert module.Record(4).root == 2 and module.Record("4") == ("4",)  # records hold anything, functions do not
    assert module.Record(4).next(1, 2, a=1) == (4,)
    with pytest.raises(BrokenContract, match=r"Record.next: \*arguments"):
        module.Record(4).next(1, "2")
    with pytest.raises(BrokenContract, match=r"Record.next: a"):
        module.Record(4).next(a="1")
    with pytest.raises(BrokenContract, match="inner: x"):
        module.made(2)(3)
    assert module.compiled(jnp.ones(3), n=2) == 6
    with pytest.raises(BrokenContract, match="compiled: x"):
        module.compiled(jnp.ones((3, 1)), n=2)


def test_a_function_may_refuse_what_breaks_its_contract(module) -> None:
    with pytest.raises(ValueError, match="must be a whole number"):
        module.refusing("1")


def test_nothing_is_checked_outside_the_tests() -> None:
    program = "from fedtangent._src.theory import checks; print(checks.failing(()))"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout == "()\n"
