"""NTK-FL's server evolution is gradient descent on the linearised network, taken t steps at once."""

from __future__ import annotations

import functools
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import pytest

from fedtangent._src.federated.ntk_fl import Evolution, Examples, ntk_evolve
from fedtangent._src.federated.ntk_fl.dual import descend_dual, geometric_sum, largest_eigenvalue, spectral_dual
from fedtangent._src.federated.ntk_fl.evolution import network_loss
from fedtangent._src.federated.ntk_fl.tangent import Pool
from fedtangent._src.kernels.empirical import empirical_ntk
from fedtangent._src.models import mlp, rbf_linear
from fedtangent._src.types import DIVERGED, NO_EXAMPLES, OK

from ...drawn import parameters
from ...nightly import nightly
from ..toys import flat
from .descent import jacobian_of, linearised_descent, outputs_of

RATE, STEPS = 0.4, 150
RNG = np.random.default_rng(0)
X = RNG.normal(size=(9, 4))
EVERY_ROW = np.ones(9, bool)


@functools.cache  # one object a network, so that its evolution compiles once
def network(outputs: int, dtype=jnp.float64):
    return mlp(4, outputs, (12,), "relu", dtype=dtype)


@functools.cache
def start_of(model):
    return parameters(model)


def targets(outputs: int) -> np.ndarray:
    return np.random.default_rng(1).normal(size=(9, outputs))


def descend(model, params, y, steps: int, rate: float) -> np.ndarray:
    """The reference: steps of gradient descent in NumPy on the explicit linearisation, loss 1/(2 N C) sum |f - y|^2."""
    j, start = jacobian(model, params), outputs_of(model, params, X).ravel()
    change = np.zeros(j.shape[1])
    for _ in range(steps):
        change = change - rate / y.size * j.T @ (start + j @ change - y.ravel())
    return flat(params) + change


def jacobian(model, params) -> np.ndarray:
    return jacobian_of(model, params, X)


def pooled(x=X, y=None, mask=EVERY_ROW, outputs: int = 3) -> Examples:
    return Examples(*map(jnp.asarray, (x, targets(outputs) if y is None else y, mask)))


def evolve(outputs: int, times=(STEPS,), rate=RATE, examples=None, dtype=jnp.float64, validation=None, **modes):
    model = network(outputs, dtype)
    params = start_of(model)
    examples = pooled(outputs=outputs) if examples is None else examples
    new, info = ntk_evolve(model, params, examples, rate, Evolution(times, **modes), validation)
    return model, params, np.asarray(examples.y), new, info


EXACT = [(3, "exact", "eigh"), (3, "exact", "iterate"), (3, "exact", "chebyshev"), (1, "exact", "eigh")]
MODES = list(itertools.product(["averaged", "exact"], ["eigh", "iterate"]))
HALF = [("averaged", "eigh"), ("exact", "iterate")]  # of every kernel and every method one, by day
ONE_OUTPUT = [(1, "averaged", "eigh"), (1, "averaged", "iterate"), (1, "averaged", "chebyshev")]


