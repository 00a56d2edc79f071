"""FedBE, with and without distillation, against NumPy loops; its distributions, its student and its teacher."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import stats

from fedtangent._src.engine.clients import engine_for
from fedtangent._src.engine.history import at_start, charge
from fedtangent._src.engine.run import predict
from fedtangent._src.federated import algorithms
from fedtangent._src.federated.algorithms.distil import Distillation, cyclical_rate, distil, num_steps
from fedtangent._src.federated.algorithms.posterior import Clients, dirichlet, gaussian
from fedtangent._src.federated.local import Work
from fedtangent._src.federated.schedule import random_models, uniform_sampling
from fedtangent._src.losses import cross_entropy
from fedtangent._src.streams import keys
from fedtangent._src.types import Algorithm, FederatedData, Key, Model, Schedule

from ..nightly import nightly
from . import reference, reference_fed_be
from .toys import (
    NUM_CLIENTS,
    SIZES,
    arguments_of,
    cohorts,
    distance,
    federated,
    go,
    models_of,
    owned_rows,
    two_layer,
    uneven_data,
)

SEED, RATE, STEPS, ROUNDS, SAMPLES = 3, 0.3, 4, 2, 3
MODEL, SERVER_X = two_layer(), np.random.default_rng(5).normal(size=(7, 3))
TOLERANCE, VISIBLE = 1e-10, 1e-4
MINI = Distillation(6, 3, 0.3, 0.05, start=2, cycle=5, momentum=0.8)  # 18 steps: 2, three cycles of 5, one too many
PLAIN = Distillation(5, None, 0.2, 0.2, cycle=None, momentum=0.0)  # five full batches, no averaging


class Case(NamedTuple):
    posterior: str
    loss: str
    student: Distillation | None  # None: no distillation
    schedule: Schedule = uniform_sampling(NUM_CLIENTS, 4)
    members: tuple[str, ...] = ("samples", "clients", "mean")
    temperature: float = 1.0
    concentration: float = 1.0


CASES = {
    "gaussian": Case("gaussian", "cross_entropy", MINI),
    "gaussian_squared_error": Case("gaussian", "squared_error", MINI, members=("samples", "mean")),
    "dirichlet_sharpened": Case("dirichlet", "cross_entropy", MINI, temperature=0.5, concentration=0.6),
    "two_models_last_weights": Case("dirichlet", "squared_error", PLAIN, random_models(NUM_CLIENTS, 2)),
    "samples_alone": Case("gaussian", "cross_entropy", PLAIN, members=("samples",)),
    "no_distillation": Case("gaussian", "cross_entropy", None),
    "no_distillation_dirichlet": Case("dirichlet", "squared_error", None, random_models(NUM_CLIENTS, 2)),
}


def build(case: Case, **changed: Any) -> Algorithm:
    options = {
        "client_learning_rate": RATE,
        "work": Work(steps=STEPS, batch_size=None),
        "loss": case.loss,
        "num_samples": SAMPLES,
        "posterior": case.posterior,
        "concentration": case.concentration,
        "members": case.members,
    }
    if case.student is None:
        return algorithms.fed_be_no_distillation(
            MODEL, case.schedule, **arguments_of(algorithms.fed_be_no_distillation, options | changed)
        )
    options |= {"server_data": SERVER_X, "distillation": case.student, "temperature": case.temperature}
    return algorithms.fed_be(MODEL, case.schedule, **arguments_of(algorithms.fed_be, options | changed))


class Ran(NamedTuple):
    start: list[reference.Params]
    state: Any
    infos: Any
    end: list[reference.Params]


@functools.cache
def ran(name: str) -> Ran:
    algorithm = build(CASES[name])
    start = algorithm.init(SEED, NUM_CLIENTS)
    state, infos = go(algorithm, data_of(CASES[name]), "scan", ROUNDS, start)
    return Ran(models_of(algorithm, start), state, infos, models_of(algorithm, state))


def data_of(case: Case) -> FederatedData:
    return uneven_data(labels=case.loss == "cross_entropy")


def server_key(t: int, k: int, num_models: int) -> Key:
    root = jax.random.fold_in(jax.random.fold_in(keys(SEED).train, t), jnp.uint32(2**31))
    return jax.random.split(root, num_models)[k]


def drawn(key: Key, models: list[reference.Params], clients: list[int], case: Case, fault: str) -> list[Any]:
    """The reference's draws, with the noise or the gammas of the engine's keys."""
    weights = [1.0 if fault == "weights" else SIZES[i] for i in clients]
    each = [jax.random.fold_in(key, m) for m in range(SAMPLES)]
    if case.posterior == "gaussian":
        names = sorted(models[0])
        noise = [
            {
                n: np.asarray(jax.random.normal(jax.random.fold_in(key, i), models[0][n].shape, np.float64))
                for i, n in enumerate(names)
            }
            for key in each
        ]
        return reference_fed_be.gaussian(models, weights, noise)
    gammas = [
        np.array([np.exp(jax.random.loggamma(jax.random.fold_in(key, i), case.concentration)) for i in clients])
        for key in each
    ]
    return reference_fed_be.dirichlet(models, weights, gammas)


def teachers(key: Key, models: list[reference.Params], clients: list[int], case: Case, fault: str) -> list[Any]:
    """The ensemble."""
    members = [m for m in case.members if m != fault]
    parts = {
        "samples": drawn(key, models, clients, case, fault),
        "clients": models,
        "mean": [reference.mean(models, [SIZES[i] for i in clients])],
    }
    return [model for name in members for model in parts[name]]


def student_batches(key: Key, how: Distillation, fault: str) -> list[np.ndarray]:
    """Rows of each step, from the orders that the engine draws in each epoch."""
    m, batch = len(SERVER_X), how.batch_size or len(SERVER_X)
    batches = []
    for e in range(how.epochs):
        draws = jax.random.uniform(jax.random.fold_in(key, 0 if fault == "order" else e), (m,), jnp.float32)
        order = np.arange(m) if how.batch_size is None else np.argsort(np.asarray(draws), kind="stable")
        batches += np.split(order, range(batch, m, batch))
    return batches


def distilled(t: int, k: int, models: list[reference.Params], clients: list[int], case: Case, fault: str) -> Any:
    """The server's part in one round, for one model."""
    average = reference.mean(models, [SIZES[i] for i in clients])
    if case.student is None:
        return average
    sample_key, student_key = jax.random.split(server_key(t, k, case.schedule.num_models))
    labels = reference_fed_be.ensemble(teachers(sample_key, models, clients, case, fault), SERVER_X, case.loss)
    if case.temperature != 1 and fault != "temperature":
        labels = labels ** (1 / case.temperature)
        labels /= labels.sum(axis=1, keepdims=True)
    how = case.student
    numbers = reference_fed_be.Student(
        how.learning_rate,
        how.learning_rate if fault == "rate" else how.final_learning_rate,
        how.start,
        None if fault == "averaging" else how.cycle,
        0.0 if fault == "momentum" else how.momentum,
    )
    begin = models[0] if fault == "start" else average
    batches = student_batches(student_key, how, fault)
    return reference_fed_be.distil(begin, SERVER_X, labels, batches, numbers, case.loss)


