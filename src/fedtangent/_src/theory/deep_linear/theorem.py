"""Theorem IV.2 of DeepLin, the linear decay of FedAvg on wide deep linear networks, and the hypotheses of its proof.

    L(t) <= rho^t L(0),    rho = 1 - eta K lambda_min(P(0)) / (2 N),

where L(t) is the sum of squares after t rounds of N clients, which take K full-batch steps at rate eta on
``1/2 |f(X_c) - Y_c|^2`` (eq. 18). P(0) is the initial tangent kernel. The proof is an induction over three hypotheses:
A, the bound itself; B, singular values of products of layers stay near their values in the limit; C, no layer moves
farther than R.

Points that the paper leaves open or states otherwise:

- lambda_min and sigma_min are the least on the range of X, and targets are ``Y = W* X`` (erratum `deep_linear.rank`),
  as in the reduced problem of Du and Hu (2019), whose result the proof uses.
- The conditions hold up to constants. The step's constant is printed inside the proof,
  ``eta <= d_out / (50 L kappa K |X|^2)``; the width's constant is taken as 1, the least possible reading.
- (18) has a quarter of the first-order rate (erratum `deep_linear.18`). ``linear_rate`` is the rate of the linear
  model, exact for any eta and K. The loss is the sum of squares (erratum `deep_linear.loss`).
- ``drift_bound`` has the factor L that eq. (33) loses, and ``radius`` the factor 16 of the proof (errata
  `deep_linear.33`, `deep_linear.radius`).
- A product W^j .. W^i has j - i + 1 layers, which ``hypotheses`` counts, unlike the paper (erratum
  `deep_linear.between`). Eq. (27) needs n <= d (erratum `deep_linear.27`).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import scipy
from jaxtyping import Float64

from fedtangent._src.checks import instance, number, whole
from fedtangent._src.theory.checks import Assumption, assumption, failing, report
from fedtangent._src.theory.deep_linear.gram import Layers, Matrix, in_row_space, layers_of, products, spectrum
from fedtangent._src.theory.deep_linear.rounds import FullBatchWork, Weights, fitting
from fedtangent._src.theory.local_gd.regression import LocalRegression, local_regression

STEP = 50  # of the condition on eta, (23)
RADIUS = 16  # of R
SPREAD = 2.0  # of hypothesis B's O(sqrt(L)): a square Gaussian matrix alone has norm 2 sqrt(m)


class DeepLinearConstants(NamedTuple):
    """Constants of Theorem IV.2 of DeepLin for one network, its data and its training.

    Attributes:
        depth, width, outputs: Layers L, hidden width m and outputs d_out of the network.
        rank, largest, least: Rank of X, its largest singular value, and the least that is not 0.
        lambda_min, lambda_max: Least and largest eigenvalue of the initial tangent kernel P(0) on the range of X.
        truth: Spectral norm of W*, the matrix of the least-squares fit ``W* X`` to the targets Y.
        residual: Norm of the initial residual, of the outputs minus ``W* X``.
        num_clients, learning_rate, local_steps: Clients N, step size eta and local steps K of a round.
        delta: Probability with which the theorem may fail.
    """

    depth: int
    width: int
    outputs: int
    num_clients: int
    rank: int
    largest: float
    least: float
    lambda_min: float
    lambda_max: float
    truth: float
    residual: float
    learning_rate: float
    local_steps: int
    delta: float

    @property
    def kappa(self) -> float:
        """Condition number of X X', the ratio of the largest to the least squared singular value of X."""
        return (self.largest / self.least) ** 2

    def rate(self) -> float:
        """Computes rho of eq. (18) of DeepLin, a bound of the factor by which a round changes the loss, at least 0."""
        return max(1 - self.learning_rate * self.local_steps * self.lambda_min / (2 * self.num_clients), 0.0)

    def step_limit(self) -> float:
        """Computes the largest step size eta that Theorem IV.2 of DeepLin allows."""
        return self.outputs / (STEP * self.depth * self.kappa * self.local_steps * self.largest**2)

    def least_width(self) -> float:
        """Computes the least hidden width m that Theorem IV.2 of DeepLin allows, with its unspecified constant as 1."""
        shared = self.rank * self.kappa**4 * self.num_clients**2
        log_depth = math.log(self.depth) if self.depth > 1 else 0.0
        terms = shared * self.outputs * (1 + self.truth**2), shared * math.log(self.rank / self.delta), log_depth
        return self.depth * max(terms)

    def radius(self) -> float:
        """Computes R of DeepLin's hypothesis C, the farthest that a layer may move; 0 for an initial residual of 0."""
        spread = math.sqrt(self.outputs * self.num_clients)
        return RADIUS * spread * self.residual * self.largest / (self.depth * self.least**2)

    def drift_bound(self, steps: int) -> float:
        """Computes the bound of a client's relative change of outputs ``|U_k - U| / |U - Y|`` (Lemma VII.7, DeepLin).

        U are the outputs before the round, U_k after k = ``steps`` local steps, Y the targets. The bound has the factor
        L, the depth, which eq. (33) of DeepLin leaves out (erratum `deep_linear.33`).
        """
        return 57 * steps * self.learning_rate * self.depth * self.largest**2 / (10 * self.outputs)

    def kernel_bound(self) -> float:
        """Computes the bound of the tangent kernel's change ``|P(t, k) - P(0)|`` (Lemma VII.5 of DeepLin).

        P(t, k) is the kernel between the server's network after t rounds and the clients' networks after k local steps
        more; the norm is the operator norm.
        """
        return 0.109 * self.depth * self.largest**2 / (self.outputs * self.kappa)


