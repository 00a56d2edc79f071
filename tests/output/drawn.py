"""Whether a figure was drawn."""

from __future__ import annotations

from pathlib import Path

import numpy as np


def pixels(path: Path) -> np.ndarray:
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    from matplotlib.image import imread

    return imread(path)


def assert_drawn(path: Path) -> None:
    image = pixels(path)
    height, width = image.shape[:2]
    assert 300 <= height <= 1500
    assert 500 <= width <= 5000
    inked = np.any(image[..., :3] < 0.9, axis=-1)
    assert 0.005 < inked.mean() < 0.9
    assert len(np.unique((image[..., :3] * 255).astype(int).reshape(-1, 3), axis=0)) > 10  # in colour
