"""How seeds are written."""

from __future__ import annotations

import pytest

from fedtangent._src.engine.sweeps import parse_seeds


@pytest.mark.parametrize(
    ("text", "seeds"),
    [("0:3", (0, 1, 2)), ("0,3,7", (0, 3, 7)), ("5", (5,)), ("7, 0:2", (7, 0, 1)), ("4294967295", (2**32 - 1,))],
)
def test_parse_seeds(text: str, seeds: tuple[int, ...]) -> None:
    assert parse_seeds(text) == seeds


@pytest.mark.parametrize("text", ["", "a", "1:", ":3", "-1", "0:2:4", "1,,2", "3:3", "1,0:2", "4294967296", "1.5"])
def test_bad_seeds(text: str) -> None:
    with pytest.raises(ValueError, match="seeds: got"):
        parse_seeds(text)
