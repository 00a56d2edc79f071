"""``fedtangent explore``: a predicted run in the browser, recomputed as settings move."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import dataclass
from typing import Any

from fedtangent._src.checks import flag, whole
from fedtangent._src.comparison.explored import explored
from fedtangent._src.output.explorer import check_installed, server
from fedtangent._src.output.files import Ended
from fedtangent._src.output.tables import console


@dataclass(frozen=True)
class ExploreOptions:
    """Options of the explorer's page, which is served on this machine until Ctrl-C."""

    dataset: str = "sine"
    """Data set, of which at most 500 training and 200 test examples are used."""
    num_clients: int = 20
    """Clients."""
    num_rounds: int = 30
    """Communication rounds."""
    seed: int = 0
    """Seed of data, clients, schedule and initial functions."""
    port: int = 5006
    """Port of the page on 127.0.0.1; 0 for any that is free."""
    browser: bool = True
    """Off: print the page's address, and open no browser."""


def prepare(options: ExploreOptions) -> tuple[Any, bool]:
    """Checks the options and loads the data; returns the server of the page, and whether to open a browser.

    Raises ``ValueError`` if Bokeh is not installed, the port cannot be used, or an option is not allowed.
    """
    check_installed("bokeh")
    whole("port", options.port, 0, 65535)
    flag("browser", options.browser)
    run = explored(options.dataset, options.num_clients, options.num_rounds, options.seed)
    return server(run, options.port), options.browser


def run_job(job: tuple[Any, bool]) -> Ended:
    """Serves the explorer's page until the user interrupts it; ``job`` is what ``prepare`` returned."""
    page, in_browser = job
    console().print(f"http://localhost:{page.port}/ shows the page; Ctrl-C ends it", highlight=False)
    if in_browser:
        page.show("/")
    # A KeyboardInterrupt may be raised inside code that catches it; the loop handles the signal between callbacks.
    asyncio.get_event_loop().add_signal_handler(signal.SIGINT, page.io_loop.stop)
    page.run_until_shutdown()
    return Ended()
