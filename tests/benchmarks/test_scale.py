"""The model of a round's seconds in ``benchmarks/scale.py``, its fit, its controls, and a run of two processes."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

PATH = Path(__file__).parents[2] / "benchmarks" / "scale.py"


@pytest.fixture(scope="module")
def scale() -> Any:
    spec = importlib.util.spec_from_file_location("benchmark_scale", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["benchmark_scale"] = module  # typing reads the annotations of NamedTuples there
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def constants(scale: Any) -> Any:
    training = {
        str(scale.SMALL.parameters): scale.Training(1e-4, 2e-6, 1e-6),
        str(scale.WIDE.parameters): scale.Training(2e-4, 1e-4, 8e-5),
    }
    merging = {"2": scale.Merging(1e-3, 1e9), "4": scale.Merging(3e-3, 5e8)}
    return scale.Constants(2, training, 4e-7, merging, (1e-5, 6e-8))


def test_a_round_is_the_sum_of_its_terms(scale: Any, constants: Any) -> None:
    alone = scale.Case("round", clients=10**6, cohort=1000, steps=5)
    assert scale.predicted(constants, alone) == pytest.approx(1e-4 + 1000 * (2e-6 + 5e-6))
    assert scale.predicted(constants, alone._replace(clients=10**8)) == scale.predicted(constants, alone)
    permuted = alone._replace(clients=4000)
    assert scale.predicted(constants, permuted) - scale.predicted(constants, alone) == pytest.approx(4000 * 4e-7)
    evaluated = alone._replace(every=10, examples=1000)
    assert scale.predicted(constants, evaluated) - scale.predicted(constants, alone) == pytest.approx(7e-6)


def test_processes_share_the_cores_and_wait_for_each_other(scale: Any, constants: Any) -> None:
    two = scale.Case("round", clients=10**6, cohort=1001, steps=5, processes=2)
    bytes_of_two = 4 * scale.SMALL.parameters
    expected = 1e-4 + 1002 * 7e-6 / 2 + 1e-3 + bytes_of_two / 1e9
    assert scale.predicted(constants, two) == pytest.approx(expected)
    four = two._replace(processes=4, cohort=1000)  # on two cores: training gains nothing, the empty round takes twice
    expected = 2e-4 + 1000 * 7e-6 / 2 + 3e-3 + bytes_of_two / 5e8
    assert scale.predicted(constants, four) == pytest.approx(expected)


def measurements(scale: Any, constants: Any, cases: Any) -> list[dict[str, Any]]:
    """What a machine with exactly these constants would measure."""
    seconds = {"choice": lambda case: constants.permuted * case.clients}
    seconds["evaluation"] = lambda case: constants.evaluation[0] + constants.evaluation[1] * case.examples
    seconds["round"] = lambda case: scale.predicted(constants, case)
    return [{"case": case, "seconds": seconds[case.kind](case), "peak_bytes": 0} for case in cases]


def test_the_fit_finds_the_constants_again(scale: Any, constants: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "CORES", 2)
    found = scale.fitted(measurements(scale, constants, scale.fitting([2, 4])))
    for network in (scale.SMALL, scale.WIDE):
        name = str(network.parameters)
        assert found.training[name] == pytest.approx(constants.training[name], rel=1e-6)
    assert found.permuted == pytest.approx(constants.permuted)
    for count in ("2", "4"):
        assert found.merging[count] == pytest.approx(constants.merging[count], rel=1e-6)
    assert found.evaluation == pytest.approx(constants.evaluation)


def test_a_wrong_model_shows(scale: Any, constants: Any) -> None:
    rows = measurements(scale, constants, scale.checking([2, 4], 10**6))
    judged = scale.verdicts(constants, rows, 1.5)
    assert all(row["ratio"] == pytest.approx(1) for row in judged)
    assert {name for row in judged for name in row["controls"]} >= {"training", "communication"}
    slower = [row | {"seconds": 2 * row["seconds"]} for row in rows]
    assert not any(row["ratio"] >= 1 / 1.5 for row in scale.verdicts(constants, slower, 1.5))


def test_fitted_and_checked_runs_are_different(scale: Any) -> None:
    assert not set(scale.fitting([2, 4])) & set(scale.checking([2, 4], 10**7))


def test_memory_ends_where_the_data_do(scale: Any, constants: Any) -> None:
    memory = 24 * 2**30
    most = scale.most_clients(scale.SMALL, memory, 2, False)
    used = [2 * scale.memory_bytes(scale.SMALL, clients, False) for clients in (most, most + 2)]
    assert used[0] <= memory < used[1] + 100 and used[0] >= 4 * scale.data_bytes(scale.SMALL, most)
    assert scale.most_clients(scale.SMALL, 1e15, 1, False) * scale.EXAMPLES < 2**31  # rows are 32 bits
    assert scale.most_clients(scale.SMALL, memory, 1, True) < most
    rows = scale.predicted_rows(constants, [2], memory, None)
    assert [row["rounds_per_second_2"] is None for row in rows] == [row["clients"] == 10**8 for row in rows]
    run = {"case": scale.Case("round", clients=10**4), "peak_bytes": 300 * 2**20}
    large = {"case": scale.Case("round", clients=10**7), "peak_bytes": 3300 * 2**20}
    (row,) = scale.memory_rows([run, large])
    assert row["measured_bytes"] == 3000 * 2**20 and row["predicted_bytes"] == 2 * scale.data_bytes(scale.SMALL, 10**7)


def test_other_hardware_is_predicted_from_the_given_numbers(scale: Any, constants: Any) -> None:
    case = scale.Case("round", clients=10**6, cohort=1000, steps=5)
    hardware = scale.Hardware(8, 1e6, 1e-5, 1e10)
    expected = 1e-4 + 5000 / 8e6 + 1e-5 + 4 * scale.SMALL.parameters / 1e10
    assert scale.on_other_hardware(constants, case, hardware) == pytest.approx(expected)


@pytest.mark.slow
def test_two_processes_are_measured(scale: Any) -> None:
    found = scale.measured(scale.Case("round", clients=50, cohort=4, processes=2, rounds=2))
    assert found["seconds"] > 0 and found["peak_bytes"] > 0
