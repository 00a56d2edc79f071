"""The evidence bound along a run, against exact expectations and draws by NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import fedtangent as ft

from ..documents import example, run
from ..nightly import nightly

NOISE, PRIOR, SCALE = 0.3, 1.4, 0.2
CLIENTS = ft.types.Partition(np.array([0, 1, 2, 3, 4, 5, 6, 7]), np.array([0, 2, 4, 6, 8]))  # not examples 8 and 9


def regression() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((10, 3))
    return x, x @ rng.standard_normal((3, 2)) + NOISE * rng.standard_normal((10, 2))


def ensemble(model: ft.types.Model, **options: object) -> ft.types.Algorithm:
    schedule = ft.schedules.per_client_permutations(4, 2)
    return ft.fed_ensemble(model, schedule, client_learning_rate=0.1, work=ft.Work(steps=2, batch_size=None), **options)


def test_every_round_of_a_linear_model_has_its_exact_terms() -> None:
    x, y = regression()
    data = ft.data.federated_data(x, y, CLIENTS, dtype=jnp.float64)
    algorithm = ensemble(ft.models.linear(3, 2, sigma=PRIOR, dtype=jnp.float64))
    measure = ft.measures.variational_diagnostics(algorithm, data, SCALE, PRIOR, NOISE, num_samples=500)
    trained = ft.simulate(algorithm, data, num_rounds=3, seed=0, evaluation=ft.Evaluation(1, measure))
    path = ft.params_by_round(algorithm, data, num_rounds=3, seed=0)["weights"]  # [R + 1, K, d, C]
    evidence = ft.theory.linear_posterior(x[:8], y[:8], NOISE, PRIOR).log_evidence
    assert len(trained.history.evaluations) == 4
    for weights, evaluation in zip(np.asarray(path), trained.history.evaluations, strict=True):
        metrics = evaluation.metrics
        residuals = y[:8] - np.einsum("nd,kdc->knc", x[:8], weights)
        square = np.mean(np.sum(residuals**2, axis=(1, 2))) + 2 * SCALE**2 * np.sum(x[:8] ** 2)
        likelihood = -square / (2 * NOISE**2) - 16 / 2 * np.log(2 * np.pi * NOISE**2)
        prior = -(np.mean(np.sum(weights**2, axis=(1, 2))) + 6 * SCALE**2) / (2 * PRIOR**2)
        assert metrics["log_prior"] == pytest.approx(prior - 3 * np.log(2 * np.pi * PRIOR**2), rel=1e-12)
        assert abs(metrics["log_likelihood"] - likelihood) < 5 * metrics["standard_error"]
        single = 3 * (1 + np.log(2 * np.pi * SCALE**2))
        assert single - 1e-9 <= metrics["entropy"] <= single + np.log(2) + 1e-9
        terms = metrics["log_likelihood"] + metrics["log_prior"] + metrics["entropy"]
        assert metrics["evidence_bound"] == pytest.approx(terms, rel=1e-12)
        assert metrics["evidence_bound"] < evidence
    first, last = (trained.history.evaluations[i].metrics["evidence_bound"] for i in (0, -1))
    assert first < last


@pytest.mark.parametrize("loss", nightly(["cross_entropy", "logistic"], ["cross_entropy"]))
def test_classifiers_have_the_likelihood_of_their_loss(loss: str) -> None:
    x, _ = regression()
    labels = np.arange(10) % 2
    signs = np.where(labels[:, None] == np.arange(2), 1.0, -1.0).astype(np.float32)
    data = ft.data.federated_data(x, labels if loss == "cross_entropy" else signs, CLIENTS)
    algorithm = ensemble(ft.models.mlp(3, 2, widths=(4,)), loss=loss)
    measure = ft.measures.variational_diagnostics(algorithm, data, SCALE, PRIOR, num_samples=400)
    state = algorithm.init(1, 4)
    metrics = measure(algorithm, state)
    params, rng, values = algorithm.params(state), np.random.default_rng(5), []
    for k in range(2):
        flat, tree = ravel_pytree(jax.tree.map(lambda leaf, k=k: leaf[k], params))
        draws = np.asarray(flat) + SCALE * rng.standard_normal((800, flat.size)).astype(np.float32)
        outputs = np.asarray(jax.vmap(lambda w, tree=tree: algorithm.model.apply(tree(w), data.x[:8]))(draws), float)
        if loss == "cross_entropy":
            outputs -= np.log(np.sum(np.exp(outputs), axis=-1, keepdims=True))
            values.append(outputs[:, np.arange(8), labels[:8]].sum(axis=1))
        else:
            values.append(-np.log1p(np.exp(-signs[:8] * outputs)).sum(axis=(1, 2)))
    error = np.hypot(np.std(values) / np.sqrt(np.size(values)), metrics["standard_error"])
    assert abs(metrics["log_likelihood"] - np.mean(values)) < 4 * error < 1
    assert measure(algorithm, state) == metrics  # the same draws at every evaluation


def test_one_model_has_the_entropy_of_one_component() -> None:
    x, y = regression()
    data = ft.data.federated_data(x, y, CLIENTS)
    fed_avg = ft.fed_avg(ft.models.linear(3, 2), ft.schedules.all_clients(4), client_learning_rate=0.1)
    metrics = ft.measures.variational_diagnostics(fed_avg, data, SCALE)(fed_avg, fed_avg.init(0, 4))
    assert metrics["entropy"] == pytest.approx(3 * (1 + np.log(2 * np.pi * SCALE**2)), rel=1e-5)


def test_a_bad_argument_is_named() -> None:
    x, y = regression()
    data = ft.data.federated_data(x, y, CLIENTS)
    good = ensemble(ft.models.linear(3, 2))
    diagnose = ft.measures.variational_diagnostics
    with pytest.raises(ValueError, match="algorithm: got the loss exponential, must be a negative log likelihood: squ"):
        diagnose(ensemble(ft.models.linear(3, 2), loss="exponential"), data, SCALE)
    with pytest.raises(ValueError, match=r"scale: got 0\.0, must be above 0"):
        diagnose(good, data, 0.0)
    with pytest.raises(ValueError, match=r"noise: got -1\.0, must be above 0"):
        diagnose(good, data, SCALE, noise=-1.0)
    with pytest.raises(ValueError, match=r"data: got .*, must be a FederatedData"):
        diagnose(good, (x, y), SCALE)
    with pytest.raises(ValueError, match=r"algorithm: got .*, must be an Algorithm"):
        diagnose(good.model, data, SCALE)
    with pytest.raises(ValueError, match="num_samples: got 1, must be"):
        diagnose(good, data, SCALE, num_samples=1)


def test_the_example_of_the_page_prints_what_it_says() -> None:
    names = run("variational_diagnostics(")
    bounds = [at.metrics["evidence_bound"] for at in names["run"].history.evaluations]
    stated = example("variational_diagnostics(").splitlines()[-1]
    assert all(f"{at}: {bound:.2f}" in stated for at, bound in zip((0, 50, 100, 150, 200), bounds, strict=True))
    assert f"ln p(D) = {names['exact'].log_evidence:.2f}" in stated
    assert max(bounds) < names["exact"].log_evidence
