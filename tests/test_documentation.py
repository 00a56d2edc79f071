"""README.md and docs/: every example runs, every table is the code's, every command is one that there is."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest
from matplotlib.image import imread

from fedtangent import enable_x64, simulate
from fedtangent._src.engine import Devices
from fedtangent._src.entries import KINDS, catalogue
from fedtangent._src.federated.algorithms.entry import Supplied, entry_of
from fedtangent._src.federated.schedule import uniform_sampling
from fedtangent._src.models import build

from .documents import README, ROOT, example, examples, of_docs, pages, run
from .federated.toys import two_layer, uneven_data
from .nightly import nightly

FIGURE = ROOT / "docs" / "side_by_side.png"
# What else is run by a test: the example in which this stands, and the test.
ELSEWHERE = {
    "side = ft.compare(": "comparison/test_comparing.py",
    "theory.reached": "comparison/test_forecast.py",
    "lazy = ft.compare": "comparison/test_from_start.py",
    "features = ft.compare(": "comparison/test_on_features.py",
    "local_regression(": "theory/test_max_margin.py",
    "deep_linear_theorem(": "theory/test_deep_linear_rounds.py",
    "variational_diagnostics(": "comparison/test_evidence.py",
    "conformal_predictor(held_out": "measures/test_conformal.py",
    "own sets": "measures/test_conformal.py",
    "def fed_exp": "federated/test_new_algorithm.py",
    "def heavy_ball(": "test_own_project.py",
    "from mine import heavy_ball": "test_own_project.py",
    "def cnn(rngs)": "models/test_nnx.py",
    "adapted = ft": "models/test_trainable.py",
    "narrow.at_width(": "models/test_maximal_update.py",
    "ft.kernels.tangent_features(": "kernels/test_tangent_features.py",
    "ft.schedules.best_fitting(": "comparison/test_polling.py",
    "largest_stable_server_rate": "theory/test_stale.py",
    "theory.private_flow(": "theory/test_private.py",
}
HERE = (
    "flow.predict(initial",
    "read_first_layer",
    "best_learning_rate",
    "ft.sweep",
    "np.savez",
    "class Network(linen.Module)",
    "from_flax(linen",
    "from_stax(pooled",
    "from_flax(Convolution(), x[:1], 4)",
    "two_functions",
    "resume=True",
    "def fed_sign",
    "def rested",
)


@pytest.fixture(scope="module")
def generated() -> ModuleType:
    """docs/generated.py."""
    return of_docs("generated")


# ---- examples ----


def test_every_example_is_run_by_a_test() -> None:
    every = [block for text in pages().values() for block in examples(text)]
    assert len(every) == len(ELSEWHERE) + len(HERE)
    for mark in (*ELSEWHERE, *HERE):
        assert example(mark) in every
    for mark, place in ELSEWHERE.items():
        assert f'"{mark}"' in (ROOT / "tests" / place).read_text(), place


@pytest.mark.slow
def test_a_simulation_beside_its_flow_is_as_far_from_it_as_the_page_says() -> None:
    """By day simulations are held to their flow by ``comparison/test_side_by_side.py``."""
    stated = float(re.findall(r"^error = .*# ([0-9.]+)", example("flow.predict(initial"), re.MULTILINE)[0])
    names = run("flow.predict(initial")
    # Networks drawn and trained anew on another platform differ by rounding only, not in the third decimal.
    assert abs(names["error"] - stated) < 0.001
    untrained = np.linalg.norm(names["initial_test"] - names["predicted"]) / np.linalg.norm(names["predicted"])
    assert untrained > 1
    assert names["limit"].mean.shape == (50, 10) and names["limit"].cov.shape == (50, 50)


def test_an_image_is_read_from_sparse_jacobians() -> None:
    assert run("read_first_layer")["similarity"] > 0.99


@pytest.mark.slow
def test_the_best_rates_are_inside_and_the_correction_helps() -> None:
    """By day the search is held by ``theory/test_tuning.py``."""
    names = run("best_learning_rate")
    assert not names["plain"].at_edge and names["corrected"].loss < names["plain"].loss


@pytest.mark.slow
def test_a_sweep_tells_the_better_rate() -> None:
    try:
        names = run("ft.sweep")
    finally:
        enable_x64()
    assert names["found"].metrics["accuracy"].shape == (5, 2, 2)
    assert names["better"].low > 0


@pytest.mark.slow
def test_data_and_networks_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    clients = run("np.savez")["clients"]
    assert clients.num_clients == 4 and list(clients.sizes) == [10] * 4
    Path("mine.py").write_text(example("class Network(linen.Module)"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    own = build("mine:network", (8, 8, 1), 10, units=50)
    assert own.apply(own.init(jax.random.key(0)), np.ones((2, 8, 8, 1), np.float32)).shape == (2, 10)
    names: dict[str, Any] = run("from_flax(linen")
    assert names["model"].apply(names["params"], np.ones((2, 5), np.float32)).shape == (2, 3)
    first, *_, last = run("two_functions")["run"].history.curves()["train.mse"]
    assert last < 0.8 * first


@pytest.mark.slow
def test_a_network_of_stax_has_the_kernel_of_its_infinite_width() -> None:
    network = run("from_stax(pooled")["network"]
    assert network.at_width(64).kernel(np.ones((2, 4, 4, 1)), get="ntk").shape == (2, 2)


def test_a_run_that_is_resumed_ends_as_the_uninterrupted_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = run("resume=True")
    whole = simulate(names["algorithm"], names["data"], num_rounds=30, seed=0, devices=Devices("scan"))
    resumed = jax.tree.leaves(names["run"].state.server)
    assert all(np.array_equal(a, b) for a, b in zip(resumed, jax.tree.leaves(whole.state.server), strict=True))
    assert int(names["run"].state.round) == 30 and (tmp_path / "checkpoints").is_dir()


def test_an_entry_of_ones_own_builds_its_algorithm() -> None:
    entry = entry_of(run("def fed_sign")["fed_sign"])
    options = entry.options(client_learning_rate=0.1, step_size=0.05)
    algorithm = entry.build(options, Supplied(two_layer(), uniform_sampling(6, 4)))
    after = simulate(algorithm, uneven_data(), num_rounds=1, seed=0, devices=Devices("scan")).state.server
    before = jax.tree.leaves(algorithm.init(0, 6).server)
    moved = [np.abs(a - b) for a, b in zip(jax.tree.leaves(after), before, strict=True)]
    assert all(np.allclose(m, options.step_size, atol=1e-12) for m in moved)


# ---- pages ----


def test_every_link_leads_to_a_page() -> None:
    dead = []
    for name, text in pages().items():
        for target in re.findall(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)", text):
            if not (ROOT / name).parent.joinpath(target).exists():
                dead.append((name, target))
    assert dead == []


def test_every_page_is_in_a_table_of_contents() -> None:
    listed = set()
    for name, text in pages().items():
        for block in re.findall(r"^```\{toctree\}\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            lines = [line for line in block.splitlines() if line and not line.startswith(":")]
            listed |= {(ROOT / name).parent.joinpath(f"{line}.md") for line in lines}
    assert set((ROOT / "docs").rglob("*.md")) == listed | {ROOT / "docs" / "index.md"}


def test_the_map_of_the_code_names_what_is_there() -> None:
    text, package = (ROOT / "CONTRIBUTING.md").read_text(), ROOT / "src" / "fedtangent"
    named = re.findall(r"((?:`\w+`(?:, | and )?)+),? (?:in |\()`((?:\w+/)*\w+\.py)`", text)
    functions = [(name, path) for names, path in named for name in re.findall(r"`(\w+)`", names)]
    paths = re.findall(r"`((?:[\w.]+/)*\w+\.(?:pyi?|toml|txt))`", text)
    places = (ROOT, package, package / "_src")
    gone = [path for path in paths if not any((place / path).exists() for place in places)]
    for name, path in functions:
        code = (package / "_src" / path).read_text() if path not in gone else ""
        gone += [] if re.search(rf"^(?: *(?:def|class) )?{name}\b", code, re.MULTILINE) else [f"{name} in {path}"]
    assert len(functions) > 30 and gone == []


# ---- what is made from the code ----


def test_pages_ask_for_every_table_of_the_code(generated: ModuleType) -> None:
    asked = {found for text in pages().values() for found in re.findall(r"^<!-- (.*) -->$", text, re.MULTILINE)}
    assert {f"table: {kind}" for kind in KINDS if kind != "theorems"} | {
        "theorems",
        "rules",
        "notebooks",
        "benchmarks",
        "errata",
        "reproduction",
    } <= asked


@pytest.mark.slow
def test_the_table_of_rules_has_every_algorithm(generated: ModuleType) -> None:
    """It builds each of them."""
    rules = generated.rules()
    assert all(f"| `{name}` |" in rules for name in catalogue("algorithms"))


TABLES = [kind for kind in KINDS if kind != "theorems"]


@pytest.mark.parametrize("kind", nightly(TABLES, [kind for kind in TABLES if kind != "algorithms"]))
def test_a_table_has_every_entry(generated: ModuleType, kind: str) -> None:
    """That of the algorithms builds each of them for its traffic, as ``make docs`` does."""
    text = generated.filled(f"<!-- table: {kind} -->\n")
    assert [f"| `{name}" in text for name in catalogue(kind)] == [True] * len(catalogue(kind))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("<!-- tables: algorithms -->", "got <!-- tables -->, allowed are"),
        ("<!-- table: algorithm-s -->", "got 'algorithm-s', allowed are"),
        ("<!-- table:algorithms -->", "got <!-- table:algorithms -->, allowed are"),
        ("  <!--Rules--> ", "got <!-- Rules -->, allowed are"),
    ],
)
def test_what_there_is_not_is_refused(generated: ModuleType, line: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        generated.filled(f"# A title\n\n{line}\n")


def test_the_traffic_of_fed_avg(generated: ModuleType) -> None:
    mebibytes = 20 * 4 * (784 * 100 + 100 + 100 * 10 + 10) / 2**20  # 20 clients, float32, an MLP 784-100-10
    row = generated.algorithm_cells("fed_avg")
    assert row[4] == row[5] == f"{mebibytes:.2f}"
    assert generated.algorithm_cells("scaffold")[4] == f"{2 * mebibytes:.2f}"


def test_the_index_of_theorems_has_statement_functions_check_figures_and_verdict(
    generated: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"check": "flow.exact", "passed": passed} for passed in (True, True, False)]
    (tmp_path / "result.json").write_text(json.dumps({"rows": rows}))
    monkeypatch.setattr(generated, "CHECKED", tmp_path / "result.json")
    documented = {name for text in pages().values() for name in re.findall(r"automodule:: (\S+)", text)}
    lines = generated.theorems().splitlines()
    for entry, line in zip(catalogue("theorems").values(), lines[2:], strict=True):
        statement, functions, check, figures, verdict = (cell.strip() for cell in line.strip("|").split(" | "))
        assert statement == entry.statement and check.startswith(f"`{entry.name}`: ")
        assert functions.count("{py:func}") == len(entry.functions) > 0
        named = re.findall(r"`~([\w.]+)\.\w+`", functions)  # Sphinx says nothing of a link that leads nowhere
        assert len(named) == len(entry.functions) and documented.issuperset(named), named
        assert figures.count("[`") == len(entry.figures)
        assert verdict == ("2 of 3 hold" if entry.name == "flow.exact" else "not run")
    (line,) = (line for line in lines if "`fed_ensemble.limit`" in line)
    assert "{py:func}`~fedtangent.theory.gp_limit`" in line
    assert "[`fed_ensemble.theorem2`](../experiments/fed_ensemble.md)" in line
    (line,) = (line for line in lines if "`ntk_fl.lemmas`" in line)
    assert "{py:func}`~fedtangent.theory.drift_bound`" in line


def test_every_notebook_is_listed_by_its_first_heading(generated: ModuleType) -> None:
    lines = generated.notebooks().splitlines()[2:]
    scripts = sorted((ROOT / "notebooks").glob("*.py"))
    assert len(lines) == len(scripts) >= 11
    for script, line in zip(scripts, lines, strict=True):
        assert f"[`{script.stem}." in line


def test_benchmarks_are_shown_where_there_are_any(generated: ModuleType, tmp_path: Path) -> None:
    assert "`make bench`" in generated.benchmarks(tmp_path)
    rows = [{"model": "mlp", "seconds": 0.123456, "sizes": [1, 2]}]
    (tmp_path / "engine.json").write_text(json.dumps({"sizes": {"num_rounds": 7, "output": "x"}, "rows": rows}))
    shown = generated.benchmarks(tmp_path)
    assert "### engine\n\nnum rounds 7.\n" in shown and "| mlp | 0.1235 |" in shown and "sizes" not in shown


def test_the_figure_is_the_notebooks(generated: ModuleType) -> None:
    first, shown = (
        imread(io.BytesIO(png)) for png in (generated.figures_of(generated.NOTEBOOK)[0], FIGURE.read_bytes())
    )
    assert generated.FIGURE == FIGURE and str(FIGURE.relative_to(ROOT)) in README.read_text()
    # Networks trained anew on another platform differ by rounding, hence by single pixels; another figure by far more.
    assert np.abs(first - shown).mean() < 1e-3 < 1e-2 < np.abs(first - shown[:, ::-1]).mean()
