"""Table VIII of Fed-ensemble: acceleration of six 3-D printers by speed, tested at a speed not trained on.

Each printer is a client. FE-2024 gives neither the network nor how it is trained: here it is a multilayer perceptron,
trained by all clients in every round, with the learning rate that is best at another speed, which tuning leaves out.
Fig. 8 (``fig8``) draws what FedAvg and Fed-ensemble predict at the same rates with the first seed.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from functools import partial

import jax.numpy as jnp
import numpy as np

import fedtangent as ft
from fedtangent._src.data.federated import max_client_size
from fedtangent._src.experiments import lab
from fedtangent._src.experiments.fed_ensemble.versus_fed_avg import NAMES, both_methods
from fedtangent._src.experiments.lab import harness
from fedtangent._src.experiments.lab.harness import Bench, EvaluationSets, Method
from fedtangent._src.experiments.lab.runner import Study, by_scale, experiment, with_changes, within
from fedtangent._src.experiments.lab.trials import EvaluationSet, Trial
from fedtangent._src.output.function_plots import UserCurve, curves_by_user
from fedtangent._src.output.run_plots import curves
from fedtangent._src.types import Algorithm, Array, PyTree

PUBLISHED = {"fed_avg": "7.6e-3 +- 0.7e-3", "fed_ensemble": "5.5e-3 +- 0.9e-3"}
FIGURE_8 = "Fig. 8 of Fed-ensemble: each printer's data, with the curves that FedAvg and Fed-ensemble predict."
LAST = 3  # rounds over which an error is averaged
SHOWN = 6  # users in fig. 8 at most; there are six printers
DECISIVE = "num_models local_epochs batch_size width hidden_layers decay"


@dataclass(frozen=True)
class PrinterSettings:
    """Settings of FedAvg and Fed-ensemble in FE-2024's Table VIII; the paper gives none of them."""

    num_models: int = within(5, least=2)
    num_rounds: int = within(200, least=LAST)
    local_epochs: int = 5
    batch_size: int = 16
    width: int = 64
    hidden_layers: int = within(2, most=100)
    learning_rates: tuple[float, ...] = within((0.01, 0.03, 0.1, 0.3), above=0)
    decay: float = within(0.99, above=0, at_most=1)
    tuning_rounds: int = within(100, least=LAST)
    tuning_seed: int = within(1000, least=0)


def _divide(study: Study, seed: int) -> Trial:
    """Builds the training data with one client per printer, and the validation and test sets.

    With the tuning seed the validation examples are left out of the training data; with other seeds they remain in it.
    """
    # The validation examples are the same for every seed: one block of each printer's examples in order of the first
    # input, which is one speed.
    loaded = ft.data.load(study.dataset, data_dir=study.data_dir)
    assert loaded.user_train is not None
    x, y = (np.asarray(a, np.float32) for a in (loaded.x_train, loaded.y_train))
    held_out = _left_out(x, loaded.user_train)
    rows = ~held_out if seed == study.settings.tuning_seed else np.ones(len(x), bool)
    clients = ft.partition.by_user(loaded.user_train[rows])
    data = ft.data.federated_data(x[rows], y[rows], clients, jnp.float32)
    sets = {"validation": (x[held_out], y[held_out]), "test": (loaded.x_test, loaded.y_test)}
    splits = {name: EvaluationSet(*(jnp.asarray(a, jnp.float32) for a in pair)) for name, pair in sets.items()}
    return Trial(seed, data, splits, 0)


