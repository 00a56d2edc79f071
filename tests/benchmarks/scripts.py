"""The scripts of a benchmark as modules."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def scripts_of(folder: Path, names: Sequence[str]) -> SimpleNamespace:
    """Imports scripts that import each other as neighbours in a folder; leaves ``sys.modules`` as it was."""
    before = {name: sys.modules.pop(name, None) for name in names}
    sys.path.insert(0, str(folder))
    try:
        return SimpleNamespace(**{name.split(".")[-1]: importlib.import_module(name) for name in names})
    finally:
        sys.path.remove(str(folder))
        for name in names:
            sys.modules.pop(name, None)
        sys.modules.update({name: module for name, module in before.items() if isinstance(module, ModuleType)})
