"""Cases that ``make check-theory`` runs, and ``make test`` a few of: each compiles programs of its own."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def nightly(cases: Iterable[Any], daily: Collection[Any]) -> list[Any]:
    """All cases, those that are not among ``daily`` marked slow; one of several values is known by itself or its first.

    Raises ``ValueError`` for a daily one that is no case.
    """
    found, seen = [], set()
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        names = {case, values[0]} & set(daily)
        seen |= names
        found.append(pytest.param(*values, marks=() if names else pytest.mark.slow))
    if missing := set(daily) - seen:
        raise ValueError(f"daily: got {missing}, which are no cases")
    return found
