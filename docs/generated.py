"""What the documentation takes from elsewhere: tables of entries, the index of theorems, notebooks, benchmarks.

A Sphinx extension. A page asks for one of them by a line of its own: ``<!-- table: algorithms -->``,
``<!-- rules -->``, ``<!-- theorems -->``, ``<!-- names: fedtangent._src.models -->``, ``<!-- notebooks -->``,
``<!-- benchmarks -->``, ``<!-- errata -->``, ``<!-- reproduction -->``. It is written there before the page is read.
``python docs/generated.py`` renews the front page's figure from the executed notebook.

The table of algorithms says what each keeps and sends, measured on one federation: NTK-FL's, an MLP 784-100-10 in
float32, 100 clients of 200 examples, 20 of them a round (all of them for algorithms whose schedule has no cohort).
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import reproduction as kept_results

from fedtangent import theory
from fedtangent._src.data.federated import federated_data
from fedtangent._src.data.sharing import with_shared
from fedtangent._src.engine.clients import engine_for
from fedtangent._src.entries import Entry, catalogue, option_names
from fedtangent._src.errata import ERRATA
from fedtangent._src.federated.algorithms.entry import Supplied, options_of
from fedtangent._src.models import mlp
from fedtangent._src.papers import PAPERS
from fedtangent._src.pytrees import num_bytes
from fedtangent._src.types import Algorithm, FederatedData, Partition

ROOT = Path(__file__).parents[1]
NOTEBOOKS = ROOT / "notebooks"
FIGURE, NOTEBOOK = ROOT / "docs" / "side_by_side.png", NOTEBOOKS / "01_side_by_side.ipynb"
BENCHMARKS, CHECKED = ROOT / "results" / "bench", ROOT / "results" / "check-theory" / "result.json"

CLIENTS, EXAMPLES, COHORT = 100, 200, 20
INPUTS, HIDDEN, OUTPUTS = 784, 100, 10
SERVER_EXAMPLES = 100
SHARED = 2000  # data sharing: a tenth of all examples
MOST_COLUMNS = 12  # of a benchmark


# ---- tables ----


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of cells."""
    lines = (columns, ("---",) * len(columns), *rows)
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


@functools.cache
def table(kind: str) -> str:
    """The entries of a kind; of most: names, what they are, their own options."""
    if kind == "algorithms":
        columns: tuple[str, ...] = ("algorithm", "composed of", "server keeps", "client keeps", "up", "down", "once")
        rows = [algorithm_cells(name) for name in catalogue(kind)]
    elif kind == "experiments":
        columns = ("experiment", "what it shows", "papers")
        rows = [[f"`{e.name}`", e.summary, ", ".join(map(named_paper, e.papers))] for e in catalogue(kind).values()]
    else:
        columns = (kind.removesuffix("s").replace("dataset", "data set"), "what it is", "options")
        rows = []
        for entry in catalogue(kind).values():
            options = ", ".join(f"`--{name.replace('_', '-')}`" for name in option_names(entry))
            rows.append([f"`{entry.written}`", entry.told, options])
        if not any(options for *_, options in rows):
            columns, rows = columns[:2], [row[:2] for row in rows]
    return markdown(columns, rows)


def named_paper(key: str) -> str:
    """A paper as the pages cite it: first author and year, or whatever its BibTeX has of them."""
    text = PAPERS.get(key, key)
    author, year = (re.search(rf"{field} = {{(.*?)(?:,| and |}})", text, re.DOTALL) for field in ("author", "year"))
    return " ".join(found[1].strip("{}") for found in (author, year) if found) or key


def built(name: str) -> Algorithm:
    """The algorithm called ``name``, for the network and the clients of the tables."""
    entry, work, cohort = catalogue("algorithms")[name], {"local_epochs": 1}, {"clients_per_round": COHORT}
    model = mlp(INPUTS, OUTPUTS, (HIDDEN,), parameterization="standard")
    of_schedule = catalogue("schedules")[entry.schedule]
    schedule = of_schedule.build(_options(of_schedule, cohort), CLIENTS, 0)
    at_server, shared = jnp.zeros((SERVER_EXAMPLES, INPUTS), jnp.float32), np.arange(SHARED, dtype=np.int32)
    options = options_of(entry)(**{key: value for key, value in work.items() if key in option_names_of(entry)})
    algorithm: Algorithm = entry.build(options, Supplied(model, schedule, server_data=at_server, shared=shared))
    return algorithm


