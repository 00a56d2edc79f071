"""The explorer: a page that shows the prediction of a run, and predicts it anew when the user moves a slider.

Bokeh draws it, in Jupyter as an ipywidget and in the browser by a server on this machine. All that the page needs comes
with the installed packages.
"""

from __future__ import annotations

import asyncio
import html
import importlib.util
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from fedtangent._src.comparison import explored as runs
from fedtangent._src.comparison.explored import Controls, Curves, Explored
from fedtangent._src.comparison.forecast import BAND
from fedtangent._src.data.dataset import Dataset
from fedtangent._src.output.style import DATA, METHODS, NEUTRAL, PREDICTED, SIMULATED

if TYPE_CHECKING:
    from bokeh.document import Document
    from bokeh.models import LayoutDOM, Slider
    from bokeh.plotting import figure as Figure
    from bokeh.server.server import Server
    from ipywidgets import DOMWidget

SOON = 20  # milliseconds in which further moves of a control are awaited
LARGEST = 1e100  # numbers beyond are not drawn
NAMES = {
    "learning_rate": "learning rate",
    "local_steps": "local steps",
    "alpha": "Dirichlet alpha of labels",
    "clients_per_round": "clients in a round",
    "num_models": "models K",
    "staleness": "rounds that answers are late",
    "width": "width of trained networks",
}
PAGE = """{% block preamble %}<meta name="viewport" content="width=device-width, initial-scale=1">
<style>body {margin: 0 auto; max-width: 1500px; padding: 8px}</style>{% endblock %}"""
WIDE, WRAP = {"sizing_mode": "stretch_width"}, {"flex-wrap": "wrap"}


@runtime_checkable
class Later(Protocol):
    """A function that may be called on any thread; soon after, it calls its argument on the thread of the page."""

    def __call__(self, function: Callable[[], object], /) -> object:
        """Arranges that ``function`` is called soon on the thread of the page.

        Args:
            function: A function without arguments.
        """


def explore(data: Dataset | str = "sine", num_clients: int = 20, num_rounds: int = 30, seed: int = 0) -> DOMWidget:
    """Shows a predicted run in Jupyter, and predicts it anew whenever a slider moves.

    The run is Fed-ensemble, or FedAvg if there is one model, of networks with one hidden layer, under the squared
    error. Sliders set the learning rate, local steps, heterogeneity, clients in a round, number of models, staleness
    (rounds by which every answer is late) and width. A button trains the networks and shows them beside the prediction.
    The page also shows the Python code of the run. The command ``fedtangent explore`` opens the same page in the
    browser. Predictions are made in float64 (``fedtangent.enable_x64()``).

    Args:
        data: A ``Dataset``, or the name of a data set. Of the options ``num_train=500`` (at most), ``num_test=200`` (at
            most) and ``gap=True``, it is loaded with those that it has.
        num_clients: Clients N.
        num_rounds: Communication rounds R.
        seed: Seed of data, clients, schedule and initial functions.

    Returns:
        The widget.

    Raises:
        ValueError: An argument has the wrong type or range, 64-bit types are off, there are more than 2,500 examples,
            the packages of the extra ``explore`` are not installed, or the call is not made in Jupyter.
    """
    check_installed("jupyter_bokeh")
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError as error:
        raise ValueError(
            "explore: must be called in Jupyter; in the browser it is the command fedtangent explore"
        ) from error
    run = runs.explored(data, num_clients, num_rounds, seed)
    from bokeh.io import output_notebook
    from bokeh.resources import INLINE
    from jupyter_bokeh.widgets import BokehModel

    output_notebook(INLINE, hide_banner=True)
    return BokehModel(page(run, lambda function: loop.call_soon_threadsafe(loop.call_later, SOON / 1000, function)))


def check_installed(package: str) -> None:
    """Raises ``ValueError`` unless ``package``, of the optional dependencies ``explore``, is installed."""
    if importlib.util.find_spec(package) is None:
        raise ValueError(f"explore: {package} is not installed: pip install 'fedtangent[explore]'")


