"""Local work: which examples are in which step, and the one local problem of all algorithms."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedtangent as ft
from fedtangent._src.federated.local import LocalProblem, Work, client_view, local_training, minimise
from fedtangent._src.federated.schedule import all_clients, random_models
from fedtangent._src.losses import squared_error
from fedtangent._src.types import Client, FederatedData, Model, PyTree

from . import reference
from .toys import EVERYBODY, NUM_CLIENTS, SIZES, Recording, distance, leaves, owned_rows, record, reordered, uneven_data

LARGEST = max(SIZES)
WORKS = {
    "epochs": Work(epochs=2, batch_size=2),
    "steps": Work(steps=7, batch_size=4),
    "batch_larger_than_clients": Work(epochs=3, batch_size=100),
}


@functools.cache
def recorded(name: str) -> Recording:
    return record(uneven_data(), EVERYBODY, WORKS[name], 8, 3, 5)


def expected_steps(work: Work, size: int) -> int:
    per_epoch = -(-size // (work.batch_size or size))
    return work.steps if work.steps is not None else per_epoch * work.epochs


def check_epochs(batches: list[np.ndarray], rows: np.ndarray, batch_size: int) -> None:
    """Whole epochs hold every row of the client once; a last, incomplete one holds no row twice."""
    per_epoch = -(-len(rows) // batch_size)
    for start in range(0, len(batches), per_epoch):
        epoch = batches[start : start + per_epoch]
        sizes = [min(batch_size, len(rows) - b * batch_size) for b in range(len(epoch))]
        assert [len(batch) for batch in epoch] == sizes
        seen = np.concatenate(epoch)
        assert len(np.unique(seen)) == len(seen)
        assert set(seen) <= set(rows)
        assert len(epoch) < per_epoch or set(seen) == set(rows)


@pytest.mark.parametrize("name", WORKS)
def test_every_real_example_once_an_epoch(name: str) -> None:
    work, seen = WORKS[name], recorded(name)
    for i, rows in enumerate(owned_rows(uneven_data())):
        for t in range(3):
            batches = seen.batches(t, i)
            assert len(batches) == expected_steps(work, len(rows))
            check_epochs(batches, rows, work.batch_size or len(rows))


def test_the_epoch_check_notices_a_repeated_and_a_foreign_row() -> None:
    rows, batches = owned_rows(uneven_data())[1], recorded("epochs").batches(0, 1)
    foreign = owned_rows(uneven_data())[0][:1]
    for wrong in (batches[1], np.concatenate([batches[0][:1], foreign])):
        with pytest.raises(AssertionError):
            check_epochs([wrong, *batches[1:]], rows, 2)


@pytest.mark.parametrize("name", WORKS)
def test_gradient_of_a_partial_batch_is_the_mean_over_its_real_examples(name: str) -> None:
    share = recorded(name).share
    for column in np.moveaxis(share, 2, -1).reshape(-1, share.shape[2]):
        members = np.flatnonzero(column)
        np.testing.assert_allclose(column[members], 1 / max(len(members), 1), rtol=1e-15)


@pytest.mark.parametrize("name", WORKS)
def test_info_reports_steps_and_examples(name: str) -> None:
    rounds = recorded(name).infos
    assert rounds["steps"].tolist() == [[expected_steps(WORKS[name], size) for size in SIZES]] * 3
    assert rounds["examples"].tolist() == [list(SIZES)] * 3


def test_order_depends_only_on_seed_round_and_client() -> None:
    """Not on the model, the slot or the mapping."""
    first = recorded("epochs")
    other = reordered(random_models(NUM_CLIENTS, 2), [4, 2, 0, 5, 1, 3])
    second = record(uneven_data(), other, WORKS["epochs"], 8, 3, 5, "vmap")
    assert second.client[0].tolist() == [4, 2, 0, 5, 1, 3]
    for t in range(3):
        for i in range(NUM_CLIENTS):
            assert np.array_equal(first.of(t, i), second.of(t, i))


@functools.cache
def many_orders() -> tuple[np.ndarray, np.ndarray]:
    """Two clients of six examples, 900 rounds of two epochs in pairs: shares [R, 2, 6, 6] under two seeds."""
    data, schedule = uneven_data(sizes=(6, 6)), all_clients(2)
    runs = [record(data, schedule, WORKS["epochs"], 6, 900, seed).share for seed in (0, 1)]
    own = np.stack(owned_rows(data))
    return tuple(np.stack([share[:, i, own[i]] for i in range(2)], axis=1) for share in runs)


def test_order_changes_with_seed_round_client_and_epoch() -> None:
    """Two of each make 16 of the 90 orders of six in pairs; were one of the four ignored, 8 at most could differ."""
    orders = {
        many_orders()[seed][t, i, :, 3 * epoch : 3 * epoch + 3].tobytes()
        for seed, t, i, epoch in np.ndindex(2, 2, 2, 2)
    }
    assert len(orders) > 8


def test_shuffles_are_uniform() -> None:
    """Each of six examples is in each of three batches in a third of the rounds, within 5 standard errors."""
    inside = np.count_nonzero(many_orders()[0], axis=0) / 900
    error = np.sqrt((1 / 3) * (2 / 3) / 900)
    assert np.all(np.abs(inside - 1 / 3) < 5 * error)
    assert np.all(np.abs(inside - 1 / 6) > 5 * error)  # negative control


def one_client(data: FederatedData, i: int, active: bool = True) -> Client:
    return client_view(data, jnp.int32(i), jnp.bool_(active), LARGEST)


def test_a_client_is_padded_with_its_own_last_example() -> None:
    """Another client's, were it not finite, would reach the gradient."""
    for i, rows in enumerate(owned_rows(uneven_data())):
        view = one_client(uneven_data(), i)
        assert view.rows.tolist() == [*rows, *[rows[-1]] * (LARGEST - len(rows))]


