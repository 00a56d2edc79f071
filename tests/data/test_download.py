"""Downloads that stop, go on, and are checked."""

from __future__ import annotations

import errno
import hashlib
import http.server
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fedtangent._src.data import download
from fedtangent._src.data.sources import shakespeare

CONTENT = bytes(range(256)) * 40


class Server:
    """Serves ``CONTENT`` by ranges from this machine to itself, as it is told, and keeps what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[str | None] = []
        self.content, self.ends_after, self.ranges, self.refuses = CONTENT, len(CONTENT), True, 0

    def answer(self, handler: http.server.BaseHTTPRequestHandler) -> None:
        asked = handler.headers.get("Range")
        self.asked.append(asked)
        if self.refuses:
            handler.send_error(self.refuses)
            return
        begin = int(asked.removeprefix("bytes=").removesuffix("-")) if asked and self.ranges else 0
        if begin >= len(self.content):
            handler.send_error(416)
            return
        handler.send_response(206 if begin else 200)
        handler.send_header("Content-Length", str(len(self.content) - begin))
        handler.end_headers()
        handler.wfile.write(self.content[begin : begin + self.ends_after])


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Server, Any]]:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(download, "PAUSE", 0.0)
    told = Server()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            told.answer(self)

        def log_message(self, *args: object) -> None:
            pass

    running = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
    file = shakespeare.TINY.files["text"]._replace(
        size=len(CONTENT), sha256=hashlib.sha256(CONTENT).hexdigest(), filename="input.txt"
    )
    url = f"http://127.0.0.1:{running.server_port}/"
    yield told, shakespeare.TINY._replace(url=url, files={"text": file})
    running.shutdown()
    running.server_close()


def test_a_connection_that_ends_early_goes_on_where_it_was(server: tuple[Server, Any], tmp_path: Path) -> None:
    told, published = server
    told.ends_after = 4000
    download.fetch(published, "text", tmp_path / "there" / "input.txt")
    assert (tmp_path / "there" / "input.txt").read_bytes() == CONTENT
    assert told.asked == ["bytes=0-", "bytes=4000-", "bytes=8000-"]
    assert [p.name for p in (tmp_path / "there").iterdir()] == ["input.txt"]


def test_a_later_call_goes_on_too(server: tuple[Server, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told, published = server
    told.ends_after = 100
    with pytest.raises(ValueError, match=r"tiny_shakespeare: cannot be prepared from .*ended after 500 bytes"):
        download.fetch(published, "text", tmp_path / "input.txt")
    assert [p.name for p in tmp_path.iterdir()] == ["input.txt.part"]
    told.ends_after = len(CONTENT)
    download.fetch(published, "text", tmp_path / "input.txt")
    assert told.asked[-1] == "bytes=500-" and (tmp_path / "input.txt").read_bytes() == CONTENT


@pytest.mark.parametrize("part", [CONTENT[:700], b"other" * 100, CONTENT + b"more"])
def test_a_server_without_ranges_and_a_part_of_something_else(
    server: tuple[Server, Any], tmp_path: Path, part: bytes
) -> None:
    told, published = server
    told.ranges = False
    (tmp_path / "input.txt.part").write_bytes(part)
    download.fetch(published, "text", tmp_path / "input.txt")
    assert (tmp_path / "input.txt").read_bytes() == CONTENT


def test_a_part_that_does_not_fit_is_found_by_the_checksum(server: tuple[Server, Any], tmp_path: Path) -> None:
    _, published = server
    (tmp_path / "input.txt.part").write_bytes(b"other" * 100)
    with pytest.raises(ValueError, match=r"is not the published input\.txt: its sha256 is"):
        download.fetch(published, "text", tmp_path / "input.txt")
    assert list(tmp_path.iterdir()) == []
    download.fetch(published, "text", tmp_path / "input.txt")
    assert (tmp_path / "input.txt").read_bytes() == CONTENT


def test_a_file_that_has_become_shorter(server: tuple[Server, Any], tmp_path: Path) -> None:
    told, published = server
    told.content = CONTENT[:500]
    (tmp_path / "input.txt.part").write_bytes(CONTENT[:700])
    with pytest.raises(ValueError, match=r"is not the published input\.txt: its sha256 is"):
        download.fetch(published, "text", tmp_path / "input.txt")
    assert told.asked == ["bytes=700-", "bytes=0-"] and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("code", "times"), [(404, 1), (403, 1), (503, download.TRIES)])
def test_an_address_that_refuses(server: tuple[Server, Any], tmp_path: Path, code: int, times: int) -> None:
    told, published = server
    told.refuses = code
    with pytest.raises(ValueError, match=f"HTTPError: HTTP Error {code}.*put input.txt into a folder") as caught:
        download.fetch(published, "text", tmp_path / "input.txt")
    assert len(told.asked) == times and list(tmp_path.iterdir()) == [] and "\n" not in str(caught.value)


def test_no_space_is_known_before_and_found_on_the_way(
    server: tuple[Server, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, published = server
    with monkeypatch.context() as patch:
        usage = download.shutil.disk_usage(tmp_path)
        patch.setattr(download.shutil, "disk_usage", lambda path: usage._replace(free=len(CONTENT) - 1))
        with pytest.raises(ValueError, match=r"tiny_shakespeare: no space left for input\.txt in"):
            download.fetch(published, "text", tmp_path / "input.txt")
    assert list(tmp_path.iterdir()) == []
    opened: Callable[..., Any] = Path.open

    def failing(block: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    class Full:
        def __init__(self, file: Any) -> None:
            self.file = file

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *args: object) -> None:
            self.file.close()

        write = staticmethod(failing)

    monkeypatch.setattr(
        Path, "open", lambda p, mode="r", *a, **k: Full(opened(p, mode, *a, **k)) if mode == "wb" else opened(p, mode)
    )
    with pytest.raises(ValueError, match=r"tiny_shakespeare: no space left for input\.txt in"):
        download.fetch(published, "text", tmp_path / "input.txt")
    assert list(tmp_path.iterdir()) == []
