"""The contracts of fedtangent's functions: in the tests, every call is checked against its annotations.

``install`` rewrites the modules of a package while they are imported, as ``jaxtyping.install_import_hook`` does: every
function checks its arguments and its result. Shapes by jaxtyping, where an axis has one size within a call; types by
beartype. jaxtyping's own hook makes two checked functions of every function that is defined, of 3 ms each time; here
most functions are closures, which are defined anew in every call, and the suite took a third longer. So here a contract
is made once, when a line of code is first called. That is late enough for names that are defined below it, or imported
under ``if TYPE_CHECKING``, which jaxtyping's hook lets pass unchecked.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple, ParamSpecArgs, ParamSpecKwargs, TypeVar, Unpack, get_origin
from unittest import mock

import beartype
import jaxtyping

DECORATOR, TYPING = "__contract__", "__typing__"  # names in a module that was rewritten
TYPES = beartype.BeartypeConf(is_pep484_tower=True)  # an int is a float
CACHED = "contracts" + hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
GENERIC = (ParamSpecArgs, ParamSpecKwargs, TypeVar)
NO_CHECK = (Any, object, inspect.Parameter.empty)


class BrokenContract(AssertionError):
    """An argument or a result is not of the type or shape that its annotation says.

    It is neither a ``TypeError`` nor a ``ValueError``, so that no code takes it for a user's mistake.
    """


class Contract(NamedTuple):
    """Checks of a function's arguments and of its result; an argument without a check may be anything.

    Attributes:
        positional: Check of each argument by place.
        more: Check of further arguments by place (``*args``).
        named: Check of each argument by name.
        others: Check of further arguments by name (``**kwargs``).
        result: Check of the result.
    """

    positional: tuple[tuple[str, Check | None], ...]
    more: Check | None
    named: dict[str, Check | None]
    others: Check | None
    result: Check | None

    def wrong(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, str] | None:
        """Returns the first argument that is not of its type, and why; None if all are."""
        for i, value in enumerate(args):
            name, check = self.positional[i] if i < len(self.positional) else ("*arguments", self.more)
            if check is not None and (wrong := violation(name, value, check)):
                return wrong
        for name, value in kwargs.items():
            check = self.named.get(name, self.others)
            if check is not None and (wrong := violation(name, value, check)):
                return wrong
        return None


Check = Callable[[Any], Any]
_CONTRACTS: dict[CodeType, Contract] = {}


def told(function: FunctionType, what: str, text: str) -> str:
    """Returns in words that ``what`` breaks the contract of ``function``."""
    return f"{function.__module__}.{function.__qualname__}: {what}: {text}"


def violation(what: str, value: Any, check: Check) -> tuple[str, str] | None:
    """Returns ``what`` and why it is not of its type; None if it is."""
    try:
        check(value)
    except beartype.roar.BeartypeCallHintViolation as error:
        return what, str(error).partition("violates type hint ")[2] or str(error)
    return None


@functools.cache
def check_of(hint: Any) -> Check:
    """Returns a function that raises if its argument is not of the type ``hint``."""

    @functools.cache
    def full() -> Check:
        def check(value):  # type: ignore[no-untyped-def]
            pass

        check.__annotations__["value"] = hint
        return beartype.beartype(conf=TYPES)(check)

    def quick(value: Any) -> None:
        if not isinstance(value, hint):
            full()(value)  # raises, and says why; or it is an int for a float

    return quick if isinstance(hint, type) else full()


def contract_of(function: FunctionType) -> Contract:
    """Returns the checks of ``function``, whose annotations are looked up now."""

    def check(annotation: Any) -> Check | None:
        hint = looked_up(annotation) if isinstance(annotation, str) else annotation
        unknown = hint in NO_CHECK or isinstance(hint, GENERIC) or get_origin(hint) is Unpack
        return None if unknown else check_of(hint)

    def looked_up(annotation: str) -> Any:
        try:
            return eval(annotation, names)
        except NameError:  # imported under `if TYPE_CHECKING`, which may take long
            exec(names[TYPING], names)
            return eval(annotation, names)

    names = dict(function.__globals__)
    parameters = [p.replace(annotation=check(p.annotation)) for p in inspect.signature(function).parameters.values()]
    kinds = {p.kind: p.annotation for p in parameters}
    by_place = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    by_name = [p for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return Contract(
        tuple((p.name, p.annotation) for p in by_place),
        kinds.get(inspect.Parameter.VAR_POSITIONAL),
        {p.name: p.annotation for p in by_name},
        kinds.get(inspect.Parameter.VAR_KEYWORD),
        check(function.__annotations__.get("return", Any)),
    )


def checked(function: FunctionType) -> Callable[..., Any]:
    """Returns ``function`` with its arguments and its result checked in every call."""
    if not function.__annotations__:
        return function
    code = function.__code__

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        contract = _CONTRACTS.get(code) or _CONTRACTS.setdefault(code, contract_of(function))
        with jaxtyping.jaxtyped("context"):  # an axis has one size from here on
            wrong = contract.wrong(args, kwargs)
            try:
                result = function(*args, **kwargs)
            except Exception as error:  # a function may refuse an argument itself
                if wrong is not None:
                    error.add_note(told(function, *wrong))
                raise
            if wrong is None and contract.result is not None:
                wrong = violation("the result", result, contract.result)
            if wrong is not None:
                raise BrokenContract(told(function, *wrong))
            return result

    return call


class _Rewriter(ast.NodeTransformer):
    """Decorates every function of a module, below its other decorators."""

    def __init__(self) -> None:
        self.typing: list[ast.stmt] = []  # imports under `if TYPE_CHECKING`

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.decorator_list.append(self._decorator(node))
        return self.generic_visit(node)

    def visit_If(self, node: ast.If) -> ast.AST:
        if ast.unparse(node.test) == "TYPE_CHECKING":
            self.typing += node.body
        return self.generic_visit(node)

    def _decorator(self, node: ast.AST) -> ast.expr:
        made = ast.parse(DECORATOR, mode="eval").body
        return ast.fix_missing_locations(ast.copy_location(made, node))


class _Loader(SourceFileLoader):
    def source_to_code(self, data: Any, path: Any, *, _optimize: int = -1) -> Any:
        rewriter = _Rewriter()
        tree = rewriter.visit(ast.parse(data, path))
        names = ast.unparse(rewriter.typing)  # type: ignore[arg-type]
        first = sum(isinstance(node, ast.ImportFrom) and node.module == "__future__" for node in tree.body)
        first += ast.get_docstring(tree) is not None
        tree.body.insert(first, ast.parse(f"{TYPING} = {names!r}").body[0])
        return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True, optimize=_optimize)

    def exec_module(self, module: ModuleType) -> None:
        vars(module)[DECORATOR] = checked
        cached = functools.partial(importlib.util.cache_from_source, optimization=CACHED)
        with mock.patch("importlib._bootstrap_external.cache_from_source", cached):
            super().exec_module(module)


class _Finder:
    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if f"{name}.".startswith(f"{self.package}."):
            spec = PathFinder.find_spec(name, path, target)
            if spec is not None and isinstance(spec.loader, SourceFileLoader):
                spec.loader = _Loader(spec.loader.name, spec.loader.path)
            return spec
        return None


def install(package: str) -> None:
    """Has the functions of every module of ``package`` that is imported from now on checked."""
    sys.meta_path.insert(0, _Finder(package))  # type: ignore[arg-type]
