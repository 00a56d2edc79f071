"""What importing neural-tangents through fedtangent does, and what it leaves alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

from fedtangent._src.kernels import neural_tangents as shim

MODULE = "fedtangent._src.kernels.neural_tangents"

WATCHED = """
import contextlib, functools, importlib, json, sys, types, warnings
warnings.simplefilter("error")
import jax, jax.core, jax.numpy, jax.lax, jax.api_util, jax.extend.core, jax.extend.linear_util, jax.interpreters.ad
import jax.experimental, jax.example_libraries.stax, jax.extend.source_info_util, jax.interpreters.batching
import jax._src.core, jax._src.interpreters.ad, jax._src.linear_util, jax._src.util, scipy.linalg

NAMES = ["jax", "jax.core", "jax.numpy", "jax.lax", "jax.api_util", "jax.extend", "jax.extend.core", "functools",
         "jax.extend.linear_util", "jax.interpreters", "jax.interpreters.ad", "jax.interpreters.batching", "builtins",
         "jax._src.core", "jax._src.interpreters.ad", "jax._src.linear_util", "jax._src.util", "scipy", "scipy.linalg"]

def look():
    return {name: {key: id(value) for key, value in vars(sys.modules[name]).items()} for name in NAMES}

def changes(before, after):
    return sorted(f"{name}.{key}" for name in before for key in before[name].keys() | after[name].keys()
                  if before[name].get(key) != after[name].get(key) and key != "__warningregistry__"
                  and not isinstance(getattr(sys.modules.get(name), key, None), types.ModuleType))
"""


def run(program: str, *arguments: str) -> Any:
    """What ``program`` prints, as JSON, in an interpreter of its own."""
    source = str(Path(shim.__file__).absolute().parents[3])
    environment = {k: v for k, v in os.environ.items() if not k.startswith("COV_CORE")} | {"PYTHONPATH": source}
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_jax_is_untouched_and_tensorflow_is_not_imported():
    program = f"""{WATCHED}
before = look()
from {MODULE} import nt, predict, stax
after_import = changes(before, look())
_, apply, kernel = net = stax.serial(stax.Dense(4), stax.Relu(), stax.Dense(1))
x = jax.random.normal(jax.random.key(0), (3, 2))
params = net[0](jax.random.key(1), x.shape)[1]
kernel(x, None, "ntk")
with contextlib.redirect_stdout(sys.stderr):  # AUTO prints what it counts
    for implementation in nt.NtkImplementation:
        nt.empirical_ntk_fn(apply, implementation=implementation)(x, None, params)
    # the check itself sees a patch
    jax.core.Jaxpr = jax.interpreters.ad.linearize = object()
tensorflow = [name for name in sys.modules if name.partition(".")[0] in ("tensorflow", "tf2jax", "keras")]
patched = changes(before, look())
del jax.core.Jaxpr
ours = any(type(finder).__module__.startswith("fedtangent") for finder in sys.meta_path)
missing = [hasattr(jax.core, "Jaxpr"), hasattr(jax, "util"), "jax.util" in sys.modules, ours]
print(json.dumps([after_import, patched, missing, tensorflow]))
"""
    after_import, patched, missing, tensorflow = run(program)
    assert after_import == []
    assert patched == ["jax.core.Jaxpr", "jax.interpreters.ad.linearize"]
    assert missing == [False] * 4
    assert tensorflow == []


@pytest.mark.versions
def test_many_threads_and_a_reload_get_one_package():
    program = f"""
import importlib, json, sys, threading, warnings
warnings.simplefilter("error")
found, barrier = [], threading.Barrier(8)
def load():
    barrier.wait()
    found.append(id(importlib.import_module("{MODULE}").nt))
threads = [threading.Thread(target=load) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
module = sys.modules["{MODULE}"]
importlib.reload(module)
import neural_tangents
print(json.dumps([len(found), len({{*found, id(module.nt), id(neural_tangents)}})]))
"""
    assert run(program) == [8, 1]


FAILS = f"""
import importlib, json, sys
import importlib.metadata as metadata
import jax, jax.extend.core
real = metadata.version
def pretend(version):
    metadata.version = lambda name: version if name == "neural-tangents" else real(name)
exec(sys.argv[1])
try:
    import {MODULE}
    print(json.dumps(""))
except ImportError as error:
    left = [name for name in sys.modules if name.startswith("neural_tangents")]
    print(json.dumps([type(error).__name__, str(error), left, [type(f).__name__ for f in sys.meta_path]]))
"""


@pytest.mark.versions
@pytest.mark.parametrize(
    ("damage", "part"),
    [
        ("pretend('0.6.2')", "installed: neural-tangents 0.6.2, jax"),
        ("jax.__version__ = '0.7.2'", "too old"),
        ("jax.__version__ = '0.99.1'; del jax.extend.core.Var", "jax 0.99.1"),
        ("jax.__version__ = '0.99.1'; sys.modules['jax.experimental.ode'] = None", "jax 0.99.1"),
        ("jax.__version__ = '0.99.1'; del jax.make_jaxpr, jax.linearize, jax.eval_shape", "jax 0.99.1"),
    ],
)
def test_a_version_that_does_not_work_is_named(damage: str, part: str):
    kind, message, left, finders = run(FAILS, damage)
    assert kind == "ImportError"
    assert part in message
    for always in ("installed: neural-tangents ", "jax ", "supported: neural-tangents 0.6.5, jax 0.8 to 0.12"):
        assert always in message
    assert "\n" not in message
    assert left == [] and "_Finder" not in finders


def test_neural_tangents_missing_or_imported_by_someone_else_is_named():
    missing = """
def absent(name, version=metadata.version):
    if name == "neural-tangents":
        raise metadata.PackageNotFoundError(name)
    return version(name)
metadata.version = absent
"""
    assert "neural-tangents 0.6.5 is not installed" in run(FAILS, missing)[1]
    foreign = "import types; sys.modules['neural_tangents'] = types.ModuleType('neural_tangents')"
    assert "imported before fedtangent adapted it" in run(FAILS, foreign)[1]


@pytest.mark.versions
def test_an_import_that_failed_before_does_no_harm():
    damage = """
try:
    import neural_tangents
except ImportError:
    pass
else:
    raise AssertionError("neural-tangents needs no help any more")
"""
    assert run(FAILS, damage) == ""


def test_every_restored_name_has_a_reason_and_is_needed():
    table = shim._restored()
    assert len({(item.module, item.name) for item in table}) == len(table)
    assert all(item.reason for item in (*table, *shim._replaced(shim.nt)))
    sources = [Path(module.__file__).read_text() for module in _modules()]
    for item in table:
        assert any(item.name in source for source in sources), f"{item.name} is not used by neural-tangents"


def _modules() -> list[Any]:
    modules = [module for name, module in sys.modules.items() if name.startswith("neural_tangents._src")]
    assert all(hasattr(module, "__jax_proxies__") for module in modules) and len(modules) > 10
    return modules


def test_the_version_under_test_is_supported():
    low, high = shim.SUPPORTED_JAX
    assert low <= tuple(int(part) for part in jax.__version__.split(".")[:2]) <= high
