"""Networks of neural-tangents' stax as models, at one width or at several, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedtangent as ft
from fedtangent._src.models.stax_networks import from_stax

stax = ft.kernels.stax()


def network(width: int) -> Any:
    return stax.serial(stax.Dense(width, 2.0**0.5, 0.1), stax.Relu(), stax.Dense(3, 2.0**0.5, 0.1))


def test_it_is_the_mlp() -> None:
    model, mlp = from_stax(network, 4, 8, "mine"), ft.models.mlp(4, 3, widths=(8,))
    x = np.random.default_rng(0).standard_normal((5, 4))
    params = mlp.init(jax.random.key(0))
    assert np.allclose(model.apply(params, x), mlp.apply(params, x), atol=1e-6)
    assert np.allclose(model.kernel(x).ntk, mlp.kernel(x).ntk, rtol=1e-12)  # type: ignore[misc]
    assert not np.allclose(model.kernel(x).ntk, ft.models.mlp(4, 3, widths=(8, 8)).kernel(x).ntk, rtol=0.1)  # type: ignore[misc]
    shapes = jax.tree.map(np.shape, model.init(jax.random.key(0)))
    assert shapes == jax.tree.map(np.shape, params)
    assert model.at_width is not None
    assert model.at_width(5).init(jax.random.key(0))[0][0].shape == (4, 5) and model.at_width(5).name == "mine"


def run(model: ft.types.Model) -> tuple[Any, ...]:
    x = np.random.default_rng(0).standard_normal((12, 4))
    y = np.stack([x[:, 0], x[:, 1], x[:, 0] * x[:, 1]], axis=1)
    work, schedule = ft.Work(steps=2, batch_size=2), ft.schedules.all_clients(2)
    algorithm = ft.fed_avg(model, schedule, client_learning_rate=0.1, work=work)
    return algorithm, (x[:8], y[:8], x[8:], y[8:]), ft.partition.iid(8, num_clients=2, seed=0)


def test_a_network_of_one_width_is_predicted_at_infinite_width() -> None:
    algorithm, data, clients = run(from_stax(network(8), 4))
    forecasting = ft.Forecasting(draws=2, rates=False)
    trained = ft.simulate(algorithm, data, clients, num_rounds=2)
    predicted = ft.predict(algorithm, data, clients, num_rounds=2, forecasting=forecasting)
    assert np.isfinite(trained.history.to_pandas()["test.mse"].iloc[-1]) and np.isfinite(predicted.loss)
    assert predicted.plan.is_flow


@pytest.mark.slow
def test_a_network_of_one_width_is_compared_from_a_start() -> None:
    algorithm, data, clients = run(from_stax(network(8), 4))
    side = ft.compare(algorithm, data, clients, num_rounds=2)
    assert side.how == "the flow of the tangent kernel at the start" and side.verdicts[0].passed


@pytest.mark.slow
def test_it_is_compared_at_several_widths() -> None:
    algorithm, data, clients = run(from_stax(network, 4, 8))
    side = ft.compare(algorithm, data, clients, num_rounds=3, widths=(32, 128, 512), draws=5)
    assert not [verdict for verdict in side.verdicts if verdict.passed is False], side


D = stax.Dense(3)
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "no kernel": (
        lambda: from_stax(stax.serial(D, stax.Elementwise(jnp.tanh), D), 4),
        "of which a layer has no analytic",
    ),
    "random numbers": (lambda: from_stax(stax.serial(D, stax.Dropout(0.5), D), 4), "which fails on an example: "),
    "places": (lambda: from_stax(stax.serial(stax.Conv(3, (2, 2)), D), (4, 4, 1)), "must map to [n, C]"),
    "activation last": (lambda: from_stax(stax.serial(D, stax.Relu()), 4), "must end in a linear layer"),
    "a number": (lambda: from_stax(3, 4), "network: got 3, must be the (init_fn, apply_fn, kernel_fn)"),  # type: ignore[arg-type]
    "no width": (lambda: from_stax(network, 4), "width: got none, must be given"),
    "a width too many": (lambda: from_stax(network(3), 4, 8), "width: got 8, must be left out"),
    "a width of 0": (lambda: from_stax(network, 4, 0), "width: got 0, must be"),
    "a shape": (lambda: from_stax(network, (4, 0), 3), "input_shape: got 0, must be"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str) -> None:
    build, says = REFUSED[case]
    with pytest.raises(ValueError, match=r"^(network|width|input_shape): ") as error:
        build()
    assert says in str(error.value) and "\n" not in str(error.value)


def test_as_many_outputs_at_every_width() -> None:
    stax = ft.kernels.stax()
    model = from_stax(lambda width: stax.serial(stax.Dense(4), stax.Relu(), stax.Dense(width)), 3, 2)
    with pytest.raises(
        ValueError, match="with 2 outputs at width 2 and 5 at 5, must have the same number at every width"
    ):
        model.at_width(5)
