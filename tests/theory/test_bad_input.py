"""One clear ValueError, naming the argument, for everything that can be given wrongly."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fedtangent._src.theory.fed_ensemble.limit import gp_limit
from fedtangent._src.theory.flow import federated_flow
from fedtangent._src.theory.prior import covariance_terms
from fedtangent._src.types import Cohort, Partition

SLOTS = np.array([[0, 1, 2], [2, 1, 0]])


@pytest.fixture
def good(maker) -> dict:
    run = maker.run([8, 8, 8], (SLOTS, SLOTS * 0, SLOTS * 0 + 1.0), 1)
    names = ("kernels", "y_train", "partition", "cohorts")
    return dict(zip(names, run.problem, strict=True)) | {"rule": run.rule()}


def with_nan(array: np.ndarray) -> np.ndarray:
    array = np.array(array)
    array[0, 0] = np.nan
    return array


def cohort(**changes) -> dict:
    slots = {"client": SLOTS, "model": SLOTS * 0, "weight": SLOTS * 0 + 1.0}
    return {"cohorts": Cohort(**{**slots, **changes})}


def kernels(given: dict, **blocks) -> dict:
    return {"kernels": given["kernels"]._replace(**blocks)}


def rule(given: dict, **changes) -> dict:
    return {"rule": replace(given["rule"], **changes)}


BAD = {
    "y one-dimensional": (lambda g: {"y_train": g["y_train"][:, 0]}, r"y_train: got shape \(24,\), must be \[n, C\]"),
    "y not finite": (lambda g: {"y_train": with_nan(g["y_train"])}, "y_train: got nan at entry .*, must be finite"),
    "y too short": (lambda g: {"y_train": g["y_train"][:-1]}, r"ntk_train: got shape \(24, 24\), must be \(23, 23\)"),
    "y as text": (lambda g: {"y_train": g["y_train"].astype(str)}, "y_train: got .*, must be a real number"),
    "kernel not square": (lambda g: kernels(g, ntk_train=np.ones((24, 3))), "ntk_train: got .*, must be a square"),
    "kernel not symmetric": (lambda g: kernels(g, ntk_train=np.tri(24)), "ntk_train: got .*, must be symmetric"),
    "kernel not finite": (
        lambda g: kernels(g, ntk_train=with_nan(g["kernels"].ntk_train)),
        "ntk_train: got nan .*, must be finite",
    ),
    "test kernel": (lambda g: kernels(g, ntk_test_train=np.ones((5, 3))), r"ntk_test_train: .*, must be \(5, 24\)"),
    "no test kernel": (lambda g: kernels(g, ntk_test_train=None), r"ntk_test_train: got shape \(\), must be \[m, 24\]"),
    "prior": (lambda g: kernels(g, nngp_test=np.ones((4, 4))), r"nngp_test: got shape \(4, 4\), must be \(5, 5\)"),
    "prior negative": (
        lambda g: kernels(g, nngp_train=-g["kernels"].nngp_train),
        r"nngp blocks together: got a smallest eigenvalue of -.*, must be a covariance \(positive semidefinite\)",
    ),
    "prior of other points": (
        lambda g: kernels(g, nngp_test_train=10 * g["kernels"].nngp_test_train),
        "nngp blocks together: got .* must be a covariance",
    ),
    "prior negative alone": (
        lambda g: kernels(g, nngp_test=None, nngp_train=-g["kernels"].nngp_train),
        "nngp_train: got .* must be a covariance",
    ),
    "prior not symmetric": (lambda g: kernels(g, nngp_train=np.tri(24)), "nngp_train: got .*, must be symmetric"),
    "prior at test points": (lambda g: kernels(g, nngp_test=np.tri(5)), "nngp_test: got .*, must be symmetric"),
    "outputs": (lambda g: {"outputs": "some"}, "outputs: got 'some', allowed are shared, full"),
    "outputs full": (lambda g: {"outputs": "full"}, r"ntk_train: got shape \(24, 24\), must be \(48, 48\)"),
    "rows out of range": (
        lambda g: {"partition": Partition(np.arange(1, 25), np.array([0, 24]))},
        "partition: got 24 for client 0, must be from 0 to 23",
    ),
    "offsets": (
        lambda g: {"partition": Partition(np.arange(24), np.array([0, 20]))},
        r"partition\.offsets: got 0 to 20, must be from 0 to .* 24",
    ),
    "offsets missing": (
        lambda g: {"partition": Partition(np.arange(24), np.array([0]))},
        r"partition\.offsets: got 1 entries",
    ),
    "indices not integer": (
        lambda g: {"partition": g["partition"]._replace(indices=g["partition"].indices * 1.0)},
        r"partition\.indices: got .*float64, must be .* whole numbers",
    ),
    "cohort shapes": (
        lambda g: cohort(weight=np.ones(3)),
        r"cohorts: got .*\(3,\), must be of one shape \[R, S\]",
    ),
    "no rounds": (
        lambda g: {"cohorts": Cohort(SLOTS[:0], SLOTS[:0], SLOTS[:0] * 1.0)},
        r"cohorts: got .* shapes \(0, 3\), .* with R, S >= 1",
    ),
    "client": (lambda g: cohort(client=SLOTS + 1), r"cohorts\.client: got 3 in round 0, slot 2, must be from 0 to 2"),
    "client not integer": (lambda g: cohort(client=SLOTS + 0.5), r"cohorts\.client: got float64, must be integers"),
    "model": (
        lambda g: {**cohort(model=SLOTS), "num_models": 2},
        r"cohorts\.model: got 2 in round 0, slot 2, must be from 0 to 1",
    ),
    "models": (lambda g: {"num_models": 0}, "num_models: got 0, must be a whole number of at least 1"),
    "models not whole": (lambda g: {"num_models": 1.5}, r"num_models: got 1\.5, must be a whole number"),
    "models as text": (lambda g: {"num_models": "2"}, "num_models: got '2', must be a whole number"),
    "weight": (lambda g: cohort(weight=SLOTS - 1.0), r"cohorts\.weight: got -1, must be at least 0"),
    "weight as text": (lambda g: cohort(weight=SLOTS.astype(str)), r"cohorts\.weight: got .*, must be a real number"),
    "no examples": (
        lambda g: {"partition": Partition(np.arange(24), np.array([0, 12, 12, 24]))},
        r"cohorts\.client: got 1 in round 0, slot 1, must be a client with examples",
    ),
    "rate": (
        lambda g: rule(g, learning_rate=-1.0),
        r"learning_rate: got -1\.0, must be above 0 \(in a round: 0 or more\) and finite",
    ),
    "rate as text": (lambda g: rule(g, learning_rate="0.1"), r"learning_rate: got '0\.1', must be a real number"),
    "rate missing": (lambda g: rule(g, learning_rate=None), "learning_rate: got None, must be a real number"),
    "rate complex": (lambda g: rule(g, learning_rate=1j), "learning_rate: got 1j, must be a real number"),
    "rates ragged": (lambda g: rule(g, learning_rate=[[1.0], 2.0]), "learning_rate: .*, must be real numbers in one"),
    "rate per round": (
        lambda g: rule(g, learning_rate=np.ones(3)),
        r"rate: got shape \(3,\), .* per round \[2\]",
    ),
    "server rate": (lambda g: rule(g, server_learning_rate=np.inf), "server_learning_rate: got inf, must be above 0"),
    "server rate as text": (
        lambda g: rule(g, server_learning_rate="1"),
        "server_learning_rate: got '1', must be",
    ),
    "steps": (lambda g: rule(g, local_steps=0), "local_steps: got 0, must be whole numbers of at least 1"),
    "steps not integer": (lambda g: rule(g, local_steps=1.5), r"local_steps: got 1\.5, must be whole numbers"),
    "steps per client": (
        lambda g: rule(g, local_steps=np.ones(4, int)),
        r"steps: got shape \(4,\), .* client \[3\]",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_flow_refuses(good, name):
    change, message = BAD[name]
    with pytest.raises(ValueError, match=message) as caught:
        federated_flow(**{**good, **change(good)})
    assert "\n" not in str(caught.value) or "array" in str(caught.value)  # only an array's own text has lines


@pytest.mark.parametrize(
    "name", [name for name in BAD if name.startswith(("y ", "kernel", "test", "prior", "outputs"))]
)
def test_limit_refuses(good, name):
    change, message = BAD[name]
    given = {key: value for key, value in {**good, **change(good)}.items() if key in ("kernels", "y_train", "outputs")}
    with pytest.raises(ValueError, match=message):
        gp_limit(**given)


@pytest.mark.parametrize("jitter", ["0.1", None, -1.0, True, [0.1]])
def test_limit_refuses_a_jitter(good, jitter):
    with pytest.raises(ValueError, match="max_relative_jitter: got"):
        gp_limit(good["kernels"], good["y_train"], max_relative_jitter=jitter)


def test_a_singular_prior_is_a_covariance(good):
    """Positive semidefinite to rounding is enough: a model of few parameters has such a prior."""
    few = np.random.default_rng(0).standard_normal((29, 3)) * 1e3
    prior = few @ few.T
    blocks = good["kernels"]._replace(
        nngp_train=prior[:24, :24], nngp_test_train=prior[24:, :24], nngp_test=prior[24:, 24:]
    )
    assert np.all(np.isfinite(gp_limit(blocks, good["y_train"]).cov))
    nothing = blocks._replace(**{name: 0 * getattr(blocks, name) for name in blocks._fields if "nngp" in name})
    assert np.all(gp_limit(nothing, good["y_train"]).cov == 0)


def test_flow_methods_refuse(good):
    flow = federated_flow(**good)  # what the refusals start from is fine
    for r in (-1, 3, 1.0, True, [0, 3]):
        with pytest.raises(ValueError, match=r"r: got .*, must be a whole number from 0 to 2"):
            flow.mean(r)
    with pytest.raises(ValueError, match="r: got an empty sequence"):
        flow.mean([])
    with pytest.raises(ValueError, match="r: got 3, must be a whole number from 0 to 2"):
        flow.cov(3)
    with pytest.raises(ValueError, match="model: got 1, must be a whole number from 0 to 0"):
        flow.cov(1, 1)
    with pytest.raises(ValueError, match=r"f0_test: got shape \(4, 2\), must be \(5, 2\) for model=0"):
        flow.predict(np.zeros((24, 2)), np.zeros((4, 2)), 1, 0)
    with pytest.raises(ValueError, match=r"f0_train: got shape \(24, 2\), must be \(1, 24, 2\) for model=None"):
        flow.residual(1, np.zeros((24, 2)))


def test_covariance_needs_the_prior(good):
    blocks = good["kernels"]._replace(nngp_train=None)
    flow = federated_flow(**{**good, "kernels": blocks})
    assert np.all(np.isfinite(flow.mean(2)))
    with pytest.raises(ValueError, match="got None as nngp_train, nngp_test_train or nngp_test"):
        flow.cov(2)
    with pytest.raises(ValueError, match=r"b: got shape \(5, 23\), must be \(5, 24\)"):
        covariance_terms(good["kernels"], np.ones((5, 23)))
