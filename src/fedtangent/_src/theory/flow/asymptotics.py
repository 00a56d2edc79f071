"""The long run of a flow: stable step sizes, and the fixed point, computed from the rounds and not from Theta^-1.

A pass over all R rounds is an affine map ``s -> L s + d`` of the state s of a model's run: its coefficients, a momentum
buffer, corrections. Coefficients a that no function depends on (null directions of Theta) are left out: with the
eigendecomposition ``Theta = V Lambda V'``, L acts on ``Lambda^(1/2) V' a``. Some combinations never change, for example
``c - mean(c_i)`` of SCAFFOLD or directions that no client trains. With these at their initial value the fixed point is
unique.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float64, Inexact

from fedtangent._src.kernels.gram import SingularKernelError, known_modes
from fedtangent._src.theory.checks import Assumption, assumption, check_known, in_float64
from fedtangent._src.theory.flow.recursion import FlowState, Input, Program, decay_map, last_state, zero_state
from fedtangent._src.theory.flow.rules import Kind
from fedtangent._src.theory.prior import covariance_terms
from fedtangent._src.types import Gaussian

if TYPE_CHECKING:
    from fedtangent._src.theory.flow.flow import Flow

# Singular values of I - L, relative to the largest: below NULL they count as 0, above LEAST as not 0; between the two
# float64 cannot tell. LEAST holds in absolute terms too: I - L is known to the rounding of L, whose norm is about 1.
NULL, LEAST = 1e-13, 1e-11
OUTSIDE = 1e-8  # share of the squared feature of a point outside the training points' features, from which on it counts
ROUNDING = 1e-9  # of a spectral radius
STEP = 1.05  # between the factors of the step sizes that are tried
MAXIMUM = 4  # halvings of the distance to a maximum of the growth


class PassSpectrum(NamedTuple):
    """Eigenvalues of a pass over all rounds, a linear map of the state of a model's run.

    ``constants`` is the number of directions that no pass changes; ``eigenvalues`` leaves out their eigenvalues, 1.
    """

    eigenvalues: Inexact[np.ndarray, "d"]  # complex, without those of directions that never change (exactly 1)
    constants: int  # number of directions that never change

    @property
    def radius(self) -> float:
        """Largest modulus of an eigenvalue; below 1, repeated passes converge at this rate per pass."""
        return float(np.max(np.abs(self.eigenvalues), initial=0.0))


class _Frame(NamedTuple):
    """Matrices that convert the recursion's state to coordinates without null directions of the kernel, and back.

    With ``Theta = V Lambda V'`` ``down`` is ``Lambda^(1/2) V'`` and ``up`` is ``V Lambda^(-1/2)``. ``of_clients`` has
    such matrices for the clients' kernel blocks, and a mask of the eigenvalues above 0, which give a coordinate each;
    one entry for each ``Bucket``, a group of clients of similar size.
    """

    down: Float64[np.ndarray, "rank q"]  # Lambda^(1/2) V'
    up: Float64[np.ndarray, "q rank"]  # V Lambda^(-1/2)
    of_clients: tuple[tuple[np.ndarray, np.ndarray, np.ndarray], ...]  # per bucket: down, up [b, s, s], used [b, s]

    def reduced(self, state: FlowState) -> Float64[np.ndarray, "d D"]:
        """Converts the state of one model to d coordinates for each of its D coefficient vectors, [d, D].

        Their order is: the models, newest first; the memory; the corrections of each bucket.
        """
        shared = [part for part in (state.models, state.memory) if part is not None]
        parts = [self.down @ np.asarray(part[:, i]) for part in shared for i in range(part.shape[1])]
        for correction, (down, _, counts) in zip(state.corrections or (), self.of_clients, strict=False):
            parts.append((down @ np.asarray(correction[:, 0]))[counts])
        return np.concatenate(parts)

    def lifted(self, like: FlowState, coordinates: Float64[np.ndarray, "d D"]) -> FlowState:
        """Converts ``coordinates`` [d, D], in the order of ``reduced``, back to the state of one model.

        ``like`` only tells which parts, such as momentum, the state has, and how many models of earlier rounds.
        """
        rank, columns = self.up.shape[1], coordinates.shape[1]
        models, shared, rest, corrections = like.models.shape[1], [], coordinates, []
        for _ in range(models if like.memory is None else models + 1):
            shared.append(jnp.asarray((self.up @ rest[:rank])[:, None, :]))
            rest = rest[rank:]
        for _, (_, up, counts) in zip(like.corrections or (), self.of_clients, strict=False):
            wide, count = np.zeros((*counts.shape, columns)), int(counts.sum())
            wide[counts], rest = rest[:count], rest[count:]
            corrections.append(jnp.asarray((up @ wide)[:, None]))
        memory, past = None if like.memory is None else shared[models], shared[1:models]
        return FlowState(shared[0], memory, tuple(corrections) or None, jnp.concatenate(past, axis=1) if past else None)


def _frame(program: Program) -> _Frame:
    values, vectors = known_modes(np.asarray(program.theta))
    root, vectors = np.sqrt(values[values > 0]), vectors[:, values > 0]
    of_clients = []
    for bucket in program.buckets:
        v, u = np.asarray(bucket.eigenvalues), np.asarray(bucket.eigenvectors)
        counts = v > 0
        size = np.sqrt(np.where(counts, v, 1.0))
        down = np.where(counts, size, 0.0)[:, :, None] * u.transpose(0, 2, 1)
        of_clients.append((down, u * np.where(counts, 1 / size, 0.0)[:, None, :], counts))
    return _Frame(root[:, None] * vectors.T, vectors / root, tuple(of_clients))


def _null(singular: Float64[np.ndarray, "d"]) -> Bool[np.ndarray, "d"]:
    """Returns which singular values of ``I - L``, in falling order, are 0 up to rounding (L: the matrix of a pass)."""
    largest = float(singular[0]) if len(singular) else 0.0
    return singular <= max(NULL * largest, 4 * len(singular) * np.finfo(float).eps)


def _constants(change: Float64[np.ndarray, "d d"]) -> Float64[np.ndarray, "c d"]:
    """Returns orthonormal rows [c, d] that span the combinations of the state that no pass changes.

    ``change`` is I minus the matrix of the pass. Raises ``SingularKernelError`` if float64 cannot tell whether a
    combination changes.
    """
    u, singular, _ = np.linalg.svd(change)
    null = _null(singular)
    between = ~null & (singular < max(LEAST * singular.max(initial=0.0), LEAST))
    if between.any():
        raise SingularKernelError(
            "the fixed point of these rounds is not unique in float64: a pass over them moves one direction by only "
            f"{singular[between].min():.3g} of itself, others by {singular[0]:.3g}; take larger steps, or a better "
            "conditioned kernel"
        )
    return u[:, null].T


@dataclass(frozen=True)
class Pass:
    """All rounds of a flow as one affine map of the state of one model's run; built by ``pass_of``.

    ``model`` is the index of the model, and ``frame`` converts the state to coordinates and back.
    """

    flow: Flow
    model: int
    frame: _Frame

    def spectrum(self) -> PassSpectrum:
        """Computes the eigenvalues of the pass, without the combinations that never change.

        With weight decay the eigenvalues of ``decay_map``, by which it shrinks the initial weights, are among them if
        test points have features that the training points lack, or if the kernel blocks lack ``ntk_test``.
        """
        matrix, decay = self._matrix(), self._decay() if self._decays_outside() else None
        count = int(np.sum(_null(np.linalg.svd(np.eye(len(matrix)) - matrix, compute_uv=False))))
        eigenvalues = np.linalg.eigvals(matrix)
        moved = eigenvalues[np.argsort(np.abs(eigenvalues - 1))][count:]
        return PassSpectrum(moved if decay is None else np.concatenate([moved, np.linalg.eigvals(decay)]), count)

    def fixed_point(self) -> Gaussian:
        """Computes mean and covariance of the model after infinitely many passes from its initial state.

        It raises ``SingularKernelError`` if there is no fixed point, or if float64 does not determine it.
        """
        on_residual, on_along, c = self._influence()
        mean = self._mean(on_residual)
        return Gaussian(mean, covariance_terms(self.flow.blocks, on_residual + c * on_along, 1 - c).total)

    def mean(self) -> Float64[np.ndarray, "m C"]:
        """Computes the mean of ``fixed_point``, [m, C]; it needs no nngp blocks."""
        return self._mean(self._influence()[0])

    def _mean(self, on_residual: Float64[np.ndarray, "rows q"]) -> Float64[np.ndarray, "m C"]:
        return (on_residual @ self.flow.targets).reshape(-1, self.flow.y_train.shape[1])

    def _influence(self) -> tuple[Float64[np.ndarray, "m q"], Float64[np.ndarray, "m q"], float]:
        """Computes how the fixed point depends on the initial residual and on ``J(X) w_0``, a matrix [m, q] each.

        J is the Jacobian, w_0 the initial weights, and q the number of kernel rows of the training points. The third
        result is the share of the initial function that weight decay removes.
        """
        matrix, decays = self._matrix(), self._decay() is not None
        change = np.eye(len(matrix)) - matrix
        constants = _constants(change)
        stacked = np.concatenate(self._drives(decays), axis=1)
        size = np.linalg.norm(stacked)
        drift = np.linalg.norm(constants @ stacked) / size if size > 0 else 0.0
        if not drift <= 1e-9:
            raise SingularKernelError(
                "these rounds have no fixed point: every pass moves the model further in one direction, by "
                f"{drift:.3g} of its whole move"
            )
        ends = np.concatenate([stacked, np.zeros((len(constants), stacked.shape[1]))])
        solved = np.linalg.lstsq(np.concatenate([change, constants]), ends, rcond=None)[0]
        up = self.frame.up
        b = self.flow.blocks.ntk_test_train @ (up @ solved[: up.shape[1]])
        on_residual, on_along = np.split(b, 2, axis=1)
        return on_residual, on_along, float(self.flow.numbers.homogeneity) if decays else 0.0

    @in_float64
    def _matrix(self) -> Float64[np.ndarray, "d d"]:
        """Computes the matrix L [d, d] by which a pass maps the state, in coordinates without null directions of Theta.

        Raises ``FloatingPointError`` if a number of L is inf or NaN.
        """
        like = zero_state(self.flow.program(self.model, 1), 1)
        size = len(self.frame.reduced(like))
        zeros = np.zeros((len(self.flow.theta), 1, size))
        matrix = self._end(zeros, zeros, self.frame.lifted(like, np.eye(size)), True)
        if not np.isfinite(matrix).all():
            raise FloatingPointError(
                "learning_rate: got one at which numbers of a pass over the rounds are beyond float64; "
                "Flow.largest_stable_learning_rate() is the largest stable one"
            )
        return matrix

    @in_float64
    def _drives(self, decayed: bool) -> tuple[Float64[np.ndarray, "d q"], Float64[np.ndarray, "d q"]]:
        """Computes how the initial residual of q rows drives the state: the part of a pass without ``L s``, [d, q].

        Column i of the first result belongs to a residual of 1 in row i. Column i of the second result belongs to a
        value of 1 in row i of ``J(X) w_0``, the Jacobian times the initial weights; it is 0 unless ``decayed``.

        Args:
            decayed: Whether weight decay has removed the initial weights w_0 before the pass.
        """
        eye = np.eye(len(self.flow.theta))[:, None, :]
        zeros = np.zeros_like(eye)
        start = zero_state(self.flow.program(self.model, 1), len(self.flow.theta))
        plain = self._end(eye, zeros, start, decayed)
        return plain, self._end(zeros, eye, start, True) if decayed else np.zeros_like(plain)

    @in_float64
    def _decay(self) -> np.ndarray | None:
        """Returns the matrix by which a pass shrinks the initial weights (``decay_map``); None if it does not."""
        if not self.flow.kind.decays:
            return None
        of_pass = np.asarray(decay_map(self.flow.program(self.model, 1)))
        return None if of_pass[0, 0] == 1 else of_pass

    def _decays_outside(self) -> bool:
        """Returns whether a test point has features that no training point has; True without ``ntk_test``.

        Weight decay shrinks these features, and nothing else changes them. With ``ntk_test`` and a homogeneity of 0 the
        result is False: the initial function does not depend on them.
        """
        blocks = self.flow.blocks
        if blocks.ntk_test is None:  # unknown
            return True
        squared, shared = np.diag(blocks.ntk_test), np.sum((blocks.ntk_test_train @ self.frame.up) ** 2, axis=1)
        return float(self.flow.numbers.homogeneity) != 0 and bool(np.any(squared - shared > OUTSIDE * squared))

    def _end(self, residual: np.ndarray, along: np.ndarray, start: FlowState, decayed: bool) -> np.ndarray:
        """Computes the state after a pass from the state ``start``, in the coordinates of ``_Frame``.

        ``residual`` and ``along`` are the initial residual and ``J(X) w_0``. If ``decayed``, weight decay has removed
        all initial weights before the pass, otherwise none.
        """
        flow = self.flow
        starts = Input(jnp.asarray(residual), jnp.asarray(along) if flow.kind.decays else None)
        beta = np.full((flow.num_rounds + 1, 1), float(not decayed))
        return self.frame.reduced(last_state(flow.program(self.model, residual.shape[2]), starts, beta, start))


def pass_of(flow: Flow, model: int) -> Pass:
    """Builds the affine map by which all rounds of a flow (a pass) change the state of one model's run.

    Raises ``ValueError`` for traced numbers, and for a flow whose mean and covariance have no closed form. With delays,
    rounds of earlier passes precede the first round, so that no answer is to the initial model.

    Args:
        flow: Flow whose R rounds are the pass.
        model: Index of the model.
    """
    flow.check_law("pass over all rounds")
    program = flow.program(model, 1)
    rounds = program.rounds
    check_known("rule", rounds.learning_rate, rounds.server_learning_rate, rounds.anchoring, flow.numbers)
    check_known("cohorts.weight", rounds.weight)
    if flow.rounds.oldest is not None:  # passes are repeated, so that no model is the initial one
        ages = jnp.full_like(flow.rounds.oldest, flow.kind.most_delay)
        flow = replace(flow, rounds=flow.rounds._replace(oldest=ages))
    return Pass(flow, model, _frame(program))


def largest_stable(flow: Flow, model: int, tolerance: float) -> float:
    """Computes the largest factor of the clients' step sizes up to which repeated passes do not grow.

    A pass is all R rounds of the flow. All factors from 0 up to the result are stable. It is inf if every factor is
    stable, 0 if none is (see ``end_of_stable``).

    Args:
        flow: Flow whose R rounds are a pass.
        model: Index of the model.
        tolerance: Relative tolerance of the factor.
    """
    in_use = pass_of(flow, model)
    flow = in_use.flow

    @in_float64
    def growth(factor: float) -> float:
        rounds = flow.rounds._replace(learning_rate=flow.rounds.learning_rate * factor)
        with np.errstate(over="ignore", invalid="ignore"):
            try:
                return replace(in_use, flow=replace(flow, rounds=rounds)).spectrum().radius
            except (FloatingPointError, np.linalg.LinAlgError):  # overflowed
                return np.inf

    start, end = factors_to_search(flow)
    tried = (lambda factor: growth(factor) if factor < end else np.inf), 1 + ROUNDING
    return end_of_stable(*tried, start=start, step=STEP, tolerance=tolerance)


@in_float64
def factors_to_search(flow: Flow) -> tuple[float, float]:
    """Returns the ends of the interval of factors of the step sizes that is searched for the largest stable factor.

    At the first end the step sizes are stable: the largest is the least of the clients' bounds (``stability``), or inf
    if no client has one. For rules without such bounds, or with a bound of 0, they are so small that no step of the
    server goes beyond a minimum. The second end is inf, except for FedNova by gradient descent with a proximal term:
    there mu times the largest step is 1, the bound of ``check_normalisers``.

    Args:
        flow: Flow with known (not traced) numbers and ``KernelBlocks``.
    """
    numbers, rate = flow.numbers, float(np.max(flow.rounds.learning_rate))
    step = rate * float(np.max(numbers.step_weights))
    ends = flow.kind.algorithm == "fed_nova" and flow.kind.dynamics == "gradient_descent" and float(numbers.mu) > 0
    end = 1 / (float(numbers.mu) * step) if ends else np.inf
    is_bounded = flow.kind.is_linear and not _unbounded_rule(flow.kind)
    if (bound := stability(flow).max_stable_learning_rate if is_bounded else 0.0) > 0:
        return bound / rate, end
    trained = np.flatnonzero(flow.slots.trains(flow.partition.num_clients))
    steepest = max((_stiffness(flow, int(i)) for i in trained), default=0.0) + float(numbers.nu)
    steps = float(flow.local_steps.max()) ** (1 if flow.kind.client_optimizer is None else 2)  # it may add up momentum
    server = float(np.max(flow.rounds.server_learning_rate)) / (1 - float(numbers.server_momentum))
    reach = steps * step * max(1.0, server) * (1 + 2 * flow.kind.most_delay)
    return (1 / (reach * steepest) if steepest > 0 else np.inf), end


def end_of_stable(
    growth: Callable[[float], float], most: float, *, start: float, step: float, tolerance: float
) -> float:
    """Finds the end of the interval of stable factors that begins at 0: inf if every factor is stable, 0 if none is.

    The search halves ``start`` until it is stable, then multiplies it again and again by ``step``, from 4096 times
    ``start`` on by 2. Where the growth has a maximum, it tries further factors nearby. Then it bisects. It misses
    unstable factors only if they lie between two neighbouring factors that are stable. Factors below ``start / 2^40``
    or above ``2^40 start`` are not tried.

    Args:
        growth: Function from a factor to the growth of a run, such as a spectral radius.
        most: Largest growth that counts as stable; NaN does not.
        start: First factor to try; if it is stable, so must be all smaller ones. If it is inf, so is the result.
        step: Ratio of neighbouring factors, above 1.
        tolerance: Relative tolerance of the end.
    """
    growths: dict[float, float] = {}

    def grows(factor: float) -> bool:
        growths[factor] = growth(factor)
        return not growths[factor] <= most

    def between(low: float, high: float) -> float:  # the geometric mean, also where the product is beyond float64
        return float(np.sqrt(low) * np.sqrt(high))

    def beside(low: float, middle: float, high: float) -> float | None:
        """Searches near a maximum of the growth for an unstable factor; returns it, or None.

        The three factors are stable and ascending. The search ends when the growth at ``middle`` is no longer above
        the growth at both others, or after ``MAXIMUM`` steps.
        """
        for _ in range(MAXIMUM):
            neighbours = max(growths[low], growths[high])
            if growths[middle] <= neighbours + ROUNDING * abs(neighbours):
                return None
            for factor in (below := between(low, middle), above := between(middle, high)):
                if grows(factor):
                    return factor
            points = low, below, middle, above, high
            largest = max((1, 2, 3), key=lambda place: growths[points[place]])
            low, middle, high = points[largest - 1 : largest + 2]
        return None

    if start == np.inf:
        return start
    low, high = start, None
    while grows(low):
        low, high = low / 2, low
        if low < 2**-40 * start:
            return 0.0
    stable = [low]
    while high is None:
        following = stable[-1] * (step if stable[-1] < 2**12 * start else 2.0)
        if following > 2**40 * start:
            return float("inf")
        if grows(following):
            high = following
        else:
            stable.append(following)
            high = beside(*stable[-3:]) if len(stable) > 2 else None
    low = max(factor for factor in growths if factor < high and growths[factor] <= most)
    while high - low > max(tolerance, 1e-15) * high:
        middle = between(low, high)
        low, high = (low, middle) if grows(middle) else (middle, high)
    return low


class Stability(NamedTuple):
    """A sufficient condition for stable FedAvg: no round expands the residual, whichever clients train.

    Client i shrinks its residual if ``0 < eta (lambda_max(Theta_ii) / n_i + mu + decay) < 2`` at its step size eta,
    with the proximal strength mu and weight decay; with minibatches every minibatch must fulfil this. With T local
    steps and server rate s the average of such clients expands nothing in the norm of Theta^-1 if also ``s (1 - (1 -
    x)^T) < 2`` for every eigenvalue x of ``eta Theta_ii / n_i``. Other clients may stabilise an unstable client, so a
    condition that fails means "not guaranteed", not "diverges".

    Attributes:
        condition: The comparison of the largest step size in use with the least of ``client_bounds``.
        client_bounds: Largest stable step size of each client; inf for a client that never trains.
    """

    condition: Assumption
    client_bounds: Float64[np.ndarray, "N"]

    @property
    def stable(self) -> bool:
        """Whether the condition holds, so that the run is stable."""
        return self.condition.holds

    @property
    def max_stable_learning_rate(self) -> float:
        """Least of the clients' largest stable step sizes."""
        return self.condition.required


