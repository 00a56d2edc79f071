"""Kernels and Lemmas 1 to 4 of the two-layer ReLU network of NTK-FL (Yue et al., ICML 2022, section 5, C and D).

The network is eq. (12), ``f(v; x) = n^{-1/2} sum_r c_r max(v_r' x, 0)``, with c fixed. Plain NumPy, float64. Points
that the lemmas' proofs leave open:

- Lemma 1 is about one example. For all examples delta becomes delta / N (union bound), or Hoeffding's inequality
  bounds the sum over neurons, whose events are independent (erratum `ntk_fl.lemma1`).
- Lemma 3 needs Markov's inequality for the sum over entries (errata `ntk_fl.lemma3`, `ntk_fl.28`).
- Lemma 4 says that entries are in [-1, 1] but uses a range of 1, rightly: a neuron's term is between 0 and x_i' x_j.

Lemma 2 bounds the distance of the NTK weights from the weights of gradient descent:
``|w_t - w~_t|_1 <= sqrt(2 n d / pi) eta R / (delta alpha) sum_{u=1}^{t-1} gamma_u``, gamma_u above every example's
residual after u steps, for the network of eq. (12). The distance has a second part,
``eta/N |J_0' sum_u (r_u - r~_u)|_1`` with the residuals r_u of the network, r~_u of its linearisation and the initial
Jacobian J_0, which the lemma leaves out and ``residual_part`` bounds (erratum `ntk_fl.lemma2`). The paper prints the
lemma's bound without R, and its Fig. 9 draws another bound, ``figure_bound`` (errata `ntk_fl.22`, `ntk_fl.fig9`).
"""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Float64

from fedtangent._src.checks import choice, number, real_array
from fedtangent._src.models.two_layer import arc_cosine, square_root
from fedtangent._src.theory import checks
from fedtangent._src.types import ArrayLike

FORMS = ("printed", "union", "concentration")


def expected_kernel(x: ArrayLike, covariance: ArrayLike = 1.0) -> Float64[np.ndarray, "N N"]:
    """Computes the infinite-width tangent kernel of NTK-FL's two-layer ReLU network (eq. 13), [N, N] float64.

    It is ``E[x_i' x_j 1{v'x_i >= 0} 1{v'x_j >= 0}]`` over Gaussian weights v of a neuron, which is
    ``x_i' x_j (pi - angle) / (2 pi)`` with the angle of x_i and x_j in the covariance's metric.

    Args:
        x: Inputs [N, d].
        covariance: Covariance of v, [d, d]; or a number times the identity, which the kernel does not depend on.
    """
    inputs = checks.check_rows("x", x, "N, d")
    return np.asarray(arc_cosine(inputs, None, _root(covariance, inputs.shape[1]))[1])


def empirical_kernel(x: ArrayLike, v: ArrayLike) -> Float64[np.ndarray, "N N"]:
    """Computes the tangent kernel of NTK-FL's two-layer ReLU network (eq. 12) at given weights, [N, N] float64.

    The kernel is ``H_ij = 1/n x_i' x_j sum_r a_ir a_jr`` with ``a_ir = 1{v_r' x_i >= 0}``.

    Args:
        x: Inputs [N, d].
        v: Weights of the n neurons [n, d].
    """
    inputs = checks.check_rows("x", x, "N, d")
    active = active_neurons(inputs, v)
    return (inputs @ inputs.T) * (active @ active.T) / active.shape[1]


def active_neurons(x: ArrayLike, v: ArrayLike) -> Float64[np.ndarray, "N n"]:
    """Computes whether neuron r is active at example i, ``1{v_r' x_i >= 0}``: 0 or 1, [N, n] float64.

    Args:
        x: Inputs [N, d].
        v: Weights [n, d].
    """
    inputs, weights = checks.check_rows("x", x, "N, d"), real_array("v", v)
    if weights.ndim != 2 or weights.shape[1] != inputs.shape[1]:
        raise ValueError(f"v: got shape {weights.shape}, must be [n, {inputs.shape[1]}]")
    return (inputs @ weights.T >= 0).astype(np.float64)


