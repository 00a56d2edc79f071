"""One clear ValueError, naming the argument, for everything that can be given wrongly."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fedtangent.theory import covariance_terms, federated_flow, gp_limit
from fedtangent.types import Cohort, Partition

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
    "y one-dimensional": (lambda g: {"y_train": g["y_train"][:, 0]}, r"y_train must be \[n, C\].*\(24,\)"),
    "y not finite": (lambda g: {"y_train": with_nan(g["y_train"])}, r"y_train must be finite.*nan"),
    "y too short": (lambda g: {"y_train": g["y_train"][:-1]}, r"ntk_train must be \[23, 23\].*\(24, 24\)"),
    "kernel not square": (
        lambda g: kernels(g, ntk_train=np.ones((24, 3))),
        "ntk_train must be a square",
    ),
    "kernel not symmetric": (
        lambda g: kernels(g, ntk_train=np.tri(24)),
        "ntk_train must be symmetric",
    ),
    "kernel not finite": (
        lambda g: kernels(g, ntk_train=with_nan(g["kernels"].ntk_train)),
        "ntk_train must be fin",
    ),
    "test kernel": (
        lambda g: kernels(g, ntk_test_train=np.ones((5, 3))),
        r"ntk_test_train.*\(5, 24\)",
    ),
    "no test kernel": (
        lambda g: kernels(g, ntk_test_train=None),
        r"ntk_test_train must be .*got \(\)",
    ),
    "prior": (
        lambda g: kernels(g, nngp_test=np.ones((4, 4))),
        r"nngp_test must be.*\(5, 5\).*\(4, 4\)",
    ),
    "outputs": (lambda g: {"outputs": "some"}, r"outputs must be one of \('shared', 'full'\), got 'some'"),
    "full kernel": (lambda g: {"outputs": "full"}, r"ntk_train must be \[48, 48\]"),
    "rows out of range": (
        lambda g: {"partition": Partition(np.arange(1, 25), np.array([0, 24]))},
        r"indices.* 0\.\.23",
    ),
    "offsets": (
        lambda g: {"partition": Partition(np.arange(24), np.array([0, 20]))},
        r"offsets must rise from 0 to .* 24",
    ),
    "offsets missing": (lambda g: {"partition": Partition(np.arange(24), np.array([0]))}, r"offsets \[N \+ 1\]"),
    "cohort shapes": (lambda g: cohort(weight=np.ones(3)), r"one shape \[R, S\].*\(2, 3\).*\(3,\)"),
    "client": (lambda g: cohort(client=SLOTS + 1), r"cohorts\.client must lie in 0\.\.2, got 3 in round 0, slot 2"),
    "client not integer": (lambda g: cohort(client=SLOTS + 0.5), r"cohorts\.client must be integers, got float64"),
    "model": (
        lambda g: {**cohort(model=SLOTS), "num_models": 2},
        r"cohorts\.model must lie in 0\.\.1, got 2 in round 0",
    ),
    "models": (lambda g: {"num_models": 0}, r"num_models must be an integer >= 1, got 0"),
    "models not whole": (lambda g: {"num_models": 1.5}, r"num_models must be an integer >= 1, got 1\.5"),
    "models as text": (lambda g: {"num_models": "2"}, r"num_models must be an integer >= 1, got '2'"),
    "no rounds": (
        lambda g: {"cohorts": Cohort(SLOTS[:0], SLOTS[:0], SLOTS[:0] * 1.0)},
        r"cohorts must hold at least one round of one slot, got \[R, S\] = \[0, 3\]",
    ),
    "indices not integer": (
        lambda g: {"partition": g["partition"]._replace(indices=g["partition"].indices * 1.0)},
        r"partition\.indices must be integers, got float64",
    ),
    "offsets not integer": (
        lambda g: {"partition": g["partition"]._replace(offsets=g["partition"].offsets * 1.0)},
        r"partition\.offsets must be integers, got float64",
    ),
    "rate as text": (lambda g: rule(g, learning_rate="0.1"), r"learning_rate must be a real number .*, got '0\.1'"),
    "rate missing": (lambda g: rule(g, learning_rate=None), "learning_rate must be a real number .*, got None"),
    "rate complex": (lambda g: rule(g, learning_rate=1j), "learning_rate must be a real number .*, got 1j"),
    "rates ragged": (lambda g: rule(g, learning_rate=[[1.0], 2.0]), "learning_rate must be real numbers in one array"),
    "server rate as text": (lambda g: rule(g, server_learning_rate="1"), "server_learning_rate must be a real number"),
    "server rates of other rounds": (
        lambda g: rule(g, server_learning_rate=np.ones(3)),
        r"server_learning_rate must have one of.*\[\(\), \(2,\)\], got \(3,\)",
    ),
    "weight as text": (lambda g: cohort(weight=SLOTS.astype(str)), r"cohorts\.weight must be a real number"),
    "y as text": (lambda g: {"y_train": g["y_train"].astype(str)}, "y_train must be a real number"),
    "prior negative": (
        lambda g: kernels(g, nngp_train=-g["kernels"].nngp_train),
        r"nngp blocks together must be a covariance \(positive semidefinite\), but the smallest eigenvalue is -",
    ),
    "prior of other points": (
        lambda g: kernels(g, nngp_test_train=10 * g["kernels"].nngp_test_train),
        "nngp blocks together must be a covariance",
    ),
    "prior negative alone": (
        lambda g: kernels(g, nngp_test=None, nngp_train=-g["kernels"].nngp_train),
        "nngp_train must be a covariance",
    ),
    "prior not symmetric": (
        lambda g: kernels(g, nngp_train=np.tri(24)),
        "nngp_train must be symmetric",
    ),
    "prior at test points not symmetric": (
        lambda g: kernels(g, nngp_test=np.tri(5)),
        "nngp_test must be symmetric",
    ),
    "weight": (lambda g: cohort(weight=SLOTS - 1.0), r"cohorts\.weight must be finite and >= 0"),
    "no examples": (
        lambda g: {"partition": Partition(np.arange(24), np.array([0, 12, 12, 24]))},
        "client 1 holds no exam",
    ),
    "steps": (lambda g: rule(g, local_steps=0), r"local_steps must be integers >= 1, got 0"),
    "steps not integer": (lambda g: rule(g, local_steps=1.5), r"local_steps must be integers >= 1, got 1\.5"),
    "steps per client": (
        lambda g: rule(g, local_steps=np.ones(4, int)),
        r"local_steps .*\[3\], got shape \(4,\)",
    ),
    "rate": (lambda g: rule(g, learning_rate=-1.0), r"learning_rate must be finite and > 0, got -1\.0"),
    "rate per round": (
        lambda g: rule(g, learning_rate=np.ones(3)),
        r"learning_rate must .*\(2,\).*got \(3,\)",
    ),
    "server rate": (
        lambda g: rule(g, server_learning_rate=np.inf),
        "server_learning_rate must be finite and > 0",
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
    with pytest.raises(ValueError, match="max_relative_jitter must be finite and >= 0, got"):
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
        with pytest.raises(ValueError, match=r"r must be an integer in 0\.\.2"):
            flow.mean(r)
    with pytest.raises(ValueError, match="at least one round"):
        flow.mean([])
    with pytest.raises(ValueError, match=r"r must be an integer in 0\.\.2, got 3"):
        flow.cov(3)
    with pytest.raises(ValueError, match=r"model must be an integer in 0\.\.0, got 1"):
        flow.cov(1, 1)
    with pytest.raises(ValueError, match=r"f0_test must have shape \(5, 2\) for model=0, got \(4, 2\)"):
        flow.predict(np.zeros((24, 2)), np.zeros((4, 2)), 1, 0)
    with pytest.raises(ValueError, match=r"f0_train must have shape \(1, 24, 2\) for model=None, got \(24, 2\)"):
        flow.residual(1, np.zeros((24, 2)))


def test_covariance_needs_the_prior(good):
    blocks = good["kernels"]._replace(nngp_train=None)
    flow = federated_flow(**{**good, "kernels": blocks})
    assert np.all(np.isfinite(flow.mean(2)))
    with pytest.raises(ValueError, match="nngp_train, nngp_test_train and nngp_test"):
        flow.cov(2)
    with pytest.raises(ValueError, match=r"b must have the shape of nngp_test_train, \(5, 24\), got \(5, 23\)"):
        covariance_terms(good["kernels"], np.ones((5, 23)))