def test_padding_counts_neither_in_the_loss_nor_in_the_share_of_wrong_examples():
    model = network(3)
    params, rng = parameters(model), np.random.default_rng(8)
    x, y = rng.normal(size=(6, *pooled().x.shape[1:])), np.eye(3)[rng.integers(0, 3, 6)]
    outputs = np.asarray(model.apply(params, jnp.asarray(x)))
    y[4:] = np.eye(3)[(outputs[4:].argmax(axis=1) + 1) % 3]  # the padding is all wrong
    held = Pool(jnp.asarray(x), jnp.asarray(y), jnp.asarray(np.arange(6)[:, None] < 4, float), jnp.float64(4))
    wrong = np.mean(outputs[:4].argmax(axis=1) != y[:4].argmax(axis=1))
    expected = {"accuracy": wrong, "loss": np.mean((outputs[:4] - y[:4]) ** 2) / 2}
    for criterion, value in expected.items():
        found = jax.jit(network_loss, static_argnums=(0, 3))(model, params, held, Evolution((1,), criterion=criterion))
        assert float(found) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(
    ("outputs", "kernel", "method"), nightly(EXACT + ONE_OUTPUT, [*EXACT[:3], (1, "averaged", "eigh")])
)
def test_weights_equal_gradient_descent_on_the_linearised_network(outputs, kernel, method):
    model, params, y, new, info = evolve(outputs, kernel=kernel, method=method)
    expected = descend(model, params, y, STEPS, RATE)
    size = np.abs(expected - flat(params)).max()
    assert size > 0.1
    np.testing.assert_allclose(flat(new), expected, rtol=0, atol=1e-8 * size)
    assert int(info["time"]) == STEPS and int(info["status"]) == OK
    assert float(info["kernel_error"]) == 0 and float(info["function_gap"]) < 1e-12
    # negative control: the paper's step eta / N with this kernel moves C times too far
    if outputs > 1:
        wrong = evolve(outputs, rate=RATE * outputs, kernel=kernel, method=method)[3]
        assert np.abs(flat(wrong) - expected).max() > 0.05 * size
    # negative control: one step more
    assert np.abs(descend(model, params, y, STEPS + 1, RATE) - expected).max() > 1e-6 * size


@pytest.mark.parametrize("method", nightly(["eigh", "iterate"], ["eigh"]))
def test_averaged_kernel_with_several_outputs_is_an_approximation_and_says_so(method):
    model, params, y, new, info = evolve(3, kernel="averaged", method=method)
    expected = descend(model, params, y, STEPS, RATE)
    assert np.abs(flat(new) - expected).max() > 0.05 * np.abs(expected - flat(params)).max()
    assert float(info["kernel_error"]) > 0.05 and float(info["function_gap"]) > 0.05


def test_averaged_kernel_follows_the_paper_and_reports_its_errors_exactly():
    """Weights by equations (9b) and (10) with H of (6), in NumPy, with the consistent step; both reported errors."""
    model, params, y, new, info = evolve(3, kernel="averaged")
    j, start = jacobian(model, params), outputs_of(model, params, X)
    theta = (j @ j.T).reshape(9, 3, 9, 3)
    h = np.einsum("ikjk->ij", theta) / 3
    step = RATE / y.size
    dual, left = np.zeros_like(y), y - start
    for _ in range(STEPS):
        dual, left = dual + step * left, left - step * h @ left
    np.testing.assert_allclose(flat(new), flat(params) + j.T @ dual.ravel(), rtol=0, atol=1e-10)
    tensor = np.einsum("ij,km->ikjm", h, np.eye(3))
    error = np.linalg.norm(theta - tensor) / np.linalg.norm(theta)
    np.testing.assert_allclose(float(info["kernel_error"]), error, rtol=1e-10)
    moved = (j @ (j.T @ dual.ravel())).reshape(9, 3)
    np.testing.assert_allclose(
        float(info["function_gap"]), np.linalg.norm(moved - h @ dual) / np.linalg.norm(h @ dual), rtol=1e-10
    )
    np.testing.assert_allclose(float(info["lambda_max"]), np.linalg.eigvalsh(h)[-1], rtol=1e-12)


def test_probes_estimate_the_kernel_error():
    """Above 1024 rows the error is estimated: within 4 standard errors of the mean of 16 probes."""
    model, n = mlp(4, 4, (12,), "relu", dtype=jnp.float64), 260
    params, x = start_of(model), np.random.default_rng(2).normal(size=(n, 4))
    info = ntk_evolve(model, params, pooled(x, np.zeros((n, 4)), np.ones(n, bool)), 0.1, Evolution((5,)))[1]
    theta = np.asarray(jax.jit(lambda p: empirical_ntk(model, p, x, trace=False))(params))
    h = np.einsum("ikjk->ij", theta) / 4
    difference = (theta - np.einsum("ij,km->ikjm", h, np.eye(4))).reshape(4 * n, 4 * n)
    exact, rest = np.sum(difference**2), 4 * np.sum(h**2)
    signs = np.random.default_rng(3).choice([-1.0, 1.0], size=(4 * n, 2000))
    spread = np.std(np.sum((difference @ signs) ** 2, axis=0)) / 16**0.5
    reported = float(info["kernel_error"]) ** 2
    estimate = reported * rest / (1 - reported)
    assert abs(estimate - exact) < 4 * spread
    assert 0 < spread < exact / 4  # so that an estimate of zero, or twice the truth, fails


