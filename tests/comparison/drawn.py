"""Theorem 2's comparison with networks that are drawn from the limit itself: no training."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from fedtangent._src.comparison.predicted import ModelLaw, Predicted
from fedtangent._src.comparison.settings import Setting
from fedtangent._src.comparison.theorems.fed_ensemble import limit as theorem2
from fedtangent._src.theory.fed_ensemble.limit import gp_limit


def drawn_for(setting: Setting) -> theorem2.Theorem2:
    """K models of every width of ``setting``, drawn from the limit; before training, from the prior."""
    blocks = setting.blocks()
    limit = gp_limit(blocks, setting.problem.y_train)
    models = setting.num_models
    law = ModelLaw(*(np.broadcast_to(part, (models, *part.shape)) for part in limit[:2]))
    rng = np.random.default_rng(setting.seed)

    def draw(cov: np.ndarray) -> np.ndarray:
        eigenvalues, vectors = np.linalg.eigh(cov)
        return (vectors * np.sqrt(np.maximum(eigenvalues, 0))) @ rng.standard_normal(law.mean.shape)

    assert blocks.nngp_test is not None
    trained = []
    for width in setting.size.widths:
        samples = law.mean + draw(limit.cov)
        off = draw(limit.cov) / np.sqrt(width)  # of a network about its own flow
        trained.append(theorem2.TrainedEnsemble(width, draw(blocks.nngp_test), samples + off, samples, 8, 8))
    gaps = theorem2.LawDistance(0.001, 0.002), theorem2.LawDistance(0.3, 0.4)
    theory = Predicted(setting, None, blocks, None, (law,), limit)  # type: ignore[arg-type]
    moved = float(np.linalg.norm(limit.mean)) * 2
    return theorem2.Theorem2(theory, *gaps, law, "Theorem 2's limit", moved, tuple(trained))


@functools.cache
def drawn(outputs: int = 8, seed: int = 0) -> theorem2.Theorem2:
    """Eighty models of the sine at widths 256 and 1024, with so many outputs that learn the same."""
    setting = theorem2._sine(seed, 80, (256, 1024), 100)
    problem = setting.problem
    targets = np.repeat(problem.y_train, outputs, axis=1), np.repeat(problem.y_test, outputs, axis=1)
    more = dataclasses.replace(problem, y_train=targets[0], y_test=targets[1])
    return drawn_for(dataclasses.replace(setting, problem=more))
