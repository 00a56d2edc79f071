"""What the flow says of FedNova and of step sizes, through ``simulate`` and ``sweep``."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from fedtangent._src import data
from fedtangent._src.comparison.comparing import compare, comparison_of
from fedtangent._src.comparison.linear_models import linear_verdict
from fedtangent._src.comparison.predicted import predict as predicted
from fedtangent._src.comparison.simulated import cohorts as drawn
from fedtangent._src.comparison.simulated import trained_networks
from fedtangent._src.data import partition
from fedtangent._src.engine import Devices, Evaluation
from fedtangent._src.engine.run import examples_of, predict, simulate
from fedtangent._src.engine.sweeps import sweep
from fedtangent._src.federated import algorithms, schedule
from fedtangent._src.federated.algorithms.normalised import Normalisation
from fedtangent._src.federated.local import Work
from fedtangent._src.kernels.gram import kernel_blocks
from fedtangent._src.losses import masked_mean
from fedtangent._src.models.features import rbf_linear
from fedtangent._src.theory.flow import Rule, best_learning_rate, federated_flow, predicted_loss
from fedtangent._src.types import Partition

MODEL = rbf_linear(40, bandwidth=0.2, seed=0, output_size=2, dtype=jnp.float64)
GRID = np.linspace(-1, 1, 15)[:, None]


def test_fed_nova_with_unequal_numbers_of_steps():
    """Clients that hold one example several times: minibatches of one row are full batches, one epoch n_i steps."""
    rng = np.random.default_rng(1)
    sizes = np.array([1, 2, 3, 5, 8])
    x, y = np.repeat(rng.uniform(-1, 1, (5, 1)), sizes, axis=0), np.repeat(rng.standard_normal((5, 2)), sizes, axis=0)
    held = Partition(np.arange(19, dtype=np.int32), np.cumsum([0, *sizes]).astype(np.int32))
    plan = schedule.uniform_sampling(5, 3)
    algorithm = algorithms.fed_nova(
        MODEL, plan, client_learning_rate=0.2, work=Work(epochs=1, batch_size=1), normalisation=Normalisation(0.3)
    )
    on_device, points = data.federated_data(x, y, held, dtype=jnp.float64), jnp.asarray(np.concatenate([x, GRID]))

    def at_points(algorithm, state):
        return {"f": np.asarray(predict(algorithm, state, points).mean)}

    history = simulate(
        algorithm, on_device, num_rounds=12, seed=4, evaluation=Evaluation(measure=at_points), devices=Devices("scan")
    ).history
    first, last = (e.metrics["f"] for e in history.evaluations)
    cohorts = schedule.drawn_cohorts(plan, held, 12, seed=4)
    blocks = kernel_blocks(MODEL.kernel, x, GRID)

    def error(**rule) -> float:
        flow = federated_flow(blocks, y, held, cohorts, Rule(sizes, 0.2, mu=0.3, **rule), num_models=1)
        found = np.asarray(flow.predict(first[:19], first[19:], 12, 0))
        return float(np.max(np.abs(found - last[19:])) / np.max(np.abs(last[19:])))

    assert error(algorithm="fed_nova") < 1e-12
    assert error() > 1e-2  # FedAvg of the same clients


def huber_like(outputs, targets, mask):
    """A loss of one's own: the mean of ``sqrt(1 + |f - y|^2)`` over real examples."""
    return masked_mean(jnp.sqrt(1 + jnp.sum((outputs - targets) ** 2, axis=-1)), mask)


def test_a_loss_of_ones_own_in_both():
    rng = np.random.default_rng(2)
    x, y = rng.uniform(-1, 1, (12, 1)), rng.standard_normal((12, 2))
    held, plan = partition.iid(12, 3, 0), schedule.all_clients(3)
    on_device, points = data.federated_data(x, y, held, dtype=jnp.float64), jnp.asarray(np.concatenate([x, GRID]))
    algorithm = algorithms.fed_avg(
        MODEL, plan, client_learning_rate=0.5, work=Work(steps=4, batch_size=None), loss=huber_like
    )
    first = predict(algorithm, algorithm.init(1, 3), points).mean
    last = np.asarray(predict(algorithm, simulate(algorithm, on_device, num_rounds=5, seed=1).state, points).mean)
    cohorts = schedule.drawn_cohorts(plan, held, 5, seed=1)

    def error(loss) -> float:
        blocks = kernel_blocks(MODEL.kernel, x, GRID)
        flow = federated_flow(blocks, y, held, cohorts, Rule(4, 0.5, loss=loss), num_models=1)
        found = np.asarray(flow.predict(first[:12], first[12:], 5, 0))
        return float(np.max(np.abs(found - last[12:])) / np.max(np.abs(last[12:])))

    assert error(huber_like) < 1e-12
    assert error("squared_error") > 1e-2  # negative control
    setting = comparison_of(algorithm, examples_of(algorithm, (x, y, x, y), held), 5, 0, Evaluation(), (16, 32, 64), 5)
    assert linear_verdict(predicted(setting, drawn(setting)), trained_networks(setting, 1)).passed
    labels = (x, np.arange(12) % 2, x, np.arange(12) % 2)
    with pytest.raises(ValueError, match="loss: got the function 'huber like' for class labels, must be the name"):
        compare(algorithm, labels, held, num_rounds=5)