def replayed(name: str, fault: str = "none") -> tuple[list[reference.Params], list[Any]]:
    """The models after the NumPy loop, and the ensembles of the last round."""
    case = CASES[name]
    data = data_of(case)
    x, y, rows = np.asarray(data.x), np.asarray(data.y), owned_rows(data)
    cohort, models = cohorts(case.schedule, SEED, ROUNDS), list(ran(name).start)
    ensembles: list[Any] = [[m] for m in models]
    for t in range(ROUNDS):
        for k in range(len(models)):
            clients = sorted(int(i) for i in cohort.client[t][(cohort.weight[t] > 0) & (cohort.model[t] == k)])
            if clients:
                trained = [reference.sgd(models[k], x, y, [rows[i]] * STEPS, RATE, case.loss) for i in clients]
                ensembles[k] = teachers(server_key(t, k, len(models)), trained, clients, case, fault)
                models[k] = distilled(t, k, trained, clients, case, fault)
    return models, ensembles


FAULTS = {
    "gaussian": ("weights", "samples", "clients", "mean", "averaging", "rate", "momentum", "start", "order"),
    "gaussian_squared_error": ("weights", "samples", "mean", "averaging", "rate"),
    "dirichlet_sharpened": ("weights", "samples", "clients", "temperature", "averaging"),
    "two_models_last_weights": ("weights", "samples", "start"),
    "samples_alone": ("weights", "start"),
}