def server(run: Explored, port: int = 0) -> Server:
    """Builds a Bokeh server that shows the explorer on this machine; its ``run_until_shutdown`` starts to serve.

    Args:
        run: The run to explore.
        port: Port on 127.0.0.1; 0 for any that is free.

    Raises:
        ValueError: The port cannot be used, for example because another program uses it.
    """
    from bokeh.server.server import Server

    def fill(document: Document) -> None:
        document.title, document.template, loop = "fedtangent explore", PAGE, asyncio.get_running_loop()
        soon = document.add_timeout_callback
        document.add_root(page(run, lambda function: loop.call_soon_threadsafe(soon, function, SOON)))

    try:
        return Server({"/": fill}, address="127.0.0.1", port=port)
    except OSError as error:
        raise ValueError(f"port: got {port}, which cannot be used: {error.strerror or error}") from error


def page(run: Explored, later: Later) -> LayoutDOM:
    """Builds the explorer's page for one visitor.

    Args:
        run: The run to explore.
        later: Calls a function soon, on the thread of the page.
    """
    from bokeh.models import Button, Column, Div, Row

    view, status = _View(run), Div(**WIDE)
    button, trainings, waiting = Button(button_type="primary"), dict[Controls, Curves](), threading.Event()

    def draw() -> None:
        waiting.clear()
        controls = view.controls
        view.draw(controls, trainings.get(controls))
        networks = "the network" if controls.num_models == 1 else f"the {controls.num_models} networks"
        button.label = f"Train {networks} of width {controls.width}"

    def move(attribute: str, old: object, new: object) -> None:
        if not waiting.is_set():
            waiting.set()
            later(draw)

    def tell(text: str) -> None:
        later(lambda: status.update(text=f"<div role=status>{html.escape(text)}</div>"))

    def train(controls: Controls) -> None:
        try:
            tell("training: programs are compiled")
            trainings[controls] = runs.trained(
                run, controls, lambda now: tell(f"training: round {now.round} of {run.num_rounds}")
            )
            ended = "trained: blue, as long as the controls stand where they stood"
        except Exception as error:  # on a thread, where nobody would see it
            ended = f"training failed: {' '.join(str(error).split()) or type(error).__name__}"
        later(finish)
        tell(ended)

    def start() -> None:
        button.disabled = True
        threading.Thread(target=train, args=(view.controls,), daemon=True).start()

    def finish() -> None:
        button.disabled = False
        draw()

    for slider in view.sliders.values():
        slider.on_change("value", move)
    button.on_click(start)
    draw()
    size = f"{run.data.name}: {len(run.data.x_train)} examples, {run.num_clients} clients, {run.num_rounds} rounds"
    heading = f"<h1 style='font-size: 1.3em; margin: 0'>A federated run, as theory predicts it</h1>{html.escape(size)}"
    return Column(
        Div(text=heading, **WIDE),
        Row(*view.sliders.values(), styles=WRAP, **WIDE),
        Row(button, status, styles=WRAP, **WIDE),
        view.summary,
        Row(*view.panels, styles=WRAP, **WIDE),
        view.code,
        **WIDE,
    )