def _left_out(x: np.ndarray, user: np.ndarray) -> np.ndarray:
    """Selects the validation examples; returns a mask [n].

    Each user's examples are sorted by their first input and cut into eleven blocks, of which the fifth is selected. A
    user with n < 11 examples has n blocks, and block ``n // 2`` is selected, at least the first.
    """
    is_left_out = np.zeros(len(x), bool)
    for rows in (np.flatnonzero(user == u) for u in np.unique(user)):
        blocks = np.array_split(rows[np.argsort(x[rows, 0], kind="stable")], min(11, len(rows)))
        is_left_out[blocks[len(blocks) // 2 - 1]] = True
    return is_left_out


def methods(settings: PrinterSettings, trial: Trial) -> dict[str, Method]:
    """Builds FedAvg and Fed-ensemble on one seed's data, with a multilayer perceptron; returns them by name."""
    sizes, widths = (trial.data.x.shape[1:], trial.data.y.shape[1]), (settings.width,) * settings.hidden_layers
    model = ft.models.build("mlp", *sizes, widths=widths, parameterization="standard")
    return both_methods(settings, trial, model, "squared_error")


def _measure(algorithm: Algorithm, state: PyTree, splits: EvaluationSets) -> dict[str, Array]:
    """Computes the mean squared error, "test.mse" for example, and its negative, "test.fit", on each split.

    Rates are chosen by the negative on the validation split.
    """
    metrics = dict[str, Array]()
    for name, (x, y) in splits.items():
        error = jnp.mean((algorithm.predict(state, x).mean - y) ** 2)
        metrics |= {f"{name}.mse": error, f"{name}.fit": -error}
    return metrics


def check(study: Study) -> None:
    """Raises ``ValueError`` for settings that FedAvg or Fed-ensemble refuses at one of the learning rates.

    It also does so if the tuning seed is one of the seeds. The data set of the first seed is loaded.
    """
    settings = study.settings
    harness.check_tuning_seed(study)
    harness.build_all(methods(settings, _divide(study, study.seeds[0])))


def _bench(study: Study) -> Bench:
    """Builds the ``Bench``, which runs FedAvg and Fed-ensemble on all seeds."""
    settings, of_seed = study.settings, functools.cache(partial(_divide, study))
    largest = max(max_client_size(of_seed(seed).data) for seed in (*study.seeds, settings.tuning_seed))
    depends_on, of_trial = harness.decisive(settings, DECISIVE), partial(methods, settings)
    return Bench(study, of_seed, of_trial, depends_on, _measure, 1, largest, "validation.fit")


def run(study: Study) -> lab.Outcome:
    """Tunes FedAvg and Fed-ensemble, trains with every seed, and compares test errors (FE-2024, Table VIII).

    Test errors are mean squared errors, averaged over the last three evaluations.
    """
    bench, is_published = _bench(study), study.dataset == "printers"
    harness.plan(bench)
    tuned = harness.tune_all(bench)
    runs = harness.repeat_all(bench, tuned)
    errors = {
        name: np.array([r.metrics["test.mse"][-LAST:].mean(dtype=np.float64) for r in runs[name]]) for name in NAMES
    }
    rows = [
        {
            "method": NAMES[name],
            "learning_rate": tuned[name].config.rate,
            "mse": float(v.mean()),
            "deviation": float(v.std(ddof=1)),
            "by_seed": [float(error) for error in v],
            "published": PUBLISHED[name] if is_published else None,
        }
        for name, v in errors.items()
    ]
    columns = "method: {method} | rate: {learning_rate:g} | test MSE: {mse:.2e} | deviation: {deviation:.1e}"
    columns += " | published: {published}" if is_published else ""
    sheet = lab.table(f"Table VIII on {study.dataset}: {len(study.seeds)} seeds", rows, columns)
    lines = {NAMES[name]: np.stack([r.metrics["test.mse"] for r in records]) for name, records in runs.items()}
    title = f"{study.dataset}, {len(study.seeds)} seeds"
    curves({"test error": lines}, harness.evaluated_rounds(runs), title, study.figures.path("by_round"))
    difference = lab.interval(errors["fed_ensemble"] - errors["fed_avg"])
    claim = difference.claim_below("Fed-ensemble's test error is below FedAvg's", "{:+.2e}")
    remarks = harness.edges({NAMES[name]: choice for name, choice in tuned.items()}, ", ")
    return lab.Outcome((sheet,), rows, (claim,), remarks=remarks)


def run_8(study: Study) -> lab.Outcome:
    """Trains FedAvg and Fed-ensemble at tuned rates with the first seed; plots up to six users' predictions.

    A user's curve is over the first input; the other inputs are taken from the user's first example.
    """
    bench, seed = _bench(study), study.seeds[0]
    loaded, rows = ft.data.load(study.dataset, data_dir=study.data_dir), []
    assert loaded.user_train is not None
    x, owners = loaded.x_train, np.asarray([] if loaded.user_test is None else loaded.user_test)
    grid = np.linspace(x[:, 0].min(), x[:, 0].max(), 120)
    harness.plan(bench, repetitions=0)
    for name, tuned in harness.tune_all(bench).items():
        method, users = bench.methods(seed)[name], []
        algorithm = method.build(0, tuned.config.rate)
        state = ft.simulate(algorithm, method.data, num_rounds=study.settings.num_rounds, seed=seed).state
        for user in np.unique(loaded.user_train)[:SHOWN]:
            of_user, tested = np.flatnonzero(loaded.user_train == user), np.flatnonzero(owners == user)
            inputs = np.repeat(x[of_user[:1]], len(grid), axis=0)
            inputs[:, 0] = grid
            curve, predicted = (
                np.asarray(algorithm.predict(state, jnp.asarray(points, jnp.float32)).mean)[:, 0]
                for points in (inputs, loaded.x_test[tested])
            )
            train = x[of_user, 0], loaded.y_train[of_user, 0]
            test = loaded.x_test[tested, 0], loaded.y_test[tested, 0]
            users.append(UserCurve(f"client {user + 1}", grid, curve, train, test))
            error = float(np.mean((predicted - test[1]) ** 2)) if len(predicted) else None
            row = {"method": NAMES[name], "learning_rate": tuned.config.rate, "client": int(user) + 1, "mse": error}
            rows.append(row)
        title = f"{NAMES[name]} on {study.dataset}, seed {seed}"
        curves_by_user(users, ("input", "output"), title, study.figures.path(f"{name}"))
    columns = "method: {method} | client: {client} | test MSE: {mse:.2e}"
    return lab.Outcome((lab.table(f"Fig. 8 on {study.dataset}: error by client, seed {seed}", rows, columns),), rows)


SMOKE = with_changes(
    PrinterSettings(), "num_rounds=20 tuning_rounds=10 local_epochs=2 width=32 learning_rates=0.03,0.1"
)
SCALES = {"sine": by_scale(SMOKE, PrinterSettings()), "printers": by_scale(SMOKE, PrinterSettings())}
ENTRIES = (
    experiment(__name__, run, SCALES, ("shi2024",), check=check, least_seeds=2),
    experiment(__name__, run_8, SCALES, ("shi2024",), check=check, part=("fig8", FIGURE_8)),
)
