"""Prediction of DP-FedAvg in the kernel regime: clipped updates, and noise that the server adds in every round.

The server's noise has independent entries of standard deviation s in the weights, so it adds a draw of
``N(0, s^2 Theta)`` to the model's function, and later rounds train on the changed function. A round's noise therefore
acts like a change of the initial function from the next round on, and the flow predicts everything else. As long as no
update is clipped, a run is linear in the noise, and its mean and covariance have a closed form. Runs with clipping are
drawn at random: each round adds a random function to the model's function, in place of noise to the weights.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Float64

from fedtangent._src.checks import choice, finite, instance, number, real_array, whole
from fedtangent._src.kernels.gram import known_modes, product
from fedtangent._src.pytrees import on_device
from fedtangent._src.theory import checks
from fedtangent._src.theory.checks import check_known, in_float64
from fedtangent._src.theory.flow import functions
from fedtangent._src.theory.flow.flow import Flow, finite_functions
from fedtangent._src.theory.flow.recursion import Input, Program, clipped_round, influences
from fedtangent._src.types import AnyArray, Array, ArrayLike, Gaussian

TOGETHER = 32  # runs that are drawn at once


class PrivateRuns(NamedTuple):
    """Outputs of E random runs of DP-FedAvg after the last round, and the share of clipped updates in each of R rounds.

    ``test`` are the outputs at the p test points.
    """

    test: Float[AnyArray, "E p C"]  # at the test points
    clipped: Float[AnyArray, "E R"]  # share of the updates of a round that were clipped


class BestPrivate(NamedTuple):
    """Client learning rate and clipping bound of the least expected squared error ``loss``, in runs of DP-FedAvg.

    ``losses`` has the error of every pair of a tried rate and a tried bound.
    """

    learning_rate: float
    clip_norm: float
    loss: float
    losses: Float64[np.ndarray, "rates clips"]  # inf where runs diverge


@in_float64
def private_flow(
    flow: Flow, clip_norm: float, noise_multiplier: float, expected_clients: float | None = None
) -> PrivateFlow:
    """Builds the prediction of a run of DP-FedAvg (McMahan et al., 2018) from the flow of the same run without privacy.

    Every update is clipped to length ``clip_norm``; the server moves by their sum divided by m, plus Gaussian noise of
    standard deviation ``noise_multiplier * clip_norm / m`` in every weight, both times its server rate. The model is
    linear in its weights, as for every flow. A network's outputs are quadratic in the noise too: this part is of the
    order of the noise's square, whatever the width, because noise moves every weight.

    Args:
        flow: Flow of one model, trained with FedAvg (or FedProx) from kernel blocks with ``ntk_test``; every client
            that answers has weight ``1 / m``, whatever its weight in the cohorts.
        clip_norm: Bound on the norm of an update.
        noise_multiplier: Noise on the sum of the updates, in units of ``clip_norm`` (``measures.noise_multiplier``).
        expected_clients: The divisor m of the sum; by default the number of slots (places for a client) of a round.
            Under Poisson sampling give the expected number of clients.

    Raises:
        ValueError: A flow of several models, of another algorithm, with weight decay, server momentum, outputs "full"
            or traced numbers, or from kernels without ``ntk_test``.

    Example, mean and covariance of a run that is never clipped:

        >>> import numpy as np, fedtangent as ft
        >>> ft.enable_x64()
        >>> x, x_test = np.linspace(-1, 1, 12)[:, None], np.linspace(-1, 1, 5)[:, None]
        >>> clients = ft.partition.iid(12, num_clients=3, seed=0)
        >>> model = ft.models.mlp(1, 1, widths=(64,), activation="erf", dtype="float64")
        >>> kernels = ft.kernels.kernel_blocks(model.kernel, x, x_test)
        >>> cohorts = ft.schedules.drawn_cohorts(ft.schedules.all_clients(3), clients, num_rounds=10, seed=0)
        >>> flow = ft.theory.federated_flow(kernels, np.sin(3 * x), clients, cohorts, ft.theory.Rule(5, 0.1))
        >>> private = ft.theory.private_flow(flow, clip_norm=2.0, noise_multiplier=0.1)
        >>> law, runs = private.law(), private.runs(200, seed=0)
        >>> law.mean.shape, law.cov.shape, bool(np.abs(runs.test.mean(axis=0) - law.mean).max() < 0.05)
        ((5, 1), (5, 5), True)
    """
    instance("flow", flow, Flow)
    choice("algorithm", flow.kind.algorithm, ("fed_avg",))
    refused = {
        "several models": flow.num_models != 1,
        "weight decay": flow.kind.decays,
        "server momentum": flow.kind.has_server_momentum,
        'outputs="full"': flow.outputs != "shared",
    }
    for feature, is_there in refused.items():
        if is_there:
            raise ValueError(f"flow: got a flow with {feature}, which private_flow does not support")
    if flow.blocks.ntk_test is None:
        raise ValueError("flow: got kernels without ntk_test, must have it: it is the covariance of the server's noise")
    check_known("flow", flow.rounds, flow.numbers)
    number("clip_norm", clip_norm, above=0)
    number("noise_multiplier", noise_multiplier, at_least=0)
    m = flow.slots.client.shape[1] if expected_clients is None else expected_clients
    number("expected_clients", m, above=0)
    weight = np.where(np.asarray(flow.rounds.weight) > 0, 1 / float(m), 0.0)
    summed = replace(flow, rounds=flow.rounds._replace(weight=on_device(weight)))
    cross, test = flow.blocks.ntk_test_train, flow.blocks.ntk_test
    values, vectors = known_modes(np.block([[flow.blocks.ntk_train, cross.T], [cross, test]]))
    factor = np.sqrt(np.maximum(values, 0.0)) * vectors
    return PrivateFlow(summed, float(clip_norm), float(noise_multiplier), float(m), factor)


@dataclass(frozen=True)
class PrivateFlow:
    """Prediction of a run of DP-FedAvg; built by ``private_flow``.

    A run has R rounds of S slots: places for a client, which may stay empty. The methods take the model's initial
    outputs, [n, C] at the n training points and [p, C] at the p test points; None means zeros. ``clip_norm``,
    ``noise_multiplier`` and ``expected_clients`` are the arguments of ``private_flow``.
    """

    flow: Flow  # with weight 1 / m for every client that answers
    clip_norm: float
    noise_multiplier: float
    expected_clients: float
    factor: Float64[np.ndarray, "points modes"]  # F F' = Theta at the training and test points together

    @property
    def deviation(self) -> float:
        """Standard deviation of the noise that the server adds to every weight in a round, at server rate 1."""
        return self.noise_multiplier * self.clip_norm / self.expected_clients

    @in_float64
    def at(self, learning_rate: float, clip_norm: float) -> PrivateFlow:
        """Returns the prediction of the same run with another client learning rate and another clipping bound.

        The noise multiplier stays, so the noise changes in proportion to the clipping bound.

        Args:
            learning_rate: The clients' rate, the same in all rounds.
            clip_norm: The clipping bound.
        """
        for name, value in (("learning_rate", learning_rate), ("clip_norm", clip_norm)):
            number(name, value, above=0)
        in_every_round = on_device(np.full(self.flow.num_rounds, float(learning_rate)))
        flow = replace(self.flow, rounds=self.flow.rounds._replace(learning_rate=in_every_round))
        return replace(self, flow=flow, clip_norm=float(clip_norm))

    @in_float64
    def norms(self, f0_train: ArrayLike | None = None) -> Float64[np.ndarray, "R S"]:
        """Computes the norm of every client's update in the run without noise and clipping, [R, S]; 0 for empty slots.

        There are R rounds of S slots (places for a client).

        Args:
            f0_train: Initial function at the n training points, [n, C]; None for zeros.
        """
        start, _ = self._starts(f0_train, None)
        program = self.flow.program(0, start.shape[1])
        return np.asarray(_norms(program, start - self._subtracted))

    @in_float64
    def law(self, f0_train: ArrayLike | None = None, f0_test: ArrayLike | None = None) -> Gaussian:
        """Computes mean [p, C] and covariance [p, p] of the last model at p test points over the server's noise.

        All outputs have the same covariance. The function only checks that no update of the run without noise is
        clipped. If noise often makes an update longer than the clipping bound, the result is inaccurate; draw runs with
        ``runs`` instead.

        Args:
            f0_train, f0_test: Initial function at the training and test points, [n, C] and [p, C]; None for zeros.

        Raises:
            ValueError: An update of the run without noise is longer than ``clip_norm``; or a loss other than the
                squared error.
            FloatingPointError: The run is unstable and leaves the range of float64.
        """
        flow, blocks = self.flow, self.flow.check_law("law of private rounds")
        longest = float(self.norms(f0_train).max(initial=0.0))
        if longest > self.clip_norm:
            raise ValueError(
                f"clip_norm: got {self.clip_norm:g}, must be at least {longest:.4g}, the longest update without noise, "
                "for a law in closed form; `runs` draws runs that are clipped"
            )
        train, test = self._starts(f0_train, f0_test)
        mean = flow.predict(np.asarray(train)[None], np.asarray(test)[None], flow.num_rounds)[0]
        program = flow.program(0, len(blocks.ntk_test_train))
        steps = self.deviation * np.asarray(flow.rounds.server_learning_rate)
        cov = _noise(program, blocks.ntk_test_train, blocks.ntk_test, flow.shares(0), steps)
        return Gaussian(np.asarray(mean), finite_functions(cov))

    @in_float64
    def runs(
        self,
        num_runs: int,
        seed: int = 0,
        f0_train: ArrayLike | None = None,
        f0_test: ArrayLike | None = None,
    ) -> PrivateRuns:
        """Draws the outputs of private runs, with noise and clipping, under any loss that the flow supports.

        Args:
            num_runs: Number E of runs, which differ in the server's noise.
            seed: Seed of the noise.
            f0_train, f0_test: Initial function at the training and test points, [n, C] and [p, C]; None for zeros.

        Returns:
            The outputs at p test points after the last round, ``test`` [E, p, C], and the share of the updates of each
            of R rounds that were clipped, ``clipped`` [E, R]. Runs that diverge have inf or NaN.
        """
        whole("num_runs", num_runs)
        keys = jax.random.split(jax.random.key(whole("seed", seed, 0)), num_runs)
        train, test = self._starts(f0_train, f0_test)
        program, of_blocks = self.flow.program(0, train.shape[1]), self.flow.blocks
        numbers = jnp.asarray(self.clip_norm), jnp.asarray(self.deviation)
        starts = train - self._subtracted, test
        of_test, clipped = _runs(program, of_blocks.ntk_test_train, self.factor, starts, numbers, keys)
        return PrivateRuns(np.asarray(of_test), np.asarray(clipped))

    @in_float64
    def best(
        self,
        y_test: ArrayLike,
        learning_rates: ArrayLike,
        clip_norms: ArrayLike,
        *,
        num_runs: int = 64,
        seed: int = 0,
        f0_train: ArrayLike | None = None,
        f0_test: ArrayLike | None = None,
    ) -> BestPrivate:
        """Finds the clients' rate and the clipping bound of the least expected squared error at this noise multiplier.

        The multiplier sets epsilon, so that every pair spends the same budget. The error is the mean over test points,
        outputs and drawn runs, with the same draws for all pairs; the choice itself reads ``y_test``, which no epsilon
        covers.

        Args:
            y_test: Targets [p, C] at the test points.
            learning_rates: Rates to try; they replace the rule's in every round.
            clip_norms: Clipping bounds to try.
            num_runs: Number of runs that are drawn for each pair.
            seed: Seed of the noise.
            f0_train, f0_test: Initial function at the training and test points, [n, C] and [p, C]; None for zeros.

        Raises:
            ValueError: An argument has the wrong shape or is out of range, or runs diverge at every pair.
        """
        targets = real_array("y_test", y_test)
        finite("y_test", targets)
        checks.check_shape("y_test", targets, (self.flow.num_test, self.flow.y_train.shape[1]))
        rates, clips = (_positive(n, v) for n, v in (("learning_rates", learning_rates), ("clip_norms", clip_norms)))
        losses = np.full((len(rates), len(clips)), np.inf)
        for (i, rate), (k, clip) in itertools.product(enumerate(rates), enumerate(clips)):
            runs = self.at(float(rate), float(clip)).runs(num_runs, seed, f0_train, f0_test).test
            loss = float(np.mean((runs - targets) ** 2))
            losses[i, k] = loss if np.isfinite(loss) else np.inf
        best = divmod(int(np.argmin(losses)), len(clips))
        if losses[best] == np.inf:
            raise ValueError(
                "learning_rates: got only rates that diverge with every clip_norm, must have a smaller one"
            )
        return BestPrivate(float(rates[best[0]]), float(clips[best[1]]), float(losses[best]), losses)

    def _starts(
        self, f0_train: ArrayLike | None, f0_test: ArrayLike | None
    ) -> tuple[Float64[np.ndarray, "n C"], Float64[np.ndarray, "m C"]]:
        """Checks the initial functions at the n training and m test points and returns them; zeros in place of None."""
        zeros = functions.zero_functions(self.flow, 0)
        values: list[np.ndarray] = []
        for (name, start), zero in zip({"f0_train": f0_train, "f0_test": f0_test}.items(), zeros, strict=True):
            values.append(zero if start is None else real_array(name, start))
            checks.check_shape(name, values[-1], zero.shape)
            finite(name, values[-1])
        return values[0], values[1]

    @property
    def _subtracted(self) -> Float64[np.ndarray, "n C"] | float:
        """Targets to subtract from initial functions; 0 under a loss other than the squared error."""
        return self.flow.targets if self.flow.kind.is_linear else 0.0


def _positive(name: str, values: ArrayLike) -> Float64[np.ndarray, "n"]:
    """Returns ``values`` as a vector; raises ``ValueError`` unless it has one or more numbers, all above 0."""
    array = np.atleast_1d(real_array(name, values))
    if array.ndim != 1 or not len(array):
        raise ValueError(f"{name}: got shape {array.shape}, must be one or more numbers")
    for value in array:
        number(name, value, above=0)
    return array


@jax.jit
def _norms(program: Program, residual: Float[AnyArray, "q D"]) -> Float[Array, "R S"]:
    """Computes the norm of every update without noise and clipping; ``residual`` is the initial one (see ``Input``)."""

    def step(a: Array, j: Array) -> tuple[Array, Array]:
        change, norms = clipped_round(program, Input(jnp.asarray(residual)[:, None, :], None), a, j, jnp.inf)
        return a + program.rounds.server_learning_rate[j] * change, norms

    rounds = jnp.arange(program.rounds.model.shape[0])
    return jax.lax.scan(step, jnp.zeros((residual.shape[0], 1, residual.shape[1])), rounds)[1]


@jax.jit
def _noise(
    program: Program,
    theta_x: Float[AnyArray, "m q"],
    theta_test: Float[AnyArray, "m m"],
    shares: Float[AnyArray, "rounds 1"],
    deviations: Float[AnyArray, "R"],
) -> Float[Array, "m m"]:
    """Computes the covariance of the last function at m test points over the noise of all rounds.

    ``theta_x`` and ``theta_test`` are the kernel between test and training points and among test points. ``shares`` are
    the shares of the initial weights before each round, ``deviations`` the noise's standard deviation in each round.
    """
    b = influences(program, jnp.asarray(theta_x), jnp.asarray(shares))[:, 0]
    b = jnp.concatenate([b[1:], jnp.zeros_like(b[:1])])  # a round's noise is there from the next round on

    def add(total: Array, now: tuple[Array, Array]) -> tuple[Array, None]:
        deviation, b = now
        cross = b @ jnp.asarray(theta_x).T
        remaining = jnp.asarray(theta_test) - cross - cross.T + b @ product(program.theta, b.T)
        return total + deviation**2 * remaining, None

    return jax.lax.scan(add, jnp.zeros_like(jnp.asarray(theta_test)), (jnp.asarray(deviations), b))[0]


@jax.jit
def _runs(
    program: Program,
    theta_x: Float[AnyArray, "m q"],
    factor: Float[AnyArray, "points modes"],
    starts: tuple[Float[AnyArray, "q D"], Float[AnyArray, "m D"]],
    numbers: tuple[Array, Array],
    keys: Array,
) -> tuple[Float[Array, "E m D"], Float[Array, "E R"]]:
    """Draws private runs: outputs at the test points after the last round, and the share of clipped updates per round.

    ``theta_x`` is the kernel between test and training points. ``factor`` is F with ``F F' = Theta`` at the training
    points followed by the test points. ``starts`` are the initial residual (as in ``Input``) and the initial outputs at
    the test points. ``numbers`` are the clipping bound and the standard deviation of the noise in each weight. ``keys``
    has one random key per run.
    """
    residual, test = (jnp.asarray(start) for start in starts)
    (q, columns), (clip_norm, deviation), rates = residual.shape, numbers, program.rounds.server_learning_rate

    def one(key: Array) -> tuple[Array, Array]:
        def step(carry: tuple[Array, Array], j: Array) -> tuple[tuple[Array, Array], Array]:
            a, added = carry
            change, norms = clipped_round(program, Input((residual + added[:q])[:, None, :], None), a, j, clip_norm)
            noise = jax.random.normal(jax.random.fold_in(key, j), (factor.shape[1], columns))
            added = added + rates[j] * deviation * (factor @ noise)
            clipped = jnp.sum(norms > clip_norm) / jnp.maximum(jnp.sum(norms > 0), 1)
            return (a + rates[j] * change, added), clipped

        start = jnp.zeros((q, 1, columns)), jnp.zeros((factor.shape[0], columns))
        (a, added), clipped = jax.lax.scan(step, start, jnp.arange(len(rates)))
        return test + added[q:] - product(jnp.asarray(theta_x), a[:, 0]), clipped

    return jax.lax.map(one, keys, batch_size=TOGETHER)
