"""Fig. 8 of Fed-ensemble: of each printer the curve that FedAvg and Fed-ensemble predict, and the data.

The rates are those of ``fed_ensemble.table8``; the curves are of the first seed.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

import fedtangent as ft
from fedtangent._src.experiments import lab
from fedtangent._src.experiments.fed_ensemble import table8
from fedtangent._src.experiments.fed_ensemble.table8 import SCALES
from fedtangent._src.experiments.fed_ensemble.versus_fed_avg import NAMES
from fedtangent._src.experiments.lab import harness
from fedtangent._src.experiments.lab.runner import Study, experiment
from fedtangent._src.output.function_plots import UserCurve, curves_by_user

SHOWN = 6  # users at most; there are six printers


def run(study: Study) -> lab.Outcome:
    """Trains both methods at their rates with the first seed, and draws each user's curve."""
    bench, seed = table8.bench_of(study), study.seeds[0]
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


ENTRIES = (experiment(__name__, run, SCALES, ("shi2024",), check=table8.check),)