@pytest.mark.parametrize("name", nightly(CASES, ["gaussian", "dirichlet_sharpened"]))
def test_two_rounds_equal_the_loop(name: str) -> None:
    start, _, infos, end = ran(name)
    assert distance(start, end) > 1e-2
    assert distance(end, replayed(name)[0]) < TOLERANCE
    for fault in FAULTS.get(name, ()):
        assert distance(end, replayed(name, fault)[0]) > VISIBLE, fault
    assert (infos["dropped"] == 0).all()


@pytest.mark.parametrize("name", nightly(["no_distillation", "no_distillation_dirichlet"], ["no_distillation"]))
def test_without_distillation_the_ensemble_predicts_and_the_models_are_fed_avgs(name: str) -> None:
    case = CASES[name]
    _, state, _, end = ran(name)
    x = np.random.default_rng(9).normal(size=(5, 3))
    got = predict(build(case), state, jnp.asarray(x))

    def loop(fault: str = "none") -> np.ndarray:
        means = [reference_fed_be.ensemble(e, x, case.loss) for e in replayed(name, fault)[1]]
        return np.mean(means, axis=0)

    softened = reference_fed_be.softmax if case.loss == "cross_entropy" else lambda f: f
    mean = softened(np.asarray(got.mean))
    np.testing.assert_allclose(mean, loop(), rtol=0, atol=TOLERANCE)
    for fault in ("weights", "samples", "clients", "mean"):
        assert np.abs(mean - loop(fault)).max() > VISIBLE, fault
    assert distance(replayed(name)[0], end) < TOLERANCE  # the loop's are averages
    if case.schedule.num_models == 1:  # all places are filled
        each = np.stack([reference.outputs(m, x) for m in replayed(name)[1][0]])
        np.testing.assert_allclose(got.members, each, rtol=0, atol=TOLERANCE)
    each = np.asarray(got.members)
    assert each.shape[0] == case.schedule.num_models * (SAMPLES + case.schedule.num_slots + 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["no_distillation", "no_distillation_dirichlet"])
def test_without_distillation_it_is_our_fed_avg(name: str) -> None:
    case = CASES[name]
    plain = algorithms.fed_avg(
        MODEL, case.schedule, client_learning_rate=RATE, work=Work(steps=STEPS, batch_size=None), loss=case.loss
    )
    same, _ = go(plain, data_of(case), "scan", ROUNDS, plain.init(SEED, NUM_CLIENTS))
    assert distance(models_of(plain, same), ran(name).end) < TOLERANCE


@pytest.mark.parametrize("loss", nightly(["cross_entropy", "squared_error"], ["cross_entropy"]))
def test_before_the_first_round_the_ensemble_is_the_model(loss: str) -> None:
    case = CASES["no_distillation"]._replace(loss=loss, members=("samples", "clients"))
    algorithm = build(case)
    state, x = algorithm.init(SEED, NUM_CLIENTS), jnp.asarray(SERVER_X)
    got, f = predict(algorithm, state, x), reference.outputs(models_of(algorithm, state)[0], SERVER_X)
    expected = np.log(reference_fed_be.softmax(f)) if loss == "cross_entropy" else f
    np.testing.assert_allclose(got.mean, expected, rtol=0, atol=1e-12)
    assert np.isfinite(np.asarray(got.members)).all()


def clients_with(values: np.ndarray, weight: np.ndarray) -> Clients:
    return Clients({"w": jnp.asarray(values)}, jnp.asarray(weight), jnp.arange(len(weight), dtype=jnp.int32))


WEIGHT = np.array([3.0, 1.0, 0.0, 4.0])
VALUES = np.random.default_rng(0).normal(size=(4, 2))
VALUES[2] = np.nan  # an empty place
DRAWS = 20000


