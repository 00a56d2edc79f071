"""The evidence lower bound of a run's K models, at every evaluation."""

from __future__ import annotations

import jax
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Float

from fedtangent._src import pytrees
from fedtangent._src.checks import instance, number, whole
from fedtangent._src.engine.loop import Measure
from fedtangent._src.losses import mean_form
from fedtangent._src.measures.loss_surface import mean_loss
from fedtangent._src.measures.tangent_kernels import check_watchable
from fedtangent._src.theory.fed_ensemble.variational import EvidenceBound, GaussianMixture, evidence_bound
from fedtangent._src.types import Algorithm, Array, FederatedData, Key, PyTree

LIKELIHOODS = ("squared_error", "cross_entropy", "logistic")  # losses that are -ln p(y | x, w), up to a constant


def variational_diagnostics(
    algorithm: Algorithm,
    data: FederatedData,
    scale: float,
    prior_scale: float = 1.0,
    noise: float = 1.0,
    num_samples: int = 32,
    seed: int | Key = 0,
) -> Measure:
    """Builds a measure for ``Evaluation``: the evidence lower bound of the mixture around a run's K models.

    The mixture is ``1/K sum_k N(w_k, scale^2 I)`` (FE-2024, section III-C), and the prior is ``N(0, prior_scale^2 I)``.
    D are the examples of all clients, each counted once. For the cross entropy and the logistic loss the negative log
    likelihood -ln p(D | w) is the sum of the loss over D: the outputs give the probability of the class. For the
    squared error it is this sum over noise^2, plus a constant: targets are normal around the outputs.
    ``theory.evidence_bound`` estimates the bound in the models' floating type, with the same draws at every evaluation,
    which cost 2 K num_samples passes over the examples. Models that are trained with weight decay
    ``noise^2 / (n prior_scale^2)`` (noise 1 for classes) descend on the negative log posterior, averaged over models
    (eq. (8) of FE-2024, ``theory.mode_objective``).

    Args:
        algorithm: An algorithm that trains and predicts with K networks.
        data: The clients' data.
        scale: Standard deviation of a component, above 0.
        prior_scale: Standard deviation of a weight under the prior.
        noise: Standard deviation of a target around its output, for the squared error.
        num_samples: Number of pairs of draws from each component, at least 2.
        seed: Seed or key of the draws.

    Returns:
        The measure, with the metrics "evidence_bound", "standard_error" (of the bound), "log_likelihood", "log_prior"
        and "entropy", in nats.

    Raises:
        ValueError: The algorithm has no networks, its loss is not a negative log likelihood, or a number is out of
            range.

    Example, a network of any kind:

        >>> import fedtangent as ft
        >>> digits = ft.data.load("digits", num_train=100)
        >>> clients = ft.partition.iid(100, 4, seed=0)
        >>> data = ft.data.federated_data(digits.x_train, digits.y_train, clients, num_classes=10)
        >>> schedule = ft.schedules.per_client_permutations(4, 2)
        >>> mlp = ft.models.mlp(64, 10, widths=(16,))
        >>> algorithm = ft.fed_ensemble(mlp, schedule, client_learning_rate=0.5, loss="cross_entropy")
        >>> measure = ft.measures.variational_diagnostics(algorithm, data, scale=0.1)
        >>> run = ft.simulate(algorithm, data, num_rounds=4, seed=0, evaluation=ft.Evaluation(measure=measure))
        >>> before, after = (e.metrics["evidence_bound"] for e in run.history.evaluations)
        >>> before < after
        True
    """
    instance("algorithm", algorithm, Algorithm)
    instance("data", data, FederatedData)
    model, parameters = algorithm.model, check_watchable(algorithm, algorithm.model, data.num_clients)
    training = algorithm.composition.training
    assert training is not None
    loss = mean_form(training.loss)
    if not isinstance(loss, str) or loss not in LIKELIHOODS:
        raise ValueError(
            f"algorithm: got the loss {getattr(loss, '__name__', loss)}, must be a negative log likelihood: "
            f"{', '.join(LIKELIHOODS)}"
        )
    for name, value in (("scale", scale), ("prior_scale", prior_scale), ("noise", noise)):
        number(name, value, above=0)
    whole("num_samples", num_samples, 2)
    rows = np.unique(np.asarray(data.indices))  # that a client holds
    x, y = data.x[rows], data.y[rows]
    is_normal, mean = loss == "squared_error", mean_loss(model, loss)
    factor = len(rows) / noise**2 if is_normal else len(rows)
    constant = y.size / 2 * np.log(2 * np.pi * noise**2) if is_normal else 0.0

    @jax.jit
    def bound(params: PyTree, x: Array, y: Array) -> EvidenceBound:
        _, to_params = ravel_pytree(pytrees.take(params, 0))

        def log_likelihood(weights: Float[Array, "d"]) -> Float[Array, ""]:
            return -factor * mean(to_params(weights), x, y) - constant

        centres = jax.vmap(lambda one: ravel_pytree(one)[0])(params)
        return evidence_bound(log_likelihood, GaussianMixture(centres, scale), prior_scale, num_samples, seed)

    def measured(_: Algorithm, state: PyTree) -> dict[str, float]:
        terms = {name: float(number) for name, number in bound(parameters(state), x, y)._asdict().items()}
        return {"evidence_bound": terms.pop("value"), **terms}

    return measured
