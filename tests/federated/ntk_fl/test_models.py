"""NTK-FL with any model, and pools that leave the padding out."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedtangent._src.engine import Devices, simulate
from fedtangent._src.federated import algorithms
from fedtangent._src.federated.aggregate import stack
from fedtangent._src.federated.algorithms.tangent import Pooling
from fedtangent._src.federated.compose import Parts, compose, sequentially
from fedtangent._src.federated.ntk_fl import Evolution, Examples, ntk_evolve, ntk_server, send_examples
from fedtangent._src.federated.schedule import all_clients, per_client_permutations
from fedtangent._src.federated.wire.subsample import largest_sample
from fedtangent._src.models import cnn, lstm
from fedtangent._src.models.flax_networks import from_flax
from fedtangent._src.types import Model, Partition

from ...drawn import parameters
from ...nightly import nightly
from ..toys import arguments_of, distance, fixed, leaves, two_layer, uneven_data
from .descent import linearised_descent

RATE, STEPS = 0.05, 30


def from_linen() -> Model:
    import flax.linen as nn

    class Small(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(2, param_dtype=jnp.float64)(nn.tanh(nn.Dense(6, param_dtype=jnp.float64)(x)))

    return from_flax(Small(), jnp.zeros((1, 3)), 2)


NETWORKS = {
    "cnn": (lambda: cnn((4, 4, 1), 2, filters=(2,), hidden=(3,), window=3), (4, 4, 1)),
    "lstm": (lambda: lstm(5, embedding=3, units=4, layers=1, differentiation="any"), (6,)),
    "flax": (from_linen, (3,)),
}


@pytest.mark.parametrize("name", nightly(NETWORKS, ["flax"]))
def test_any_network_follows_the_descent_on_its_linearisation(name):
    """Against the steps taken one by one in weight space."""
    build, shape = NETWORKS[name]
    model, rng = build(), np.random.default_rng(0)
    x = rng.integers(5, size=(7, *shape)) if name == "lstm" else rng.normal(size=(7, *shape))
    x, y, params = (
        jnp.asarray(x),
        jnp.asarray(rng.normal(size=(7, model.output_size))),
        jax.tree.map(jnp.float64, parameters(model, scale=0.4)),
    )
    expected = linearised_descent(model, params, x, y, STEPS, RATE)
    given = Examples(x, y, jnp.ones(7, bool))
    found = ntk_evolve(model, params, given, RATE, Evolution((STEPS,), "exact", "chebyshev"))[0]
    moved = distance(expected, params)
    assert distance(found, expected) < 1e-10 * moved
    assert distance(linearised_descent(model, params, x, y, STEPS + 1, RATE), expected) > 1e-4 * moved


@pytest.mark.parametrize("dtype", [jnp.float64, jnp.float32])
@pytest.mark.slow
def test_a_pool_without_padding_changes_nothing(dtype):
    """Uneven clients, one of them empty, two models, an empty slot."""
    data = uneven_data(sizes=(3, 5, 0, 4, 6, 2))
    data = data._replace(x=data.x.astype(dtype), y=data.y.astype(dtype))
    slots = [(0, 0, 1.0), (2, 0, 1.0), (4, 1, 1.0), (1, 1, 0.0), (3, 0, 1.0), (5, 1, 1.0)]
    partition = Partition(np.asarray(data.indices), np.asarray(data.offsets))
    assert largest_sample(partition, 2) == 11 and largest_sample(partition, 0) == 1

    def run(pool_size):
        algorithm = algorithms.ntk_fl(
            two_layer(dtype),
            fixed(6, 2, slots),
            learning_rate=0.2,
            evolution=Evolution(times=(2, 7)),
            pooling=Pooling(pool_size=pool_size),
        )
        return simulate(algorithm, data, num_rounds=2, seed=0, devices=Devices("scan"))

    padded, dense, small = run(None), run(11), run(5)
    tolerance = 1e-10 if dtype == jnp.float64 else 1e-5
    assert distance(dense.state.server, padded.state.server) < tolerance
    assert {leaf.dtype for leaf in leaves(dense.state.server)} == {np.dtype(dtype)}
    assert np.all(np.asarray(dense.history.rounds["examples_dropped"]) == 0)
    np.testing.assert_array_equal(small.history.rounds["examples_dropped"], [[2, 3]] * 2)  # of 7 and of 8
    assert distance(small.state.server, padded.state.server) > 1e-3


def test_two_models_of_a_shuffled_pool_stay_the_same_to_rounding():
    def run(shuffle):
        model, plan = two_layer(), per_client_permutations(6, 2)
        server = ntk_server(model, 0.2, Evolution((2, 7), "exact"), shuffle=shuffle)
        server = server._replace(map_models=sequentially)
        algorithm = compose("shuffled", model, send_examples(), server, plan, Parts(aggregate=stack(6)))
        return simulate(algorithm, uneven_data(), num_rounds=2, seed=0, devices=Devices("scan")).state.server

    assert 0 < distance(run(True), run(False)) < 1e-10


def test_class_labels_are_told_to_become_targets():
    algorithm = algorithms.ntk_fl(two_layer(), all_clients(6), learning_rate=0.1, evolution=Evolution(times=(1,)))
    with pytest.raises(ValueError, match=r"y and mask: got \(36,\) and .*class labels: one-hot"):
        simulate(algorithm, uneven_data(labels=True), num_rounds=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"times": ()}, r"times: got \(\), must be one or more increasing"),
        ({"pool_size": 0}, "pool_size: "),
        ({"unstable": "warn"}, "unstable: .*stop, clip, allow"),
        ({"validation": (np.ones((5, 3)), np.ones((5, 9)))}, r"validation: got x \(5, 3\) and y \(5, 9\)"),
        ({"validation": np.ones((5, 3))}, r"validation: got .*, must be None or a tuple of two"),
    ],
)
def test_mistakes_are_named_before_any_work(options, message):
    with pytest.raises(ValueError, match=message):
        algorithms.ntk_fl(
            two_layer(),
            all_clients(6),
            **arguments_of(algorithms.ntk_fl, {"learning_rate": 0.1, "times": (1,), **options}),
        )
