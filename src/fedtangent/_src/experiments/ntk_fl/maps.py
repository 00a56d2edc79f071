"""Which client holds which training images in the NTK-FL authors' own code (github.com/KAI-YUE/ntk-fed).

An archive of such divisions, here called maps, has two arrays for each map M: ``M/indices`` (the clients' images, one
client after another, by their positions in the original file) and ``M/offsets``. Client k holds ``indices[offsets[k] :
offsets[k + 1]]``. In maps drawn by Dirichlet (``a0.1_0``: alpha 0.1, draw 0) clients share images.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedtangent._src import checks
from fedtangent._src.data import files
from fedtangent._src.data.dataset import Dataset
from fedtangent._src.data.partition import given
from fedtangent._src.types import Partition

FOLDER = "ntk_fed_partitions"
ARCHIVES = {"fashion_mnist": "fmnist300.npz", "mnist": "mnist300.npz"}


def authors_map(loaded: Dataset, name: str, folder: Path | None) -> Partition:
    """Reads one of the NTK-FL authors' divisions of a data set among clients.

    Args:
        loaded: The data set, with all training images in the order of the original file.
        name: Name of the map, such as ``a0.5_0``.
        folder: Data folder; the archive is in it or in a subfolder ``ntk_fed_partitions*``.

    Raises:
        ValueError: There are no maps of this data set, no archive, or no map of that name, or the archive is damaged.
    """
    if loaded.name not in ARCHIVES:
        allowed = " and ".join(ARCHIVES)
        raise ValueError(f"partition: got 'given' for {loaded.name}, must be another: there are maps of {allowed}")
    archive = ARCHIVES[loaded.name]
    places = [] if folder is None else [place / archive for place in files.places(folder, FOLDER)]
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        raise ValueError(
            f"data_dir: got {folder}, must be a folder with {archive}, the authors' maps, in it or in {FOLDER}*"
        )
    arrays = files.arrays("map", path)
    names = sorted(key.removesuffix("/offsets") for key in arrays if key.endswith("/offsets"))
    checks.choice("map", name, names)
    if f"{name}/indices" not in arrays:
        raise ValueError(f"map: got {path}, which is damaged: it has {name}/offsets without {name}/indices")
    return given.of(Partition(arrays[f"{name}/indices"], arrays[f"{name}/offsets"]), len(loaded.x_train), "map")


def among(clients: Partition, rows: np.ndarray, num_examples: int) -> Partition:
    """Restricts a partition to some of the examples; examples are then numbered by their positions in ``rows``.

    Args:
        clients: Partition of all examples.
        rows: Chosen examples, [n].
        num_examples: Number of all examples.
    """
    place = np.full(num_examples, -1, np.int64)
    place[rows] = np.arange(len(rows))
    places = [place[clients.client(i)] for i in range(clients.num_clients)]
    return given.of([client[client >= 0] for client in places], len(rows), "map")
