"""Features of images by fixed random convolutions; storage of the features of large data sets in blocks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Float32, Num

from fedtangent._src import checks
from fedtangent._src.data import cache
from fedtangent._src.data.dataset import IMAGE, VECTOR, Dataset
from fedtangent._src.storage import expanded, sha256
from fedtangent._src.types import Array, ArrayLike

BLOCK = 1000  # images whose features are kept together
BATCH = 50  # images that are computed together
Tick = Callable[[int, int], None]  # called with the number of finished images and the number of all images


class Features(NamedTuple):
    """Features of images, F numbers for each of n images.

    Attributes:
        values: The features [n, F].
        made_by: Text that describes how they were computed.
    """

    values: Float32[np.ndarray, "n F"]
    made_by: str  # full description: equal texts mean equal features of the same images


def in_blocks(
    images: ArrayLike, made_by: str, compute: Callable[[np.ndarray], Array], folder: Path | str | None, tick: Tick
) -> Features:
    """Computes the features of all images, 1000 images at a time, and stores each such block in a file.

    Interrupted work continues at the block where it stopped. The name of a block's file is a digest of its images and
    of ``made_by``, so features of more images of a data set reuse the blocks that are stored for its first images.

    Args:
        images: [n, h, w, c], uint8, which are divided by 255, or floating within [0, 1].
        made_by: Full description of the features: equal texts mean equal features of the same images.
        compute: Function from a batch of images [b, h, w, c] to features [b, F] float32.
        folder: Folder in which features are stored; None stores nothing.
        tick: Called with the number of finished images and the number of all images.

    Raises:
        ValueError: Images have another form, the folder cannot be written to, or stored features were altered.
    """
    x = checked_images(images)
    place = None if folder is None else checks.writable("folder", expanded("folder", folder), "features")
    blocks = []
    for start in range(0, len(x), BLOCK):
        raw = x[start : start + BLOCK]
        block = (raw / np.float32(255) if raw.dtype == np.uint8 else raw).astype(np.float32)
        digest = sha256(f"{made_by}\0{block.shape}\0", block)[:32]
        stored = None if place is None else cache.read(place / f"features-{digest}")
        if stored is None:
            stored = {"features": _computed(block, compute, start, len(x), tick)}
            if place is not None:
                cache.write(place / f"features-{digest}", stored)
        else:
            tick(start + len(block), len(x))
        blocks.append(stored["features"])
    return Features(np.concatenate(blocks), made_by)


def checked_images(images: ArrayLike) -> Num[np.ndarray, "n h w c"]:
    """Returns ``images`` as an array [n, h, w, c]; raises ``ValueError`` unless uint8, or floating within [0, 1]."""
    x = np.asarray(images)
    if x.ndim != 4 or x.size == 0 or not (x.dtype == np.uint8 or x.dtype.kind == "f"):
        raise ValueError(
            f"images: got shape {x.shape}, dtype {x.dtype}, must be [n, height, width, channels], uint8 or floating"
        )
    if x.dtype != np.uint8 and not (x.min() >= 0 and x.max() <= 1):
        raise ValueError(f"images: got values from {x.min():g} to {x.max():g}, must be within 0 and 1")
    return x


def with_features(dataset: Dataset, features: Callable[[np.ndarray], Features], standardise: bool = True) -> Dataset:
    """Returns the data set with features [n, F] float32 in place of its training and test images.

    The result has the kind "vector", and its ``info.source`` describes the features.

    Args:
        dataset: A data set of images, with or without test images.
        features: Function from images to features, such as ``functools.partial(random_convolution,
            num_features=1024)``.
        standardise: Whether to subtract the mean of each feature over the training images and divide by its standard
            deviation there (by 1 if that is 0).

    Raises:
        ValueError: The data set has no images, ``features`` refuses them, or it describes training and test features
            differently.
    """
    if dataset.kind != IMAGE:
        raise ValueError(f"dataset: got {dataset.name} of kind {dataset.kind}, must be of kind {IMAGE}")
    train = features(dataset.x_train)
    test = features(dataset.x_test) if len(dataset.x_test) else train._replace(values=train.values[:0])
    if train.made_by != test.made_by:
        raise ValueError(
            f"features: got {train.made_by!r} of training and {test.made_by!r} of test images, must be of one kind"
        )
    x_train, x_test, description = train.values, test.values, train.made_by
    if checks.flag("standardise", standardise):
        mean, deviation = x_train.mean(axis=0, dtype=np.float64), x_train.std(axis=0, dtype=np.float64)
        deviation[deviation == 0] = 1.0
        x_train, x_test = (((x - mean) / deviation).astype(np.float32) for x in (x_train, x_test))
        description += ", standardised"
    info = dataset.info._replace(source=f"{dataset.info.source}; {description}")
    return dataset._replace(x_train=x_train, x_test=x_test, info=info, kind=VECTOR)


def _computed(
    x: Float32[np.ndarray, "n h w c"], compute: Callable[[np.ndarray], Array], first: int, total: int, tick: Tick
) -> Float32[np.ndarray, "n F"]:
    """Computes the features of one block of images, in batches of 50, the last one padded with zeros.

    Args:
        x: Images of the block, within [0, 1].
        compute: Function from a batch of images to features.
        first: Number of images in the blocks before this one.
        total: Number of all images.
        tick: Called with the number of finished images and ``total``.
    """
    features = []
    with jax.enable_x64(False):
        for start in range(0, len(x), BATCH):
            batch = x[start : start + BATCH]
            padded = np.concatenate([batch, np.zeros((BATCH - len(batch), *batch.shape[1:]), np.float32)])
            features.append(np.asarray(compute(padded))[: len(batch)])
            tick(first + start + len(batch), total)
    return np.concatenate(features)


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
    """Computes features [n, F] float32 of images by fixed random filters; Coates, Ng and Lee (2011) learn theirs.

    A patch p is ``filter_size`` pixels wide and high and has all channels, D numbers. Every patch of an image is
    normalised: ``z = (p - mean p) / sqrt(var p + 1e-3)``. Each of the ``F / grid^2`` filters has weights w [D], drawn
    from N(0, 1) and then centred, and a threshold b from N(0, 1); a patch's response is ``max(0, w'z / sqrt(D) - b)``.
    The image is divided into ``grid`` x ``grid`` cells (sizes differ by at most one), over which responses are
    averaged. Features are ordered by the cell's row, its column and the filter.

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
    """Computes the features [b, F] of images ``x`` [b, h, w, c] within [0, 1]; see ``random_convolution``.

    ``filters`` are [filter_size, filter_size, c, number]. The function subtracts each filter's mean, so that it
    need not centre the patches. ``biases`` [number] are the thresholds b.
    """
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
    """Returns the matrix [grid, places] that averages ``places`` numbers along an axis over ``grid`` cells."""
    rows = np.zeros((grid, places), np.float32)
    for row, cell in zip(rows, np.array_split(np.arange(places), grid), strict=True):
        row[cell] = 1 / len(cell)
    return rows