@pytest.mark.slow
def test_a_loss_of_ones_own_is_compared_whole():
    """By day the test above has its one exact verdict."""
    rng = np.random.default_rng(2)
    x, y, held = rng.uniform(-1, 1, (12, 1)), rng.standard_normal((12, 2)), partition.iid(12, 3, 0)
    work = Work(steps=4, batch_size=None)
    algorithm = algorithms.fed_avg(MODEL, schedule.all_clients(3), client_learning_rate=0.5, work=work, loss=huber_like)
    side = compare(algorithm, (x, y, x, y), held, num_rounds=5, widths=(16, 32, 64), draws=5)
    assert [v.passed for v in side.verdicts if "linear" in v.statement] == [True]


@pytest.mark.slow
@pytest.mark.theory
@pytest.mark.parametrize("alpha", [0.1, 10.0])
def test_the_best_rate_of_a_sweep_is_the_predicted_one(alpha):
    """Three rounds of five steps, labels noisy: too small a rate does not learn, too large a one oscillates."""
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (60, 1))
    groups = (x[:, 0] > 0).astype(int) + 2 * (np.abs(x[:, 0]) > 0.5)
    held = partition.dirichlet(groups, num_clients=6, alpha=alpha, seed=0, min_client_size=2)
    y = np.concatenate([np.sin(2 * np.pi * x), np.cos(3 * x)], axis=1) + 0.3 * rng.standard_normal((60, 2))
    y_test = np.concatenate([np.sin(2 * np.pi * GRID), np.cos(3 * GRID)], axis=1)
    plan = schedule.all_clients(6)
    on_device = data.federated_data(x, y, held, dtype=jnp.float64)
    cohorts = schedule.drawn_cohorts(plan, held, 3)
    blocks = kernel_blocks(MODEL.kernel, x, GRID)

    def loss(rate):
        return predicted_loss(federated_flow(blocks, y, held, cohorts, Rule(5, rate), num_models=1), y_test).total

    bound = federated_flow(blocks, y, held, cohorts, Rule(5, 0.1), num_models=1).stability().max_stable_learning_rate
    found = best_learning_rate(loss, bound / 100, 1.5 * bound)
    rates = np.geomspace(found.rate / 3, min(3 * found.rate, 1.4 * bound), 9).tolist()

    def build(rate):
        return algorithms.fed_avg(MODEL, plan, client_learning_rate=rate, work=Work(steps=5, batch_size=None))

    def error(algorithm, state):
        return {"mse": jnp.mean((algorithm.predict(state, jnp.asarray(GRID)).mean - y_test) ** 2)}

    measured = sweep(
        build,
        on_device,
        num_rounds=3,
        seeds=range(200),
        grid={"rate": [*rates, found.rate]},
        evaluation=Evaluation(measure=error),
    ).metrics["mse"][:, :, -1]
    at_best = measured[:, -1]
    assert abs(at_best.mean() - found.loss) < 3 * at_best.std(ddof=1) / np.sqrt(len(at_best))
    for rate, column in zip(rates, measured.T, strict=False):
        paired = column - at_best
        standard_error = paired.std(ddof=1) / np.sqrt(len(paired))
        assert paired.mean() > -3 * standard_error, rate
        assert abs(column.mean() - float(loss(rate))) < 4 * column.std(ddof=1) / np.sqrt(len(column)), rate
    # both ends of the sweep are worse beyond doubt: the minimum is inside
    for column in (measured[:, 0], measured[:, len(rates) - 1]):
        paired = column - at_best
        assert paired.mean() > 3 * paired.std(ddof=1) / np.sqrt(len(paired))
