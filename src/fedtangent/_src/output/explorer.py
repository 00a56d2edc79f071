"""The explorer: a page of controls and panels that shows a predicted run anew as one moves the controls.

Bokeh draws it, in Jupyter (as an ipywidget) and by a small server in the browser. All that the page needs comes from
the installed package.
"""

from __future__ import annotations

import asyncio
import html
import importlib.util
import threading
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from fedtangent._src.comparison.explored import Controls, Curves, Explored, explored, moved, python_call, trained
from fedtangent._src.data.dataset import Dataset
from fedtangent._src.engine.history import Measurement
from fedtangent._src.output.style import DATA, NEUTRAL, PREDICTED, SIMULATED

if TYPE_CHECKING:
    from bokeh.document import Document
    from bokeh.models import LayoutDOM
    from bokeh.plotting import figure as Figure
    from ipywidgets import DOMWidget

TITLE = "A federated run, as theory predicts it"
SOON = 0.02  # seconds in which further moves of a control are awaited
WRAP, GROW = {"flex-wrap": "wrap"}, {"flex": "1 1 320px"}
BAND = (5, 95)
PAGE = """{% block preamble %}<meta name="viewport" content="width=device-width, initial-scale=1">
<style>body {margin: 0 auto; max-width: 1500px; padding: 8px}</style>{% endblock %}"""


class Later(Protocol):
    """A function that calls another one a moment later, on the thread of the page."""

    def __call__(self, function: Any, /) -> Any:
        """Arranges a call without arguments.

        Args:
            function: The function to call.
        """


def explore(data: Dataset | str = "sine", num_clients: int = 20, num_rounds: int = 30, seed: int = 0) -> DOMWidget:
    """Shows a predicted run in Jupyter, computed anew as one moves its controls.

    The run is Fed-ensemble (FedAvg with one model) of networks with one hidden layer under the squared error. The
    controls are learning rate, local steps, heterogeneity, clients in a round, models, width and staleness. A button
    trains the networks beside the prediction. The page shows the Python code of the same run. In the browser it is
    ``fedtangent explore``. Predictions are made in float64 (``fedtangent.enable_x64()``).

    Args:
        data: A data set, or the name of one, of which 500 training and 200 test examples are loaded.
        num_clients: Clients N.
        num_rounds: Communication rounds R.
        seed: Seed of data, partition, schedule and initial functions.

    Returns:
        The widget.

    Raises:
        ValueError: An argument of the wrong type or range, 64-bit types are off, more than 2,500 examples, or the
            packages of the extra ``explore`` are not installed.
    """
    check_installed("jupyter_bokeh")
    run = explored(data, num_clients, num_rounds, seed)
    from bokeh.io import output_notebook
    from jupyter_bokeh.widgets import BokehModel

    loop = asyncio.get_event_loop()
    return BokehModel(page(run, lambda function: loop.call_later(SOON, function)))


def check_installed(package: str) -> None:
    """Raises ``ValueError`` if a package of the extra ``explore`` is not installed."""
    if importlib.util.find_spec(package) is None:
        raise ValueError(f"explore: {package} is not installed: pip install 'fedtangent[explore]'")


def serve(run: Explored, port: int) -> Any:
    """Starts the server of the explorer on the loopback address, and returns it; ``run_until_shutdown`` serves.

    Args:
        run: The run to explore.
        port: Port of the server; 0 for any that is free.
    """
    from bokeh.server.server import Server

    def fill(document: Document) -> None:
        document.title, document.template = "fedtangent explore", PAGE
        document.add_root(page(run, lambda function: document.add_timeout_callback(function, int(1000 * SOON))))

    return Server({"/": fill}, address="127.0.0.1", port=port)


