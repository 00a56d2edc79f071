"""Fig. 8 of Fed-ensemble: of each printer the curve that FedAvg and Fed-ensemble predict, and the data.

The rates are those of ``fed_ensemble.table8``; the curves are of the first seed.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from fedtangent._src import data
from fedtangent._src.engine.run import simulate
from fedtangent._src.experiments.fed_ensemble import table8
from fedtangent._src.experiments.fed_ensemble.table8 import SCALES
from fedtangent._src.experiments.fed_ensemble.versus_fed_avg import NAMES
from fedtangent._src.experiments.lab.results import Outcome, table
from fedtangent._src.experiments.lab.runner import Study, experiment
from fedtangent._src.output.function_plots import UserCurve, curves_by_user

SHOWN = 6  # users at most; there are six printers


def run(study: Study) -> Outcome:
    """Trains both methods at their rates with the first seed, and draws each user's curve."""
    bench, seed = table8.bench_of(study), study.seeds[0]
    loaded, rows = data.load(study.dataset, data_dir=study.data_dir), []
    assert loaded.user_train is not None
    x = loaded.x_train
    grid = np.linspace(x[:, 0].min(), x[:, 0].max(), 120)
    for name, tuned in table8.chosen_rates(bench).items():
        method, shown = bench.methods(seed)[name], []
        algorithm = method.build(0, tuned.config.rate)
        state = simulate(algorithm, method.data, num_rounds=study.settings.num_rounds, seed=seed).state
        for user in np.unique(loaded.user_train)[:SHOWN]:
            own = np.flatnonzero(loaded.user_train == user)
            inputs = np.repeat(x[own[:1]], len(grid), axis=0)
            inputs[:, 0] = grid
            tested = _tested(loaded, int(user))
            curve, at = (np.asarray(algorithm.predict(state, jnp.asarray(i, jnp.float32)).mean)[:, 0]
                         for i in (inputs, loaded.x_test[tested]))  # fmt: skip
            test = loaded.x_test[tested, 0], loaded.y_test[tested, 0]
            shown.append(UserCurve(f"client {user + 1}", grid, curve, (x[own, 0], loaded.y_train[own, 0]), test))
            error = float(np.mean((at - test[1]) ** 2)) if len(at) else None
            rows.append({"method": NAMES[name], "learning_rate": tuned.config.rate, "client": int(user) + 1,
                         "mse": error})  # fmt: skip
        curves_by_user(shown, ("input", "output"), f"{NAMES[name]} on {study.dataset}, seed {seed}",
                       study.figures.path(f"{name}"))  # fmt: skip
    columns = {"method": "{method}", "client": "{client}", "test MSE": "{mse:.2e}"}
    return Outcome((table(f"Fig. 8 on {study.dataset}: error by client, seed {seed}", rows, columns),), rows)


def _tested(loaded: data.Dataset, user: int) -> np.ndarray:
    """Returns the rows of a user's test examples; none if the data set does not name the users of test examples."""
    return np.flatnonzero(np.asarray([] if loaded.user_test is None else loaded.user_test) == user)


ENTRIES = (experiment(__name__, run, SCALES, ("shi2024",), check=table8.check),)