def undecided_bound(
    radius: float, alpha: float, delta: float, width: int, num_examples: int = 1, form: str = "printed"
) -> float:
    """Computes a bound of the number of neurons whose ReLU may switch at an example (Lemma 1 of NTK-FL).

    Args:
        radius: R, the largest distance that a neuron moves.
        alpha: Root of the least eigenvalue of the neurons' covariance.
        delta: Probability with which the bound may fail.
        width: Number n of neurons.
        num_examples: Number N of examples.
        form: "printed", the paper's lemma: ``sqrt(2 / pi) n R / (delta alpha)``, which Markov's inequality gives for
            one example. "union": N times that, for all examples. "concentration":
            ``n (erf(R / (sqrt(2) alpha)) + sqrt(ln(N / delta) / (2 n)))``, for all examples.
    """
    _check_lemma(radius, alpha, delta, width, num_examples, form)
    if form == "concentration":
        mean = math.erf(radius / (math.sqrt(2) * alpha))
        return width * (mean + math.sqrt(math.log(num_examples / delta) / (2 * width)))
    single = math.sqrt(2 / math.pi) * width * radius / (delta * alpha)
    return single * num_examples if form == "union" else single


def drift_bound(
    radius: float, alpha: float, delta: float, width: int, num_examples: int, form: str = "printed"
) -> float:
    """Bounds the tangent kernel's change in operator norm when neurons move by at most R (Lemma 3 of NTK-FL).

    Args:
        radius: R, the largest distance that a neuron moves.
        alpha: Root of the least eigenvalue of the neurons' covariance.
        delta: Probability with which the bound may fail.
        width, num_examples: Number n of neurons and number N of examples.
        form: "printed", the paper's lemma: ``2 sqrt(2 / pi) N R / (delta alpha)``. "union": N times that, by Markov's
            inequality for the sum over entries. "concentration": ``2 N / n`` times ``undecided_bound``, because an
            entry of the kernel changes by at most ``(|S_i| + |S_j|) / n``, S_i the neurons that switch at example i.
    """
    _check_lemma(radius, alpha, delta, width, num_examples, form)
    return 2 * num_examples * undecided_bound(radius, alpha, delta, width, num_examples, form) / width


def sampling_bound(width: float, num_examples: int, delta: float) -> float:
    """Computes a bound of the distance of a random network's kernel from the infinite-width kernel, in operator norm.

    It is ``N sqrt(ln(2 N^2 / delta) / (2 n))``, Lemma 4 of NTK-FL.

    Args:
        width: Number n of neurons, which are drawn independently.
        num_examples: Number N of examples.
        delta: Probability with which the bound may fail.
    """
    _check_lemma(0.0, 1.0, delta, width, num_examples, "printed")
    return num_examples * math.sqrt(math.log(2 * num_examples**2 / delta) / (2 * width))


def _root(covariance: ArrayLike, input_size: int) -> Float64[np.ndarray, "d d"]:
    if np.ndim(covariance) == 0:
        number("covariance", covariance, above=0)
        return math.sqrt(float(np.asarray(covariance))) * np.eye(input_size)
    return square_root(covariance, input_size)


def _check_lemma(radius: float, alpha: float, delta: float, width: float, num_examples: int, form: str) -> None:
    choice("form", form, FORMS)
    number("radius", radius, at_least=0)
    number("alpha", alpha, above=0)
    number("width", width, above=0)
    number("num_examples", num_examples, above=0)
    number("delta", delta, above=0, below=1)


def weight_gap_bound(
    gamma: ArrayLike,
    *,
    learning_rate: float,
    width: int,
    input_size: int,
    radius: float,
    alpha: float = 1.0,
    delta: float = 0.05,
) -> Float64[np.ndarray, "times"]:
    """Bounds the distance between the weights of NTK-FL and of gradient descent after 0 to T steps, [T + 1].

    Source: Lemma 2 of NTK-FL. The distance is the sum of the absolute differences of all weights.

    Args:
        gamma: Numbers [T] above ``|f_u(x_i) - y_i|`` for every i, u = 0 .. T - 1.
        learning_rate: eta of ``1/(2 N) |f - y|^2``.
        width: Number n of neurons.
        input_size: Dimension d of inputs of norm 1.
        radius: R, the largest distance that a neuron moves in these steps.
        alpha: Root of the least eigenvalue of the neurons' covariance.
        delta: Probability with which the bound may fail.
    """
    sums = _sums(gamma)
    undecided = undecided_bound(radius, alpha, delta, width)
    return _per_step(learning_rate, width, input_size) * undecided * sums


