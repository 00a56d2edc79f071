"""Comparisons small enough to run in seconds."""

from __future__ import annotations

import pytest

from fedtangent._src.comparison import all_verdicts, side_by_side
from fedtangent._src.comparison.settings import Setting
from fedtangent._src.comparison.side_by_side import Comparison, run

from .tiny import digits, linear, network


@pytest.fixture(scope="package")
def linear_setting() -> Setting:
    return linear()


@pytest.fixture(scope="package")
def linear_result(linear_setting: Setting) -> Comparison:
    """Without NTK-FL, which the command's tests run on it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(side_by_side, "_evolutions", lambda *given: [])
        return run(linear_setting)


@pytest.fixture(scope="package")
def network_result() -> Comparison:
    """With NTK-FL of the widest networks only, no flow for ever, distances not in parts: ``whole_result`` has all."""
    evolutions = side_by_side._evolutions
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(side_by_side, "_evolutions", lambda *given: evolutions(*given)[-1:])
        patch.setattr(side_by_side, "watched_draws", lambda setting: 0)
        patch.setattr(all_verdicts, "_fixed_points", lambda *given: [])
        return run(network())


@pytest.fixture(scope="package")
def whole_result() -> Comparison:
    return run(network())


@pytest.fixture(scope="package")
def digits_result() -> Comparison:
    return run(digits())