@dataclass(frozen=True, repr=False)
class DeepLinearTheorem:
    """Theorem IV.2 of DeepLin for one network and its data; built by ``deep_linear_theorem``.

    ``initial`` are the initial weights. ``reduced`` is ``U' X`` [r, d] for an orthonormal basis U of the range of the
    inputs X [n, d], so that r = rank(X) rows replace the n examples. ``linear`` is FedAvg on the same data at infinite
    width.
    """

    constants: DeepLinearConstants
    assumptions: tuple[Assumption, ...]
    initial: Layers  # W^i(0)
    reduced: Float64[np.ndarray, "r d"]  # X on its range
    linear: LocalRegression  # FedAvg of the limit of infinite width, on the same data

    def __repr__(self) -> str:
        c = self.constants
        numbers = f"L {c.depth}, m {c.width}, N {c.num_clients}, K {c.local_steps}, eta {c.learning_rate:.3g}"
        decay = f"rho {c.rate():.9g}, at infinite width {self.linear_rate:.9g}"
        spectrum = f"P(0) from {c.lambda_min:.4g} to {c.lambda_max:.4g}"
        return report(f"DeepLinearTheorem({numbers}, {spectrum}, {decay}", self.assumptions) + ")"

    @property
    def failing(self) -> tuple[str, ...]:
        """Names of the assumptions that do not hold."""
        return failing(self.assumptions)

    @property
    def linear_rate(self) -> float:
        """Factor by which a round finally shrinks the sum of squares at infinite width; rho of eq. (18) is a bound.

        For the linear model M and its limit M*, a round leaves at most this share of ``|M - M*|^2``; with K > 1 a
        single round may leave more of ``|X (M - M*)|^2``.
        """
        return self.linear.contraction**2

    def singular_values(self, weights: Weights) -> tuple[float, float]:
        """Computes least and largest singular value of products of layers, divided by their values at infinite width.

        The products are ``W^L .. W^i`` for i > 1, and ``W^i .. W^1 X`` for i < L. At infinite width the singular values
        of a product of j layers are ``m^(j/2)``, in the second case times a singular value of X.

        Args:
            weights: Weights ``W^1 .. W^L`` of the network, two layers or more.
        """
        weights, c, low, high = self._alike(weights), self.constants, list[float](), list[float]()
        if c.depth < 2:
            raise ValueError("weights: got one layer, must be two or more")
        for products_, least, largest in (
            (_tails(weights), 1.0, 1.0),
            (_heads(weights, self.reduced), c.least, c.largest),
        ):
            for layers, product in enumerate(products_, start=1):
                values = np.linalg.svd(product, compute_uv=False) / math.sqrt(c.width) ** layers
                low.append(float(values[-1] / least))
                high.append(float(values[0] / largest))
        return min(low), max(high)

    def hypotheses(self, weights: Weights, loss: float, rounds: int) -> tuple[Assumption, ...]:
        """Checks the proof's hypotheses A, B and C at the server's weights after ``rounds`` rounds.

        A bounds the loss, B the singular values of products of layers (left out for a single layer), and C the distance
        of a layer from its start.

        Args:
            weights: Weights of the server.
            loss: Loss relative to the start, L(t) / L(0).
            rounds: Number of finished rounds t.

        Returns:
            A record of each measured inequality: "A"; "B, largest", "B, least" and, with three layers or more,
            "B, between"; and "C".
        """
        weights, c = self._alike(weights), self.constants
        whole("rounds", rounds, 0)
        hypotheses = [assumption("A", "loss relative to the start", loss, "<=", c.rate() ** rounds)]
        if c.depth > 1:
            low, high = self.singular_values(weights)
            text = "singular value relative to infinite width"
            hypotheses += [
                assumption("B, largest", text, high, "<=", 1.25),
                assumption("B, least", text, low, ">", 0.75),
            ]
        if between := _between(weights):
            most = max(_norm(w) / math.sqrt(c.width) ** count for count, w in between)
            text, spread = "norm of inner layers' products over m^(count/2)", SPREAD * math.sqrt(c.depth)
            hypotheses.append(assumption("B, between", text, most, "<=", spread))
        moved = max(float(np.linalg.norm(w - w0)) for w, w0 in zip(weights, self.initial, strict=True))
        return (*hypotheses, assumption("C", "distance of a layer from its start", moved, "<=", c.radius()))

    def _alike(self, weights: Weights) -> Layers:
        layers = layers_of(weights)
        shapes, allowed = ([w.shape for w in of] for of in (layers, self.initial))
        if shapes != allowed:
            raise ValueError(f"weights: got shapes {shapes}, must be {allowed}, as at the start")
        return layers