@in_float64
def stability(flow: Flow) -> Stability:
    """Compares the largest step size of a FedAvg run with the largest stable step size of every client that trains."""
    check_known("rule", flow.rounds.learning_rate, flow.rounds.server_learning_rate, flow.numbers)
    flow.check_law("bound of stable steps")
    if unbounded := _unbounded_rule(flow.kind):
        must = "must be plain fed_avg, without server_momentum and client_optimizer"
        raise ValueError(f"rule: got {unbounded}, {must}; other rules have largest_stable_learning_rate()")
    nu, largest = float(flow.numbers.nu), float(np.max(flow.numbers.step_weights))
    bounds = np.full(flow.partition.num_clients, np.inf)
    for i in np.flatnonzero(flow.slots.trains(flow.partition.num_clients)):
        stiffness = _stiffness(flow, int(i))
        if stiffness + nu > 0:
            bounds[i] = _largest_x(flow, int(flow.local_steps[i])) / (stiffness + nu) / largest
    step, bound = float(np.max(flow.rounds.learning_rate, initial=0.0)), float(bounds.min(initial=np.inf))
    text = "learning rate against the least of the clients' bounds (2 n_i / lambda_max(Theta_ii) for plain FedAvg)"
    return Stability(assumption("stable_step", text, step, "<", bound), bounds)


