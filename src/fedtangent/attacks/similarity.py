"""How much of an image came back."""

from __future__ import annotations

import numpy as np


def ssim(images: np.ndarray, originals: np.ndarray, data_range: float = 1.0, window: int | None = None) -> np.ndarray:
    """Structural similarity of each image to its original, [n] float64; 1 for equal images.

    ``images`` and ``originals`` are [n, H, W] or [n, H, W, channels], on a scale of ``data_range`` from black to white;
    what lies outside the originals' scale is for the caller to clip. ``window`` is the odd side of the sliding window:
    by default 7, as in scikit-image, and at most half of the image (3 for 8 x 8), for the mean goes over windows that
    lie inside the image. Raises ``ValueError`` for other shapes, a ``data_range`` that is not positive and a window
    that is even, below 3, or does not fit. (Wang, Bovik, Sheikh and Simoncelli, 2004.)
    """
    from skimage.metrics import structural_similarity

    images, originals = np.asarray(images, np.float64), np.asarray(originals, np.float64)
    if images.shape != originals.shape or images.ndim not in (3, 4):
        raise ValueError(
            f"images: got {images.shape} and originals {originals.shape}, must be equal, [n, H, W] or [n, H, W, C]"
        )
    if not (np.isfinite(data_range) and data_range > 0):
        raise ValueError(f"data_range: got {data_range}, must be positive")
    side = min(images.shape[1:3])
    size = max(min(7, side // 2 - (side // 2 + 1) % 2), 3) if window is None else window
    if size < 3 or size % 2 == 0 or size > side:
        raise ValueError(f"window: got {size}, must be odd, at least 3 and at most the image's side, {side}")
    channel = -1 if images.ndim == 4 else None
    return np.array(
        [
            structural_similarity(a, b, win_size=size, data_range=data_range, channel_axis=channel)
            for a, b in zip(images, originals, strict=True)
        ]
    )
