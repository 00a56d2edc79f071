"""Imports run one way, heavy libraries stay out until they are needed, and `import fedtangent` is quick."""

from __future__ import annotations

import ast
import graphlib
import importlib
import json
import os
import pkgutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import fedtangent
from fedtangent._src import entries

SOURCE = Path(__file__).parents[1] / "src"

# Rooms from the ground up; one imports what stands before it, never what stands after. Below one roof, data flows this
# way too.
GROUND = (
    *("types", "pytrees", "checks", "losses", "optimizers", "streams", "papers", "progress"),
    *("intervals", "liveness", "storage", "timings", "programs"),
)
FLOW = (
    ("data",),
    *((f"federated.{part}",) for part in ("schedule", "local", "aggregate", "wire", "server", "predict", "compose")),
    ("federated.algorithms",),
    ("engine",),
    ("comparison",),
    ("output",),
    ("experiments",),
    ("cli",),
)
ABOVE = {"comparison", "experiments", "cli"}
NEVER = {
    **{part: {"data", "models", "kernels", "federated", "engine", "theory", "measures"} | ABOVE for part in GROUND},
    "theory": {"federated", "engine", "measures", "attacks", "output"} | ABOVE,
    "kernels": {"federated", "engine", "theory", "measures", "attacks", "output"} | ABOVE,
    "federated": {"theory", "engine", "attacks", "output"} | ABOVE,
    "data": {"models", "kernels", "federated", "engine", "theory"} | ABOVE,
    "models": {"federated", "engine", "theory"} | ABOVE,
    "engine": {"theory", "attacks", "output", *(f"measures.{m}" for m in ("loss_surface", "paired", "privacy"))}
    | ABOVE,
    "measures": {"theory", "attacks", "output"} | ABOVE,
    "attacks": {"theory", "engine", "measures", "output"} | ABOVE,
}
DRAWN = {
    "fedtangent._src.engine.history -> fedtangent._src.output.history_plots"
}  # a record's figure, when it is asked for
SOLE_IMPORTER = {"neural_tangents": "fedtangent._src.kernels.neural_tangents", "tensorflow": None, "tf2jax": None}
HEAVY = ("tensorflow", "tensorflow_datasets", "neural_tangents", "matplotlib", "sklearn", "tf2jax", "torch", "keras")
HEAVY += ("tensorboardX", "pandas", "bokeh", "ipywidgets")
IMPORT_SECONDS = 1.5
MOST_ARGUMENTS = 8


def read_sources(root: Path) -> dict[str, str]:
    """The text of every module under ``root``, by dotted name."""
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text()
    return found