@functools.partial(jax.jit, static_argnums=0)
def solve(model: Model, start: PyTree, anchor: PyTree, tilt: PyTree, prox: float, client: Client):
    """Five full-batch steps on the tilted, proximal problem."""
    problem = LocalProblem(start, anchor, tilt, prox)
    return minimise(
        jax.random.key(9), model, squared_error, optax.sgd(0.1), Work(steps=5, batch_size=None), problem, client
    )


@pytest.mark.parametrize("prox", [0.0, 0.3])
def test_problem_with_tilt_and_proximal_term(model: Model, data: FederatedData, prox: float) -> None:
    start, anchor, tilt = (model.init(jax.random.key(i)) for i in range(3))
    params, info = solve(model, start, anchor, tilt, prox, one_client(data, 3))
    x, y = (np.asarray(a)[owned_rows(data)[3]] for a in (data.x, data.y))
    w, seen = {name: np.asarray(leaf) for name, leaf in start.items()}, []
    for _ in range(5):
        seen.append(reference.loss_and_residual(reference.outputs(w, x), y, "squared_error")[0])
        g = reference.gradient(w, x, y, "squared_error")
        w = {n: w[n] - 0.1 * (g[n] + np.asarray(tilt[n]) + prox * (w[n] - np.asarray(anchor[n]))) for n in w}
    assert distance(dict(params), w) < 1e-12
    np.testing.assert_allclose(info["loss"], np.mean(seen), rtol=1e-6)  # summed in float32
    for other in (solve(model, start, anchor, tilt, 0.1, one_client(data, 3)),
                  solve(model, start, anchor, start, prox, one_client(data, 3))):  # fmt: skip
        assert distance(dict(other[0]), w) > 1e-3


@pytest.mark.parametrize("work", [Work(steps=3, batch_size=None), Work(epochs=2, batch_size=2)])
def test_an_empty_client_returns_its_start(model: Model, data: FederatedData, work: Work) -> None:
    start = model.init(jax.random.key(0))
    local = local_training(model, squared_error, optax.sgd(0.1), work)
    message, state, info = jax.jit(local.update)(jax.random.key(1), start, (), one_client(data, 4, active=False))
    assert all(np.all(leaf == 0) for leaf in leaves(message))
    assert state == ()
    assert (int(info["steps"]), float(info["loss"])) == (0, 0.0)


def test_a_clients_view_holds_no_row_of_another(data: FederatedData) -> None:
    for i, rows in enumerate(owned_rows(data)):
        client = one_client(data, i)
        assert np.asarray(client.rows)[: len(rows)].tolist() == rows.tolist()
        assert set(np.asarray(client.rows).tolist()) == set(rows.tolist())
        assert int(client.size) == len(rows)
    assert int(one_client(data, 0, active=False).size) == 0


def test_gradients_that_an_optimiser_still_holds_are_counted() -> None:
    """Four batches of ``optax.MultiSteps``, three at a time: one gradient is dropped when the round ends."""
    x, y = np.ones((8, 1), np.float32), np.arange(8, dtype=np.float32)[:, None]
    data = ft.data.federated_data(x, y, [np.arange(8)])
    model, work = ft.models.linear(1, 1), Work(epochs=1, batch_size=2)
    for every, dropped in ((3, 1), (4, 0)):
        several = optax.MultiSteps(optax.sgd(0.1), every).gradient_transformation()
        algorithm = ft.fed_avg(model, all_clients(1), work=work, client_optimizer=several)
        run = ft.simulate(algorithm, data, num_rounds=2, start={"weights": np.zeros((1, 1), np.float32)})
        assert run.history.rounds["unapplied"].tolist() == [[dropped]] * 2
        assert (f"finished; {2 * dropped} gradients had not been applied" in repr(run)) == bool(dropped)
    # four batches together are one of all eight examples
    np.testing.assert_allclose(run.state.server.params["weights"][0, 0, 0], 3.5 * (1 - 0.9**2), rtol=1e-6)