def test_gaussian_has_the_weighted_mean_and_variance() -> None:
    draws = np.asarray(
        jax.vmap(gaussian(clients_with(VALUES, WEIGHT)))(jax.random.split(jax.random.key(0), DRAWS))["w"]
    )
    there, share = VALUES[WEIGHT > 0], WEIGHT[WEIGHT > 0] / WEIGHT.sum()
    mean = share @ there
    variance = share @ (there - mean) ** 2
    assert (np.abs(draws.mean(axis=0) - mean) < 4.5 * np.sqrt(variance / DRAWS)).all()
    assert (np.abs(draws.var(axis=0) / variance - 1) < 4.5 * np.sqrt(2 / DRAWS)).all()
    assert (np.abs(there.var(axis=0) / variance - 1) > 9 * np.sqrt(2 / DRAWS)).any()  # negative control: unweighted
    assert abs(np.corrcoef(draws.T)[0, 1]) < 4.5 / np.sqrt(DRAWS)  # diagonal, though the clients' models correlate


@pytest.mark.parametrize("concentration", nightly([0.3, 2.0], [0.3]))
def test_dirichlet_draws_are_convex_and_have_its_marginals(concentration: float) -> None:
    """With equal weights the share of each client is Beta(a, 2 a): the models are unit vectors, so draws are shares."""
    corners = np.concatenate([np.eye(3), np.full((1, 3), np.nan)])
    clients = clients_with(corners, np.array([2.0, 2.0, 2.0, 0.0]))
    draws = np.asarray(jax.vmap(dirichlet(clients, concentration))(jax.random.split(jax.random.key(1), DRAWS))["w"])
    np.testing.assert_allclose(draws.sum(axis=1), 1, rtol=0, atol=1e-12)
    assert (draws >= 0).all()
    for i in range(3):
        assert stats.kstest(draws[:, i], stats.beta(concentration, 2 * concentration).cdf).pvalue > 1e-3
        assert stats.kstest(draws[:, i], stats.beta(2 * concentration, 4 * concentration).cdf).pvalue < 1e-9


def test_a_single_client_leaves_nothing_to_draw() -> None:
    alone = clients_with(VALUES, np.array([0.0, 5.0, 0.0, 0.0]))
    for draw in (gaussian(alone), dirichlet(alone, 0.01)):
        np.testing.assert_allclose(draw(jax.random.key(0))["w"], VALUES[1], rtol=0, atol=1e-15)


def test_cyclical_rate_by_hand() -> None:
    how = Distillation(learning_rate=1.0, final_learning_rate=0.4, start=2, cycle=3)
    rates = [float(cyclical_rate(how, jnp.int32(i))) for i in range(9)]
    np.testing.assert_allclose(rates, [1, 1, 0.8, 0.6, 0.4, 0.8, 0.6, 0.4, 0.8], rtol=0, atol=1e-15)
    default = [float(cyclical_rate(Distillation(), jnp.int32(i))) for i in (0, 249, 274, 299)]
    np.testing.assert_allclose(default, [1e-3, 1e-3, 4e-4, 4e-4], rtol=0, atol=1e-18)
    assert num_steps(Distillation(), 10_000) == 1575  # 1580 steps, to the end of the last cycle


def test_cross_entropy_of_soft_labels_is_optaxs_on_the_real_examples() -> None:
    rng = np.random.default_rng(2)
    f, q = rng.normal(size=(5, 3)), rng.dirichlet(np.ones(3), 5)
    mask = np.array([True, True, False, True, False])
    expected = optax.softmax_cross_entropy(f, q)[mask].mean()
    assert float(cross_entropy(f, q, mask)) == pytest.approx(float(expected), abs=1e-14)


def test_a_student_that_starts_as_its_teacher_stays() -> None:
    params = MODEL.init(jax.random.key(0))
    labels = jax.nn.softmax(MODEL.apply(params, jnp.asarray(SERVER_X)))
    other = MODEL.init(jax.random.key(2))

    def taught(how: Distillation, begin: Any) -> Any:
        return distil(jax.random.key(1), MODEL, cross_entropy, how, begin, jnp.asarray(SERVER_X), labels)

    learn = jax.jit(taught, static_argnums=0)
    assert distance(learn(MINI, params)[0], params) < 1e-14
    end, first = learn(MINI, other)
    assert distance(end, params) > VISIBLE
    assert float(learn(MINI._replace(epochs=300), other)[1]) < float(first)