def imports_of(name: str, sources: dict[str, str], for_types: bool = True) -> set[str]:
    """Dotted names that module ``name`` imports anywhere in it; a submodule, where it is one, not its package.

    Without ``for_types`` those under ``if TYPE_CHECKING`` are left out: they never run.
    """
    is_package = any(other.startswith(name + ".") for other in sources)
    found, tree = set(), ast.parse(sources[name])
    if not for_types:
        tree.body = [n for n in tree.body if not (isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING")]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = name.split(".") + ([""] if is_package else [])
                base = ".".join([*parents[: len(parents) - node.level], *([base] if base else [])])
            for alias in node.names:
                child = f"{base}.{alias.name}"
                found.add(child if child in sources else base)
    return found


def is_under(module: str, part: str) -> bool:
    """Whether ``module`` is, or lies in, ``fedtangent._src.<part>``."""
    return f"{module}.".startswith(f"fedtangent._src.{part}.")


def violations(sources: dict[str, str]) -> list[str]:
    """Every import that goes against the rules above, as `importer -> imported`."""
    order = {part: place for place, parts in enumerate(FLOW) for part in parts}
    found = set()
    for name in sources:
        for other in imports_of(name, sources):
            barred = {b for owner, bars in NEVER.items() if is_under(name, owner) for b in bars}
            for part, place in order.items():
                if is_under(name, part):
                    barred |= {later for later, i in order.items() if i > place}
            if any(is_under(other, part) for part in barred):
                found.add(f"{name} -> {other}")
            top = other.partition(".")[0]
            if top in SOLE_IMPORTER and name != SOLE_IMPORTER[top]:
                found.add(f"{name} -> {other}")
    return sorted(found - DRAWN)


def cycle(sources: dict[str, str]) -> list[str]:
    """A cycle of imports among the modules, or []."""
    graph = {name: imports_of(name, sources, for_types=False) & (sources.keys() - {name}) for name in sources}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def test_imports_run_one_way():
    sources = read_sources(SOURCE)
    assert "fedtangent._src.types" in sources
    assert violations(sources) == []


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("theory.flow", "from fedtangent._src.federated import compose", "fedtangent._src.federated.compose"),
        ("theory.flow", "def f():\n    import fedtangent._src.engine.run", "fedtangent._src.engine.run"),
        ("theory.flow", "from ..comparison import cases", "fedtangent._src.comparison"),
        ("kernels", "from . import neural_tangents\nfrom .. import theory", "fedtangent._src.theory"),
        (
            "data.dataset",
            "from fedtangent._src.federated.schedule import all_clients",
            "fedtangent._src.federated.schedule",
        ),
        ("checks", "from fedtangent._src import data", "fedtangent._src.data"),
        ("federated.local", "from .algorithms import fed_avg", "fedtangent._src.federated.algorithms"),
        ("engine.run", "from fedtangent._src.output import tables", "fedtangent._src.output"),
        ("comparison.table", "from fedtangent._src.output import tables", "fedtangent._src.output"),
        ("models.dense", "import neural_tangents as nt", "neural_tangents"),
        ("attacks.leakage", "from fedtangent._src.engine import run", "fedtangent._src.engine.run"),
        ("kernels.gram", "from fedtangent._src.federated import compose", "fedtangent._src.federated.compose"),
        ("models.dense", "from neural_tangents import stax", "neural_tangents"),
        ("kernels.neural_tangents", "import tensorflow as tf", "tensorflow"),
    ],
)
def test_a_wrong_import_is_found(name: str, text: str, found: str):
    rooms = ("engine.run", "theory", "data", "federated.compose", "federated.algorithms", "kernels.neural_tangents")
    sources = {f"fedtangent._src.{part}": "" for part in (*rooms, "output.tables")}
    sources[f"fedtangent._src.{name}"] = text
    bad = violations(sources)
    assert bad and all(row.startswith(f"fedtangent._src.{name} -> {found}") for row in bad)


def test_the_allowed_importer_is_allowed():
    assert violations({"fedtangent._src.kernels.neural_tangents": "import neural_tangents"}) == []


def test_no_import_cycles():
    assert cycle(read_sources(SOURCE)) == []


def test_a_cycle_is_found():
    sources = {"fedtangent.a": "from fedtangent import b", "fedtangent.b": "def f():\n    from . import a"}
    assert set(cycle(sources)) == {"fedtangent.a", "fedtangent.b"}
    assert cycle({**sources, "fedtangent.b": ""}) == []
    assert cycle({**sources, "fedtangent.b": "if TYPE_CHECKING:\n    from . import a"}) == []


def long_signatures(sources: dict[str, str]) -> list[str]:
    """Functions of more than eight arguments; ``**options`` of a named record is one."""
    found = []
    for name, text in sources.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                given = node.args
                single = [given.vararg, given.kwarg]
                number = len(given.posonlyargs + given.args + given.kwonlyargs) + sum(a is not None for a in single)
                if number > MOST_ARGUMENTS:
                    found.append(f"{name}.{node.name}")
    return found


FRONT_DOOR = ("simulate", "compare")  # a run, its start and its settings: one more than others


def test_what_travels_together_is_one_argument():
    long = [name for name in long_signatures(read_sources(SOURCE)) if name.rpartition(".")[2] not in FRONT_DOOR]
    assert long == []
    assert long_signatures({"a": "def f(a, b, c, d, *e, f, g, h, **i): ...", "b": "def g(**options): ..."}) == ["a.f"]


COMPLETED = """
import json, sys
import fedtangent
for name in sys.argv[1:]:
    getattr(fedtangent, name)
print(json.dumps({name: dir(module) for name, module in list(sys.modules.items()) if "fedtangent." in name}))
"""


