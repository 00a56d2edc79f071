"""Faults as operators on the syntax tree: a fault names a function and what happens to one place in it.

The place is found by the operator (it applies to few kinds of nodes), by ``at`` (text that the place must contain, as
``ast.unparse`` writes it), and by ``nth`` among the places that remain, counted from 1 in the order of the source. So a
fault outlives renamed locals, new lines and formatting. The text of that place alone is replaced.
"""

from __future__ import annotations

import ast
import builtins
import copy
import functools
import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

SYMBOLS: dict[str, type[ast.AST]] = {
    **{"+": ast.Add, "-": ast.Sub, "*": ast.Mult, "/": ast.Div, "//": ast.FloorDiv, "%": ast.Mod, "**": ast.Pow},
    **{"@": ast.MatMult, "&": ast.BitAnd, "|": ast.BitOr, "<": ast.Lt, "<=": ast.LtE, ">": ast.Gt, ">=": ast.GtE},
    **{"==": ast.Eq, "!=": ast.NotEq, "is": ast.Is, "is not": ast.IsNot, "in": ast.In, "not in": ast.NotIn},
    **{"and": ast.And, "or": ast.Or},
}

ROOT = Path(__file__).resolve().parents[1]
SOURCES = Path("src/fedtangent/_src")


class Fault(NamedTuple):
    """A fault of ``mutants.toml``.

    Attributes:
        function: ``path::name``: the path below src/fedtangent/_src, and the dotted name of a function, class or
            assigned variable in it (``Class.method``, ``outer.inner``).
        operator: One of ``OPERATORS`` or ``CONDITIONS``.
        to: What the operator puts in, for those that need it.
        at: Text that the place contains; "" for any.
        nth: Which of the places that remain, from 1.
        tests: The files below tests/ that are run to catch it.
    """

    function: str
    operator: str
    to: str = ""
    at: str = ""
    nth: int = 1
    tests: tuple[str, ...] = ()

    @property
    def path(self) -> Path:
        """The file, below the root of the repository."""
        return SOURCES / self.function.partition("::")[0]

    def __str__(self) -> str:
        details = [f"{name} {value!r}" for name, value in (("to", self.to), ("at", self.at)) if value]
        return " ".join([self.function, self.operator, *details, *([f"nth {self.nth}"] if self.nth > 1 else [])])


def read_list() -> list[Fault]:
    """The faults of ``mutants.toml``."""
    rows = tomllib.loads((ROOT / "tests" / "mutants.toml").read_text())["faults"]
    return [Fault(**row | {"tests": tuple(row["tests"])}) for row in rows]


class Edit(NamedTuple):
    """A node and what takes its place."""

    node: ast.expr | ast.stmt
    replacement: ast.AST


def parsed(text: str) -> ast.expr | ast.stmt:
    """The syntax tree of an expression or of a statement."""
    (statement,) = ast.parse(text).body
    return statement.value if isinstance(statement, ast.Expr) else statement


# ---- the operators: each gives what takes the place of a node, or None where it does not apply ----

Operator = Callable[[ast.AST, str], ast.AST | None]


def drop_left(node: ast.AST, to: str) -> ast.AST | None:
    """``a + b`` becomes ``b``, for every operator; ``a and b and c`` becomes ``b and c``."""
    match node:
        case ast.BinOp(right=right):
            return right
        case ast.BoolOp(op=op, values=[_, *rest]):
            return rest[0] if len(rest) == 1 else ast.BoolOp(op, rest)
    return None


def drop_right(node: ast.AST, to: str) -> ast.AST | None:
    """``a + b`` becomes ``a``, for every operator; ``a and b and c`` becomes ``a and b``."""
    match node:
        case ast.BinOp(left=left):
            return left
        case ast.BoolOp(op=op, values=[*rest, _]):
            return rest[0] if len(rest) == 1 else ast.BoolOp(op, rest)
    return None


def swap_operator(node: ast.AST, to: str) -> ast.AST | None:
    """The operator of ``a + b``, ``a < b`` or ``a += b`` becomes ``to``."""
    symbol = SYMBOLS[to]
    match node:
        case ast.BinOp(left, op, right) if type(op) is not symbol and issubclass(symbol, ast.operator):
            return ast.BinOp(left, symbol(), right)
        case ast.Compare(left, [op], comparators) if type(op) is not symbol and issubclass(symbol, ast.cmpop):
            return ast.Compare(left, [symbol()], comparators)
        case ast.BoolOp(op, values) if type(op) is not symbol and issubclass(symbol, ast.boolop):
            return ast.BoolOp(symbol(), values)
        case ast.AugAssign(target, op, value) if type(op) is not symbol and issubclass(symbol, ast.operator):
            return ast.AugAssign(target, symbol(), value)
    return None


