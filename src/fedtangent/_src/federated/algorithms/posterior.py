"""Distributions over global models that FedBE fits to the clients' models of a round (Chen and Chao, ICLR 2021)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Shaped

from fedtangent._src import pytrees
from fedtangent._src.checks import choice
from fedtangent._src.federated.aggregate import Stacked
from fedtangent._src.losses import Loss, mean_prediction
from fedtangent._src.types import AnyArray, Array, Key, Model, PyTree

POSTERIORS = ("gaussian", "dirichlet")
MEMBERS = ("samples", "clients", "mean")


class Clients(NamedTuple):
    """The models that clients trained from one global model in a round, sorted by client id; empty rows are last.

    Attributes:
        params: The clients' models [M, ...].
        weight: Weight of each model, [M] float; 0 in a row without a client.
        client: Id of each client, [M] int32; -1 in a row without a client.
    """

    params: PyTree
    weight: Array
    client: Array


class Teacher(NamedTuple):
    """The ensemble from which FedBE's student learns: its distribution over models, and the kinds of its members.

    Attributes:
        posterior: Name of the distribution, "gaussian" or "dirichlet".
        num_samples: Number of models drawn from the distribution.
        concentration: Concentration of the Dirichlet distribution.
        members: Kinds of members: "samples" from the distribution, "clients" (their models), "mean" (of these models).
    """

    posterior: str
    num_samples: int
    concentration: float
    members: tuple[str, ...]


def clients_of(params: PyTree, sent: Stacked) -> Clients:
    """Computes the models that clients trained from one global model, sorted by client id.

    Args:
        params: The broadcast parameters of the global model.
        sent: The clients' messages ``server - client``, at most M of them, [M, ...].
    """
    filled = sent.weight > 0
    order = jnp.argsort(jnp.where(filled, sent.client, jnp.iinfo(jnp.int32).max), stable=True)
    models = jax.tree.map(lambda p, m: p[None] - m[order], params, sent.messages)
    return Clients(models, sent.weight[order], jnp.where(filled, sent.client, -1)[order])


def no_clients(params: PyTree, places: int) -> Clients:
    """Returns ``Clients`` without any client: M rows with copies of ``params``, weight 0 and client -1.

    Args:
        params: Parameters of the global model.
        places: Number M of rows.
    """
    models = jax.tree.map(lambda p: jnp.broadcast_to(p[None], (places, *p.shape)), params)
    return Clients(models, jnp.zeros((places,), pytrees.precision(params)), jnp.full((places,), -1, jnp.int32))


def _combined(clients: Clients, share: Array) -> PyTree:
    """Returns the sum of the M clients' models, each times its entry in ``share`` [M]; those of weight 0 are 0."""

    def leaf(models: Array) -> Array:
        present_models = jnp.where((clients.weight > 0).reshape((-1,) + (1,) * (models.ndim - 1)), models, 0)
        return jnp.tensordot(share.astype(models.dtype), present_models, axes=(0, 0), precision="highest")

    return jax.tree.map(leaf, clients.params)


def _shares(clients: Clients) -> Array:
    total = jnp.sum(clients.weight)
    return clients.weight / jnp.where(total > 0, total, 1)


def gaussian(clients: Clients) -> Callable[[Key], PyTree]:
    """Fits ``N(mean, diag(variance))`` to the clients' models w_i; returns the function that draws a model with a key.

    ``mean = sum_i p_i w_i`` and ``variance = sum_i p_i (w_i - mean)^2``, elementwise, where ``p_i = n_i / n`` is client
    i's share of the weight (Chen and Chao, 2021, section 3.2).
    """
    share = _shares(clients)
    mean = _combined(clients, share)
    squares = jax.tree.map(lambda models, m: (models - m[None]) ** 2, clients.params, mean)
    deviation = jax.tree.map(jnp.sqrt, _combined(clients._replace(params=squares), share))

    def draw(key: Key) -> PyTree:
        leaves, tree = jax.tree.flatten(mean)
        noise = [jax.random.normal(jax.random.fold_in(key, i), p.shape, p.dtype) for i, p in enumerate(leaves)]
        return jax.tree.map(lambda m, std, z: m + std * z, mean, deviation, jax.tree.unflatten(tree, noise))

    return draw