def test_linearised_descent_takes_the_same_steps():
    model, y = network(3), targets(3)
    params = start_of(model)
    taken = linearised_descent(model, params, jnp.asarray(X), jnp.asarray(y), 40, RATE)
    np.testing.assert_allclose(flat(taken), descend(model, params, y, 40, RATE), rtol=0, atol=1e-11)


@pytest.mark.parametrize(("kernel", "method"), nightly(MODES, HALF))
def test_padding_has_no_effect(kernel, method):
    """Rows of padding may hold anything, NaN too, and lie anywhere."""
    keep = np.sort(np.random.default_rng(4).permutation(14)[:9])
    x, y, mask = np.full((14, 4), np.nan), np.full((14, 3), np.nan), np.zeros(14, bool)
    x[keep], y[keep], mask[keep] = X, targets(3), True
    modes = {"kernel": kernel, "method": method}
    plain, padded = evolve(3, **modes), evolve(3, examples=pooled(x, y, mask), **modes)
    np.testing.assert_allclose(flat(padded[3]), flat(plain[3]), rtol=0, atol=1e-11)
    for name, value in plain[4].items():
        np.testing.assert_allclose(padded[4][name], value, rtol=1e-9, atol=1e-12, err_msg=name)
    x[keep[0]] += 1  # negative control: a real row counts
    assert np.abs(flat(evolve(3, examples=pooled(x, y, mask), **modes)[3]) - flat(plain[3])).max() > 1e-3


def test_the_time_with_the_smallest_loss_of_the_real_network_is_kept():
    times = (1, 5, 20, 80, 300, 1000)
    model, params, y, new, info = evolve(3, times, 1.0, kernel="exact", method="eigh")
    losses, unflatten = [], jax.flatten_util.ravel_pytree(params)[1]
    for t in times:
        at_t = unflatten(jnp.asarray(descend(model, params, y, t, 1.0)))
        losses.append(np.mean((outputs_of(model, at_t, X) - y) ** 2) / 2)
    np.testing.assert_allclose(info["losses"], losses, rtol=1e-9)
    best = int(np.argmin(losses))
    assert 0 < best < len(times) - 1, losses  # neither the first nor the last by accident
    assert int(info["time"]) == times[best]
    np.testing.assert_allclose(np.mean((outputs_of(model, new, X) - y) ** 2) / 2, losses[best], rtol=1e-12)
    before = np.mean((outputs_of(model, params, X) - y) ** 2) / 2
    np.testing.assert_allclose(float(info["loss_before"]), before, rtol=1e-12)


@pytest.mark.parametrize(("kernel", "method"), nightly(MODES, HALF))
def test_divergence_is_masked_and_reported(kernel, method):
    modes = {"times": (1, 2000), "kernel": kernel, "method": method, "unstable": "allow"}
    stable = float(evolve(3, **modes)[4]["stable_learning_rate"])
    _, params, _, new, info = evolve(3, rate=100 * stable, **modes)
    assert np.isfinite(info["losses"][0]) and np.isinf(info["losses"][1])
    assert int(info["time"]) == 1 and int(info["status"]) == OK
    _, params, _, new, info = evolve(3, rate=1e200 * stable, **modes)
    assert int(info["status"]) == DIVERGED and int(info["time"]) == 0
    np.testing.assert_array_equal(flat(new), flat(params))