class _View:
    """Sliders and panels of the explorer's page for one visitor."""

    def __init__(self, run: Explored) -> None:
        from bokeh.models import CategoricalSlider, ColumnDataSource, Div

        first = run.first()
        self.run, self.first = run, first
        self.sliders: dict[str, Slider] = {
            name: CategoricalSlider(
                title=NAMES[name],
                categories=[f"{position:g}" for position in positions],
                value=f"{getattr(first, name):g}",
                width=250,
                margin=(5, 20, 5, 12),
            )
            for name, positions in run.positions().items()
            if len(positions) > 1
        }
        self.summary, self.code = Div(**WIDE), Div(**WIDE)
        names = ("curve", "networks", "band", "members", "trained", "residuals", "left", "stable", "unstable")
        self.sources = {name: ColumnDataSource() for name in names}
        self.panels = [self._learning(), *([self._functions()] if run.is_curve else [])]
        self.panels += [self._residuals(), self._spectrum()]

    @property
    def controls(self) -> Controls:
        """The settings of the run that the sliders show."""
        at = {name: type(getattr(self.first, name))(slider.value) for name, slider in self.sliders.items()}
        return Controls(**vars(self.first) | at)

    @np.errstate(all="ignore")  # of a run that is not stable
    def draw(self, controls: Controls, networks: Curves | None) -> None:
        """Shows the prediction of the run with the settings ``controls``, and trained ``networks`` if there are any."""
        run, now = self.run, runs.moved(self.run, controls)
        curves, clients, place = now.curves, np.arange(run.num_clients), np.arange(1, len(now.curvatures) + 1)
        self._set("curve", round=curves.rounds, **_bands(curves.errors))
        self._set("residuals", client=clients, before=now.before, after=curves.residuals)
        values = np.sort(now.curvatures)[::-1]
        for name, rows in (("stable", (values > 0) & (values <= 2)), ("unstable", values > 2)):
            self._set(name, place=place[rows], value=values[rows])
        one = slice(0 if networks is None else None)  # nothing without networks
        beside = networks or curves
        self._set(
            "networks", round=beside.rounds[one], **{split: errors[0, one] for split, errors in beside.errors.items()}
        )
        self._set("left", client=clients[one], after=beside.residuals[one])
        if run.is_curve:
            x = np.ravel(run.plan.setting.problem.x_test)
            every, order = curves.functions.reshape(-1, len(x)), np.argsort(x)
            mean, sd = every.mean(axis=0), every.std(axis=0)
            self._set(
                "band", x=x[order], mean=mean[order], low=(mean - 1.96 * sd)[order], high=(mean + 1.96 * sd)[order]
            )
            for name, lines in (("members", curves.functions[0]), ("trained", beside.functions[0, one])):
                self.sources[name].data = {"x": [x[order]] * len(lines), "f": list(_drawn(lines[:, order]))}
        for item in (item for panel in self.panels for item in panel.legend[0].items):
            item.visible = any(len(next(iter(line.data_source.data.values()))) for line in item.renderers)
        every = np.concatenate(list(curves.errors.values()))
        low, high = max(np.nanmin(_drawn(every)), 1e-12), every[:, 0].max()
        self.panels[0].y_range.update(start=low / 1.2, end=high * 1.2)
        mark = "&#9888; " if now.remark.startswith("unstable") else ""
        scores = f"Test error after round {run.num_rounds}: {_score(curves)}."
        scores += f" Trained: {_score(networks)}." if networks is not None else ""
        self.summary.text = f"<div role=status><b>{mark}{now.remark[0].upper()}{now.remark[1:]}.</b> {scores}</div>"
        code = html.escape(runs.python_call(run, controls))
        self.code.text = f"<b>The same run in Python</b><pre tabindex=0 style='white-space: pre-wrap'>{code}</pre>"

    def _set(self, name: str, **columns: np.ndarray) -> None:
        self.sources[name].data = {key: _drawn(values) for key, values in columns.items()}

    def _figure(self, title: str, x: str, y: str, **options: Any) -> Figure:
        from bokeh.plotting import figure

        fixed = {"tools": "", "toolbar_location": None, "height": 320, "min_width": 300, "max_width": 700}
        return figure(
            title=title, x_axis_label=x, y_axis_label=y, styles={"flex": "1 1 300px"}, **fixed, **WIDE, **options
        )

    def _learning(self) -> Figure:
        from bokeh.models import Range1d

        log = {"y_axis_type": "log", "x_range": (0, self.run.num_rounds), "y_range": Range1d(0.1, 1)}
        panel = self._figure("Learning curve, 90 % of starts", "round", "mean squared error", **log)
        for split, dash, fill in (("test", "solid", SIMULATED), ("train", "dashed", "white")):
            curve, dots = ({"x": "round", "source": self.sources[name]} for name in ("curve", "networks"))
            ends = {"y1": f"{split}_low", "y2": f"{split}_high"}
            panel.varea(**curve, **ends, color=PREDICTED, alpha=0.2)
            line = {"line_dash": dash, "line_width": 2, "color": PREDICTED}
            panel.line(**curve, y=split, **line, legend_label=f"{split}, predicted")
            dot = {"line_color": SIMULATED, "fill_color": fill, "size": 7}
            panel.scatter(**dots, y=split, **dot, legend_label=f"{split}, trained")
        return _below(panel)

    def _functions(self) -> Figure:
        problem, reach = self.run.plan.setting.problem, 2 * float(np.abs(self.run.data.y_train).max())
        panel = self._figure("Functions, 95 % of starts", "input x", "f(x)", y_range=(-reach, reach))
        band = {"x": "x", "source": self.sources["band"], "color": PREDICTED}
        panel.varea(**band, y1="low", y2="high", alpha=0.2)
        panel.scatter(*map(np.ravel, (problem.x_train, problem.y_train)), color=NEUTRAL, size=4, legend_label="data")
        lines = (("members", PREDICTED, "K models, predicted"), ("trained", SIMULATED, "trained"))
        for name, colour, label in lines:
            panel.multi_line("x", "f", source=self.sources[name], color=colour, line_width=1.2, legend_label=label)
        panel.line(**band, y="mean", line_width=3, legend_label="mean, predicted")
        return _below(panel)

    def _residuals(self) -> Figure:
        panel = self._figure("Residual at every client", "client", "root mean square")
        ends = {"x": "client", "source": self.sources["residuals"]}
        panel.segment("client", "before", "client", "after", source=self.sources["residuals"], color=NEUTRAL)
        panel.scatter(**ends, y="before", color=NEUTRAL, marker="dash", size=10, legend_label="before training")
        panel.scatter(**ends, y="after", color=PREDICTED, size=8, legend_label="predicted")
        trained = {"x": "client", "y": "after", "source": self.sources["left"], "marker": "x", "line_width": 2}
        panel.scatter(**trained, color=SIMULATED, size=9, legend_label="trained")
        panel.y_range.start = 0
        return _below(panel)

    def _spectrum(self) -> Figure:
        from bokeh.models import Span

        log = {"x_axis_type": "log", "y_axis_type": "log"}
        panel = self._figure("Spectrum of all clients' kernels", "mode", "rate x eigenvalue / examples", **log)
        looks = {
            "stable": (METHODS[2], "circle", "stable, at most 2"),
            "unstable": (METHODS[3], "triangle", "unstable"),
        }
        for name, (colour, marker, label) in looks.items():
            dots = {"x": "place", "y": "value", "source": self.sources[name], "size": 6}
            panel.scatter(**dots, color=colour, marker=marker, legend_label=label)
        panel.add_layout(Span(location=2, dimension="width", line_color=DATA, line_dash="dashed"))
        return _below(panel)