def switched_bound(
    gamma: ArrayLike, switched: ArrayLike, *, learning_rate: float, width: int, input_size: int, num_examples: int
) -> Float64[np.ndarray, "times"]:
    """Bounds the distance between the weights of NTK-FL and of gradient descent after 0 to T steps, [T + 1].

    The distance is the sum of the absolute differences of all weights. Source: eq. (25d) of NTK-FL. Where Lemma 2
    bounds the number of switched neurons by Lemma 1, this bound takes the counted number:
    ``eta sqrt(d) / (N sqrt(n)) sum_{u=1}^{t-1} gamma_u sum_i |S_i(u)|``. S_i(u) are the neurons that are on at example
    i after u steps but were off at the start, or the other way round.

    Args:
        gamma: Numbers [T] above ``|f_u(x_i) - y_i|`` for every i, u = 0 .. T - 1.
        switched: Number of switched pairs of a neuron and an example, ``sum_i |S_i(u)|``, for the same u, [T].
        learning_rate, width, input_size: As for ``weight_gap_bound``.
        num_examples: Number N of examples.
    """
    counts = real_array("switched", switched)
    residuals = real_array("gamma", gamma)
    checks.check_shape("switched", counts, residuals.shape)
    return _per_step(learning_rate, width, input_size) * _sums(residuals * counts) / num_examples


def residual_part(
    apart: ArrayLike, *, learning_rate: float, width: int, input_size: int, num_examples: int
) -> Float64[np.ndarray, "times"]:
    """Bounds the part of the distance in ``weight_gap_bound`` that Lemma 2 of NTK-FL leaves out, [T + 1].

    It is ``eta sqrt(n d) / N |sum_{u<t} (r_u - r~_u)|_1``, from residuals r_u of the network and r~_u of its
    linearisation.

    Args:
        apart: Norms ``|sum_{u<t} (r_u - r~_u)|_1`` over examples [T + 1], of the residuals of the network minus the
            residuals of its linearisation, each trained by gradient descent.
        learning_rate, width, input_size: As for ``weight_gap_bound``.
        num_examples: Number N of examples.
    """
    norms = real_array("apart", apart)
    if norms.ndim != 1:
        raise ValueError(f"apart: got shape {norms.shape}, must be [T + 1]")
    if not np.all(norms >= 0):
        raise ValueError(f"apart: got {norms.min():g}, every number must be at least 0")
    number("num_examples", num_examples)
    return _per_step(learning_rate, width, input_size) * width * norms / num_examples


def figure_bound(gamma: ArrayLike) -> Float64[np.ndarray, "times"]:
    """Computes the "analytical upper bound" of NTK-FL's Fig. 9, ``2 sum_{u=1}^{t-1} gamma_u`` for t = 0 .. T, [T + 1].

    ``gamma`` [T] bounds every example's residual after each step.
    """
    return 2 * _sums(gamma)


def _per_step(learning_rate: float, width: int, input_size: int) -> float:
    """Computes ``eta sqrt(d / n)``, the factor of the bounds of NTK-FL's Lemma 2, for input dimension d and width n."""
    number("learning_rate", learning_rate, above=0)
    number("width", width, above=0)
    number("input_size", input_size, above=0)
    return learning_rate * math.sqrt(input_size / width)


def _sums(gamma: ArrayLike) -> Float64[np.ndarray, "times"]:
    """Computes ``sum_{u=1}^{t-1} gamma_u`` for t = 0 .. T from ``gamma`` [T], [T + 1].

    gamma_0 is left out, because NTK-FL and gradient descent take the same first step.
    """
    values = real_array("gamma", gamma)
    if values.ndim != 1 or len(values) == 0:
        raise ValueError(f"gamma: got shape {values.shape}, must be [T] with T of at least 1")
    if not np.all(values >= 0):
        raise ValueError(f"gamma: got {values.min():g}, every number must be at least 0")
    return np.concatenate([[0.0], np.cumsum(values) - values[0]])
