"""The public names of fedtangent and their signatures are those of ``public_api.txt``.

Public are the names of the package, and of the modules among them (``__all__``). After a change
that is meant, ``python tests/test_public_api.py`` writes the file anew; the change belongs into CHANGELOG.md.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterable
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, ForwardRef, is_typeddict

import pytest

import fedtangent

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "tests" / "public_api.txt"
RENEW = "The public API has changed. If that is meant, say so in CHANGELOG.md and run: python tests/test_public_api.py"


def public_modules(package: ModuleType) -> dict[str, ModuleType]:
    """A package and every module that it, or a package that it exports, exports, by name."""
    found = {package.__name__: package}
    for value in (getattr(package, name) for name in getattr(package, "__all__", ())):
        if isinstance(value, ModuleType) and value.__name__ not in found:
            found |= public_modules(value)
    return dict(sorted(found.items()))


def api(modules: Iterable[ModuleType]) -> str:
    """The names of every module with their signatures; of a class, its methods; at the end what ``**options`` are."""
    text, options = "", {}
    for module in modules:
        exported = vars(module).get("__all__", ())
        text += f"\n{module.__name__}\n"
        for name in sorted(exported):
            value = getattr(module, name)
            text += "".join(f"    {line}\n" for line in described(name, value))
            options |= options_of(value)
    lines = "".join(f"    {name}{fields}\n" for name, fields in sorted(options.items()))
    return f"{text}\n**options\n{lines}".lstrip()


def options_of(function: Any) -> dict[str, str]:
    """The keywords that a function takes as ``**options: Unpack[Name]``, by the name of their type."""
    made = inspect.unwrap(function)
    written = getattr(made, "__annotations__", {}).values() if isinstance(made, FunctionType) else ()
    names = (found[1] for found in (re.fullmatch(r"Unpack\[(\w+)\]", str(text)) for text in written) if found)
    return {name: keywords(made.__globals__[name]) for name in names}


def keywords(kind: Any) -> str:
    """The fields of a ``TypedDict``."""
    return f"({', '.join(f'{name}: {annotation(of)}' for name, of in kind.__annotations__.items())})"


def described(name: str, value: Any) -> list[str]:
    """One line of what a name stands for; of a class, also one line of each method."""
    if isinstance(value, ModuleType):
        return [f"{name}: module {value.__name__}"]
    if inspect.isclass(value):
        return [f"class {name}{constructor(value)}", *methods(value)]
    if (callable(value) and hasattr(value, "__name__")) or isinstance(value, functools.partial):
        return [f"{name}{signature(value)}"]
    return [f"{name}: {type(value).__name__}"]


def constructor(kind: type) -> str:
    """The arguments from which a class of ours is made: the fields of a tuple or dataclass, or of ``__init__``."""
    if is_typeddict(kind):
        return keywords(kind)
    if hasattr(kind, "_fields"):
        made = signature(kind.__new__)
    elif isinstance(vars(kind).get("__init__"), FunctionType):
        made = signature(kind.__init__)  # type: ignore[misc]
    else:  # of a base class that is not ours, and may differ from one Python to the next
        return ""
    return re.sub(r"^\(\w+(, )?", "(", made).partition(" -> ")[0]


def methods(kind: type) -> list[str]:
    """Public methods and properties that a class itself defines."""
    lines = []
    for name, value in sorted(vars(kind).items()):
        function = getattr(value, "__func__", getattr(value, "func", value))
        if name.startswith("_"):
            continue
        if isinstance(value, property):
            function = value.fget
        if isinstance(function, FunctionType):
            lines.append(f"    {name}{signature(function)}")
    return lines


def signature(function: Any) -> str:
    """Names, kinds, annotations as they are written, and defaults of a function's arguments."""
    taken = inspect.signature(function)
    parts: list[str] = []
    named = False  # whether a bare * is due before arguments that are given by name only
    for argument in taken.parameters.values():
        if argument.kind is argument.VAR_POSITIONAL:
            named = True
        elif argument.kind is argument.KEYWORD_ONLY and not named:
            parts.append("*")
            named = True
        stars = {argument.VAR_POSITIONAL: "*", argument.VAR_KEYWORD: "**"}.get(argument.kind, "")
        text = f"{stars}{argument.name}"
        if argument.annotation is not argument.empty:
            text += f": {annotation(argument.annotation)}"
        if argument.default is not argument.empty:
            text += f" = {default(argument.default)}"
        parts.append(text)
    result = "" if taken.return_annotation is taken.empty else f" -> {annotation(taken.return_annotation)}"
    return f"({', '.join(parts)}){result}"


