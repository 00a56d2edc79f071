"""A learning rate above the largest stable one is refused, clipped or allowed, and a run says so."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedtangent._src.engine import Devices, Evaluation, simulate
from fedtangent._src.federated import algorithms
from fedtangent._src.federated.ntk_fl import Evolution, ntk_evolve
from fedtangent._src.federated.schedule import all_clients
from fedtangent._src.types import DIVERGED, OK, REFUSED

from ...drawn import parameters
from ...nightly import nightly
from ..toys import leaves, two_layer, uneven_data
from .test_evolution import evolve, flat, jacobian, network, pooled


def edge() -> float:
    """2 N C / lambda_max of the averaged kernel, in NumPy from the Jacobian."""
    model = network(3)
    j = jacobian(model, parameters(model)).reshape(9, -1)
    return 2 * 9 * 3 / float(np.linalg.eigvalsh(j @ j.T / 3)[-1])


@pytest.mark.parametrize("method", ["eigh", "chebyshev"])
def test_eagerly_the_error_names_the_rate_and_the_largest_stable_one(method):
    with pytest.raises(ValueError, match=r"learning_rate: got .* of the averaged kernel of these 9 examples") as caught:
        evolve(3, (1, 200), 1.01 * edge(), method=method)
    given, stable = (float(number) for number in re.findall(r"(?:got|at most) ([\d.e+-]+),", str(caught.value)))
    np.testing.assert_allclose([given, stable], [1.01 * edge(), edge()], rtol=1e-5)
    info = evolve(3, (1, 200), 0.99 * edge(), method=method)[4]  # control: just below
    assert int(info["status"]) == OK and not bool(info["refused"])
    np.testing.assert_allclose(info["stable_learning_rate"], edge(), rtol=1e-7)


def test_under_jit_it_is_a_status_and_the_parameters_stay():
    model = network(3)
    params = parameters(model)
    traced = jax.jit(lambda rate: ntk_evolve(model, params, pooled(), rate, Evolution((1, 200))))
    new, info = traced(2 * edge())
    assert int(info["status"]) == REFUSED and bool(info["refused"]) and int(info["time"]) == 0
    assert np.all(np.isinf(info["losses"])) and int(info["products"]) == 0
    np.testing.assert_array_equal(flat(new), flat(params))
    new, info = traced(0.5 * edge())
    assert int(info["status"]) == OK and np.abs(flat(new) - flat(params)).max() > 0.01


def test_clip_is_the_run_at_nine_tenths_of_the_largest_stable_rate():
    _, _, _, clipped, info = evolve(3, (50, 200), 40 * edge(), unstable="clip")
    np.testing.assert_allclose(info["learning_rate"], 0.9 * edge(), rtol=1e-12)
    assert bool(info["rate_cut"])
    expected = evolve(3, (50, 200), 0.9 * edge(), unstable="allow")[3]
    np.testing.assert_allclose(flat(clipped), flat(expected), rtol=0, atol=1e-10)
    below = evolve(3, (50, 200), 0.3 * edge(), unstable="clip")[4]  # a stable rate is left alone
    np.testing.assert_allclose(below["learning_rate"], 0.3 * edge(), rtol=1e-12)
    assert not bool(below["rate_cut"])
    allowed = evolve(3, (50, 200), 1e200 * edge(), unstable="allow")[4]
    assert int(allowed["status"]) == DIVERGED


@functools.cache  # one object, so that its round compiles once
def rising():
    """From the fourth round on the rate is far above the largest stable one."""
    return algorithms.ntk_fl(
        two_layer(),
        all_clients(6),
        learning_rate=lambda r: jnp.where(r < 3, 0.3, 1e4),
        evolution=Evolution(times=(4, 9)),
    )


def run(rounds: int, **options):
    evaluation = Evaluation(**options)
    return simulate(rising(), uneven_data(), num_rounds=rounds, seed=1, evaluation=evaluation, devices=Devices("scan"))


@pytest.mark.parametrize("every", nightly([None, 2], [2]))
def test_a_run_ends_before_the_round_that_is_refused(every):
    ended = run(7, stop_on_divergence=True, every=every, measure=lambda _, state: {})
    assert re.fullmatch(
        r"unstable at round 4: learning rate 10000 is above [\d.]+, the largest stable one", ended.status
    )
    assert int(ended.state.round) == 3 and ended.history.evaluations[-1].round == 3
    good = run(3, stop_on_divergence=True)
    assert good.status == "finished"
    for a, b in zip(leaves(ended.state.server), leaves(good.state.server), strict=True):
        np.testing.assert_array_equal(a, b)


def test_without_the_guard_the_run_goes_on_and_its_status_tells():
    through = run(6)
    assert through.status.startswith("unstable at round 4: learning rate 10000 is above ")
    assert list(np.asarray(through.history.rounds["refused"])[:, 0]) == [False] * 3 + [True] * 3
    for a, b in zip(leaves(through.state.server), leaves(run(3).state.server), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_run_whose_every_candidate_diverges_says_so() -> None:
    """Where a step that is too large is allowed the model is kept, as where it is refused, and the run tells."""
    wild = algorithms.ntk_fl(
        two_layer(), all_clients(6), learning_rate=1e200, evolution=Evolution(times=(4, 9), unstable="allow")
    )
    through, ended = (
        simulate(
            wild, uneven_data(), num_rounds=3, evaluation=Evaluation(stop_on_divergence=stop), devices=Devices("scan")
        )
        for stop in (False, True)
    )
    assert through.status == "unstable at round 1: the loss is finite after none of the candidate numbers of steps"
    assert (through.history.rounds["status"] == DIVERGED).all()
    assert ended.status == through.status and len(ended.history.rounds["status"]) == 0
    for a, b in zip(leaves(ended.state.server), leaves(through.state.server), strict=True):
        np.testing.assert_array_equal(a, b)
