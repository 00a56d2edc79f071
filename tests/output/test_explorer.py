"""The page of the explorer: without a browser by its models, and in a headless browser by its keys and its pixels."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np
import pytest

from fedtangent._src.comparison import explored as runs
from fedtangent._src.comparison.explored import Explored, explored
from fedtangent._src.engine.history import Measurement

from .browser import Browser

pytest.importorskip("bokeh", reason="the extra explore is not installed")

from bokeh.events import ButtonClick
from bokeh.models import Button, CategoricalSlider, Div, GlyphRenderer

from fedtangent._src.output import explorer


@pytest.fixture(scope="module")
def sine() -> Explored:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "LOADED", {"num_users": 20, "test_points": 10})
        patch.setattr(runs, "MANY_DRAWS", 4)
        return explored("sine", num_clients=8, num_rounds=4)


class Page:
    """A page whose late calls run when ``work`` is called."""

    def __init__(self, run: Explored) -> None:
        self.later = Queue[Callable[[], None]]()
        self.root = explorer.page(run, self.later.put)
        self.sliders = {slider.title: slider for slider in self.root.select({"type": CategoricalSlider})}
        (self.button,) = self.root.select({"type": Button})
        self.texts = lambda: " ".join(div.text for div in self.root.select({"type": Div}))
        self.lines = lambda: list(self.root.select({"type": GlyphRenderer}))

    def work(self, seconds: float = 0) -> None:
        """Makes one late call."""
        self.later.get(timeout=seconds or None, block=bool(seconds))()

    def curve(self) -> np.ndarray:
        """The test errors of the learning curve."""
        return next(line.data_source.data["test"] for line in self.lines() if "test_low" in line.data_source.data)


def test_a_move_is_shown_and_several_at_once_are_one(sine: Explored) -> None:
    page = Page(sine)
    assert page.sliders.keys() == set(explorer.NAMES.values())
    assert "client_learning_rate=" in page.texts() and "Stable" in page.texts()
    before = page.curve()
    for title, value in (
        (explorer.NAMES["learning_rate"], page.sliders["learning rate"].categories[0]),
        ("models K", "3"),
    ):
        page.sliders[title].value = value
    assert page.later.qsize() == 1 and page.curve() is before
    page.work()
    assert "3 networks of width 256" in page.button.label and "fed_ensemble" in page.texts()
    assert page.curve()[-1] > before[-1]  # a hundredth of the rate learns less


def test_an_unstable_run_is_said_to_be_and_drawn_as_far_as_it_can_be(sine: Explored) -> None:
    page = Page(sine)
    page.sliders["learning rate"].value = page.sliders["learning rate"].categories[-1]
    page.work()
    page.sliders["local steps"].value = "100"
    page.work()
    assert "Unstable: the training error grows" in page.texts()
    every = [np.concatenate([np.ravel(v) for v in line.data_source.data.values()]) for line in page.lines()]
    assert not any(np.isinf(values.astype(float)).any() for values in every)


def trained_page(sine: Explored, monkeypatch: pytest.MonkeyPatch, train: Any) -> Page:
    """A page whose button has been pressed."""
    page, press = Page(sine), threading.Event()

    def waits(*given: Any) -> Any:
        assert press.wait(20)
        return train(*given)

    monkeypatch.setattr(runs, "trained", waits)
    page.button._trigger_event(ButtonClick(page.button))
    assert page.button.disabled
    page.sliders["models K"].value = "2"  # controls stay usable
    press.set()
    return page


def test_networks_are_trained_beside_it(sine: Explored, monkeypatch: pytest.MonkeyPatch) -> None:
    networks = runs.moved(sine, sine.first()).curves

    def train(run: Explored, controls: Any, report: Callable[[Any], None]) -> Any:
        report(Measurement(3, {}, 0, 0, 0.0))
        return networks

    page = trained_page(sine, monkeypatch, train)
    shown = []
    while "trained: blue" not in page.texts():
        page.work(20)
        shown.append(page.texts())
    assert any("training: round 3 of 4" in text for text in shown)
    assert not page.button.disabled and "Trained:" not in page.texts()  # the controls have moved on
    page.sliders["models K"].value = "1"
    page.work()
    assert "Trained:" in page.texts()


def test_a_training_that_fails_says_why(sine: Explored, monkeypatch: pytest.MonkeyPatch) -> None:
    def train(*given: Any) -> Any:
        raise FloatingPointError("diverged at <round> 2")

    page = trained_page(sine, monkeypatch, train)
    while "failed" not in page.texts():
        page.work(20)
    assert "training failed: diverged at &lt;round&gt; 2" in page.texts() and not page.button.disabled


def test_without_its_packages_one_line_says_what_to_install() -> None:
    with pytest.raises(ValueError, match=r"explore: no_package is not installed: pip install 'fedtangent\[explore\]'"):
        explorer.check_installed("no_package")


async def visit(run: Explored, folder: Path, width: int, trains: bool) -> None:
    """Opens the page, moves a control, and trains, by the keyboard."""
    page = explorer.server(run)
    page.start()
    async with Browser(folder, width) as browser:
        await browser.call("Page.navigate", url=f"http://localhost:{page.port}/")
        await browser.seconds_until("text().includes('The same run in Python')", "the page is shown")
        rates, first = run.positions()["learning_rate"], run.first().learning_rate
        lower = f"client_learning_rate={rates[rates.index(first) - 1]},"
        assert lower not in await browser.value("text()")
        await browser.press("Tab")
        await browser.press("ArrowLeft")  # the first control: the learning rate
        await browser.seconds_until(f"text().includes('{lower}')", "the rate is lower")
        for _ in explorer.NAMES:
            await browser.press("Tab")
        assert await browser.value("all(document).some((e) => e.tagName == 'BUTTON' && e.matches(':focus'))")
        if trains:
            await browser.press("Enter")
            await browser.seconds_until("text().includes('trained: blue')", "networks are trained", 120)
            assert "Trained:" in await browser.value("text()")
        assert await browser.value("document.documentElement.scrollWidth") <= width
        assert await browser.value("all(document).filter((e) => e.tagName == 'CANVAS' && e.width > 200).length") >= 4
        assert {url.split("/")[2] for url in browser.urls if "//" in url} == {f"localhost:{page.port}"}
        assert browser.errors == []
    page.stop()


def test_in_a_narrow_browser_by_its_keys_alone(sine: Explored, tmp_path: Path) -> None:
    asyncio.run(visit(sine, tmp_path / "profile", 400, trains=False))


@pytest.mark.slow
def test_in_a_wide_browser_networks_are_trained(sine: Explored, tmp_path: Path) -> None:
    asyncio.run(visit(sine, tmp_path / "profile", 1300, trains=True))