def page(run: Explored, later: Later) -> LayoutDOM:
    """Builds the page of one visitor.

    Args:
        run: The run to explore.
        later: Calls a function soon, on the thread of the page.
    """
    from bokeh.models import Button, Column, Div, Row

    loop, view, status = asyncio.get_event_loop(), _View(run), Div()
    button = Button(button_type="primary")
    trainings: dict[Controls, Curves] = {}
    waiting = threading.Event()

    def draw() -> None:
        waiting.clear()
        controls = view.controls
        view.draw(trainings.get(controls))
        networks = "the network" if controls.num_models == 1 else f"the {controls.num_models} networks"
        button.label = f"Train {networks} of width {controls.width}"

    def move(attribute: str, old: object, new: object) -> None:
        if not waiting.is_set():
            waiting.set()
            later(draw)

    def tell(text: str) -> None:
        loop.call_soon_threadsafe(later, lambda: status.update(text=f"<div role=status>{html.escape(text)}</div>"))

    def train(controls: Controls) -> None:
        def report(measurement: Measurement) -> None:
            tell(f"training: round {measurement.round} of {run.num_rounds}")

        try:
            tell("training: compiling")
            trainings[controls] = trained(run, controls, report)
            tell("trained; blue where the controls are as they were")
        except Exception as error:  # of a thread, where nobody would see it
            tell(f"training failed: {' '.join(str(error).split()) or type(error).__name__}")
        loop.call_soon_threadsafe(later, finish)

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
    wide = {"sizing_mode": "stretch_width"}
    heading = f"<h1 style='font-size: 1.3em; margin: 0'>{TITLE}</h1>{html.escape(run.plan.setting.title)}"
    return Column(
        Div(text=heading, **wide),
        Row(*view.sliders.values(), styles=WRAP, **wide),
        Row(button, status, styles=WRAP, **wide),
        view.summary,
        Row(*view.panels, styles=WRAP, **wide),
        view.code,
        **wide,
    )


