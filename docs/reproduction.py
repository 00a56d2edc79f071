"""What was measured of every table and figure of the five papers: the kept results, and the rows of the page.

``python docs/reproduction.py DIR..`` keeps the results of finished runs of ``fedtangent experiment``, whose output
folders are DIR: what ran, its claims and verdicts, and the time, as text that the experiment itself wrote. They are
committed in ``docs/kept``, a file for each experiment. ``docs/reproduction.toml`` lists the tables and figures with the
published numbers, and quotes the pages of ``docs/experiments`` where a run's own files were not kept.
"""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedtangent._src.data.files import json_of
from fedtangent._src.entries import catalogue
from fedtangent._src.experiments import lab
from fedtangent._src.output.files import write_json

DOCS = Path(__file__).parent
KEPT, LISTED, PAGES = DOCS / "kept", DOCS / "reproduction.toml", DOCS / "experiments"
VERDICTS = {lab.SEEN: "reproduced", lab.NOT_SEEN: "refuted", lab.UNDECIDED: "undecided"}
OURS = ("ours: ",)  # a claim with one of these parts is not the paper's
NOT_RUN = "not run"
COLUMNS = ("published", "measured here", "scale, data", "seeds", "verdict", "command, time")
HOLDS = {True: "holds", False: "does not hold", None: "undecided"}


# ---- keeping ----


def kept(folder: Path) -> dict[str, Any]:
    """Returns what is kept of a finished run; ``ValueError`` for another folder, or a run that does not count.

    Args:
        folder: Output folder of ``fedtangent experiment``.
    """
    config, result = (json_of("folder", folder / f"{name}.json") for name in ("config", "result"))
    if config.get("command") != "experiment" or result.get("status") is None or result["failed"]:
        raise ValueError(f"folder: got {folder}, must hold a finished run of fedtangent experiment that counts")
    options = config["options"]
    return {
        "name": options["name"],
        "command": command(options),
        "scale": options["scale"],
        "dataset": result["dataset"],
        "seeds": config["resolved"]["seeds"],
        "seconds": round(result["seconds"], 1),
        "device": config["environment"]["device"],
        "settings": result["settings"],
        "claims": [[c["claim"], c["measured"], c["verdict"]] for c in result["claims"]],
        "verdicts": [
            [f"{v['subject']}: {v['statement']}", f"{v['measured']} (theory: {v['expected']})", HOLDS[v["passed"]]]
            for v in result.get("verdicts", [])
        ],
    }


def command(options: dict[str, Any]) -> str:
    """Returns the command of a run without its folders, which are of one machine."""
    words = ["fedtangent experiment", options["name"], "--scale", options["scale"]]
    words += ["--dataset", options["dataset"]] if options["dataset"] else []
    words += ["--data-dir DIR"] if options["data_dir"] else []
    words += ["--seeds", options["seeds"]] if options["seeds"] else []
    words += ["--seed", str(options["seed"])] if options["seed"] else []
    return " ".join([*words, *(["--set", *options["set"]] if options["set"] else [])])


def keep(folder: Path, place: Path = KEPT) -> Path:
    """Writes what is kept of a run to the file of its experiment, in place of an earlier run by the same command."""
    run = kept(folder)
    path = place / f"{run['name']}.json"
    runs = [] if not path.exists() else json.loads(path.read_text())
    place.mkdir(exist_ok=True)
    write_json(path, [*(r for r in runs if r["command"] != run["command"]), run])
    return path


# ---- the page ----

Cells = tuple[str, str, str, str, str]
"""What was measured, scale and data, seeds, verdict, command and time."""


class Row(NamedTuple):
    """A row of the page."""

    shown: str  # the table or figure, or the experiment
    published: str
    ours: str
    how: str  # scale and data set
    seeds: str
    verdict: str
    ran: str  # command and time


def listed(path: Path = LISTED) -> dict[str, Any]:
    """Reads the list of tables, figures and quotations."""
    return tomllib.loads(path.read_text(encoding="utf-8"))


def runs_of(name: str, place: Path = KEPT) -> list[dict[str, Any]]:
    """Reads the kept runs of an experiment."""
    path = place / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else []


