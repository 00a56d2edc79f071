"""The residual ledger: the distance of each client's residuals from their prediction, at every evaluation of a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float64

from fedtangent._src import pytrees
from fedtangent._src.checks import whole
from fedtangent._src.comparison import ledger_bounds as bounds
from fedtangent._src.engine.history import History
from fedtangent._src.federated.schedule import drawn_cohorts
from fedtangent._src.kernels.empirical import empirical_ntk
from fedtangent._src.measures.tangent_kernels import check_watchable
from fedtangent._src.models.features import LinearStructure
from fedtangent._src.theory.checks import require_float64
from fedtangent._src.theory.flow import Rule
from fedtangent._src.types import Algorithm, Array, Cohort, FederatedData, Key, Model, Partition, PyTree


class LedgerRow(NamedTuple):
    """Gap between simulated and predicted outputs of one model at one client's examples, at one evaluation.

    ``gap``, ``tolerance`` and ``moved`` are root mean squares over examples and outputs.

    Attributes:
        round, model, client: Numbers of the round, the model and the client.
        gap: Simulated minus predicted outputs.
        tolerance: Largest gap at which the row passes.
        passed: Whether the gap is within the tolerance; False if either is NaN.
        moved: Predicted minus initial outputs, the scale of the gap.
    """

    round: int
    model: int
    client: int
    gap: float
    tolerance: float
    passed: bool
    moved: float


class Snapshot(NamedTuple):
    """Measurements of the K models at one evaluation.

    Attributes:
        round: Number of the round.
        outputs: Outputs at the training points.
        change: Change of each model's tangent kernel since round 0; q is n, or n C if the kernel couples outputs.
        travelled: Distance ``|w - w_0|`` of each model's weights from the start.
        weights: Norm ``|w|`` of each model's weights.
    """

    round: int
    outputs: Float64[np.ndarray, "K n C"]
    change: Float64[np.ndarray, "K q q"]
    travelled: Float64[np.ndarray, "K"]
    weights: Float64[np.ndarray, "K"]


class Observer(NamedTuple):
    """The function that measures a run's state for the residual ledger, and the tangent kernels at the start.

    Attributes:
        look: Takes a state; returns the models' outputs, tangent kernels, and norms ``|w - w_0|`` and ``|w|``.
        kernels: Tangent kernels at round 0, [K, q, q]; q is n, or n C if the kernel couples outputs.
        along: Jacobian times initial weights, ``J(X) w_0``, of each model, [K, n, C]; None without weight decay.
        unit: Rounding unit of the run's arithmetic.
        parameters: Number of parameters of a model.
    """

    look: Callable[[PyTree], tuple[Array, Array, Array, Array]]
    kernels: np.ndarray
    along: np.ndarray | None
    unit: float
    parameters: int


@dataclass(frozen=True)
class ResidualLedger:
    """A measure for ``Evaluation`` that compares residuals with theory; built by ``residual_ledger``.

    ``federation`` holds the parts of the run that all models share, and ``observer`` measures the run's state. Each
    evaluation adds to ``rows`` one row for each client and model. ``paths`` are the predictions of the models,
    ``snapshots`` the measurements, and ``sources`` the gaps that the change of each model's kernel has added.
    """

    federation: bounds.Federation
    observer: Observer
    paths: tuple[bounds.Path, ...]  # one per model
    snapshots: list[Snapshot] = field(default_factory=list)
    sources: tuple[list[bounds.Source], ...] = ()
    rows: list[LedgerRow] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether there are rows and every gap is within its tolerance."""
        return bool(self.rows) and all(row.passed for row in self.rows)

    def __call__(self, algorithm: Algorithm, state: PyTree) -> dict[str, float]:
        """Adds the rows of an evaluation to the residual ledger.

        Args:
            algorithm: Not used.
            state: State of the run.

        Returns:
            "failed", the share of rows that fail; "worst_ratio", the largest gap over tolerance; and the means of "gap"
            and "tolerance".

        Raises:
            ValueError: The round is beyond ``num_rounds``, or not after the previous evaluation.
        """
        outputs, kernels, travelled, weights = (np.asarray(a) for a in self.observer.look(state))
        snapshot = Snapshot(int(state.round), outputs, kernels - self.observer.kernels, travelled, weights)
        round_, last = snapshot.round, self.federation.num_rounds
        if round_ > last:
            raise ValueError(f"state: got round {round_}, must be at most {last}, the ledger's num_rounds")
        if self.snapshots and round_ <= self.snapshots[-1].round:
            last = self.snapshots[-1].round
            raise ValueError(f"state: got round {round_}, must be after {last}: use a new ledger for each run")
        return self._record(snapshot)

    def _record(self, snapshot: Snapshot) -> dict[str, float]:
        before = self.snapshots[-1].round if self.snapshots else 0
        self.snapshots.append(snapshot)
        rows = [row for k in range(len(self.paths)) for row in self._of_model(k, snapshot, before)]
        self.rows.extend(rows)
        with np.errstate(invalid="ignore"):
            ratios = np.array([row.gap for row in rows]) / [row.tolerance for row in rows]
        return {
            "failed": float(np.mean([not row.passed for row in rows])),
            "worst_ratio": float(np.max(ratios)),
            "gap": float(np.mean([row.gap for row in rows])),
            "tolerance": float(np.mean([row.tolerance for row in rows])),
        }

    def _of_model(self, k: int, snapshot: Snapshot, before: int) -> list[LedgerRow]:
        of, path, r = self.federation, self.paths[k], snapshot.round
        if r > before:
            self.sources[k].append(bounds.source(of, path, snapshot.change[k], before, r, float(snapshot.travelled[k])))
        gap = path.gap(r, snapshot.outputs[k])
        moved = path.gap(0, path.outputs[r])
        kernel = self.observer.kernels[k]
        steps = r * float(np.max(of.rule.local_steps))
        floor = bounds.rounding(
            self.observer.unit,
            steps,
            self.observer.parameters + len(kernel),
            float(np.sqrt(np.max(np.diag(kernel)))),
            max(float(earlier.weights[k]) for earlier in self.snapshots),
        )
        rows = []
        for client in np.flatnonzero(of.partition.sizes):
            examples = of.rows(int(client))
            off = bounds.rms(gap[examples])
            allowed = floor + bounds.first_order(self.sources[k], r, int(client), examples)
            rows.append(LedgerRow(r, k, int(client), off, allowed, bool(off <= allowed), bounds.rms(moved[examples])))
        return rows

    def against(
        self, *, cohorts: Cohort | None = None, models: Sequence[int] | None = None, **changes: Any
    ) -> ResidualLedger:
        """Compares the recorded evaluations with another prediction, for instance a wrong one, which must fail.

        ``against(cohorts=run.history.rounds["cohort"])`` is the prediction for the cohorts that a run has recorded.

        Args:
            cohorts: Other cohorts: S clients in each of R rounds, [R, S].
            models: For each model, the number of the model whose initial function it gets; None for no change.
            changes: Fields of the rule to replace.

        Returns:
            A new residual ledger with the same evaluations.
        """
        ledger = self._predicting(cohorts, models, changes)
        for snapshot in self.snapshots:
            ledger._record(snapshot)
        return ledger

    def last_gap(self, **changes: Any) -> float:
        """Computes the root mean square gap of the last evaluation's outputs from their prediction, over all models.

        Args:
            changes: Fields of the rule to replace in the prediction.
        """
        ledger, last = self._predicting(None, None, changes), self.snapshots[-1]
        clients = [ledger.federation.rows(int(i)) for i in np.flatnonzero(ledger.federation.partition.sizes)]
        gaps = [path.gap(last.round, last.outputs[k]) for k, path in enumerate(ledger.paths)]
        return bounds.rms(np.array([bounds.rms(gap[examples]) for gap in gaps for examples in clients]))

    def _predicting(
        self, cohorts: Cohort | None, models: Sequence[int] | None, changes: Mapping[str, Any]
    ) -> ResidualLedger:
        """Builds a residual ledger without rows, for a prediction that differs from this ledger's in the arguments.

        Tangent kernels, and the products ``J(X) w_0`` for weight decay, do not change.

        Args:
            cohorts: Other cohorts: S clients in each of R rounds, [R, S]; None for no change.
            models: For each model, the number of the model whose initial function it gets; None for no change.
            changes: Fields of the rule to replace, by name.
        """
        old = self.federation
        cohorts = old.cohorts if cohorts is None else jax.tree.map(np.asarray, cohorts)
        of = old._replace(cohorts=cohorts, rule=dataclasses.replace(old.rule, **changes))
        starts = self.paths if models is None else [self.paths[m] for m in models]
        return _ledger(of, self.observer, np.stack([path.outputs[0] for path in starts]))

    def is_of(self, history: History) -> bool:
        """Returns whether the cohorts recorded in ``history`` are those that the prediction assumes."""
        recorded = history.rounds["cohort"]
        filled, assumed = (
            [np.where(np.asarray(of.weight) > 0, leaf, 0)[: len(recorded.client)] for leaf in of]
            for of in (recorded, self.federation.cohorts)
        )
        return all(np.array_equal(a, b) for a, b in zip(filled, assumed, strict=True))


