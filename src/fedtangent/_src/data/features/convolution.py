"""Features of fixed random convolutions, which need no training and no files."""

from __future__ import annotations

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fedtangent._src import checks
from fedtangent._src.data.features.blocks import Features, Tick, checked_images, in_blocks
from fedtangent._src.types import Array, ArrayLike

SMOOTHING = 1e-3  # added to the variance of a patch: flat ones, with only noise, stay small
VERSION = 1  # of the computation: another one where its results change


def random_convolution(
    images: ArrayLike,
    num_features: int = 1024,
    seed: int = 0,
    filter_size: int = 5,
    grid: int = 2,
    folder: Path | str | None = None,
    tick: Tick = lambda done, total: None,
) -> Features:
    """Computes features [n, F] float32 by fixed random filters, after Coates, Ng and Lee (2011), who learn theirs.

    Each patch p of D numbers, ``filter_size`` wide and high, of all channels, at every place of an image, is
    normalised: ``z = (p - mean p) / sqrt(var p + 1e-3)``. There are ``F / grid^2`` filters, each w [D] of N(0, 1) minus
    its mean, and b of N(0, 1); a patch's response is ``max(0, w'z / sqrt(D) - b)``. Responses are averaged over each
    cell of a ``grid`` x ``grid`` (sizes differ by at most one). Feature ``(row * grid + column) * filters + j`` is the
    average of filter j in that cell.

    Args:
        images: [n, height, width, channels], uint8 or floating within [0, 1].
        num_features: F, a multiple of ``grid**2``.
        seed: Seed of the filters.
        filter_size: Side of a patch.
        grid: Number of cells along each axis.
        folder: Folder in which features are stored and found again, 1000 images in each file; None stores nothing.
        tick: Called with the number of finished images and the number of all images.

    Raises:
        ValueError: Images have another form or are too small for a patch in each cell, an option is out of range, or
            the folder cannot be written to.
    """
    x = checked_images(images)
    filter_size = checks.whole("filter_size", filter_size, 1, min(x.shape[1:3]))
    grid = checks.whole("grid", grid, 1, min(x.shape[1:3]) - filter_size + 1)
    num_features, seed = checks.whole("num_features", num_features), checks.seed(seed)
    if num_features % grid**2:
        raise ValueError(f"num_features: got {num_features}, must be a multiple of grid**2 = {grid**2}")
    with jax.enable_x64(False):
        of_filters, of_biases = jax.random.split(jax.random.key(seed))
        filters = jax.random.normal(of_filters, (filter_size, filter_size, x.shape[-1], num_features // grid**2))
        biases = jax.random.normal(of_biases, filters.shape[-1:])
    settings = f"seed {seed}, {filter_size} x {filter_size} patches, {grid} x {grid} cells, version {VERSION}"
    made_by = f"{num_features} features of random convolutions, {settings}"
    return in_blocks(x, made_by, functools.partial(_responses, filters, biases, grid), folder, tick)


@functools.partial(jax.jit, static_argnums=2)
def _responses(filters: Array, biases: Array, grid: int, x: Array) -> Array:
    """Maps [b, h, w, c] to [b, grid^2 filters]; filters have mean 0, so the patch's mean need not be subtracted."""
    size = filters[..., 0].size
    centred = filters - filters.mean(axis=(0, 1, 2), keepdims=True)
    mean = _convolved(x, jnp.full((*filters.shape[:3], 1), 1 / size, x.dtype))
    square = _convolved(x**2, jnp.full((*filters.shape[:3], 1), 1 / size, x.dtype))
    deviation = jnp.sqrt(jnp.maximum(square - mean**2, 0.0) + SMOOTHING)
    responses = jax.nn.relu(_convolved(x, centred) / (deviation * np.sqrt(size)) - biases[None, None, None])
    down, across = (_cells(places, grid) for places in responses.shape[1:3])
    pooled = jnp.einsum("bhwf,gh,kw->bgkf", responses, down, across, precision=lax.Precision.HIGHEST)
    return pooled.reshape(len(x), -1)


def _convolved(x: Array, kernel: Array) -> Array:
    dimensions = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(
        x, kernel, (1, 1), "VALID", dimension_numbers=dimensions, precision=lax.Precision.HIGHEST
    )


def _cells(places: int, grid: int) -> np.ndarray:
    """Returns the matrix [grid, places] that averages over the cells of one axis."""
    rows = np.zeros((grid, places), np.float32)
    for row, cell in zip(rows, np.array_split(np.arange(places), grid), strict=True):
        row[cell] = 1 / len(cell)
    return rows
