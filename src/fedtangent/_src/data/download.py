"""Downloads of published files. They resume where they stopped, and a file appears only if its checksum is right."""

from __future__ import annotations

import contextlib
import errno
import http.client
import shutil
import time
import urllib.error
from pathlib import Path
from urllib.request import Request, urlopen

from fedtangent._src.data.published import Published
from fedtangent._src.progress import progress_of
from fedtangent._src.storage import sha256_of_file

CHUNK = 2**20
TRIES = 5  # connections, where one breaks
PAUSE = 1.0  # seconds before the second connection; doubled before each further one
TIMEOUT = 30.0


def fetch(published: Published, role: str, path: Path) -> None:
    """Downloads one file to ``path``, and resumes a download that was interrupted.

    The bytes are in ``path.part`` until the file is complete and has the published checksum; a wrong checksum or a full
    disk deletes them.

    Args:
        published: The data set.
        role: Key of the file in ``published.files``.
        path: Path to write.

    Raises:
        ValueError: There is no network, the address is gone, the checksum is wrong, or the disk is full.
    """
    file = published.files[role]
    url, part = published.url + file.filename, path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _received(url, part, file.size)
        actual = sha256_of_file(part)
        if actual != file.sha256:
            part.unlink()
            raise ValueError(
                f"{published.name}: {url} is not the published {file.filename}: its sha256 is {actual}, expected "
                f"{file.sha256}"
            )
        part.replace(path)
    except (OSError, http.client.HTTPException) as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            part.unlink(missing_ok=True)
            raise ValueError(f"{published.name}: no space left for {file.filename} in {path.parent}") from error
        raise ValueError(unavailable(published, error)) from error


def unavailable(published: Published, error: Exception) -> str:
    """Returns the error message for files that cannot be downloaded.

    Args:
        published: The data set.
        error: The error that the download raised.
    """
    reason = " ".join(str(error).split())[:300]
    names = [file.filename for file in published.files.values()]
    listed = ", ".join(names) if len(names) <= 6 else f"{names[0]} and {len(names) - 1} more"
    return (
        f"{published.name}: cannot be prepared from {published.url} ({type(error).__name__}: {reason}); put {listed} "
        f"into a folder and name it by data_dir or FEDTANGENT_DATA"
    )


def _received(url: str, part: Path, size: int) -> None:
    """Downloads all of ``url``, ``size`` bytes, to the file ``part``, and reconnects up to four times.

    Raises ``OSError`` or ``HTTPException`` if the last connection fails too, or at once if a retry cannot help.
    """
    for attempt in range(TRIES):
        before = _size(part)
        try:
            if _receive(url, part, size):
                return
            error: Exception = ConnectionError(f"the connection ended after {_size(part)} bytes")
        except urllib.error.HTTPError as refused:
            if refused.code < 500 and refused.code != 429:
                raise
            error = refused
        except (urllib.error.URLError, TimeoutError, ConnectionError, http.client.HTTPException) as broken:
            error = broken
        silent = isinstance(error, urllib.error.URLError) and not isinstance(error, urllib.error.HTTPError)
        if silent and _size(part) == before and attempt == 0:
            raise error  # no server answers: not worth a second try
        if attempt + 1 < TRIES:
            time.sleep(PAUSE * 2**attempt)
    raise error


def _receive(url: str, part: Path, size: int) -> bool:
    """Downloads the rest of ``url`` to ``part`` over one connection, or all of it if the server cannot resume.

    Returns whether ``part`` then has all bytes: as many as the server announces, or ``size`` if it announces none.
    Raises ``OSError`` if the disk has too little space for them.
    """
    begun = _size(part)
    if begun > size:  # left from another file
        part.unlink()
        begun = 0
    if begun == size:
        return True
    request = Request(url, headers={"User-Agent": "fedtangent", "Range": f"bytes={begun}-"})
    try:
        response = urlopen(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as refused:
        refused.close()
        if refused.code != http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            raise
        part.unlink()  # longer than the file on the server: start again; the checksum decides
        return _receive(url, part, size)
    with response:
        if response.status != http.HTTPStatus.PARTIAL_CONTENT:  # the whole file, not the range in the request
            begun = 0
        length = response.headers.get("Content-Length")
        total = size if length is None else begun + int(length)
        if shutil.disk_usage(part.parent).free < total - begun:
            raise OSError(errno.ENOSPC, f"{total - begun} bytes are needed")
        megabytes = (-(-total // CHUNK), url.rpartition("/")[2], "MB", begun // CHUNK)
        with part.open("ab" if begun else "wb") as out, progress_of(*megabytes) as bar:
            while block := response.read(CHUNK):
                out.write(block)
                bar.update(len(block) / CHUNK)
    return _size(part) >= total


def _size(path: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_size
    return 0
