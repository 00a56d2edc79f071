"""Data in principal directions: nothing is lost, and losses are sums over modes."""

from __future__ import annotations

import numpy as np
import pytest

from fedtangent._src import data
from fedtangent._src.data.dataset import Dataset
from fedtangent._src.experiments.deep_linear import problems
from fedtangent._src.experiments.lab import trials


def toy(n: int = 40, d: int = 9, rank: int = 5) -> Dataset:
    """Images of a rank below their size, three classes."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((n, rank)) @ rng.standard_normal((rank, d))
    y = np.arange(n, dtype=np.int32) % 3
    return Dataset("toy", x.reshape(n, 3, 3, 1), y, x, y, 3, None, data.SourceInfo("drawn here", "none", "generated"))


def test_the_row_space_keeps_every_inner_product():
    loaded = toy()
    flat = loaded.x_train.reshape(40, 9)
    flat /= np.linalg.norm(flat, axis=1, keepdims=True)
    whole, fewer = problems._problem_of(loaded), problems._problem_of(loaded, 4)
    assert whole.x.shape == (40, 5) and (whole.rank, whole.dimension) == (5, 9)
    np.testing.assert_allclose(whole.x @ whole.x.T, flat @ flat.T, atol=1e-13)
    assert np.abs(fewer.x @ fewer.x.T - flat @ flat.T).max() > 1e-3
    np.testing.assert_allclose(whole.x.T @ whole.x, np.diag(whole.singular**2), atol=1e-12)
    np.testing.assert_allclose(whole.singular, np.linalg.svd(flat)[1][:5], rtol=1e-12)
    with pytest.raises(ValueError, match="directions: got 6, must be at most 5, the rank of the inputs"):
        problems._problem_of(loaded, 6)


def test_the_excess_is_the_loss_less_that_of_least_squares():
    given = problems._problem_of(toy())
    model = np.random.default_rng(1).standard_normal((2, 5, 3))
    loss = np.sum((given.x @ model - given.y) ** 2, axis=(1, 2)) / 80
    np.testing.assert_allclose(given.floor + given.excess(model), loss, rtol=1e-12)
    np.testing.assert_allclose(given.best, np.linalg.lstsq(given.x, given.y, rcond=None)[0], atol=1e-12)
    near = given.best + 1e-12 * model[0]  # where the difference of the two losses has no digit left
    np.testing.assert_allclose(given.excess(near), 1e-24 * np.sum((given.x @ model[0]) ** 2) / 80, rtol=1e-3)
    assert np.sum((given.x @ near - given.y) ** 2) / 80 - given.floor == pytest.approx(0, abs=1e-15)


def test_targets_are_one_hot_and_may_be_centred():
    plain, centred = problems._problem_of(toy()), problems._problem_of(toy(), centred=True)
    assert set(plain.y.ravel()) == {0.0, 1.0}
    np.testing.assert_allclose(centred.y.sum(axis=1), 0, atol=1e-15)


def test_clients_have_as_many_classes_as_said():
    given = problems._problem_of(toy(60))
    kinds = [len(set(given.labels[c])) for c in map(trials.dealt(given.labels, 6, 2, 0).client, range(6))]
    assert kinds == [2] * 6
    assert len(set(given.labels[trials.dealt(given.labels, 3, trials.IID, 0).client(0)])) == 3
    assert [trials.scheme_name(k) for k in (0, 1, 2)] == ["i.i.d.", "1 class", "2 classes"]
    with pytest.raises(ValueError, match="num_clients: got 61"):
        trials.dealt(given.labels, 61, trials.IID, 0)
