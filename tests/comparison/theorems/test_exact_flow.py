"""The check of the exact flow: every option on both sides, and a theory that ignores it is noticed."""

from __future__ import annotations

import numpy as np
import pytest

from fedtangent._src.comparison.theorems import flow


@pytest.fixture(scope="module")
def case() -> flow.Case:
    """The linear model's case, for every option."""
    return flow._linear_case(1, 6)


DAILY = ("SCAFFOLD, permutations, K = 2",)


@pytest.mark.parametrize(
    "option",
    [pytest.param(o, marks=() if o.name in DAILY else pytest.mark.slow) for o in flow.OPTIONS],
    ids=lambda option: option.name,
)
def test_a_linear_model_is_the_flow_and_no_wrong_theory_is(option: flow.Option, case: flow.Case) -> None:
    verdict = flow._exact(option, case)
    assert verdict.passed, verdict
    assert float(verdict.measured) < 1e-12
    assert float(verdict.control_measured) > 1e-3


def test_an_option_that_the_simulation_ignores_is_noticed() -> None:
    option = next(o for o in flow.OPTIONS if o.name == "server rate 0.7")
    assert not flow._exact(option._replace(both={}, predicted=option.both), flow._linear_case(1, 4)).holds


def test_every_option_has_a_name_of_its_own_and_a_theory_that_ignores_it() -> None:
    assert len({o.name for o in flow.OPTIONS}) == len(flow.OPTIONS)
    case = flow._linear_case(0, 3)
    assert len(set(case.problem.partition.sizes.tolist())) > 1  # weights by examples matter
    for option in flow.OPTIONS:
        assert option.ignored is None or option.ignored != option.both | option.predicted


def test_fed_avg_is_centralised_with_one_local_step_and_equal_weights_of_examples_only(case: flow.Case) -> None:
    blocks, every = case.blocks(), flow.OPTIONS[0]
    one_step = {"local_steps": 1}
    assert flow._from_central(every, case, blocks, one_step) < 1e-11
    for wrong in ({}, {**one_step, "uniform": True}, {"uniform": True}):
        assert flow._from_central(every, case, blocks, wrong) > 1e-2
    # by a loop: gradient descent of all examples, and of the clients' means, on the predictions at all points
    kernel, y, held = np.asarray(blocks.ntk_train), case.problem.y_train, case.problem.partition
    rows = [held.client(i) for i in range(held.num_clients)]
    after = []
    for clients in ([np.arange(len(y))], rows):
        f, test = np.zeros_like(y), np.zeros((case.problem.x_test.shape[0], y.shape[1]))
        for _ in range(case.num_rounds):
            ends = []
            for of_client in clients:
                g, moved = f.copy(), test.copy()
                for _ in range(flow.LOCAL_STEPS):
                    residual = (g - y)[of_client] / len(of_client) * case.learning_rate
                    g, moved = (
                        g - kernel[:, of_client] @ residual,
                        moved - np.asarray(blocks.ntk_test_train)[:, of_client] @ residual,
                    )
                ends.append((g, moved))
            share = [len(of_client) / len(y) for of_client in clients]
            f, test = (np.tensordot(share, np.stack(part), 1) for part in zip(*ends, strict=True))
        after.append(test)
    central, federated = after
    measured = np.linalg.norm(federated - central) / np.linalg.norm(central)
    assert flow._from_central(every, case, blocks) == pytest.approx(measured, rel=1e-9)


@pytest.mark.slow
@pytest.mark.theory
def test_networks_approach_the_flow_at_slope_minus_one_half() -> None:
    case = flow._network_case(0, 10)
    for place in (0, 2):
        verdict = flow._network_slope(flow.OPTIONS[place], case, (128, 512, 2048), 40)
        assert verdict.passed, verdict