def option_names_of(entry: Any) -> set[str]:
    """The options of an algorithm, of one around another those of FedAvg inside it too."""
    return {field.name for field in dataclasses.fields(options_of(entry))}


def algorithm_cells(name: str) -> list[str]:
    """The row of one algorithm: state in models' sizes, bytes in MiB. Nothing is trained: shapes are traced."""
    entry, algorithm = catalogue("algorithms")[name], built(name)
    model, schedule = algorithm.model, algorithm.schedule
    data = _data(np.arange(SHARED, dtype=np.int32) if "shared" in entry.needs else None)
    state = jax.eval_shape(lambda: algorithm.init(0, CLIENTS))
    size = schedule.num_models * num_bytes(jax.eval_shape(model.init, jax.random.key(0)))
    cost, slots = algorithm.cost(data, engine_for(data, "scan")), schedule.num_slots
    kept = num_bytes(state.server) / size - 1, num_bytes((state.client, state.channel)) / CLIENTS / size
    once = (cost.uplink_once + cost.downlink_once) / 2**20
    return [
        f"`{name}`",
        entry.parts,
        *("" if abs(models) < 5e-3 else f"{models:.3g}" for models in kept),
        f"{slots * (cost.uplink + cost.uplink_per_example * EXAMPLES) / 2**20:.2f}",
        f"{slots * cost.downlink / 2**20:.2f}",
        "" if once == 0 else f"{once:.2f}",
    ]


def _options(entry: Entry, given: dict[str, Any]) -> Any:
    """An entry's options with those of the given values that it has."""
    return entry.options(**{name: value for name, value in given.items() if name in option_names(entry)})


def _data(shared: np.ndarray | None) -> FederatedData:
    ends = np.arange(0, CLIENTS * EXAMPLES + 1, EXAMPLES, dtype=np.int32)
    clients = Partition(np.arange(CLIENTS * EXAMPLES, dtype=np.int32), ends)
    if shared is not None:
        clients = with_shared(clients, shared)
    x, y = np.zeros((CLIENTS * EXAMPLES, INPUTS), np.float32), np.zeros((CLIENTS * EXAMPLES, OUTPUTS), np.float32)
    return federated_data(x, y, clients, dtype=jnp.float32)


def rules() -> str:
    """What theory says of every algorithm: that it follows it, or why not and what is nearest."""
    rows = []
    for entry in catalogue("algorithms").values():
        rule = built(entry.name).rule
        said = "as the algorithm inside it (`--base`)" if entry.has_base else "has a rule"
        rows.append((f"`{entry.name}`", rule if isinstance(rule, str) else said))
    return markdown(("algorithm", "theory"), rows)


# ---- the index of theorems ----


def theorems() -> str:
    """The checks of theorems: statement, functions of ``theory``, figures, and the verdicts that were computed here."""
    verdicts = found_verdicts()
    rows = []
    for entry in catalogue("theorems").values():
        functions = ", ".join(f"{{py:func}}`~{documented(function)}`" for function in entry.functions)
        figures = ", ".join(f"[`{name}`](../experiments/{name.split('.')[0]}.md)" for name in entry.figures)
        seen = verdicts.get(entry.name, "not run")
        rows.append((entry.statement, functions, f"`{entry.name}`: {entry.summary}", figures, seen))
    return markdown(("theorem or equation", "functions", "check", "figures of", "verdicts"), rows)


def documented(function: Callable[..., Any]) -> str:
    """Returns the name under which a function of ``theory`` is documented; ``ValueError`` if it is not public."""
    if function.__name__ not in theory.__all__:
        raise ValueError(f"functions: got {function.__name__}, must be a name of fedtangent.theory")
    return f"{theory.__name__}.{function.__name__}"


def found_verdicts() -> dict[str, str]:
    """Of every check that ``make check-theory`` has run here, how many of its verdicts are as they must be."""
    if not CHECKED.exists():
        return {}
    rows = json.loads(CHECKED.read_text())["rows"]
    counted = {row["check"]: [other["passed"] for other in rows if other["check"] == row["check"]] for row in rows}
    return {check: f"{sum(one is True for one in passed)} of {len(passed)} hold" for check, passed in counted.items()}


# ---- errata, and what was reproduced ----


