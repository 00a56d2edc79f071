"""Runs of a few digits that are put beside theory, by the options of the command line."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from fedtangent._src.comparison.comparing import comparison_of
from fedtangent._src.comparison.forecast import Forecasting, Plan, plan_of
from fedtangent._src.comparison.settings import Setting
from fedtangent._src.comparison.side_by_side import Comparison, run
from fedtangent._src.engine.building import Built, build
from fedtangent._src.engine.description import describe
from fedtangent._src.engine.loop import Evaluation
from fedtangent._src.types import Model

SMALL: dict[str, Any] = {
    "dataset": "digits", "num_train": 40, "num_test": 8, "partition": "quantity_skew", "num_clients": 5, "alpha": 2.0,
    "num_rounds": 5, "client_learning_rate": 0.3,
}  # fmt: skip
MINIBATCHES = {"batch_size": 4, "local_epochs": 2}
BESIDE: dict[str, Any] = {"compared": (8, 16, 32), "draws": 5, "every": 2}


def remembered(model: Model) -> Model:
    """The model, each of whose other widths is one object too, so that runs share their programs."""
    return model if model.at_width is None else model._replace(at_width=functools.cache(model.at_width))


MODELS: dict[tuple[str, ...], Model] = {}  # by their descriptions: runs of one model share its programs


def built(model_options: dict[str, Any] | None = None, **options: Any) -> Built:
    """The described run; options of its model that have the name of another stand apart."""
    described = describe(**options)
    changed = dataclasses.replace(described.model.options, **(model_options or {}))
    found = build(described._replace(model=described.model._replace(options=changed)))
    key = found.model.name, repr(found.description.model), found.description.dataset.entry.name
    if key not in MODELS:
        MODELS[key] = remembered(found.model)
    return found._replace(model=MODELS[key], algorithm=found.algorithm.on(MODELS[key]))


def setting_of(
    compared: tuple[int, ...] = (8, 16, 32), draws: int = 5, every: int | None = None, **options: Any
) -> Setting:
    """The setting of its comparison at the widths ``compared``."""
    run_ = built(**options)
    of_run = run_.description.run
    return comparison_of(
        run_.algorithm, run_.examples, of_run.num_rounds, of_run.seed, Evaluation(every), compared, draws
    )


def beside(**options: Any) -> Comparison:
    """Its comparison."""
    return run(setting_of(**options))


def planned(draws: int = 4, target: float | None = None, every: int = 1, rates: bool = True, **options: Any) -> Plan:
    """The plan of its forecast."""
    run_ = built(**options)
    of_run, forecasting = run_.description.run, Forecasting(target, draws, rates)
    return plan_of(run_.algorithm, run_.examples, of_run.num_rounds, of_run.seed, Evaluation(every), forecasting)
