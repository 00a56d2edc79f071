"""Objects that pass for a record of the package, with those attributes only that a function reads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def stand_in(kind: type, **attributes: Any) -> Any:
    """Returns an object with these attributes that ``isinstance`` takes for a ``kind``."""
    return type("StandIn", (SimpleNamespace,), {"__class__": kind})(**attributes)