def test_tab_completion_shows_public_names_only():
    """Of the package and of its public modules, once they are reached from the package."""
    others = {"np", "jnp", "jax", "optax", "Any", "NamedTuple", "Callable", "Array", "partial", "annotations", "math"}
    public = {name: room for name in fedtangent.__all__ if isinstance(room := getattr(fedtangent, name), ModuleType)}
    rooms, command = [room.__name__ for room in public.values()], [sys.executable, "-c", COMPLETED, *public]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    for name in rooms:
        shown = [one for one in found[name] if not one.startswith("__")]
        assert others.isdisjoint(shown) and shown == sorted(importlib.import_module(name).__all__), name
    assert set(fedtangent.__all__) == set(dir(fedtangent))


def shadowed(package: ModuleType) -> list[str]:
    """Modules of a package, and of those in it, that bear the name of something else that their package exports."""
    found = []
    for info in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        *_, name = info.name.rpartition(".")
        if not isinstance(getattr(package, name, package), ModuleType):
            found.append(info.name)
        if info.ispkg:
            found += shadowed(importlib.import_module(info.name))
    return found


def test_no_module_bears_the_name_of_a_function_that_its_package_exports(tmp_path: Path, monkeypatch):
    assert shadowed(fedtangent) == []
    (tmp_path / "shadowing").mkdir()
    (tmp_path / "shadowing" / "train.py").write_text("def train(): pass")
    (tmp_path / "shadowing" / "__init__.py").write_text("from shadowing.train import train")
    monkeypatch.syspath_prepend(tmp_path)
    assert shadowed(importlib.import_module("shadowing")) == ["shadowing.train"]


@pytest.mark.parametrize("kind", ["algorithms", "models"])
def test_no_module_bears_the_name_of_an_entry_that_its_package_exports(kind: str):
    """The module would hide the function once it is imported."""
    package = importlib.import_module(entries.KINDS[kind])
    assert entries.catalogue(kind).keys().isdisjoint(info.name for info in pkgutil.iter_modules(package.__path__))


PROBE = """
import json, sys, time
{first}
before = set(sys.modules)
start = time.process_time()
{statement}
seconds = time.process_time() - start
print(json.dumps([seconds, sorted({{name.partition(".")[0] for name in sys.modules}})]))
"""


# by their comparison
BESIDE = "('compare', 'compare_case', 'predict', 'Forecasting', 'explore', 'testing', 'measures', 'types')"
ALL = f"import fedtangent\nfor name in fedtangent.__all__:\n    name in {BESIDE} or getattr(fedtangent, name)"


def probe(statement: str = ALL, first: str = "import jax") -> tuple[float, list[str]]:
    """CPU seconds of ``statement`` in a fresh interpreter after ``first``, and the top-level modules loaded."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("COV_CORE")} | {"PYTHONPATH": str(SOURCE)}
    command = [sys.executable, "-c", PROBE.format(statement=statement, first=first)]
    out = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    seconds, modules = json.loads(out)
    return seconds, modules


def test_import_is_quick_and_light():
    # CPU time, not the clock's, so that a busy machine does not decide; the quickest of three, as others only add.
    for _ in range(3):
        seconds, modules = probe()
        if seconds < IMPORT_SECONDS:
            break
    assert seconds < IMPORT_SECONDS
    assert {"fedtangent", "optax"} <= set(modules)
    assert set(modules).isdisjoint(HEAVY), sorted(set(modules) & set(HEAVY))


def test_the_package_itself_brings_nothing_so_that_the_program_answers_from_its_first_moment_on():
    _, modules = probe("import fedtangent", first="")
    assert "fedtangent" in modules and not {"jax", "numpy", "optax", "tyro"} & set(modules)


FREE = "import jax\nfrom fedtangent._src.entries import KINDS, catalogue\nfor kind in KINDS: catalogue(kind)\n"
FREE += "{more}\njax.config.update('jax_num_cpu_devices', 1)  # which is refused once a device was used"


def test_no_module_uses_a_device_when_it_is_imported():
    """Else a run could no longer choose how many of the machine's cores are devices."""
    probe(FREE.format(more=""))
    with pytest.raises(subprocess.CalledProcessError):  # control
        probe(FREE.format(more="jax.devices()"))


def test_the_probe_sees_a_heavy_import_and_a_slow_one():
    slow = f"while time.process_time() < start + {IMPORT_SECONDS}: pass"
    seconds, modules = probe(f"import matplotlib\n{slow}", first="")
    assert seconds >= IMPORT_SECONDS
    assert not set(modules).isdisjoint(HEAVY)
