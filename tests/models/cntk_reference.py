"""The kernels of convolutional ReLU networks, written from the formulas in NumPy (Arora et al., 2019, section 4)."""

from __future__ import annotations

import numpy as np

W, B = 2.0, 0.01  # variances of weights and biases


def _windows(s: np.ndarray, window: int) -> np.ndarray:
    """Sums over a window of covariances [h, w, h', w']: both places move together, zeros beyond the edges."""
    low, side = (window - 1) // 2, s.shape[:2]
    out = np.zeros_like(s)
    for a in range(side[0]):
        for b in range(side[1]):
            for c in range(side[0]):
                for d in range(side[1]):
                    for i in range(window):
                        for j in range(window):
                            p, q = (a + i - low, b + j - low), (c + i - low, d + j - low)
                            if all(0 <= u < n for place in (p, q) for u, n in zip(place, side, strict=True)):
                                out[a, b, c, d] += s[(*p, *q)]
    return out / window**2


def _places(s: np.ndarray) -> np.ndarray:
    """The variance at each place, [h, w]."""
    return np.einsum("abab->ab", s)


def _pooled(s: np.ndarray, readout: str) -> float:
    h, w = s.shape[:2]
    if readout == "global":
        return float(s.mean())
    if readout == "average":
        s = s.reshape(h // 2, 2, w // 2, 2, h // 2, 2, w // 2, 2).mean(axis=(1, 3, 5, 7))
    return float(_places(s).mean())


def cntk(x: np.ndarray, y: np.ndarray, depth: int, window: int, readout: str) -> tuple[float, float]:
    """The prior covariance and the tangent kernel of two images [h, w, C]."""
    pairs = {"xx": (x, x), "yy": (y, y), "xy": (x, y)}
    sigma = {name: np.einsum("abc,dec->abde", *pair) / x.shape[2] for name, pair in pairs.items()}
    theta = np.zeros_like(sigma["xy"])
    for _ in range(depth):
        sigma = {name: W * _windows(s, window) + B for name, s in sigma.items()}
        theta = W * _windows(theta, window) + sigma["xy"]
        v = {name: _places(s) for name, s in sigma.items()}
        ends = {"xx": (v["xx"], v["xx"]), "yy": (v["yy"], v["yy"]), "xy": (v["xx"], v["yy"])}
        for name, s in sigma.items():
            norm = np.sqrt(np.multiply.outer(*ends[name]))
            angle = np.arccos(np.clip(s / norm, -1, 1))
            if name == "xy":
                theta = theta * (np.pi - angle) / (2 * np.pi)
            sigma[name] = norm * (np.sin(angle) + (np.pi - angle) * np.cos(angle)) / (2 * np.pi)
    nngp = W * _pooled(sigma["xy"], readout) + B
    return nngp, W * _pooled(theta, readout) + nngp
