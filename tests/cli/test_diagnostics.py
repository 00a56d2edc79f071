"""``fedtangent train --diagnostics``."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedtangent._src.cli import train
from fedtangent._src.comparison.laziness import METRICS as LAZINESS
from fedtangent._src.engine import Evaluation, Measurement
from fedtangent._src.measures.tangent_kernels import METRICS

from ..metrics_file import alike, rows_of
from .asking import prepared

RUN = ["train", "--algorithm", "fed_ensemble", "--num-models", "2", "--num-train", "200", "--num-clients", "4"]
RUN += ["--widths", "8", "--num-rounds", "4", "--evaluate-every", "2", "--client-learning-rate", "0.1"]
RUN += ["--mapping", "scan", "--host-devices", "1"]
WATCHED = ["--diagnostics-examples", "40", "--checkpoint-every", "1", "--diagnostics"]


def untimed(row: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in row.items() if name != "seconds"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["kernel", "laziness"])
def test_what_is_written_what_does_not_change_and_a_resumed_run(
    run: Callable, folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    assert run(*RUN, "--checkpoint-every", "0", "--output", "plain").code == 0
    watched = [*RUN, *WATCHED, kind]
    assert run(*watched, "--output", "watched").code == 0
    _check_rows(folder, kind)
    simulate = train.simulate_rounds

    def interrupted(*arguments: Any, evaluation: Evaluation, **options: Any) -> Any:
        def then(row: Measurement) -> None:
            evaluation.report(row)  # type: ignore[misc]
            if row.round == 2:
                raise KeyboardInterrupt

        return simulate(*arguments, evaluation=dataclasses.replace(evaluation, report=then), **options)

    with monkeypatch.context() as patch:
        patch.setattr(train, "simulate_rounds", interrupted)
        assert run(*watched, "--output", "out").code == 130
    assert run(*watched, "--output", "out", "--resume").code == 0
    # with the initial kernel of its seed, not of where it continued
    assert alike(folder / "out") == alike(folder / "watched")
    assert (folder / f"out/figures/{kind}.png").exists()


def _check_rows(folder: Path, kind: str) -> None:
    rows = rows_of(folder / "watched")
    own = [row for row in rows if row["split"] == kind]
    assert [untimed(row) for row in rows if row["split"] != kind] == list(map(untimed, rows_of(folder / "plain")))
    metrics = METRICS if kind == "kernel" else LAZINESS
    names = [*metrics, *(f"{name}_model_{k}" for name in metrics for k in range(2))]
    assert [(int(r["round"]), r["metric"]) for r in own] == [(r, name) for r in (0, 2, 4) for name in names]
    values = {(int(r["round"]), r["metric"]): float(r["value"]) for r in own}
    assert values[0, "drift"] == 0.0 < values[2, "drift"] < 1
    assert values[4, "drift"] == pytest.approx((values[4, "drift_model_0"] + values[4, "drift_model_1"]) / 2)
    if kind == "kernel":
        assert 1 <= values[4, "trace_over_largest"] <= values[4, "effective_rank"] <= 40
    else:
        assert (
            values[0, "total"]
            == 0.0
            < values[4, "total"]
            <= values[4, "feature_learning"] + values[4, "initial_kernel"]
        )
    assert (folder / f"watched/figures/{kind}.png").stat().st_size > 20_000
    assert not (folder / f"plain/figures/{kind}.png").exists()
    result = json.loads((folder / "watched/result.json").read_text())
    assert {r["metric"]: r["value"] for r in result["rows"] if r["split"] == kind}["drift"] == values[4, "drift"]


def test_several_seeds_of_a_network_whose_kernel_is_singular(run: Callable, folder: Path) -> None:
    given = ["--activation", "erf", "--seeds", "0,5", "--batch-size", "0", "--local-steps", "2", "--output", "out"]
    narrow = ["1" if word == "8" else word for word in RUN]
    ended = run(*narrow, "--diagnostics", "kernel", "--diagnostics-examples", "200", *given)
    assert (ended.code, ended.err) == (0, ""), ended
    lines = [line.split() for line in ended.out.splitlines() if line.strip().startswith("kernel ")]
    assert [line[1:-2] for line in lines] == [["drift"], ["commutator", "relative"]]
    rows = {(r["seed"], r["round"], r["metric"]): float(r["value"]) for r in rows_of(folder / "out")}
    for seed in ("0", "5"):  # each has its own Theta_0
        assert rows[seed, "0", "drift"] == 0.0 < rows[seed, "2", "drift"]
        assert rows[seed, "2", "condition_number"] == np.inf


@pytest.mark.slow
def test_laziness_of_several_seeds_where_theory_has_no_rule(run: Callable, folder: Path) -> None:
    given = ["--algorithm", "fed_adam", "--server-learning-rate", "0.01", "--seeds", "0,5"]
    base = [*RUN[:1], *RUN[5:]]  # a single model
    ended = run(*base, *given, "--diagnostics", "laziness", "--output", "out")
    assert (ended.code, ended.err) == (0, ""), ended
    assert "not compared with infinite width: algorithm: got 'fed_adam'" in " ".join(ended.out.split())
    lines = [line.split() for line in ended.out.splitlines() if line.strip().startswith("laziness ")]
    assert [line[1:-2] for line in lines] == [["feature", "learning"], ["drift"]]
    rows = {(r["seed"], r["round"], r["metric"]): float(r["value"]) for r in rows_of(folder / "out")}
    for seed in ("0", "5"):
        assert rows[seed, "0", "feature_learning"] == 0.0 < rows[seed, "2", "feature_learning"] < 1
    assert (folder / "out/figures/laziness.png").exists()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--diagnostics kernels", "diagnostics: got 'kernels', allowed are none, kernel, laziness"),
        ("--diagnostics kernel --diagnostics-examples 1", "diagnostics_examples: got 1, must be"),
        ("--diagnostics laziness --algorithm local_only", "algorithm: got local_only, must predict with trained"),
        ("--diagnostics kernel --algorithm local_only", "algorithm: got local_only, must predict with trained"),
        ("--diagnostics kernel --algorithm lg_fed_avg", "algorithm: got lg_fed_avg, must predict with trained"),
        ("--diagnostics kernel --algorithm fed_be_no_distillation", "algorithm: got fed_be_no_distillation, must"),
    ],
)
def test_what_it_means_nothing_for_is_refused(line: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prepared("train --num-train 40 --num-clients 2 " + line)