def dirichlet(clients: Clients, concentration: float) -> Callable[[Key], PyTree]:
    """Builds the distribution of the models' random convex combinations; returns the function that draws with a key.

    A draw is ``sum_i g_i n_i w_i / sum_i g_i n_i``, where w_i is client i's model, n_i its weight and ``g`` is drawn
    from a symmetric Dirichlet distribution (Chen and Chao, 2021, section 3.2). g_i is drawn with the key ``fold_in(key,
    client id)``, so it does not depend on the other clients.

    Args:
        clients: The clients' models.
        concentration: Concentration of the Dirichlet distribution.
    """

    def draw(key: Key) -> PyTree:
        def log_gamma(client: Array) -> Array:
            client_key = jax.random.fold_in(key, client)
            return jax.random.loggamma(
                client_key, jnp.asarray(concentration, clients.weight.dtype), (), clients.weight.dtype
            )

        present = clients.weight > 0
        log_weight = jnp.log(jnp.where(present, clients.weight, 1))
        logits = jnp.where(present, jax.vmap(log_gamma)(clients.client) + log_weight, -jnp.inf)
        largest = jnp.where(jnp.any(present), jnp.max(logits), 0)
        share = jnp.exp(logits - largest)
        return _combined(clients, share / jnp.maximum(jnp.sum(share), jnp.finfo(share.dtype).tiny))

    return draw


def check_teacher(teacher: Teacher) -> None:
    """Raises ``ValueError`` for an unknown distribution, or a concentration that is not positive and finite.

    It also raises unless the kinds of members are one or more of ``MEMBERS``, each once. ``num_samples`` is not
    checked.
    """
    choice("posterior", teacher.posterior, POSTERIORS)
    unknown = [name for name in teacher.members if name not in MEMBERS]
    if unknown or not teacher.members or len(set(teacher.members)) != len(teacher.members):
        raise ValueError(f"members: got {teacher.members}, must be one or more of {', '.join(MEMBERS)}, each once")
    if not 0 < teacher.concentration < float("inf"):
        raise ValueError(f"concentration: got {teacher.concentration}, must be positive and finite")


def members_of(teacher: Teacher, key: Key, mean: PyTree, clients: Clients) -> tuple[PyTree, Array]:
    """Returns the parameters of the E members of an ensemble, [E, ...], and whether each member is present, [E] bool.

    Depending on ``teacher.members`` the members are draws from the distribution, the clients' models, and their mean.
    A client of weight 0 is absent. The mean is always the last row, absent if it is no member; but without any client
    (before the first round) only the mean is present, member or not. Draw m has the key ``fold_in(key, m)``.

    Args:
        teacher: The distribution and the kinds of members.
        key: Key of the draws.
        mean: The clients' weighted mean.
        clients: The clients' models.
    """
    anyone = jnp.any(clients.weight > 0)
    parts, present = [], []
    if "samples" in teacher.members:
        fitted = gaussian(clients) if teacher.posterior == "gaussian" else dirichlet(clients, teacher.concentration)
        draw_keys = jax.vmap(lambda m: jax.random.fold_in(key, m))(jnp.arange(teacher.num_samples))
        parts.append(jax.vmap(fitted)(draw_keys))
        present.append(jnp.broadcast_to(anyone, (teacher.num_samples,)))
    if "clients" in teacher.members:
        parts.append(clients.params)
        present.append(clients.weight > 0)
    parts.append(jax.tree.map(lambda p: p[None], mean))
    present.append(jnp.bool_("mean" in teacher.members) | ~anyone[None])
    together = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)
    return together, jnp.concatenate(present)


def ensemble_outputs(
    model: Model, members: PyTree, present: Array, x: Shaped[AnyArray, "n ..."], loss: str | Loss
) -> tuple[Array, Array]:
    """Computes the outputs of each member of an ensemble, [E, n, C], and the ensemble's prediction, [n, C].

    An absent member has outputs 0. The prediction is over the members that are present: the mean of their
    outputs or, for a loss of class labels, the log of their mean softmax probabilities.

    Args:
        model: The network.
        members: Parameters [E, ...].
        present: Whether each member is present, [E] bool.
        x: Inputs [n, ...].
        loss: Name of the loss by which the members were trained, or a function.
    """
    outputs = pytrees.wide(jax.lax.map(lambda p: model.apply(p, x), members))
    outputs = jnp.where(present[:, None, None], outputs, 0)
    return outputs, mean_prediction(loss, outputs, present / jnp.sum(present).astype(outputs.dtype))


def weighted_mean_of(clients: Clients) -> PyTree:
    """Returns the weighted mean of the clients' models, which is FedAvg's next model."""
    return _combined(clients, _shares(clients))