def swap_operands(node: ast.AST, to: str) -> ast.AST | None:
    """``a - b`` becomes ``b - a``, ``a < b`` becomes ``b < a``."""
    match node:
        case ast.BinOp(left, op, right):
            return ast.BinOp(right, op, left)
        case ast.Compare(left, [op], [right]):
            return ast.Compare(right, [op], [left])
    return None


def swap_arguments(node: ast.AST, to: str) -> ast.AST | None:
    """``f(a, b, c)`` becomes ``f(b, a, c)``, and the tuple ``a, b`` becomes ``b, a``."""
    match node:
        case ast.Call(func, [first, second, *rest], keywords):
            return ast.Call(func, [second, first, *rest], keywords)
        case ast.Tuple([first, second, *rest], context):
            return ast.Tuple([second, first, *rest], context)
    return None


def flip_sign(node: ast.AST, to: str) -> ast.AST | None:
    """``-a`` becomes ``a``, and ``a + b`` becomes ``a - b`` and the reverse."""
    match node:
        case ast.UnaryOp(ast.USub(), operand):
            return operand
        case ast.BinOp(left, ast.Add(), right):
            return ast.BinOp(left, ast.Sub(), right)
        case ast.BinOp(left, ast.Sub(), right):
            return ast.BinOp(left, ast.Add(), right)
    return None


def scale(node: ast.AST, to: str) -> ast.AST | None:
    """``a`` becomes ``to * a``; the place is an expression that can be a number."""
    numeric = (ast.Name, ast.Attribute, ast.Call, ast.BinOp, ast.Subscript)
    is_value = isinstance(node, numeric) and isinstance(getattr(node, "ctx", ast.Load()), ast.Load)
    return ast.BinOp(parsed(to), ast.Mult(), node) if is_value else None


def change_constant(node: ast.AST, to: str) -> ast.AST | None:
    """A number, a string, None, True, False or a constant named in capitals becomes ``to``."""
    is_named = isinstance(node, ast.Name) and node.id.isupper() and isinstance(node.ctx, ast.Load)
    return parsed(to) if is_named or isinstance(node, ast.Constant) else None


def change_name(node: ast.AST, to: str) -> ast.AST | None:
    """A variable becomes the variable ``to``."""
    return ast.Name(to, node.ctx) if isinstance(node, ast.Name) and node.id != to else None


def change_attribute(node: ast.AST, to: str) -> ast.AST | None:
    """``a.max`` becomes ``a.to``."""
    return ast.Attribute(node.value, to, node.ctx) if isinstance(node, ast.Attribute) and node.attr != to else None


def set_value(node: ast.AST, to: str) -> ast.AST | None:
    """``x = ..`` becomes ``x = to``, ``return ..`` becomes ``return to``."""
    match node:
        case ast.Assign(targets, value) if not isinstance(value, ast.Constant):
            return ast.Assign(targets, parsed(to), lineno=0)
        case ast.Return():
            return ast.Return(parsed(to))
    return None


def conditions(node: ast.AST) -> list[ast.expr]:
    """The conditions that ``node`` itself decides by."""
    match node:
        case ast.If(test) | ast.While(test) | ast.IfExp(test) | ast.Assert(test):
            return [test]
        case ast.comprehension(ifs=ifs):
            return ifs
    return []


def choose(node: ast.AST, to: str) -> ast.AST | None:
    """``a if c else b`` becomes ``a`` (``to`` is "if") or ``b`` (``to`` is "else")."""
    if not isinstance(node, ast.IfExp):
        return None
    return {"if": node.body, "else": node.orelse}[to]


def return_argument(node: ast.AST, to: str) -> ast.AST | None:
    """``f(a, b)`` becomes its argument number ``to``, from 1; number 0 of ``x.f(a)`` is ``x``."""
    match node:
        case ast.Call(ast.Attribute(value=value)) if to == "0":
            return value
        case ast.Call(args=args) if to != "0" and len(args) >= int(to):
            argument = args[int(to) - 1]
            return None if isinstance(argument, ast.Starred) else argument
    return None


def drop_argument(node: ast.AST, to: str) -> ast.AST | None:
    """``f(a, b=c)`` without the argument ``to``: a keyword's name, or a number from 1."""
    match node:
        case ast.Call(func, args, keywords) if to.isdigit() and len(args) >= int(to):
            return ast.Call(func, [a for i, a in enumerate(args, 1) if i != int(to)], keywords)
        case ast.Call(func, args, keywords) if to in [k.arg for k in keywords]:
            return ast.Call(func, args, [k for k in keywords if k.arg != to])
    return None