def deep_linear_theorem(weights: Weights, work: FullBatchWork, delta: float = 0.1) -> DeepLinearTheorem:
    """Computes the decay rate rho of DeepLin's Theorem IV.2 and checks which of its assumptions hold.

    Args:
        weights: Initial weights ``W^1 .. W^L``.
        work: The clients' examples, learning rate and local steps.
        delta: Probability with which the theorem may fail.

    Raises:
        ValueError: Weights that do not fit the data, or a rate at which the linear model diverges.
    """
    number("delta", delta, above=0, below=1)
    instance("work", work, FullBatchWork)
    weights = fitting(weights, work)
    start = products(weights, work.x)
    depth, outputs = len(weights), work.y.shape[1]
    limit = stable_learning_rate(work, depth)
    if work.learning_rate > limit:
        raise ValueError(
            f"learning_rate: got {work.learning_rate:g}, at which local descent diverges, must be at most {limit:.4g} "
            "(2 d_out / (L |X_c|^2) of the client with the largest |X_c|)"
        )
    reduced = in_row_space(work.x)
    singular = np.linalg.norm(reduced, axis=1)
    truth = np.linalg.lstsq(work.x, work.y, rcond=None)[0]
    realised = work.x @ truth
    lambda_min, lambda_max = spectrum(weights, work.x)
    constants = DeepLinearConstants(
        depth=depth,
        width=np.shape(weights[0])[0] if depth > 1 else 1,
        outputs=outputs,
        num_clients=work.num_clients,
        rank=len(reduced),
        largest=float(singular.max()),
        least=float(singular.min()),
        lambda_min=lambda_min,
        lambda_max=lambda_max,
        truth=_norm(truth),
        residual=float(np.linalg.norm(start.outputs - realised)),
        learning_rate=work.learning_rate,
        local_steps=work.local_steps,
        delta=delta,
    )
    off = float(np.linalg.norm(work.y - realised) / max(np.linalg.norm(work.y), np.finfo(float).tiny))
    assumptions: tuple[Assumption, ...] = (
        assumption("step", "eta", constants.learning_rate, "<=", constants.step_limit()),
        assumption("realisable", "share of |Y| that no linear map of X fits", off, "<=", 1e-9),
    )
    if depth > 1:
        text, need = "least width of the theorem, its constant as 1", constants.least_width()
        assumptions += (assumption("width", text, need, "<=", constants.width),)
    return DeepLinearTheorem(constants, assumptions, weights, reduced, deep_linear_limit(work, depth))