def residual_ledger(
    algorithm: Algorithm,
    model: Model,
    data: FederatedData,
    num_rounds: int,
    rule: Rule,
    /,
    *,
    seed: int | Key = 0,
    start: Key | PyTree | None = None,
    weighting: str = "examples",
) -> ResidualLedger:
    """Builds a measure for ``Evaluation`` that compares every model with theory on every client's examples.

    The prediction of a model is ``theory.federated_flow`` with the model's empirical kernel Theta_0 and initial
    function, under the cohorts that the algorithm's schedule draws from ``seed``. At every evaluation each pair of
    model and client gives a ``LedgerRow``: the root mean square gap between simulated and predicted residual, its
    tolerance, and whether the gap is within the tolerance.

    The tolerance has no constant to fit. For a model linear in its weights it is rounding (``ledger_bounds.rounding``).
    For a network it adds the integral of section 9.4 of the paper FE-2021. The flow moves the function by ``Theta_0 c``
    with coefficients c; while the kernel is Theta_t, the gap grows by ``(Theta_t - Theta_0)`` times the growth of c,
    and then evolves as the linear model does. For every interval between evaluations the ledger multiplies the kernel's
    change, measured at the end of the interval, by the growth of c in it, and follows the product with the flow. The
    sizes of these products are added over clients and intervals, so that they cannot cancel; the size that a client
    gets is at least the root mean square over all clients. This is first order in the kernel's change, which is
    O(width^-1/2) at most. For terms of second order in the step size (the kernel's change within a round, and the term
    v_1 of the paper) the term of an interval is multiplied by 1 + a, where a is the largest move of a client's weights
    within a round of the interval, divided by ``|w - w_0|`` at its end.

    A kernel that changes and comes back between two evaluations is missed: evaluate more often. A mistake in a
    network's prediction shows once it is larger than the tolerance. Each evaluation stores a kernel [n C, n C] (or
    [n, n] if outputs share the kernel) for each model.

    Args:
        algorithm: The algorithm of the run, for ``model``.
        model: The network.
        data: Training data with numbers as targets.
        num_rounds: Number of rounds that are predicted; the run has at most as many.
        rule: Rule of clients and server in the theory, ``theory.Rule(local_steps, learning_rate, ..)``. What server or
            clients carry from round to round, such as momentum, enters the prediction; in a network's tolerance it is
            taken as 0 at the end of each interval between evaluations.
        seed: Seed or key of the run.
        start: Beginning of the run, as in ``simulate``.
        weighting: How the algorithm weighs clients, ``"examples"`` or ``"uniform"``.

    Raises:
        ValueError: 64-bit mode is off, targets are labels, the algorithm has no networks of ``model``, or the flow
            refuses an argument.

    Example, a linear model that follows the flow to rounding, and a prediction with a step size wrong by 1 %:

        >>> import jax.numpy as jnp, numpy as np, fedtangent as ft
        >>> ft.enable_x64()
        >>> x = np.linspace(-1, 1, 12)[:, None]
        >>> clients = ft.partition.iid(12, 3, seed=0)
        >>> data = ft.data.federated_data(x, np.sin(3 * x), clients, dtype=jnp.float64)
        >>> model = ft.models.rbf_linear(num_features=20, bandwidth=0.3, dtype=jnp.float64)
        >>> schedule = ft.schedules.per_client_permutations(3, 2)
        >>> work = ft.Work(steps=5, batch_size=None)
        >>> algorithm = ft.fed_ensemble(model, schedule, client_learning_rate=0.1, work=work)
        >>> rule = ft.theory.Rule(local_steps=5, learning_rate=0.1)
        >>> ledger = ft.measures.residual_ledger(algorithm, model, data, 20, rule)
        >>> run = ft.simulate(algorithm, data, num_rounds=20, evaluation=ft.Evaluation(every=10, measure=ledger))
        >>> len(ledger.rows), ledger.passed, ledger.is_of(run.history)
        (18, True, True)
        >>> max(row.gap for row in ledger.rows) < 1e-12
        True
        >>> ledger.against(learning_rate=0.101).passed
        False
    """
    require_float64()
    rounds = whole("num_rounds", num_rounds)
    if not jnp.issubdtype(data.y.dtype, jnp.floating):
        raise ValueError(f"data: got {data.y.dtype} labels as targets, must be numbers [n, C] for the squared loss")
    check_watchable(algorithm, model, data.num_clients)
    partition = Partition(np.asarray(data.indices), np.asarray(data.offsets))
    shared = model.output_size == 1 or isinstance(model.structure, LinearStructure)
    of = bounds.Federation(
        y=np.asarray(data.y, np.float64),
        partition=partition,
        cohorts=drawn_cohorts(algorithm.schedule, partition, rounds, seed, weighting),
        num_models=algorithm.schedule.num_models,
        outputs="shared" if shared else "full",
        rule=rule,
    )
    first = algorithm.init(seed, data.num_clients, start)
    observer, outputs = _observer(algorithm, model, data, first, of)
    return _ledger(of, observer, outputs)