def drop_call(node: ast.AST, to: str) -> ast.AST | None:
    """A statement that assigns, or calls for its effect, is left out."""
    is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return ast.Pass() if isinstance(node, ast.Expr | ast.Assign | ast.AugAssign) and not is_docstring else None


def drop_subscript(node: ast.AST, to: str) -> ast.AST | None:
    """``a[i]`` becomes ``a``."""
    return node.value if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load) else None


def drop_inversion(node: ast.AST, to: str) -> ast.AST | None:
    """``~a`` or ``not a`` becomes ``a``."""
    match node:
        case ast.UnaryOp(ast.Invert() | ast.Not(), operand):
            return operand
    return None


def drop_entry(node: ast.AST, to: str) -> ast.AST | None:
    """A dictionary without its key ``to``; a tuple, list or f-string without its part number ``to``, from 1."""
    match node:
        case ast.Dict(keys, values):
            rest = [(k, v) for k, v in zip(keys, values, strict=True) if k is None or ast.unparse(k) != to]
            return ast.Dict([k for k, _ in rest], [v for _, v in rest]) if len(rest) < len(keys) else None
        case ast.Tuple(elts=parts) | ast.List(elts=parts) | ast.JoinedStr(values=parts) if to.isdigit():
            if len(parts) < int(to):
                return None
            changed = copy.copy(node)
            name = "values" if isinstance(node, ast.JoinedStr) else "elts"
            setattr(changed, name, [part for i, part in enumerate(parts, 1) if i != int(to)])
            return changed
    return None


def rewrite(node: ast.AST, to: str) -> ast.AST | None:
    """``to`` is ``pattern -> result``: single capital letters stand for any expression."""
    pattern, _, result = to.partition(" -> ")
    bound: dict[str, ast.AST] = {}
    return substituted(parsed(result), bound) if matches(parsed(pattern), node, bound) else None


OPERATORS: dict[str, Operator] = {
    operator.__name__.replace("_", "-"): operator
    for operator in (drop_left, drop_right, swap_operator, swap_operands, swap_arguments, flip_sign, scale)
    + (change_constant, change_name, change_attribute, set_value, choose, return_argument)
    + (drop_argument, drop_call, drop_subscript, drop_inversion, drop_entry, rewrite)
}
CONDITIONS = {"negate-condition": "not ({})", "hold-condition": "True", "fail-condition": "False"}


# ---- patterns ----


def is_wildcard(node: ast.AST) -> bool:
    """Whether ``node`` is a variable of a pattern."""
    return isinstance(node, ast.Name) and len(node.id) == 1 and node.id.isupper()


def matches(pattern: object, node: object, bound: dict[str, ast.AST]) -> bool:
    """Whether ``node`` is ``pattern`` with expressions for its wildcards, which are put into ``bound``."""
    if isinstance(pattern, ast.Name) and is_wildcard(pattern) and isinstance(node, ast.expr):
        return ast.dump(bound.setdefault(pattern.id, node)) == ast.dump(node)
    if isinstance(pattern, list):
        pairs = zip(pattern, node, strict=True) if isinstance(node, list) and len(node) == len(pattern) else None
        return pairs is not None and all(matches(a, b, bound) for a, b in pairs)
    if isinstance(pattern, ast.AST):
        if type(pattern) is not type(node):
            return False
        names = [name for name in pattern._fields if name != "ctx"]
        return all(matches(getattr(pattern, name), getattr(node, name), bound) for name in names)
    return bool(pattern == node)


