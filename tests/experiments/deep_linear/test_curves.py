"""DeepLin's figures: runs beside a NumPy loop and the closed form, claims on made-up curves, what is refused."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path

import jax
import numpy as np
import pytest

from fedtangent import theory
from fedtangent._src.experiments.deep_linear import curves, figures, problems
from fedtangent._src.experiments.deep_linear.curves import Curve, CurveSettings, Setting, Wrong
from fedtangent._src.experiments.deep_linear.figures import Pair
from fedtangent._src.experiments.lab import NOT_SEEN, SEEN, UNDECIDED, trials
from fedtangent._src.output.files import Figures
from fedtangent._src.theory.deep_linear.theorem import DeepLinearConstants
from fedtangent._src.types import Partition

from ...data.originals import write
from ...nightly import nightly
from ..performed import performed, study_of
from .test_problems import toy

SMALL = ("num_train=120", "directions=4", "width=128", "num_rounds=6")
TINY = CurveSettings(width=16, num_rounds=5)
GIVEN = problems._problem_of(toy(60))
RATE = 0.05


# ---- the runs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fig2", "fig3", "fig4"])
@pytest.mark.slow
def test_a_small_run(name: str, tmp_path: Path) -> None:
    found, metrics = performed(f"deep_linear.{name}", SMALL, tmp_path)
    assert found.failed == () and all(v.passed for v in found.verdicts)
    assert {p.name for p in (tmp_path / "figures").iterdir()} == {f"{name}.png", f"{name}_loss.png"}
    runs = {"fig2": 6, "fig3": 6, "fig4": 8}[name]
    assert len(found.rows) == 2 * runs and len(metrics) == 2 * runs * 3 * 7
    for row in found.rows:
        assert row["end"] < row["start"] and 0 < row["theorem_decay"] < row["flow_decay"] < 1
        assert abs(math.log(row["end"] / row["flow_end"])) <= row["error"] < 0.5
    assert any("the theorem asks for a width" in line for line in found.remarks)


@pytest.mark.slow
@pytest.mark.parametrize("dataset", ["mnist", "fashion_mnist"])
def test_of_files(dataset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(dataset, tmp_path / dataset, monkeypatch)
    found, _ = performed("deep_linear.fig2", (*SMALL, "num_train=20", "num_clients=5,10"), tmp_path, dataset=dataset)
    assert found.failed == () and all(v.passed for v in found.verdicts)


def test_runs_that_diverge_do_not_count(tmp_path: Path) -> None:
    changes = (*SMALL, "width=4", "share=1", "num_rounds=12", "local_steps=1,10", "classes_per_client=2")
    found, _ = performed("deep_linear.fig3", changes, tmp_path)
    assert found.rows == [] and len(found.failed) == 1
    assert re.match(r"\d of 4 runs diverged at eta = .*, first 2 classes, N = 10, K = ", found.failed[0])


def loop(held: list[np.ndarray], weights: list[np.ndarray], rounds: int, steps: int, rate: float = RATE) -> np.ndarray:
    """Eqs. (6) to (8), by hand, as one matrix after every round."""
    x, y, scale = GIVEN.x, GIVEN.y, (len(weights[0]) ** 2 * GIVEN.y.shape[1]) ** -0.5
    path = [weights]
    for _ in range(rounds):
        ends = []
        for rows in held:
            w1, w2, w3 = path[-1]
            for _ in range(steps):
                off = scale * w3 @ w2 @ w1 @ x[rows].T - y[rows].T
                g1, g2, g3 = w2.T @ w3.T @ off @ x[rows], w3.T @ off @ x[rows] @ w1.T, off @ x[rows] @ w1.T @ w2.T
                w1, w2, w3 = (w - rate * scale * g for w, g in ((w1, g1), (w2, g2), (w3, g3)))
            ends.append((w1, w2, w3))
        path.append([np.mean(layer, axis=0) for layer in zip(*ends, strict=True)])
    return np.stack([(scale * w3 @ w2 @ w1).T for w1, w2, w3 in path])


def test_runs_are_those_of_a_loop():
    held = trials.dealt(GIVEN.labels, 4, 2, 0)
    with jax.enable_x64():
        found = curves._trained(GIVEN, held, TINY, Setting(4, 3), RATE, 1, "scan")
        other = curves._trained(GIVEN, trials.dealt(GIVEN.labels, 2, 0, 0), TINY, Setting(2, 1), RATE, 1, "scan")
    rows = [held.client(c) for c in range(4)]
    np.testing.assert_allclose(found.models, loop(rows, found.initial, 5, 3), atol=1e-11)
    for wrong in (
        loop(rows, found.initial, 5, 2),
        loop(rows, found.initial, 5, 3, RATE / 15),
        loop(rows[:3], found.initial, 5, 3),
    ):
        assert np.abs(found.models - wrong).max() > 1e-4
    assert np.array_equal(other.models[0], found.models[0])  # every run of a seed starts at one network


def test_a_finished_run_is_read_again_and_a_damaged_one_trained_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    study = dataclasses.replace(study_of("deep_linear.fig2"), figures=Figures(tmp_path / "figures"), say=said.append)
    clients = trials.dealt(GIVEN.labels, 4, 2, 0)
    network = curves.Trained([np.ones((2, 3)), np.ones((4, 2))], np.ones((5, 3, 4)))
    trained: list[float] = []

    def train(
        examples: problems.Problem,
        clients: Partition,
        settings: CurveSettings,
        setting: Setting,
        rate: float,
        seed: int,
    ) -> curves.Trained:
        trained.append(rate)
        return network

    monkeypatch.setattr(curves, "_trained", train)
    for rate in (0.1, 0.1, 0.2):
        again = curves._finished(study, GIVEN, clients, Setting(4, 3), rate, 1)
        assert len(again.initial) == 2 and np.array_equal(again.initial[1], network.initial[1])
        assert np.array_equal(again.models, network.models)
    assert trained == [0.1, 0.2] and said == []
    other = GIVEN._replace(y=2 * GIVEN.y)
    curves._finished(study, other, clients, Setting(4, 3), 0.1, 1)
    assert trained == [0.1, 0.2, 0.1]  # other data are another run
    for path in (tmp_path / "runs").iterdir():
        path.write_bytes(path.read_bytes()[:-30])
    curves._finished(study, GIVEN, clients, Setting(4, 3), 0.1, 1)
    assert len(trained) == 4 and len(said) == 1 and "computed again" in said[0]


@pytest.mark.parametrize("steps", nightly([1, 6], [6]))
def test_one_layer_is_its_flow_and_ends_at_its_limit(steps: int):
    """A network of one layer is the linear model itself. With K = 1 it ends at least squares, with K > 1 beside it."""
    rounds = 4000 if steps == 1 else 150
    s, held = dataclasses.replace(TINY, depth=1, num_rounds=rounds), trials.dealt(GIVEN.labels, 4, 2, 0)
    with jax.enable_x64():
        found = curves._trained(GIVEN, held, s, Setting(4, steps), 0.2, 1, "scan").models
    flow = theory.deep_linear_limit(theory.full_batch_work(GIVEN.x, GIVEN.y, held, 0.2, steps), 1)
    np.testing.assert_allclose(found, flow.models(rounds, found[0]), atol=1e-10)
    end, limit = GIVEN.excess(found[-1]), GIVEN.excess(flow.limit(found[0]))
    if steps == 1:
        assert end < 1e-15 * GIVEN.excess(found[0]) and limit < 1e-25
    else:
        assert end == pytest.approx(limit, rel=1e-6) and limit > 1e-4 * GIVEN.excess(found[0])


def test_a_share_of_the_stable_rate_is_cut_to_two_digits_and_twice_it_diverges():
    study = study_of("deep_linear.fig2", SMALL)
    limit, rate = curves.stable_rate(study), curves.rate_of(study)
    assert 0.45 * limit < rate <= 0.5 * limit and float(f"{rate:.1e}") == rate
    norms = []
    for seed in (0, 1):
        given = curves.problem(study, seed)
        held = [trials.dealt(given.labels, n, classes, seed) for n in (5, 10, 20) for classes in (0, 2)]
        norms += [np.linalg.norm(given.x[one.client(c)], 2) for one in held for c in range(one.num_clients)]
    assert limit == pytest.approx(2 * 10 / (3 * max(norms) ** 2))


# ---- what is read from curves ---------------------------------------------------------------------------------------


def curve(
    seed: int, classes: int, setting: Setting, decay: float, flow: float | None = None, limit: float = 0.0
) -> Curve:
    """An excess that falls by exp(-decay) a round to ``limit``."""
    rounds = np.arange(31)
    constants = DeepLinearConstants(3, 500, 10, setting.num_clients, 5, 2.0, 1.0, 0.5, 2.0, 1.0, 1.0, 0.1,
                                    setting.local_steps, 0.1)  # fmt: skip
    fall = [np.exp(-d * rounds) + limit for d in (decay, decay if flow is None else flow)]
    return Curve(seed, classes, setting, 0.2, *fall, 1e-6, 0.9, constants, 0.5)


def of_power(power: float, what: str) -> list[Curve]:
    """Rounds to a level grow as N or K to that power, in three seeds that differ little."""
    found = []
    for seed in range(3):
        for value in (1, 2, 4):
            setting = Setting(10 * value, 5) if what == "N" else Setting(10, value)
            found.append(curve(seed, 0, setting, 0.5 * value**-power * (1 + 0.01 * seed)))
    return found


def test_rounds_to_a_level_are_told_between_rounds():
    own = curve(0, 0, Setting(10, 5), 0.3)
    assert curves.rounds_to(own.excess, 0.2) == pytest.approx(math.log(5) / 0.3)
    assert curves.rounds_to(own.excess, 1e-9) == math.inf
    assert curves._row(own, 1e-9)["rounds"] is None


def test_the_bound_is_that_of_the_theorem():
    own = curve(0, 0, Setting(10, 5), 0.3)
    np.testing.assert_allclose(own.bound, (1 - 0.1 * 5 * 0.5 / 20) ** np.arange(31))
    assert np.all(own.excess <= own.bound)


def test_claims_of_figures_2_and_3():
    assert [c.verdict for c in figures.by_power(of_power(1.0, "N"), 0.2, "N", 1.0)] == [SEEN, SEEN]
    assert [c.verdict for c in figures.by_power(of_power(0.5, "N"), 0.2, "N", 1.0)] == [SEEN, NOT_SEEN]
    assert [c.verdict for c in figures.by_power(of_power(-1.0, "N"), 0.2, "N", 1.0)] == [NOT_SEEN, NOT_SEEN]
    assert [c.verdict for c in figures.by_power(of_power(1.0, "N"), 1e-6, "N", 1.0)] == [UNDECIDED]
    assert [c.verdict for c in figures.by_power(of_power(-1.0, "K"), 0.2, "K", -1.0)] == [SEEN, SEEN]
    assert [c.verdict for c in figures.by_power(of_power(1.0, "K"), 0.2, "K", -1.0)] == [NOT_SEEN, NOT_SEEN]


def test_claims_and_pairs_of_figure_4():
    s = figures.RatioSettings(num_clients=(20, 10), classes_per_client=(0, 2))
    assert s.runs() == [Setting(20, 5), Setting(40, 10), Setting(10, 5), Setting(20, 10)]

    def runs(iid: float, two: float) -> list[Curve]:
        """What more decay the curve of twice as many clients has, by scheme."""
        decays = {Setting(20, 5): 0.1, Setting(40, 10): 0.1, Setting(10, 5): 0.2, Setting(20, 10): 0.2}
        return [
            curve(seed, classes, setting, decay + (more * (1 + 0.01 * seed) if setting.local_steps == 10 else 0))
            for classes, more in ((0, iid), (2, two)) for setting, decay in decays.items() for seed in range(3)
        ]  # fmt: skip

    pairs = figures._pairs(runs(0.001, 0.008), s)
    assert len(pairs) == 2 * 2 * 3
    for pair in pairs:
        assert pair.one.setting.ratio == pair.twice.setting.ratio != pair.other.setting.ratio
        assert pair.one.seed == pair.twice.seed == pair.other.seed
        assert pair.of_ratios == pytest.approx(3.0)
        assert pair.until == (30 if pair.one.classes == 0 else 12)
    assert pairs[0].of_excess == pytest.approx(0.03) and pairs[0].of_loss < pairs[0].of_excess
    assert [c.verdict for c in figures.claims(pairs)] == [SEEN] * 4 + [SEEN, NOT_SEEN] * 2 + [SEEN]
    assert [c.verdict for c in figures.claims(figures._pairs(runs(0.008, 0.001), s))][-1] == NOT_SEEN
    limits = Pair(
        curve(0, 0, Setting(10, 5), 0.1)._replace(limit=2e-3), pairs[0].twice._replace(limit=1e-3), pairs[0].one
    )
    assert limits.of_limits == pytest.approx(math.log(2))


def test_the_verdict_can_fail_and_so_can_its_control():
    right = [curve(0, 0, Setting(10, 5), 0.2, 0.21), curve(0, 0, Setting(20, 5), 0.1, 0.105)]
    slow, fast = np.exp(-0.03 * np.arange(31)), np.exp(5.0 * np.arange(4))
    assert curves._verdict(right, [Wrong(slow, fast)] * 2, "").passed
    off = [right[0]._replace(flow=right[1].flow * 0.5), right[1]]
    assert curves._verdict(off, [Wrong(slow, fast)] * 2, "").holds is False
    assert curves._verdict(right, [Wrong(right[0].excess, fast)] * 2, "").control_fails is False
    assert curves._verdict(right, [Wrong(None, right[0].excess[:3])] * 2, "").control_fails is False


# ---- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("fig2", "learning_rate=3", r"learning_rate: got 3, at which local descent diverges, must be at most 0\.\d+, "),
        ("fig2", "num_clients=5,10,2000", "num_clients: got 2000, must be"),
        ("fig2", "num_clients=2,4", r"num_clients \* classes_per_client: got 4, must be at least 10"),
        ("fig2", "num_clients=20,10", "num_clients: got 20,10, must be 2 or more increasing"),
        ("fig2", "directions=70", "directions: got 70, must be at most"),
        ("fig3", "local_steps=1", "local_steps: got 1, must be 2 or more increasing values"),
        ("fig4", "num_clients=10", "num_clients: got 10, must be 2 or more different values"),
        ("fig4", "depth=0", "depth: got 0"),
        ("fig4", "centred=2", "centred: got 2"),
    ],
)  # fmt: skip
def test_bad_settings_are_refused(name: str, change: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        study_of(f"deep_linear.{name}", ("num_train=120", change))


def test_a_rate_below_the_limit_is_not_refused():
    study = study_of("deep_linear.fig2", SMALL)
    limit = curves.stable_rate(study)
    study_of("deep_linear.fig2", (*SMALL, f"learning_rate={0.999 * limit}"))
    with pytest.raises(ValueError, match=r"learning_rate: got .*, at which local descent diverges"):
        study_of("deep_linear.fig2", (*SMALL, f"learning_rate={1.001 * limit}"))
