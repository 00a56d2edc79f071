"""Images published as idx files, prepared by TensorFlow Datasets as array_record, without TensorFlow.

TFDS's own ``mnist`` imports TensorFlow to unpack the files and to encode each image as PNG, and shuffles the examples.
Here the features are plain uint8 tensors, and the original order is kept.
"""

from __future__ import annotations

import hashlib
import socket
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from tensorflow_datasets.core.download.checksums import UrlInfo
from tensorflow_datasets.core.download.download_manager import NonMatchingChecksumError
from tensorflow_datasets.core.download.resource import get_dl_fname
from tensorflow_datasets.core.download.util import DownloadError

from fedtangent.data import idx

SPLITS = ("train", "test")


def _config(source: idx.IdxSource) -> tfds.core.BuilderConfig:
    return tfds.core.BuilderConfig(name=source.name, version="1.0.0", description=source.description)


class FedtangentIdxImages(tfds.core.GeneratorBasedBuilder):
    """The builder; its config is named after the data set and knows the source's addresses and checksums."""

    VERSION = tfds.core.Version("1.0.0")
    BUILDER_CONFIGS = tuple(_config(source) for source in (idx.MNIST, idx.FASHION_MNIST))

    def __init__(self, source: idx.IdxSource, data_dir: str | Path | None = None) -> None:
        """A builder of ``source`` under ``data_dir`` (TFDS's own default folder if None)."""
        self.source = source
        known = {config.name: config for config in self.BUILDER_CONFIGS}
        super().__init__(
            config=known.get(source.name) or _config(source), data_dir=data_dir, file_format="array_record"
        )

    @property
    def url_infos(self) -> dict[str, UrlInfo]:
        """Size and checksum of each address, for TFDS's download manager to verify."""
        return {
            self.source.url + f.filename: UrlInfo(
                size=tfds.core.utils.Size(f.size), checksum=f.sha256, filename=f.filename
            )
            for f in self.source.files.values()
        }

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            description=self.source.description,
            homepage=self.source.homepage,
            license=self.source.licence,
            disable_shuffling=True,
            features=tfds.features.FeaturesDict(
                {
                    "image": tfds.features.Tensor(shape=(28, 28), dtype=np.uint8),
                    "label": tfds.features.Scalar(dtype=np.uint8),
                }
            ),
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Iterator[tuple[int, dict[str, Any]]]]:
        folders = [Path(dl_manager.download_dir) / self.source.name, Path(dl_manager.download_dir) / self.name]
        names = [get_dl_fname(self.source.url + f.filename, f.sha256) for f in self.source.files.values()]
        if not all(any((f / n).exists() or (f / self.source.name / n).exists() for f in folders) for n in names):
            _connect(self.source.url)
        # In the folder of the data set's name, where TFDS's own builder of that data set keeps its downloads, too.
        resources = {
            role: tfds.download.Resource(url=self.source.url + f.filename, relative_download_dir=self.source.name)
            for role, f in self.source.files.items()
        }
        paths = dl_manager.download(resources)
        arrays = {role: idx.read(self.source, role, Path(path)) for role, path in paths.items()}
        return {split: self._generate_examples(arrays[f"x_{split}"], arrays[f"y_{split}"]) for split in SPLITS}

    def _generate_examples(self, images: np.ndarray, labels: np.ndarray) -> Iterator[tuple[int, dict[str, Any]]]:
        for i, (image, label) in enumerate(zip(images, labels, strict=True)):
            yield i, {"image": image, "label": label}


def prepare(source: idx.IdxSource, data_dir: str | Path | None = None) -> dict[str, np.ndarray]:
    """The four arrays of ``source``, uint8, in the original order, read from array_record through ``as_data_source``.

    Downloads (or takes from TFDS's download cache) and prepares them first where needed. Raises ``ValueError`` if the
    files cannot be had, or if what comes back is not, byte for byte, the published data.
    """
    builder = FedtangentIdxImages(source, data_dir)
    try:
        builder.download_and_prepare(download_config=tfds.download.DownloadConfig(try_download_gcs=False))
    except (OSError, DownloadError, NonMatchingChecksumError) as error:
        raise ValueError(_unavailable(source, error)) from error
    arrays = {}
    for split in SPLITS:
        examples = list(builder.as_data_source(split=split))
        arrays[f"x_{split}"] = np.stack([e["image"] for e in examples])
        arrays[f"y_{split}"] = np.array([e["label"] for e in examples], np.uint8)
    for role, array in arrays.items():
        if hashlib.sha256(idx.render(array)).hexdigest() != source.files[role].sha256_unpacked:
            raise ValueError(
                f"{source.name}: {role} in {builder.data_dir} is not the published {source.files[role].filename}; "
                f"remove that folder and it is made again"
            )
    return arrays


def _connect(url: str) -> None:
    """Raise ``OSError`` at once if ``url`` cannot be reached; TFDS would retry for minutes. Skipped behind a proxy."""
    address = urllib.parse.urlsplit(url)
    if address.scheme not in urllib.request.getproxies():
        port = address.port or (443 if address.scheme == "https" else 80)
        with socket.create_connection((address.hostname or "", port), timeout=10):
            return


def _unavailable(source: idx.IdxSource, error: Exception) -> str:
    reason = " ".join(str(error).split())[:300]
    names = ", ".join(f.filename for f in source.files.values())
    return (
        f"{source.name}: cannot be prepared from {source.url} ({type(error).__name__}: {reason}); put {names} into a "
        f"folder and name it by data_dir or FEDTANGENT_DATA"
    )