def substituted(pattern: ast.AST, bound: dict[str, ast.AST]) -> ast.AST:
    """The pattern with ``bound`` for its wildcards."""

    class Substitute(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.AST:
            return bound.get(node.id, node) if is_wildcard(node) else node

    return Substitute().visit(pattern)


# ---- where a fault is, and its text ----


def definitions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    """The dotted names of functions, classes and assigned variables below ``node``."""
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.FunctionDef(name) | ast.ClassDef(name):
                yield prefix + name, child
                yield from definitions(child, f"{prefix}{name}.")
            case ast.Assign([ast.Name(name)]) | ast.AnnAssign(ast.Name(name)):
                yield prefix + name, child
            case ast.stmt():
                yield from definitions(child, prefix)


def children(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes right below ``node``, without annotations, decorators and the insides of f-strings."""
    for name, value in ast.iter_fields(node):
        if not isinstance(node, ast.JoinedStr) and name not in ("annotation", "returns", "decorator_list"):
            yield from (part for part in (value if isinstance(value, list) else [value]) if isinstance(part, ast.AST))


def places(function: ast.AST) -> list[ast.AST]:
    """The nodes of ``function``, each before its parts."""
    nodes, todo = [], [function]
    while todo:
        nodes.append(todo.pop())
        todo += [part for part in children(nodes[-1]) if not is_docstring(part)]
    return nodes


def is_docstring(node: ast.AST) -> bool:
    """Whether a statement is only a text."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def edits(fault: Fault, function: ast.AST) -> list[Edit]:
    """Every place where the operator applies, in the order of the source; outer ones first where two begin together."""
    nodes = places(function)
    if fault.operator in CONDITIONS:
        form = CONDITIONS[fault.operator]
        tests = [test for node in nodes for test in conditions(node)]
        changes = [Edit(test, parsed(form.format(ast.unparse(test)))) for test in tests]
    elif fault.operator not in OPERATORS:
        raise ValueError(f"{fault}: allowed operators are {', '.join([*OPERATORS, *CONDITIONS])}")
    else:
        operator = OPERATORS[fault.operator]
        pairs = [(node, operator(node, fault.to)) for node in nodes]
        changes = [Edit(node, replacement) for node, replacement in pairs if replacement is not None]
    return sorted(changes, key=lambda edit: (edit.node.lineno, edit.node.col_offset))


def text_of(edit: Edit) -> str:
    """The text that takes the place of the node."""
    text = ast.unparse(ast.fix_missing_locations(copy.deepcopy(edit.replacement)))
    if isinstance(edit.node, ast.stmt):
        return text
    match edit.replacement:
        case ast.Slice():
            return text
        case ast.Tuple(elts) if any(isinstance(e, ast.Slice) for e in elts):
            return text.removeprefix("(").removesuffix(")")
    return f"({text})"


def spliced(source: str, edit: Edit) -> str:
    """``source`` with the text of the edit's node replaced."""
    lines = source.encode().splitlines(keepends=True)
    node = edit.node
    begin = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
    end = sum(map(len, lines[: node.end_lineno - 1])) + node.end_col_offset
    whole = b"".join(lines)
    return (whole[:begin] + text_of(edit).encode() + whole[end:]).decode()


def mutated(fault: Fault, root: Path = ROOT) -> str:
    """Returns the text of the fault's file with the fault in it.

    Args:
        fault: A fault of the list.
        root: The root of the repository.

    Raises:
        ValueError: The file, the function or the place is not there; one line says which.
    """
    path, _, name = fault.function.partition("::")
    if not (root / fault.path).is_file():
        raise ValueError(f"{fault}: there is no file {path}{elsewhere(name, root)}")
    source = (root / fault.path).read_text()
    defined, known = read(source)
    function = defined.get(name)
    if function is None:
        raise ValueError(f"{fault}: {path} has no {name}{elsewhere(name, root)}")
    applicable = edits(fault, function)
    chosen = [edit for edit in applicable if not fault.at or fault.at in ast.unparse(edit.node)]
    if len(chosen) < fault.nth:
        raise ValueError(f"{fault}: the operator applies to {len(applicable)} places, {len(chosen)} of them with `at`")
    edit = chosen[fault.nth - 1]
    if strangers := names_of(edit.replacement) - known - set(dir(builtins)):
        raise ValueError(f"{fault}: {path} does not know {', '.join(sorted(strangers))}")
    return spliced(source, edit)


@functools.lru_cache(2)
def read(source: str) -> tuple[dict[str, ast.AST], set[str]]:
    """The definitions of a text and the names in it, read once for all faults of a file: no operator changes a node."""
    tree = ast.parse(source)
    return dict(definitions(tree)), names_of(tree)


def names_of(tree: ast.AST) -> set[str]:
    """The names that ``tree`` reads, sets, takes as arguments or imports."""
    names = set()
    for node in ast.walk(tree):
        match node:
            case ast.Name(name) | ast.arg(name) | ast.FunctionDef(name) | ast.ClassDef(name):
                names.add(name)
            case ast.alias(name, alias):
                names.add(alias or name)
    return names


def elsewhere(name: str, root: Path) -> str:
    """Where else a definition has this name, for the message that it is not where the list says."""
    outer, folder = name.partition(".")[0], root / SOURCES
    pattern = re.compile(rf"^ *(def|class) {outer}\b|^{outer}\b.*=", re.MULTILINE)
    paths = [str(p.relative_to(folder)) for p in sorted(folder.rglob("*.py")) if pattern.search(p.read_text())]
    return f"; {outer} is in {', '.join(paths[:3])}" if paths else ""
