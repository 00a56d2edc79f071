"""The memory of a device, and an estimate of the memory that a traced program needs, by the lifetimes of its arrays."""

from __future__ import annotations

import collections
import functools
import math
import os
from pathlib import Path
from typing import Any

import jax
from jax.extend import core

from fedtangent._src import pytrees

USABLE = 0.9  # share of the memory to plan with; the rest is for programs, buffers in flight and fragmentation


@functools.cache
def memory_limit() -> int:
    """Returns the bytes that a run may use on a device: the accelerator's limit, or the host's (cgroups included)."""
    statistics = jax.local_devices()[0].memory_stats()
    if statistics and statistics.get("bytes_limit"):
        return int(statistics["bytes_limit"])
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            host = min(host, int((Path("/sys/fs/cgroup") / name).read_text()))
        except (OSError, ValueError):  # no such control group, or "max"
            continue
    return host


def size(num_bytes: float) -> str:
    """Returns a number of bytes as text, such as ``1.5 GiB``."""
    if num_bytes < 1024:
        return f"{num_bytes:.0f} B"
    power = min(int(math.log(num_bytes, 1024)), 3)
    return f"{num_bytes / 1024**power:.1f} {('KiB', 'MiB', 'GiB')[power - 1]}"


def _bytes(var: core.Var | core.Literal) -> int:
    aval: Any = var.aval
    if isinstance(var, core.Literal) or not hasattr(aval, "shape"):
        return 0
    return math.prod(aval.shape) * pytrees.item_bytes(aval.dtype)


Program = core.ClosedJaxpr | core.Jaxpr


def is_program(value: object) -> bool:
    """Returns whether ``value`` is a traced program, a jaxpr of JAX."""
    return isinstance(value, Program)


def inner_programs(equation: core.JaxprEqn) -> list[core.Jaxpr]:
    """Returns the programs that an operation runs, such as the body of a loop.

    Args:
        equation: Operation of a traced program.
    """
    values = jax.tree.leaves(equation.params, is_leaf=is_program)
    return [v.jaxpr if isinstance(v, core.ClosedJaxpr) else v for v in values if isinstance(v, Program)]


# Operations that compilers fuse into the operation that uses their result, if there is only one: it is not stored.
FUSED = frozenset(
    ("abs", "add", "add_any", "and", "broadcast_in_dim", "convert_element_type", "copy", "cos", "div", "eq", "exp")
    + ("ge", "gt", "integer_pow", "iota", "le", "log", "log1p", "logistic", "lt", "max", "min", "mul", "ne", "neg")
    + ("not", "or", "pow", "reshape", "rsqrt", "select_n", "sign", "sin", "sqrt", "square", "squeeze", "sub", "tanh")
)


def peak_bytes(jaxpr: core.Jaxpr, loop: bool = False) -> int:
    """Estimates the most bytes that a program's intermediate arrays take at once; inputs and constants do not count.

    An elementwise result with one consumer takes no bytes, because it is fused into the consumer.

    Args:
        jaxpr: The traced program.
        loop: Whether ``jaxpr`` is the body of a loop; its results then take no bytes, as they overwrite the loop's
            buffers.
    """
    users = collections.defaultdict[core.Var, list[int]](list)
    for i, equation in enumerate(jaxpr.eqns):
        for var in equation.invars:
            if isinstance(var, core.Var):
                users[var].append(i)
    returned = {v for v in jaxpr.outvars if isinstance(v, core.Var)}
    for var in returned:
        users[var].append(len(jaxpr.eqns))
    needed = _needed_until(jaxpr, users)
    live, peak, ends = 0, 0, collections.Counter[int]()
    for i, equation in enumerate(jaxpr.eqns):
        for var in equation.outvars:
            free = _is_fused(jaxpr, i, users[var]) or (loop and var in returned)
            size_of_result = 0 if free else _bytes(var)
            live += size_of_result
            ends[max((needed[j] for j in users[var]), default=i)] += size_of_result
        body = equation.primitive.name in ("while", "scan")
        inside = max((peak_bytes(inner, body) for inner in inner_programs(equation)), default=_work_bytes(equation))
        peak = max(peak, live + inside)
        live -= ends[i]
    return peak


def _is_fused(jaxpr: core.Jaxpr, i: int, users: list[int]) -> bool:
    """Returns whether compilers fuse equation ``i`` of a program into the only equation that reads its result.

    ``users`` has the indices of the equations that read the result of ``i``, and the number of equations if the program
    returns that result.
    """
    if not _is_elementwise(jaxpr.eqns[i]) or len(users) != 1 or users[0] == len(jaxpr.eqns):
        return False
    user = jaxpr.eqns[users[0]]
    return _is_elementwise(user) or user.primitive.name.startswith(("reduce_", "arg"))


def _is_elementwise(equation: core.JaxprEqn) -> bool:
    """Returns whether an operation, or a function such as relu, computes each number of its result independently."""
    if equation.primitive.name in FUSED:
        return True
    inner = [] if equation.primitive.name in ("while", "scan", "cond") else inner_programs(equation)
    return bool(inner) and all(_is_elementwise(one) for jaxpr in inner for one in jaxpr.eqns)


def _needed_until(jaxpr: core.Jaxpr, users: dict[core.Var, list[int]]) -> list[int]:
    """Returns for each equation the index of the last equation until which its operands must stay in memory.

    Usually that is the equation itself. A compiler may compute an elementwise equation again wherever its result is
    used, so its operands are needed until the last use. One further entry is the number of equations, for the program's
    end. ``users`` has the indices of the equations that read each variable.
    """
    until = list(range(len(jaxpr.eqns) + 1))  # a compiler may recompute an elementwise result wherever it is used
    for i in reversed(range(len(jaxpr.eqns))):
        used = [j for var in jaxpr.eqns[i].outvars for j in users[var] if j < len(jaxpr.eqns)]
        if _is_elementwise(jaxpr.eqns[i]) and used:
            until[i] = max(until[j] for j in used)
    return until


def _work_bytes(equation: core.JaxprEqn) -> int:
    """Estimates the bytes of an operation's work space: copies of stacked matrices for a product, arrays of LAPACK.

    LAPACK is counted for ``eigh`` and ``svd`` only; all other operations but products have 0.
    """
    if equation.primitive.name == "dot_general":
        operands = (*equation.invars, *equation.outvars)
        return sum(_bytes(v) for v in operands if len(getattr(v.aval, "shape", ())) > 2)
    return 2 * max(map(_bytes, equation.outvars)) if equation.primitive.name in ("eigh", "svd") else 0