def annotation(value: Any) -> str:
    """A type as it is written in the source, whatever Python and JAX make of it."""
    if isinstance(value, ForwardRef):
        return value.__forward_arg__
    return value if isinstance(value, str) else getattr(value, "__name__", str(value))


def default(value: Any) -> str:
    """A default that reads alike everywhere: of an object, its name or its kind."""
    if type(value) is tuple:
        return f"({', '.join(map(default, value))}{',' * (len(value) == 1)})"
    if value is None or type(value) in (bool, int, float, str):
        return repr(value)
    name = getattr(value, "__name__", f"{type(value).__name__}(..)")
    return name if name[0].isalpha() else ".."


# ---- tests ----


def test_the_public_api_has_not_changed_unnoticed() -> None:
    now, before = (text.splitlines() for text in (api(public_modules(fedtangent).values()), LIST.read_text()))
    gone, new = ([line for line in a if line not in b] for a, b in ((before, now), (now, before)))
    changed = "\n".join([RENEW, *(f"- {line.strip()}" for line in gone), *(f"+ {line.strip()}" for line in new)])
    assert now == before, changed


CODE = """
from __future__ import annotations
from typing import NamedTuple, TypedDict, Unpack
__all__ = ["Rule", "train"]
class Rule(NamedTuple):
    steps: int
    rate: float = 0.1
    def stable(self, margin: float) -> bool: ...
class Options(TypedDict, total=False):
    loss: str
def train(model: Model, rule: Rule, *, seed: int = 0, **options: Unpack[Options]) -> Run: ...
"""


def of(code: str) -> str:
    """The list of a module with this code."""
    module = ModuleType("own")
    exec(code, vars(module))
    return api([module])


def test_signatures_are_written_as_in_the_source() -> None:
    assert of(CODE) == (
        "own\n"
        "    class Rule(steps: int, rate: float = 0.1)\n"
        "        stable(self, margin: float) -> bool\n"
        "    train(model: Model, rule: Rule, *, seed: int = 0, **options: Unpack[Options]) -> Run\n"
        "\n**options\n"
        "    Options(loss: str)\n"
    )


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('"Rule", ', ""),  # a name is not exported any more
        ("rule: Rule, *", "*"),  # an argument less
        ("seed: int", "key: int"),  # renamed
        ("seed: int = 0", "seed: int"),  # no default
        ("*, seed", "seed"),  # by place, too
        ("rate: float", "step: float"),  # a field
        ("def stable", "def _stable"),  # a method
        ("margin: float", "margin: int"),  # a type
        ("loss: str", "losses: str"),  # one of the options
    ],
)
def test_every_change_is_seen(before: str, after: str) -> None:
    assert CODE.count(before) == 1
    assert of(CODE.replace(before, after)) != of(CODE)


def test_an_argument_that_a_public_function_loses_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = public_modules(fedtangent)
    monkeypatch.setattr(fedtangent.data, "sign_targets", lambda labels: labels)
    monkeypatch.setattr(fedtangent.data, "__all__", [n for n in fedtangent.data.__all__ if n != "load"])
    gone = set(LIST.read_text().splitlines()) - set(api(modules.values()).splitlines())
    assert sorted(line.split("(")[0].strip() for line in gone) == ["load", "sign_targets"]


def test_every_public_module_has_its_place_in_the_documentation() -> None:
    text = "".join(path.read_text() for path in sorted((ROOT / "docs" / "reference").rglob("*.md")))
    documented = set(re.findall(r"automodule:: (\S+)", text))
    assert set(public_modules(fedtangent)) - documented == set()


if __name__ == "__main__":
    LIST.write_text(api(public_modules(fedtangent).values()))