def _unbounded_rule(kind: Kind) -> str:
    """Returns which feature of the rule prevents a bound of stable steps, for a message; empty for plain FedAvg."""
    parts = {"server_momentum": kind.has_server_momentum, "client_optimizer": kind.client_optimizer is not None}
    with_ = " and ".join(name for name, is_on in parts.items() if is_on)
    if kind.algorithm != "fed_avg":
        return kind.algorithm
    return f"fed_avg with {with_}" if with_ else ""


def _stiffness(flow: Flow, i: int) -> float:
    """Computes the largest eigenvalue of client i's kernel block, divided by its number of examples n_i.

    With minibatches it is the largest over the client's batches, of the batch's kernel block divided by the batch size.
    """
    clients, batches = flow.clients, flow.rounds.batches
    if batches is None:
        return float(clients.largest_eigenvalue[i] / np.asarray(flow.partition.sizes)[i])
    bucket, place = clients.buckets[clients.bucket_of[i]], clients.place_in_bucket[i]
    assert bucket.block is not None
    block, worst = np.asarray(bucket.block[place]), 0.0
    steps = np.asarray(batches)[flow.slots.present & (flow.slots.client == i)][:, : flow.local_steps[i]]
    for padded in np.unique(steps.reshape(-1, steps.shape[-1]), axis=0):
        places = padded[padded >= 0]
        share = np.bincount(places, minlength=len(block) // flow.kind.rows_per_example) / len(places)
        root = np.sqrt(np.repeat(share, flow.kind.rows_per_example))
        worst = max(worst, float(np.linalg.eigvalsh(root[:, None] * block * root)[-1]))
    return worst


def _largest_x(flow: Flow, steps: int) -> float:
    """Computes the largest x* <= 2 with ``s (1 - (1 - x)^steps) < 2`` for all x in (0, x*), s the largest server rate.

    Gradient flow has ``e^-x`` in place of ``1 - x`` and no limit of 2: x* may be inf. For minibatches and step weights
    the result is only safe: 2 for s <= 1, otherwise 0.
    """
    server = float(np.max(flow.rounds.server_learning_rate))
    if flow.kind.dynamics == "gradient_flow":
        return np.inf if server <= 2 else float(-np.log(1 - 2 / server) / steps)
    if flow.rounds.batches is not None or flow.kind.weighs_steps:  # safe if the server does not extrapolate
        return 2.0 if server <= 1 else 0.0
    if server >= 2:
        return float(1 - (1 - 2 / server) ** (1 / steps))
    if server > 1 and steps % 2:
        return float(1 + (2 / server - 1) ** (1 / steps))
    return 2.0
