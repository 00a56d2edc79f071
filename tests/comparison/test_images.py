"""Networks of images beside their infinite width: ``compare`` on digits as they are, 8 x 8 x 1."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import fedtangent as ft
from fedtangent._src.comparison.side_by_side import Comparison
from fedtangent._src.types import Model

SHAPE, C, WIDTHS = (8, 8, 1), 3, (16, 64, 256)
NETWORKS: dict[str, tuple[Model, float]] = {  # with a rate at which they learn
    "convolutions": (ft.models.ntk_cnn(SHAPE, C), 1.0),
    "residual": (ft.models.ntk_resnet(SHAPE, C), 0.2),
    "attention": (ft.models.ntk_transformer(SHAPE, C), 0.1),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_networks_approach_their_infinite_width(name: str) -> None:
    model, rate = NETWORKS[name]
    digits: Any = ft.data.load("digits")
    train, test = (np.flatnonzero(y < C)[:n] for y, n in ((digits.y_train, 24), (digits.y_test, 12)))
    data = digits.x_train[train], digits.y_train[train], digits.x_test[test], digits.y_test[test]
    work, clients = ft.Work(steps=3, batch_size=4), ft.partition.iid(24, num_clients=3, seed=0)
    algorithm = ft.fed_avg(model, ft.schedules.all_clients(3), client_learning_rate=rate, work=work)
    side = ft.compare(algorithm, data, clients, num_rounds=4, seed=0, widths=WIDTHS, draws=5)
    assert isinstance(side, Comparison) and side.setting.problem.x_train.shape == (24, *SHAPE)
    assert not side.remark, side.remark
    assert any(verdict.passed for verdict in side.verdicts)
    assert not [verdict for verdict in side.verdicts if verdict.passed is False], side  # or if its control passes too
    gaps = [float(gap.error[-1].mean()) for gap in side.gaps]
    assert gaps[0] > gaps[1] > gaps[2], gaps  # the slope is one of the verdicts