@pytest.mark.parametrize("method", nightly(["eigh", "iterate"], ["eigh"]))
def test_the_stable_learning_rate_separates_decay_from_divergence(method):
    model, params, y, _, info = evolve(3, kernel="exact", method=method)
    edge = float(info["stable_learning_rate"])
    j = jacobian(model, params)
    np.testing.assert_allclose(edge, 2 * y.size / np.linalg.eigvalsh(j @ j.T)[-1], rtol=1e-10)
    start = outputs_of(model, params, X).ravel() - y.ravel()

    def residual_after(rate: float) -> float:
        weights = descend(model, params, y, 3000, rate) - flat(params)
        return float(np.linalg.norm(start + j @ weights))

    assert residual_after(0.99 * edge) < np.linalg.norm(start) < residual_after(1.01 * edge)


def test_nothing_to_learn_from_keeps_the_parameters():
    _, params, _, new, info = evolve(3, examples=pooled(mask=np.zeros(9, bool)))
    assert int(info["status"]) == NO_EXAMPLES and int(info["time"]) == 0
    np.testing.assert_array_equal(flat(new), flat(params))
    assert float(info["kernel_error"]) == 0 and float(info["function_gap"]) == 0  # and not NaN, of no kernel at all


def test_float32_parameters_stay_float32_and_follow_the_float64_evolution():
    _, params, y, new, _ = evolve(3, dtype=jnp.float32, kernel="exact")
    assert {leaf.dtype for leaf in jax.tree.leaves(new)} == {jnp.dtype(jnp.float32)}
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), params)
    expected = descend(network(3), wide, y, STEPS, RATE)
    np.testing.assert_allclose(flat(new), expected, rtol=2.0**-24, atol=0)  # one rounding to float32, no more


def test_a_linear_model_evolves_exactly():
    model = rbf_linear(output_size=2, dtype=jnp.float64)
    params, x = start_of(model), np.linspace(-1, 1, 9)[:, None]
    y = np.concatenate([np.sin(2 * np.pi * x), np.cos(2 * np.pi * x)], axis=1)
    averaged, info = ntk_evolve(model, params, pooled(x, y), 0.3, Evolution((50,), "averaged"))
    exact, _ = ntk_evolve(model, params, pooled(x, y), 0.3, Evolution((50,), "exact"))
    np.testing.assert_allclose(flat(averaged), flat(exact), rtol=0, atol=1e-12)  # Theta is H (x) I here
    assert float(info["kernel_error"]) < 1e-12 and float(info["function_gap"]) < 1e-12
    taken = linearised_descent(model, params, jnp.asarray(x), jnp.asarray(y), 50, 0.3)
    np.testing.assert_allclose(flat(exact), flat(taken), rtol=0, atol=1e-12)