class _View:
    """The controls and panels of one visitor."""

    def __init__(self, run: Explored) -> None:
        from bokeh.models import ColumnDataSource, CustomJSTickFormatter, Div, Slider

        first, size = run.first(), run.num_clients // run.num_strata
        rate, shown = np.log10(first.learning_rate), "return Number((10 ** tick).toPrecision(2)).toString()"
        power, clients = "return (2 ** tick).toString()", f"return ({run.num_strata} * tick).toString()"
        ends = {
            "learning_rate": ("learning rate", rate - 2, rate + 1.2, 0.05, rate, shown),
            "local_steps": ("local steps", 1, 50, 1, first.local_steps, ""),
            "alpha": ("Dirichlet alpha (small: unlike clients)", -2, 2, 0.25, 0, shown),
            "clients_per_stratum": ("clients in a round", 1, size, 1, size, clients),
            "num_models": ("models K", 1, 8, 1, 1, ""),
            "staleness": ("rounds an answer is late", 0, 8, 1, 0, ""),
            "width": ("width (of trained networks)", 3, 11, 1, 8, power),
        }
        self.run, self.sliders = run, {}
        for name, (title, low, high, step, value, code) in ends.items():
            form = {"format": CustomJSTickFormatter(code=code)} if code else {}
            self.sliders[name] = Slider(
                title=title, start=low, end=max(high, low + step), step=step, value=value, width=230, **form
            )
            self.sliders[name].disabled = high <= low
        wide = {"sizing_mode": "stretch_width"}
        self.summary, self.code = Div(**wide), Div(**wide)
        self.sources = {name: ColumnDataSource() for name in ("learning", "trained", "functions", "members", "networks")}
        self.sources |= {name: ColumnDataSource() for name in ("residuals", "learned", "modes", "beyond")}
        self.panels = [self._learning(), self._residuals(), self._spectrum()]
        if run.is_curve:
            self.panels.insert(1, self._functions())

    @property
    def controls(self) -> Controls:
        """The position of the controls."""
        at = {name: slider.value for name, slider in self.sliders.items()}
        whole = {name: int(at[name]) for name in ("local_steps", "clients_per_stratum", "num_models", "staleness")}
        rounded = {name: float(f"{10 ** at[name]:.2g}") for name in ("learning_rate", "alpha")}
        return Controls(**whole, **rounded, width=2 ** int(at["width"]))

    def draw(self, networks: Curves | None) -> None:
        """Shows the prediction at the present controls, beside trained networks if there are any."""
        controls = self.controls
        now, run = moved(self.run, controls), self.run
        curves, stable = now.curves, "unstable" not in now.remark
        self._set("learning", rounds=curves.rounds, **_bands(curves.errors))
        low = min(np.nanmin(np.where(np.isfinite(e), e, np.inf)) for e in curves.errors.values())
        first = max(float(e[:, 0].mean()) for e in curves.errors.values())
        self.panels[0].y_range.update(start=low / 1.5, end=first * (2 if stable else 100))
        none = np.zeros(0)
        self._set(
            "trained",
            rounds=none if networks is None else networks.rounds,
            **{split: none if networks is None else networks.errors[split][0] for split in ("train", "test")},
        )
        clients = np.arange(run.num_clients)
        self._set("residuals", client=clients, before=now.before, after=curves.residuals)
        self._set("learned", client=clients if networks is not None else none, after=none if networks is None else networks.residuals)
        order = np.argsort(-now.curvatures)
        values, beyond = now.curvatures[order], now.curvatures[order] > 2
        place = np.arange(1, len(values) + 1)
        self._set("modes", place=place[~beyond & (values > 0)], value=values[~beyond & (values > 0)])
        self._set("beyond", place=place[beyond], value=values[beyond])
        if run.is_curve:
            self._draw_functions(curves, networks)
        low, high = np.percentile(curves.errors["test"][:, -1], BAND)
        right = "" if np.isnan(curves.accuracy) else f", accuracy {curves.accuracy:.1%}"
        beside = ""
        if networks is not None:
            right_too = "" if np.isnan(networks.accuracy) else f", accuracy {networks.accuracy:.1%}"
            beside = f" Trained: {networks.errors['test'][0, -1]:.3g}{right_too}."
        self.summary.text = (
            f"<div role=status><b style='color: {PREDICTED if not stable else DATA}'>{now.remark[0].upper()}{now.remark[1:]}.</b> Test error "
            f"after round {run.num_rounds}: {curves.errors['test'][:, -1].mean():.3g} (of 90 % of starts {low:.3g} to {high:.3g}){right}.{beside}</div>"
        )
        self.code.text = f"<b>The same run in Python</b><pre tabindex=0 style='overflow-x: auto'>{html.escape(python_call(run, controls))}</pre>"

    def _set(self, name: str, **columns: np.ndarray) -> None:
        """Replaces the columns of a panel; numbers beyond what can be drawn are left out."""
        finite = {key: np.where(np.abs(values) < 1e100, values, np.nan) for key, values in columns.items()}
        self.sources[name].data = finite

    def _draw_functions(self, curves: Curves, networks: Curves | None) -> None:
        x = np.ravel(self.run.plan.setting.problem.x_test)
        order = np.argsort(x)
        every = curves.functions.reshape(-1, len(x))[:, order]
        mean, sd = every.mean(axis=0), every.std(axis=0)
        self._set("functions", x=x[order], mean=mean, low=mean - 1.96 * sd, high=mean + 1.96 * sd)
        for name, functions in (("members", curves.functions[0]), ("networks", None if networks is None else networks.functions[0])):
            lines = [] if functions is None else [np.where(np.abs(f) < 1e100, f, np.nan)[order] for f in functions]
            self.sources[name].data = {"xs": [x[order]] * len(lines), "ys": lines}

    def _figure(self, title: str, x: str, y: str, **options: Any) -> Figure:
        from bokeh.plotting import figure

        panel = figure(title=title, x_axis_label=x, y_axis_label=y, tools="", toolbar_location=None, height=300, min_width=320, sizing_mode="stretch_width", styles=GROW, **options)
        panel.grid.grid_line_alpha = 0.4
        return panel

    def _with_legend(self, panel: Figure) -> Figure:
        panel.add_layout(panel.legend[0], "below")
        panel.legend.update(orientation="horizontal", label_text_font_size="12px", border_line_color=None, padding=0, ncols=2)
        return panel

    def _learning(self) -> Figure:
        from bokeh.models import Range1d

        panel = self._figure("Learning curve, 90 % of starts", "round", "mean squared error", y_axis_type="log", y_range=Range1d(1e-3, 1))
        source, dots = self.sources["learning"], self.sources["trained"]
        for split, dash, fill in (("test", "solid", SIMULATED), ("train", "dashed", "white")):
            panel.varea("rounds", f"{split}_low", f"{split}_high", source=source, color=PREDICTED, alpha=0.2)
            panel.line("rounds", split, source=source, color=PREDICTED, width=2, line_dash=dash, legend_label=f"{split}, predicted")
            panel.scatter("rounds", split, source=dots, line_color=SIMULATED, fill_color=fill, size=7, legend_label=f"{split}, trained")
        return self._with_legend(panel)

    def _functions(self) -> Figure:
        panel = self._figure("Functions, 95 % of starts", "input x", "f(x)")
        problem = self.run.plan.setting.problem
        source = self.sources["functions"]
        panel.scatter(np.ravel(problem.x_train), np.ravel(problem.y_train), color=NEUTRAL, size=4, alpha=0.5, legend_label="training data")
        panel.varea("x", "low", "high", source=source, color=PREDICTED, alpha=0.2)
        panel.multi_line("xs", "ys", source=self.sources["members"], color=PREDICTED, alpha=0.7, width=1, legend_label="the K models, predicted")
        panel.line("x", "mean", source=source, color=PREDICTED, width=3, legend_label="mean, predicted")
        panel.multi_line("xs", "ys", source=self.sources["networks"], color=SIMULATED, width=1.5, legend_label="trained")
        reach = 2 * float(np.abs(problem.y_train).max())
        panel.y_range.update(start=-reach, end=reach)
        return self._with_legend(panel)

    def _residuals(self) -> Figure:
        panel = self._figure("Residual at every client", "client", "root mean square")
        source = self.sources["residuals"]
        panel.segment("client", "before", "client", "after", source=source, color=NEUTRAL, alpha=0.5)
        panel.scatter("client", "before", source=source, color=NEUTRAL, marker="dash", size=10, line_width=2, legend_label="before training")
        panel.scatter("client", "after", source=source, color=PREDICTED, size=8, legend_label="at the end, predicted")
        panel.scatter("client", "after", source=self.sources["learned"], color=SIMULATED, marker="x", line_width=2, size=9, legend_label="at the end, trained")
        panel.y_range.start = 0
        return self._with_legend(panel)

    def _spectrum(self) -> Figure:
        from bokeh.models import Span

        panel = self._figure("Modes of all clients' kernels", "mode, the steepest first", "rate x eigenvalue / examples", y_axis_type="log", x_axis_type="log")
        panel.scatter("place", "value", source=self.sources["modes"], color=SIMULATED, size=5, legend_label="stable (at most 2)")
        panel.scatter("place", "value", source=self.sources["beyond"], color=PREDICTED, marker="triangle", size=9, legend_label="its steps overshoot and grow")
        panel.add_layout(Span(location=2, dimension="width", line_color=DATA, line_dash="dashed"))
        return self._with_legend(panel)


def _bands(errors: dict[str, Any]) -> dict[str, Any]:
    """Returns the mean of the errors, and the ends of their band, by name."""
    bands = {}
    for split, of_split in errors.items():
        low, high = np.percentile(of_split, BAND, axis=0)
        bands |= {split: of_split.mean(axis=0), f"{split}_low": low, f"{split}_high": high}
    return bands
