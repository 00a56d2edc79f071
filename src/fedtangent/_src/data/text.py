"""Texts as windows of characters, each with the character that follows it."""

from __future__ import annotations

import numpy as np
from jaxtyping import Num, UInt8

WINDOW = 80  # characters
# LEAF's characters, in its order (Caldas et al., 2018); a character that is not among them is read as a space.
CHARACTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"


def encoded(text: UInt8[np.ndarray, "L"], characters: str = CHARACTERS) -> UInt8[np.ndarray, "L"]:
    """Computes the index in ``characters`` of each byte, uint8 [L]; an unknown byte gets the index of the space.

    Args:
        text: Bytes [L].
        characters: The characters, each one byte.
    """
    table = np.full(256, characters.index(" "), np.uint8)
    table[np.frombuffer(characters.encode("latin-1"), np.uint8)] = np.arange(len(characters), dtype=np.uint8)
    return table[text]


def windows(codes: Num[np.ndarray, "L"], stride: int) -> tuple[Num[np.ndarray, "n 80"], Num[np.ndarray, "n"]]:
    """Returns windows [n, 80] of a text, and the character that follows each window, [n].

    Args:
        codes: The text, one number for each character, [L].
        stride: Characters from the start of a window to the start of the next one.
    """
    if len(codes) <= WINDOW:
        return np.zeros((0, WINDOW), codes.dtype), np.zeros(0, codes.dtype)
    both = np.lib.stride_tricks.sliding_window_view(codes, WINDOW + 1)[::stride]
    return both[:, :WINDOW], both[:, WINDOW]