def deep_linear_limit(work: FullBatchWork, depth: int) -> LocalRegression:
    """Computes FedAvg at infinite width: a linear model ``f(x) = M' x``, M [d, C], with tangent kernel ``L/C x x'``.

    A lazily trained network is this model at the rate ``eta L / C``, started from the initial product of its layers.
    Every round follows in closed form (``LocalRegression.models``).

    Args:
        work: Full-batch work of the clients.
        depth: Number L of layers.
    """
    instance("work", work, FullBatchWork)
    whole("depth", depth)
    rate = work.learning_rate * depth / work.y.shape[1]
    return local_regression(
        work.x, work.y, work.partition, learning_rate=rate, local_steps=work.local_steps, loss="squared_error_sum"
    )


def linear_model(weights: Weights) -> Float64[np.ndarray, "d C"]:
    """Returns the network as one matrix M [d, C]: ``f(x) = M' x``."""
    layers = layers_of(weights)
    return products(layers, np.eye(layers[0].shape[1])).outputs


def stable_learning_rate(work: FullBatchWork, depth: int) -> float:
    """Computes the rate above which a client's descent diverges at infinite width: min_c ``2 d_out / (L |X_c|^2)``.

    X_c are the inputs of client c, and d_out is the number of outputs.

    Args:
        work: Full-batch work of the clients; the result is inf if all their inputs X_c are 0.
        depth: Number L of layers.
    """
    instance("work", work, FullBatchWork)
    whole("depth", depth)
    largest = max(_squared_norm(work.x[work.partition.client(c)]) for c in range(work.num_clients))
    return 2 * work.y.shape[1] / (depth * largest) if largest > 0 else math.inf


def _norm(matrix: Matrix) -> float:
    return float(np.linalg.norm(matrix, 2))


def _squared_norm(x: Matrix) -> float:
    """Computes the squared spectral norm ``|X|^2`` from the smaller Gram matrix, much cheaper than singular values."""
    gram = x @ x.T if len(x) < x.shape[1] else x.T @ x
    return float(scipy.linalg.eigh(gram, eigvals_only=True, subset_by_index=(len(gram) - 1, len(gram) - 1))[0])


def _tails(weights: Weights) -> list[Matrix]:
    """Returns the products ``W^L .. W^i`` for i = L, .., 2, of 1 to L - 1 layers."""
    return list(itertools.accumulate(weights[:0:-1], np.matmul))


def _heads(weights: Weights, x: Float64[np.ndarray, "n d"]) -> list[Matrix]:
    """Returns ``(W^i .. W^1 X)'`` for i = 1, .., L - 1."""
    return list(itertools.accumulate((w.T for w in weights[:-1]), np.matmul, initial=x))[1:]


def _between(weights: Weights) -> list[tuple[int, Matrix]]:
    """Returns the products ``W^j .. W^i`` for 1 < i <= j < L, each with its number of layers."""
    inner = weights[1:-1]
    starts = (itertools.accumulate(inner[i:], lambda product, w: w @ product) for i in range(len(inner)))
    return [pair for products_ in starts for pair in enumerate(products_, start=1)]
