"""Features of a residual network that is trained here, in place of the Local-GD paper's ResNet-50 of ImageNet.

A share of the training images trains the network, centrally and from scratch. Its last layer is taken off, and its
features of the other images become the nodes' inputs. So features are learned from other images of the same classes,
not from another data set.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import fedtangent as ft
from fedtangent._src.data.dataset import Dataset
from fedtangent._src.data.features import with_features
from fedtangent._src.data.features.convolution import Features
from fedtangent._src.types import Model, PyTree

BLOCKS, WIDENING = (1, 1, 1, 1), 8  # a small ResNet: its features are 8 times as many as its first channels
RATE, BATCH, AT_ONCE = 0.1, 32, 500
LAST = "Dense_0"  # the last layer, in the network's parameters


def with_trained_features(dataset: Dataset, share: float, epochs: int, num_features: int, seed: int) -> Dataset:
    """Trains a network on some training images, and replaces all other images by the network's standardised features.

    The images that train the network are left out of the returned data set.

    Args:
        dataset: A data set of images.
        share: Share of the training images that trains the network.
        epochs: Passes of SGD over these images.
        num_features: Number F of features, a multiple of 8.
        seed: Seed of the choice of images and of the training.
    """
    order = np.random.default_rng([seed, 1]).permutation(len(dataset.y_train))
    chosen, others = np.split(order, [round(share * len(order))])
    pool = dataset._replace(x_train=dataset.x_train[chosen], y_train=dataset.y_train[chosen])
    params = _trained(pool, epochs, num_features, seed)
    made_by = f"{num_features} features of a ResNet trained here, {epochs} epochs on {len(chosen)} other images"
    headless, cut = beheaded(params, dataset.x_train.shape[1:], num_features)
    compute = partial(_features, headless, cut, made_by)
    rest = dataset._replace(x_train=dataset.x_train[others], y_train=dataset.y_train[others])
    return with_features(rest, compute)


def check(share: float, num_features: int, weights: str) -> None:
    """Checks the options of a network that is trained here.

    Args:
        share: Share of the training images that trains the network.
        num_features: Number of features.
        weights: File of another network's weights, "" for none.

    Raises:
        ValueError: There is a file of weights too, or ``num_features`` is not a multiple of 8.
    """
    if weights:
        raise ValueError(f"pretraining: got {share:g} together with a file of weights, must be 0 with such a file")
    if num_features % WIDENING:
        raise ValueError(f"num_features: got {num_features}, must be a multiple of {WIDENING} with pretraining")


def _network(shape: tuple[int, ...], outputs: int, num_features: int) -> Model:
    return ft.models.resnet18(shape, outputs, width=num_features // WIDENING, blocks=BLOCKS)


def _trained(dataset: Dataset, epochs: int, num_features: int, seed: int) -> PyTree:
    """Trains the network by SGD on the cross entropy of all training images; returns its parameters."""
    model = _network(dataset.x_train.shape[1:], dataset.num_classes, num_features)
    work = ft.Work(epochs=epochs, batch_size=BATCH)
    schedule = ft.schedules.all_clients(1)
    algorithm = ft.fed_avg(model, schedule, client_learning_rate=RATE, loss="cross_entropy", work=work)
    everything = ft.partition.of([np.arange(len(dataset.y_train))], len(dataset.y_train))
    data = ft.data.federated_data(dataset.x_train, dataset.y_train, everything, jnp.float32)
    path = ft.params_by_round(algorithm, data, num_rounds=1, seed=seed)
    return jax.tree.map(lambda leaf: leaf[-1, 0], path)


def beheaded(params: PyTree, shape: tuple[int, ...], num_features: int) -> tuple[Model, PyTree]:
    """Returns the network without its last layer, so that its outputs are the features, and the parameters for it.

    Args:
        params: Parameters of the whole network.
        shape: Shape of an image.
        num_features: Number F of features.
    """
    identity = {"kernel": jnp.eye(num_features), "bias": jnp.zeros(num_features)}
    return _network(shape, num_features, num_features), {**params, LAST: identity}


def _features(model: Model, params: PyTree, made_by: str, images: np.ndarray) -> Features:
    """Computes the features [n, F] float32 of images [n, h, w, c]; the text ``made_by`` says where they come from."""
    apply = jax.jit(model.apply)
    parts = [apply(params, jnp.asarray(images[i : i + AT_ONCE])) for i in range(0, len(images), AT_ONCE)]
    return Features(np.concatenate([np.asarray(part, np.float32) for part in parts]), made_by)