def rows_of_run(run: dict[str, Any], ours: Sequence[str] | None) -> Iterator[Cells]:
    """Yields what a kept run measured, a row for each claim and verdict.

    Args:
        run: The run.
        ours: Parts of the claims that are not the paper's; None: none is of a table or figure. The verdict on the
            paper's claims says whether they are reproduced, at the run's scale and on its data.
    """
    changed = run["command"].partition(" --set ")[2]
    how, seeds = f"{run['scale']}, {run['dataset']}" + (f", with {changed}" if changed else ""), str(len(run["seeds"]))
    ran = f"`{run['command']}`, {run['seconds']:.0f} s on {run['device']}"
    for claim, measured, verdict in run["claims"]:
        is_papers = ours is not None and not any(part in claim for part in (*OURS, *ours))
        where = f"at scale {run['scale']} on {run['dataset']}{', with other settings' if changed else ''}"
        said = f"{VERDICTS[verdict]} {where}" if is_papers else verdict
        yield f"{claim}: {measured}", how, seeds, said, ran
    for statement, measured, verdict in run["verdicts"]:
        yield f"simulation beside theory, {statement}: {measured}", how, seeds, verdict, ran


def rows_of_quote(quote: dict[str, Any]) -> Iterator[Cells]:
    """Yields what a page of ``docs/experiments`` says of a run whose files were not kept."""
    page = f"[{quote['page']}](experiments/{quote['page']}.md)"
    ran = f"`{quote['command']}`, {quote.get('time', 'time not kept')}; from {page}"
    yield quote["text"], quote["how"], quote.get("seeds", "not named"), quote["verdict"], ran


def measured(names: Sequence[str], found: dict[str, Any], ours: Sequence[str] | None) -> list[Cells]:
    """Returns all that was measured by the experiments called ``names``.

    Args:
        names: Experiments.
        found: ``listed()``.
        ours: As for ``rows_of_run``.
    """
    rows = [row for name in names for run in runs_of(name) for row in rows_of_run(run, ours)]
    return rows + [row for q in found["quote"] if q["experiment"] in names for row in rows_of_quote(q)]


def rows_of_item(item: dict[str, Any], found: dict[str, Any]) -> list[Row]:
    """Returns the rows of one table or figure: what was measured, and what was not run and why."""
    names = item.get("experiments", [])
    rows = measured(names, found, item.get("ours", ()))
    if "same" in item:
        rows.append((f"see {item['same']}", "", "", "see there", ""))
    elif "not_run" in item or not rows:
        name = f"`fedtangent experiment {names[0]} --scale paper`" if names else ""
        rows.append((f"{NOT_RUN}: {item.get('not_run', 'no result is kept')}", "", "", NOT_RUN, name))
    places = [f"{item['place']}: {item['shows']}", *[""] * (len(rows) - 1)]
    published = [item.get("published", ""), *[""] * (len(rows) - 1)]
    return [Row(place, said, *row) for place, said, row in zip(places, published, rows, strict=True)]


def others(found: dict[str, Any]) -> list[Row]:
    """Returns the rows of the experiments that are no table or figure of a paper."""
    linked = {name for item in found["item"] for name in item.get("experiments", [])}
    rows = list[Row]()
    for name, entry in catalogue("experiments").items():
        if name not in linked:
            none = (f"{NOT_RUN}: no result is kept", "", "", NOT_RUN, f"`fedtangent experiment {name}`")
            for i, row in enumerate(measured([name], found, None) or [none]):
                rows.append(Row("" if i else f"`{name}`: {entry.summary}", "", *row))
    return rows


def tables() -> list[tuple[str, tuple[str, ...], list[Row]]]:
    """Returns the tables of the page: title, columns and rows."""
    found = listed()
    papers = dict.fromkeys(item["paper"] for item in found["item"])
    of_paper = {p: [r for i in found["item"] if i["paper"] == p for r in rows_of_item(i, found)] for p in papers}
    columns = ("table or figure", *COLUMNS)
    shown = [(paper, columns, rows) for paper, rows in of_paper.items()]
    return [*shown, ("Experiments that are no table or figure", ("experiment", *COLUMNS), others(found))]


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        print(keep(Path(argument)))