def _below(panel: Figure) -> Figure:
    """Moves the legend of a panel below the panel, and returns the panel."""
    legend = panel.legend[0]
    panel.add_layout(legend, "below")
    legend.update(orientation="horizontal", ncols=2, border_line_color=None, padding=0, margin=0, spacing=8)
    return panel


def _drawn(values: np.ndarray) -> np.ndarray:
    """Replaces by NaN the numbers that are not finite, or too large for the plot."""
    return np.where(np.abs(values) < LARGEST, values, np.nan)


def _bands(errors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Computes the mean and the 5th and 95th percentiles of errors over E initial functions, [r] each.

    ``errors`` has the errors [E, r] of each split at r rounds. The key of a mean in the result is the split's name; the
    keys of the percentiles end in "_low" and "_high".
    """
    columns = dict[str, np.ndarray]()
    for split, of_split in errors.items():
        low, high = np.percentile(of_split, BAND, axis=0)
        columns |= {split: of_split.mean(axis=0), f"{split}_low": low, f"{split}_high": high}
    return columns


def _score(curves: Curves) -> str:
    """Describes the test error at the end of a run in words, with its range over 90 % of the initial functions.

    The accuracy follows if it was computed.
    """
    errors = curves.errors["test"][:, -1]
    if not np.isfinite(errors).all():
        return "beyond all numbers"
    low, high = np.percentile(errors, BAND)
    of_starts = "" if len(errors) == 1 else f" (of 90 % of starts {low:.3g} to {high:.3g})"
    return f"{errors.mean():.3g}{of_starts}" + (
        "" if np.isnan(curves.accuracy) else f", accuracy {curves.accuracy:.1%}"
    )
