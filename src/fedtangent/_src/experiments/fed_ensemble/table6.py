"""Table VI of Fed-ensemble: accuracy of one, two and five models, i.i.d. and two classes a client (CIFAR-10)."""

from __future__ import annotations

from functools import partial

from fedtangent._src.experiments.fed_ensemble import classifiers, table5
from fedtangent._src.experiments.fed_ensemble.classifiers import ClassifierSettings
from fedtangent._src.experiments.fed_ensemble.table2 import image_scales
from fedtangent._src.experiments.lab.runner import experiment, with_changes

SCALES = image_scales(with_changes(ClassifierSettings(), "methods=fed_ensemble num_models=1,2,5"))
RUN = partial(table5.run, "Table VI")
ENTRIES = (experiment(__name__, RUN, SCALES, ("shi2024",), check=classifiers.check, least_seeds=2),)