def test_jit_vmap_and_a_traced_learning_rate():
    model, exact = network(3), Evolution((STEPS,), "exact", "eigh")
    params = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(parameters(model, seed) for seed in (0, 1)))

    given = pooled()

    @jax.jit
    def both(params, rate):
        return jax.vmap(lambda p: ntk_evolve(model, p, given, rate, exact))(params)

    new, info = both(params, RATE)
    assert info["losses"].shape == (2, 1)
    for k in range(2):
        one = jax.tree.map(lambda leaf, k=k: leaf[k], params)
        alone = ntk_evolve(model, one, given, RATE, exact)[0]
        np.testing.assert_allclose(flat(jax.tree.map(lambda leaf, k=k: leaf[k], new)), flat(alone), atol=1e-11)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"times": ()}, r"times: got \(\)"),
        ({"times": (0, 5)}, r"times: got \(0, 5\), must be one or more increasing positive whole numbers"),
        ({"times": (5, 5)}, "increasing"),
        ({"times": (1.5,)}, "whole numbers"),
        ({"times": (5, float("nan"))}, r"times: got \(5, nan\)"),
        ({"times": (5, float("inf"))}, r"times: got \(5, inf\)"),
        ({"times": (5, 2**31)}, r"times: got \(5, 2147483648\), must be .* below 2\*\*31"),
        ({"times": (True,)}, "times: got"),
        ({"times": 5}, "times: got 5, must be one or more"),
        ({"times": ("5",)}, "times: got"),
        ({"kernel": "full"}, "kernel: .*averaged, exact"),
        ({"method": "svd"}, "method: .*auto, eigh, chebyshev, iterate"),
        ({"criterion": "mse"}, "criterion: .*loss, accuracy"),
        ({"unstable": "warn"}, "unstable: .*stop, clip, allow"),
        ({"loss": "hinge"}, "loss: .*squared_error, cross_entropy"),
        ({"patience": 0}, "patience: "),
        ({"kernel_bytes": -1}, "kernel_bytes: "),
        ({"loss": "cross_entropy", "method": "eigh"}, "method: got 'eigh', allowed are auto, iterate, multirate with"),
        ({"loss": "cross_entropy", "method": "chebyshev"}, "method: got 'chebyshev', allowed are auto"),
        (
            {"method": "multirate"},
            "method: got 'multirate', allowed are auto, eigh, chebyshev, iterate with the loss sq",
        ),
    ],
)
def test_options_that_are_not_allowed(options, message):
    with pytest.raises(ValueError, match=message):
        Evolution(**options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rate": 0.0}, "learning_rate: got 0.0, must be above 0 and finite"),
        ({"rate": -1.0}, "learning_rate: got -1.0"),
        ({"rate": float("inf")}, "learning_rate: got inf"),
        ({"rate": "fast"}, "learning_rate: got 'fast', must be a number"),
        ({"rate": np.ones(1)}, r"learning_rate: got an array of shape \(1,\)"),
        ({"kernel_bytes": 100, "method": "eigh"}, r"method: got 'eigh', whose kernel \[9, 9\] takes 648 bytes"),
        ({"validation": np.ones((5, 3))}, "validation: got .*, must be None or a tuple of two"),
        ({"validation": (np.ones((5, 4)), np.ones((5, 2)))}, r"validation: got x \(5, 4\) and y \(5, 2\)"),
        ({"validation": (np.ones((5, 3)), np.ones((5, 3)))}, r"validation: got x \(5, 3\)"),
        ({"examples": (X[:0], np.ones((0, 3)), np.ones(0, bool))}, r"x: got shape \(0, .*, must hold at least one"),
        ({"examples": (X, np.zeros((9, 2)), EVERY_ROW)}, r"y and mask: got \(9, 2\) and \(9,\)"),
        ({"examples": (X, np.zeros((9, 3)), np.ones(8, bool))}, r"y and mask: got \(9, 3\) and \(8,\)"),
    ],
)
def test_examples_that_cannot_be_evolved(arguments, message):
    if "examples" in arguments:
        arguments = {"examples": pooled(*arguments["examples"])}
    with pytest.raises(ValueError, match=message):
        evolve(3, **arguments)


def test_without_64_bit_mode_the_error_says_what_to_call():
    with (
        jax.enable_x64(False),
        pytest.raises(ValueError, match=r"dtype: got float32, .*enable_x64\(\)"),
    ):
        evolve(3, dtype=jnp.float32)


def test_dual_of_both_methods_and_of_the_closed_form():
    basis = np.linalg.qr(RNG.normal(size=(6, 6)))[0]
    eigenvalues = np.array([0.0, 1e-14, 1e-3, 0.4, 1.0, 1.7])
    kernel, residual, times = basis * eigenvalues @ basis.T, RNG.normal(size=(6, 2)), (1, 7, 40)
    start = jnp.asarray(residual)

    @jax.jit
    def both(kernel: jax.Array) -> tuple[jax.Array, jax.Array]:
        by_steps = descend_dual(lambda g: kernel @ g, lambda moved: start - moved, start, 1.0, times)
        return spectral_dual(*jnp.linalg.eigh(kernel), start, 1.0, times), by_steps

    by_eigh, by_steps = both(jnp.asarray(kernel))
    np.testing.assert_allclose(by_eigh, by_steps, rtol=0, atol=1e-11)
    for dual, t in zip(by_eigh, times, strict=True):  # the function's evolution: y - f_t = (I - s K)^t (y - f_0)
        left = np.linalg.matrix_power(np.eye(6) - kernel, t) @ residual
        np.testing.assert_allclose(residual - kernel @ dual, left, rtol=0, atol=1e-12)