def test_the_ledger_is_charged_for_the_servers_data_once() -> None:
    data = data_of(CASES["gaussian"])
    cost = build(CASES["gaussian"]).cost(data, engine_for(data, "scan"))
    model = sum(leaf.nbytes for leaf in ran("gaussian").end[0].values())
    assert at_start(cost) == (SERVER_X.nbytes, 0)
    assert charge(cost, ran("gaussian").infos) == (ROUNDS * 4 * model, ROUNDS * 4 * model)


def test_clients_beyond_the_places_are_reported() -> None:
    algorithm = build(CASES["no_distillation"], slots_per_model=3, work=Work(steps=1, batch_size=None))
    _, infos = go(algorithm, uneven_data(labels=True), "scan", ROUNDS, algorithm.init(SEED, NUM_CLIENTS))
    assert infos["dropped"].tolist() == [[1], [1]]


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"server_data": None}, "server_data: got None, must be examples without labels"),
        ({"server_data": np.zeros((0, 3))}, r"server_data: got shape \(0, 3\)"),
        ({"posterior": "laplace"}, "posterior: got 'laplace', allowed are gaussian, dirichlet"),
        ({"num_samples": 0}, "num_samples: got 0, must be a whole number of at least 1"),
        ({"members": ()}, r"members: got \(\), must be one or more of samples, clients, mean"),
        ({"members": ("mean", "mean")}, "members: .* each once"),
        ({"concentration": 0.0}, "concentration: got 0.0"),
        ({"temperature": 0.0}, "temperature: got 0.0"),
        ({"temperature": 0.5, "loss": "squared_error"}, "temperature: got 0.5, .* 1 for the loss 'squared_error'"),
        (
            {"server_learning_rate": 0.5},
            "server_learning_rate: got 0.5, but fed_be does not use it",
        ),
        ({"slots_per_model": 5}, "slots_per_model: got 5, must be a whole number from 1 to 4"),
        ({"loss": "hinge"}, "loss: got 'hinge'"),
        ({"distillation": Distillation()}, "20 epochs over 7 examples are 20 steps, .* = 250 \\+ 25 steps"),
        ({"distillation": MINI._replace(momentum=1.0)}, "distillation momentum: got 1.0"),
        ({"distillation": MINI._replace(learning_rate=0.0)}, "distillation learning_rate: got 0.0"),
        ({"distillation": MINI._replace(cycle=0)}, "distillation cycle: got 0"),
        ({"distillation": MINI._replace(start=-1)}, "distillation start: got -1"),
        ({"distillation": MINI._replace(epochs=0)}, "distillation epochs: got 0"),
    ],
)
def test_bad_arguments(changed: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        build(CASES["gaussian"], **changed)


def test_bad_arguments_without_distillation() -> None:
    for changed, named in (({"posterior": "x"}, "posterior"), ({"server_learning_rate": 2.0}, "server_learning_rate")):
        with pytest.raises(ValueError, match=named):
            build(CASES["no_distillation"], **changed)


def test_logits_far_apart_keep_their_logarithms() -> None:
    """A model of logits (5000.5, -5000.5): the mean is log-sum-exp's (0, -10001), where a probability's log is -inf."""

    def init(key: Key) -> jax.Array:
        return jnp.asarray([[5000.5, -5000.5]], jnp.float32)

    model = Model("far", init, lambda params, x: x @ params, None, 2, loss="cross_entropy")
    algorithm = algorithms.fed_be_no_distillation(
        model, uniform_sampling(NUM_CLIENTS, 4), client_learning_rate=1e-9, work=Work(steps=1)
    )
    x = jnp.ones((3, 1), jnp.float32)
    data = federated(np.ones((6, 1), np.float32), np.zeros(6, np.int32), list(np.arange(6)[:, None]))
    state, _ = go(algorithm, data, "scan", 1, algorithm.init(SEED, NUM_CLIENTS))
    found = algorithm.predict(state, x)
    assert found.members.shape[0] > 1
    np.testing.assert_allclose(found.mean, np.tile([[0.0, -10001.0]], (3, 1)), rtol=1e-6)
    with np.errstate(divide="ignore"):
        assert np.isneginf(np.log(np.asarray(jax.nn.softmax(found.members, axis=-1)).mean(axis=0))[:, 1]).all()
