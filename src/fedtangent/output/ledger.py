"""A residual ledger on the terminal, as a figure, as files."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

from fedtangent.compare.ledger import LedgerRow, ResidualLedger
from fedtangent.output.files import write_atomically, write_json
from fedtangent.output.plots import _figure, _save
from fedtangent.output.tables import number


def summary(ledger: ResidualLedger) -> list[dict[str, Any]]:
    """A line for each evaluation: rows, how many failed, root mean squares, and the worst of them."""
    lines = []
    for round_ in dict.fromkeys(row.round for row in ledger.rows):
        rows = [row for row in ledger.rows if row.round == round_]
        worst = max(rows, key=_ratio)
        line: dict[str, Any] = {"round": round_, "rows": len(rows), "failed": sum(not row.passed for row in rows)}
        line |= {name: _rms([getattr(row, name) for row in rows]) for name in ("gap", "tolerance", "moved")}
        lines.append(line | {"worst_ratio": _ratio(worst), "worst_model": worst.model, "worst_client": worst.client})
    return lines


def ledger_table(ledger: ResidualLedger, title: str = "simulated less predicted residual") -> Table:
    """The summary, and whether all of it is within tolerance."""
    lines = summary(ledger)
    rows, failed = len(ledger.rows), sum(line["failed"] for line in lines)
    verdict = f"all {rows} within tolerance" if not failed else f"{failed} of {rows} BEYOND TOLERANCE"
    table = Table(
        title=f"{title}: {verdict}", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False
    )
    for name in ("round", "failed", "gap (RMS)", "tolerance", "moved", "worst gap / tolerance"):
        table.add_column(name, justify="right")
    table.add_column("at")
    for line in lines:
        table.add_row(
            str(line["round"]),
            f"{line['failed']} of {line['rows']}",
            *(number(line[name], 4) for name in ("gap", "tolerance", "moved", "worst_ratio")),
            f"model {line['worst_model']}, client {line['worst_client']}",
        )
    return table


def ledger_heat_map(ledger: ResidualLedger, path: Path, title: str = "gap / tolerance") -> Path:
    """Clients by evaluations, a panel for each model: the decimal logarithm of gap / tolerance, above 0 where it fails.

    Rows beyond tolerance, and those without a number, are crossed.
    """
    models = sorted({row.model for row in ledger.rows})
    clients, rounds = (sorted({getattr(row, name) for row in ledger.rows}) for name in ("client", "round"))
    values = np.full((len(models), len(clients), len(rounds)), np.nan)
    for row in ledger.rows:
        ratio = _ratio(row)
        place = models.index(row.model), clients.index(row.client), rounds.index(row.round)
        values[place] = np.log10(ratio) if ratio > 0 else -np.inf
    known = values[np.isfinite(values)]
    most = max(1.0, float(np.max(np.abs(known)))) if known.size else 1.0
    values = np.where(values < -most, -most, values)  # no gap at all, as in round 0
    figure, axes = _figure(len(models), width=3.6, height=0.9 + max(1.8, min(0.22 * len(clients), 8.0)), sharey=True)
    for ax, panel, model in zip(axes[0], values, models, strict=True):
        image = ax.imshow(panel, cmap="RdBu_r", vmin=-most, vmax=most, aspect="auto", interpolation="nearest")
        failed = np.argwhere(panel > 0)
        ax.plot(failed[:, 1], failed[:, 0], "x", color="black", ms=4)
        shown = np.unique(np.linspace(0, len(rounds) - 1, min(len(rounds), 6)).astype(int))
        ax.set_xticks(shown, [str(rounds[i]) for i in shown])
        few = np.unique(np.linspace(0, len(clients) - 1, min(len(clients), 12)).astype(int))
        ax.set_yticks(few, [str(clients[i]) for i in few])
        ax.set_xlabel("round")
        ax.set_title(f"model {model}", fontsize=10)
    axes[0][0].set_ylabel("client")
    figure.colorbar(image, ax=axes, label="log10 gap / tolerance", fraction=0.05)
    figure.suptitle(title)
    return _save(figure, path)


def write_ledger(ledger: ResidualLedger, folder: Path) -> list[Path]:
    """ledger.csv, every row; ledger.json, the verdict and the summary; ledger.png, the heat map. In ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(LedgerRow._fields)
    writer.writerows(ledger.rows)
    write_atomically(folder / "ledger.csv", text.getvalue())
    write_json(folder / "ledger.json", {"passed": ledger.passed, "rows": summary(ledger)})
    return [folder / "ledger.csv", folder / "ledger.json", ledger_heat_map(ledger, folder / "ledger.png")]


def _ratio(row: LedgerRow) -> float:
    """Gap over tolerance; infinite where there is no number."""
    ratio = row.gap / row.tolerance if row.tolerance > 0 else float("inf")
    return ratio if np.isfinite(ratio) else float("inf")


def _rms(values: list[float]) -> float:
    return float(np.sqrt(np.mean(np.square(values))))