def errata() -> str:
    """The errata of each paper; a place is shown by a check or test, or was found by reading."""
    parts = []
    for paper in dict.fromkeys(row.paper for row in ERRATA):
        rows = []
        for row in (row for row in ERRATA if row.paper == paper):
            how = f"{'read; right in' if row.read else 'fails in'} `{row.shown}`"
            rows.append((f"`{row.key}`", row.place, row.printed, row.right, how))
        columns = ("row", "place", "as printed", "as it should be", "how it was found")
        parts.append(f"## {paper}\n\n{markdown(columns, rows)}")
    return "\n".join(parts)


def reproduction() -> str:
    """Every table and figure of the papers, and every other experiment, with what was measured here."""
    shown = kept_results.tables()
    return "\n".join(f"## {title}\n\n{markdown(columns, rows)}" for title, columns, rows in shown)


# ---- notebooks, benchmarks, the figure ----


def notebooks(folder: Path = NOTEBOOKS) -> str:
    """Every notebook by its first heading: the executed one, or its script where it has not been executed."""
    rows = []
    for script in sorted(folder.glob("*.py")):
        executed = script.with_suffix(".ipynb")
        (title,) = re.findall(r"^# # (.*)$", script.read_text(), re.MULTILINE)[:1]
        shown = executed if executed.exists() else script
        rows.append((f"[`{shown.name}`](../notebooks/{shown.name})", title))
    return markdown(("notebook", "what it shows"), rows)


def benchmarks(folder: Path = BENCHMARKS) -> str:
    """Every JSON file that ``make bench`` and ``make benchmarks`` wrote, as tables; without any, how to get them."""
    files = sorted(folder.glob("*.json"))
    if not files:
        return "No benchmark was run before these pages were built. `make bench`, then `make docs`, adds them.\n"
    return "\n".join(f"### {path.stem}\n\n{benchmark(json.loads(path.read_text()))}" for path in files)


def benchmark(found: Any) -> str:
    """What a benchmark wrote: its settings in a line, and its lists of rows as one table each."""
    parts = found if isinstance(found, dict) else {"rows": found}
    groups = [parts, *(part for part in parts.values() if isinstance(part, dict))]
    numbers = {name: value for group in groups for name, value in group.items() if _is_cell(value) and name != "output"}
    settings = ", ".join(f"{name.replace('_', ' ')} {_cell(value)}" for name, value in numbers.items())
    shown = [f"{settings}.\n"] if settings else []
    for name, rows in parts.items():
        if isinstance(rows, list) and rows and all(isinstance(row, dict) for row in rows):
            columns = list(dict.fromkeys(key for row in rows for key, value in row.items() if _is_cell(value)))
            columns = columns[:MOST_COLUMNS]
            cells = [[_cell(row.get(column, "")) for column in columns] for row in rows]
            title = "" if name == "rows" else f"{name}:\n\n"
            shown.append(f"{title}{markdown(columns, cells)}")
    return "\n".join(shown) or "No rows.\n"


def _is_cell(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)


def figures_of(notebook: Path) -> list[bytes]:
    """The figures among an executed notebook's outputs."""
    outputs = (o for cell in json.loads(notebook.read_text())["cells"] for o in cell.get("outputs", ()))
    return [base64.b64decode("".join(o["data"]["image/png"])) for o in outputs if "image/png" in o.get("data", {})]


# ---- pages ----

WRITERS = {
    "table": table,
    "rules": rules,
    "theorems": theorems,
    "notebooks": notebooks,
    "benchmarks": benchmarks,
    "errata": errata,
    "reproduction": reproduction,
}


def filled(text: str) -> str:
    """A page's text with what it asks for; raises ``ValueError`` for what there is not."""

    def written(found: re.Match[str]) -> str:
        kind, _, of = found[1].strip().partition(": ")
        if kind not in WRITERS:
            raise ValueError(f"got <!-- {kind} -->, allowed are {', '.join(WRITERS)}")
        return WRITERS[kind](*([of] if of else []))  # type: ignore[operator]

    return re.sub(r"^ *<!--(.*)--> *$\n?", written, text, flags=re.MULTILINE)


def fill(app: Any, docname: str, source: list[str]) -> None:
    """Sphinx's event ``source-read``."""
    source[0] = filled(source[0])


def setup(app: Any) -> dict[str, Any]:
    """Register the extension."""
    app.connect("source-read", fill)
    return {"parallel_read_safe": True}


if __name__ == "__main__":
    FIGURE.write_bytes(figures_of(NOTEBOOK)[0])