def test_geometric_sum_at_every_scale():
    z = np.array([0.0, 1e-300, 1e-17, 1e-9, 1e-3, 0.3, 0.499, 0.5, 0.9, 1.0, 1.5, 2.0, 2.1])
    for t in (1, 2, 9, 200):
        expected = [float(np.sum((1 - np.longdouble(v)) ** np.arange(t))) for v in z]
        np.testing.assert_allclose(geometric_sum(jnp.asarray(z), t), expected, rtol=1e-12, atol=1e-14)


def test_largest_eigenvalue():
    basis = np.linalg.qr(RNG.normal(size=(60, 60)))[0]
    eigenvalues = np.concatenate([np.linspace(0, 1, 58), [1.9, 2.0]])
    matrix = basis * eigenvalues @ basis.T
    start = jnp.asarray(RNG.normal(size=(60, 1)))
    largest = jax.jit(lambda start: largest_eigenvalue(lambda v: matrix @ v, start))
    np.testing.assert_allclose(largest(start), 2.0, rtol=1e-5)
    assert float(largest(jnp.zeros((60, 1)))) == 0
    small = jnp.asarray([[2.0, 1.0], [1.0, 2.0]])  # Krylov space exhausted after one or two steps
    np.testing.assert_allclose(largest_eigenvalue(lambda v: small @ v, jnp.ones((2, 1))), 3.0, rtol=1e-12)


ROUND = """
import pathlib, resource, sys
import jax, jax.numpy as jnp
jax.config.update("jax_enable_x64", True)
from fedtangent._src.federated.ntk_fl import Evolution, Examples, ntk_evolve
from fedtangent._src.models import mlp
model, n = mlp(784, 10, (100,)), 20 * 200
params = model.init(jax.random.key(0))
x = jax.random.normal(jax.random.key(1), (n, 784), jnp.float32)
y = jax.nn.one_hot(jnp.arange(n) % 10, 10)
times = (100, 2000) if sys.argv[1] == "averaged" else (10, 20)
new, info = ntk_evolve(model, params, Examples(x, y, jnp.ones(n, bool)), 1.0, Evolution(times, sys.argv[1]))
assert int(info["status"]) == 0
status = pathlib.Path("/proc/self/status")  # Linux carries ru_maxrss over from the parent process
if status.exists():
    print(next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM")) * 1024)
else:
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["averaged", "exact"])
def test_a_round_at_the_papers_size_stays_under_two_gigabytes(kernel):
    """20 clients x 200 examples, MLP 784-100-10: the Jacobian alone would be 25 GB in float64."""
    source = str(Path(__file__).parents[3] / "src")
    environment = {**os.environ, "PYTHONPATH": source, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", ROUND, kernel], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 2e9


@pytest.mark.slow
def test_the_benchmark_runs_and_its_two_versions_agree(tmp_path):
    script = Path(__file__).parents[3] / "benchmarks" / "ntk_round.py"
    environment = {**os.environ, "PYTHONPATH": str(script.parents[1] / "src")}
    sizes = ["--examples", "20", "--paper-examples", "30", "--times", "5", "50", "--repeats", "1"]
    command = [sys.executable, str(script), *sizes, "--output", str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr  # it fails where the weights differ by 1e-8
    by_products, *rows = json.loads((tmp_path / "ntk_round.json").read_text())["rows"]
    assert by_products["loss"] == "cross_entropy" and 0 <= by_products["relative_distance"] < 1e-8
    assert [row["kernel"] for row in rows] == ["averaged", "exact"]
    assert all(0 <= row["largest_difference"] < 1e-8 and row["ratio"] > 0 for row in rows)
