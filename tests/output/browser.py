"""A headless Chromium, driven through its debugging protocol: no further package is needed."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from tornado.websocket import websocket_connect

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
# Elements of all shadow roots, in which Bokeh draws.
DEEP = """
const all = (root) => [...root.querySelectorAll('*')].flatMap((e) => e.shadowRoot ? [e, ...all(e.shadowRoot)] : [e]);
const leaves = () => all(document).filter((e) => !e.children.length || e.role == 'status');
const text = () => leaves().map((e) => e.textContent).join(' ');
"""


class Browser:
    """One page of a browser; use it as a context."""

    def __init__(self, folder: Path, width: int, height: int = 900) -> None:
        program = next((found for name in NAMES if (found := shutil.which(name))), None)
        if program is None:
            pytest.skip(f"no browser is installed: none of {', '.join(NAMES)}")
        flags = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--remote-debugging-port=0",
            f"--window-size={width},{height}",
        ]
        self.folder, self.sent, self.urls, self.errors = folder, 0, list[str](), list[str]()
        self.process = subprocess.Popen(
            [program, *flags, f"--user-data-dir={folder}", "about:blank"], stderr=subprocess.DEVNULL
        )
        self.size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}

    async def __aenter__(self) -> Browser:
        file = self.folder / "DevToolsActivePort"
        await until(lambda: file.exists() and len(file.read_text().split()) == 2, "the browser starts")
        port, path = file.read_text().split()
        self.socket = await websocket_connect(f"ws://127.0.0.1:{port}{path}", max_message_size=2**26)
        self.session = None
        (target,) = [t for t in (await self.call("Target.getTargets"))["targetInfos"] if t["type"] == "page"]
        self.session = (await self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True))[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Network"):
            await self.call(f"{domain}.enable")
        await self.call("Emulation.setDeviceMetricsOverride", **self.size)
        return self

    async def __aexit__(self, *error: object) -> None:
        self.socket.close()
        await self.socket.read_message()  # closed
        self.process.terminate()
        self.process.wait()

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The answer of the browser to one command."""
        self.sent += 1
        message = {"id": self.sent, "method": method, "params": params}
        await self.socket.write_message(json.dumps(message | ({"sessionId": self.session} if self.session else {})))
        while True:
            answer = json.loads(await self.socket.read_message() or "{}")
            if answer.get("method") == "Network.requestWillBeSent":
                self.urls.append(answer["params"]["request"]["url"])
            if answer.get("method") == "Runtime.exceptionThrown":
                self.errors.append(str(answer["params"]))
            if answer.get("id") == self.sent:
                return answer["result"]

    async def value(self, code: str) -> Any:
        """What an expression of JavaScript is worth on the page."""
        found = await self.call(
            "Runtime.evaluate", expression=f"(() => {{{DEEP} return {code}}})()", returnByValue=True
        )
        return found["result"].get("value")

    async def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            code = {"Tab": 9, "ArrowLeft": 37, "ArrowRight": 39, "Enter": 13}[key]
            text = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
            await self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **text)

    async def seconds_until(self, code: str, what: str, most: float = 60) -> float:
        """Seconds until an expression is true."""
        begun = time.perf_counter()
        while not await self.value(code):
            assert time.perf_counter() < begun + most, f"{what}: {await self.value('text()')}"
            await asyncio.sleep(0.005)
        return time.perf_counter() - begun


async def until(test: Any, what: str, most: float = 30) -> None:
    begun = time.monotonic()
    while not test():
        assert time.monotonic() < begun + most, what
        await asyncio.sleep(0.02)
