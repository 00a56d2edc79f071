"""Tangent kernels watched along training: an ``evaluate`` for ``simulate`` that measures every model's kernel."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedtangent.checks import whole
from fedtangent.data.dataset import classification_targets
from fedtangent.kernels import measures
from fedtangent.kernels.empirical import empirical_ntk
from fedtangent.models.dense import DenseStructure
from fedtangent.models.linear import LinearStructure
from fedtangent.types import Algorithm, Array, FederatedData, Key, Model, Partition, PyTree

METRICS = (  # of each model
    *("drift", "drift_operator", "alignment", "alignment_centred", "effective_rank", "trace_over_largest"),
    *("largest_eigenvalue", "smallest_eigenvalue", "condition_number"),
    *("commutator", "commutator_relative", "gram_variance", "gram_variance_relative"),
)
BLOCK_SIZE = 128  # of kernels of networks that have no structured kernel: bounds what is held at once


class Watched(NamedTuple):
    """The examples that kernels are measured on."""

    rows: np.ndarray  # [m] rows of the data, ascending
    x: Array  # [m, ...]
    targets: np.ndarray  # [m, C] float64
    clients: Partition  # which of the m each client holds


@dataclass(frozen=True)
class KernelDiagnostics:
    """``evaluate`` of a run: ``state -> {metric: value}``; made by ``kernel_diagnostics``.

    Values are means over the K models; with several models those of each come too, as ``drift_model_0``. A metric is
    not-a-number while a model's kernel is not finite. The state is only read: a run watched and one that is not have
    the same history, bit for bit.
    """

    watched: Watched
    kernels_of: Callable[[PyTree, Array], Array]  # parameters [K, ...], x -> [K, m, m]
    parameters: Callable[[PyTree], PyTree]  # of a state
    initial: np.ndarray  # [K, m, m] Theta_0

    def __call__(self, state: PyTree) -> dict[str, float]:
        """The metrics of ``METRICS`` by name."""
        each = [self.measure(theta, k) for k, theta in enumerate(self.kernels(state))]
        found = {name: float(np.mean([values[name] for values in each])) for name in METRICS}
        if len(each) > 1:
            found |= {f"{name}_model_{k}": values[name] for name in METRICS for k, values in enumerate(each)}
        return found

    def kernels(self, state: PyTree) -> np.ndarray:
        """The tangent kernel of every model on the watched examples, mean over outputs: [K, m, m] float64."""
        return np.asarray(self.kernels_of(self.parameters(state), self.watched.x), np.float64)

    def measure(self, theta: np.ndarray, model: int) -> dict[str, float]:
        """The metrics of one kernel [m, m] of ``model``."""
        moved = measures.drift(theta, self.initial[model])
        spectrum = measures.spectrum(theta)
        gram = measures.gram_operators(theta, self.watched.clients)
        values = (
            moved.frobenius,
            moved.operator,
            measures.alignment(theta, self.watched.targets),
            measures.alignment(theta, self.watched.targets, centred=True),
            spectrum.effective_rank,
            spectrum.trace_ratio,
            float(spectrum.eigenvalues[0]),
            float(spectrum.eigenvalues[-1]),
            spectrum.condition_number,
            gram.mean,
            gram.relative_mean,
            gram.variance,
            gram.relative_variance,
        )
        return dict(zip(METRICS, values, strict=True))

    def of_seed(self, algorithm: Algorithm, num_clients: int, seed: int | Key, init_key: Key | None = None) -> Any:
        """The same for a run of another seed, from its own initial kernels; nothing is compiled anew."""
        return replace(self, initial=self.kernels(algorithm.init(seed, num_clients, init_key)))


def kernel_diagnostics(
    algorithm: Algorithm,
    model: Model,
    data: FederatedData,
    seed: int | Key = 0,
    num_examples: int = 256,
    examples_seed: int = 0,
    init_key: Key | None = None,
) -> KernelDiagnostics:
    """Watches the tangent kernels of a run ``simulate(algorithm, data, .., seed, init_key=.., evaluate=watch)``.

    At every evaluation, for each of the K models on the same training examples: relative drift from the initial kernel
    (Frobenius and operator norm: Theorem 9.1 of FE-2021), alignment with the targets (plain and centred), effective
    rank, trace over largest eigenvalue, ends of the spectrum, condition number; mean norm of the pairwise commutators
    of the clients' Gram operators and the norm of their variance (FE-2021 section 9.2, Lemmas 9.2 and 9.3). See
    ``kernels.diagnostics`` for the definitions. Kernels are means over outputs, computed in float64 where JAX's 64-bit
    types are enabled and the model is an ``mlp`` or linear in its parameters; any other network's are computed in its
    own precision (in float32 eigenvalues below 1e-6 of the largest are rounding). The initial ones are recomputed from
    the seed, so that a resumed run has the same Theta_0.

    Args:
        algorithm: one that predicts with K networks of ``model``; its ``params`` says so.
        seed, init_key: those of the run.
        num_examples: how many, at most; drawn by ``examples_seed``, from each client in proportion to what it holds.
            Clients' operators are those of their drawn examples.

    Raises ``ValueError`` for an algorithm without such networks, a ``model`` that is not the algorithm's, or bad
    numbers.
    """
    params = check_watchable(algorithm, model, data.num_clients, num_examples)
    watched = stratified(data, model.output_size, num_examples, examples_seed)
    cheap = isinstance(model.structure, (DenseStructure, LinearStructure))

    @jax.jit
    def kernels_of(all_params: PyTree, x: Array) -> Array:
        wide, inputs = jax.tree.map(_widest, (all_params, x)) if cheap else (all_params, x)
        block = None if cheap else BLOCK_SIZE
        return jax.lax.map(lambda p: empirical_ntk(model, p, inputs, block_size=block), wide)

    fresh = KernelDiagnostics(watched, kernels_of, jax.jit(params), np.zeros(0))
    found: KernelDiagnostics = fresh.of_seed(algorithm, data.num_clients, seed, init_key)
    return found


def stratified(data: FederatedData, output_size: int, num_examples: int, seed: int) -> Watched:
    """At most ``num_examples`` distinct examples of ``data``, from each client in proportion to what it holds.

    Every client that has examples gives one at least, if there are as many to draw as such clients; with fewer, clients
    are drawn. An example counts for every client that holds it.
    """
    rng = np.random.default_rng(seed)
    indices, offsets = np.asarray(data.indices), np.asarray(data.offsets)
    owned = [np.unique(indices[a:b]) for a, b in itertools.pairwise(offsets)]
    quota = _quotas(np.array([len(own) for own in owned]), num_examples, rng)
    drawn = [rng.choice(own, take, replace=False) for own, take in zip(owned, quota, strict=True)]
    rows = np.unique(np.concatenate(drawn))
    held = [np.flatnonzero(np.isin(rows, own)) for own in owned]
    ends = np.cumsum([0, *map(len, held)])
    clients = Partition(np.concatenate(held).astype(np.int32), ends.astype(np.int32))
    y = np.asarray(data.y[rows])
    targets = classification_targets(y, output_size, centred=True) if np.issubdtype(y.dtype, np.integer) else y
    return Watched(rows, data.x[rows], np.asarray(targets, np.float64), clients)


def _quotas(sizes: np.ndarray, total: int, rng: np.random.Generator) -> np.ndarray:
    """How many each client gives: proportional by largest remainder, 1 at least, or 1 of drawn clients if too few."""
    if sizes.sum() <= total:
        return sizes
    full = np.flatnonzero(sizes)
    quota = np.zeros(len(sizes), int)
    if len(full) >= total:
        quota[rng.choice(full, total, replace=False)] = 1
        return quota
    share = sizes * (total / sizes.sum())
    quota = np.where(sizes > 0, np.maximum(np.floor(share).astype(int), 1), 0)
    while quota.sum() != total:  # a few steps: the floors lose, and the ones gain, less than one each
        step = 1 if quota.sum() < total else -1
        free = (quota < sizes) if step > 0 else (quota > 1)
        quota[np.argmax(np.where(free, step * (share - quota), -np.inf))] += step
    return quota


def _widest(leaf: Array) -> Array:
    """Floating numbers as float64 where 64-bit types are enabled: small eigenvalues are all rounding in float32."""
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        return leaf
    return leaf.astype(jnp.promote_types(leaf.dtype, jnp.result_type(float)))


def check_watchable(
    algorithm: Algorithm, model: Model, num_clients: int, num_examples: int = 2
) -> Callable[[PyTree], PyTree]:
    """How to get the networks' parameters [K, ...] from a state of ``algorithm``; nothing is computed.

    Raises ``ValueError`` for an algorithm that does not predict with K trained networks, for a ``model`` that does not
    have their parameters, for fewer than 2 examples.
    """
    whole("num_examples", num_examples, 2)
    params = algorithm.params
    if params is None:
        raise ValueError(f"algorithm: {algorithm.name} does not predict with trained networks, one kernel for each")
    given = jax.eval_shape(lambda: params(algorithm.init(0, num_clients)))
    own = jax.eval_shape(model.init, jax.random.key(0))
    shapes, stacked = (
        {jax.tree_util.keystr(path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
        for tree in (own, given)
    )
    if shapes != {path: shape[1:] for path, shape in stacked.items()}:
        raise ValueError(f"model: {model.name} does not have the parameters of the networks of {algorithm.name}")
    return params