def _ledger(of: bounds.Federation, observer: Observer, starts: Float64[np.ndarray, "K n C"]) -> ResidualLedger:
    """Builds a residual ledger without rows, which predicts each model from its initial function ``starts``."""
    paths = tuple(
        bounds.predict_path(of, k, kernel, starts[k], None if observer.along is None else observer.along[k])
        for k, kernel in enumerate(observer.kernels)
    )
    return ResidualLedger(of, observer, paths, sources=tuple([] for _ in paths))


def _observer(
    algorithm: Algorithm, model: Model, data: FederatedData, start: PyTree, of: bounds.Federation
) -> tuple[Observer, Float64[np.ndarray, "K n C"]]:
    """Builds the ``Observer`` of a run that begins in the state ``start``; returns it and the initial functions.

    ``of`` holds the parts of the run that all models share. The initial functions are at the training points, [K, n,
    C].
    """
    parameters = algorithm.params
    assert parameters is not None
    initial, x = parameters(start), data.x
    wide = x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x
    size, shared = len(of.y) * (1 if of.outputs == "shared" else of.y.shape[1]), of.outputs == "shared"

    def one(pair: tuple[PyTree, PyTree]) -> tuple[Array, Array, Array, Array]:
        params, first = pair
        in_64 = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), params)
        kernel = empirical_ntk(model, in_64, wide, trace=shared).reshape(size, size)
        away = jax.tree.map(lambda a, b: a - b.astype(jnp.float64), in_64, first)
        outputs = model.apply(params, x).astype(jnp.float64)
        return outputs, 0.5 * (kernel + kernel.T), pytrees.norm(away), pytrees.norm(in_64)

    @jax.jit
    def look(state: PyTree) -> tuple[Array, Array, Array, Array]:
        measured: tuple[Array, Array, Array, Array] = jax.lax.map(one, (parameters(state), initial))
        return measured

    along = None
    if np.any(np.asarray(of.rule.weight_decay) != 0):
        tangents = jax.lax.map(lambda p: jax.jvp(lambda w: model.apply(w, x), (p,), (p,))[1], initial)
        along = np.asarray(tangents, np.float64)
    outputs, kernels, _, _ = look(start)
    leaves = jax.tree.leaves(initial)
    unit = max(float(jnp.finfo(leaf.dtype).eps) for leaf in leaves) / 2
    count = sum(leaf.size for leaf in leaves) // of.num_models
    return Observer(look, np.asarray(kernels), along, unit, count), np.asarray(outputs)
