"""Download one file completely and with the right checksum, or raise an error with the reason and leave no file."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager, suppress
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

from rooftop.errors import WeightsError

STALL_S = 30.0  # a server that sends nothing for this long has stalled
CHUNK_BYTES = 1 << 20


class _Failure(Exception):
    """The reason why a download failed."""


def download(url: str, target: Path, sha256: str) -> None:
    """Download a URL to a temporary file next to `target`, check the file, and rename it; a failure leaves no file.

    Args:
        sha256: the first hex digits of the file's checksum.

    Raises:
        WeightsError: the server, the network or the disk failed, or the checksum is wrong.
    """
    partial = target.with_name(f"{target.name}.{uuid.uuid4().hex}.partial")  # two processes may download the same file
    digest = hashlib.sha256()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("xb") as file, closing(_received(url, target.name)) as chunks:
            for chunk in chunks:
                digest.update(chunk)
                file.write(chunk)
        if not digest.hexdigest().startswith(sha256):
            raise _Failure(f"the server sent a different file, whose SHA-256 begins with {digest.hexdigest()[:8]}")
        partial.replace(target)
    except (OSError, _Failure) as error:  # `_received` raises _Failure for network errors, so OSError means the disk
        problem = error if isinstance(error, _Failure) else f"{target} cannot be written ({error.strerror or error})"
        raise WeightsError(
            f"{url} was not downloaded: {problem}. Expected a file whose SHA-256 begins with {sha256}. "
            f"Download it elsewhere and put it at {target}, or give a file as weights"
        ) from error
    finally:
        with suppress(OSError):  # the file may not exist
            partial.unlink()


def sha256_of(path: Path) -> str:
    """The checksum of a file, in hex.

    Raises:
        WeightsError: the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise WeightsError(f"{path} cannot be read: {error.strerror or error}") from error


def _received(url: str, name: str) -> Generator[bytes]:
    """Yield the body of the response in chunks until it is complete.

    Raises:
        _Failure: the network or the server failed.
    """
    received, length = 0, 0
    try:
        request = Request(url, headers={"User-Agent": "rooftop"})
        with urlopen(request, timeout=STALL_S) as response, _progress_bar(name) as (bar, task):
            length = int(response.headers.get("Content-Length") or 0)
            bar.update(task, total=length or None)
            while chunk := response.read(CHUNK_BYTES):
                received += len(chunk)
                yield chunk
                bar.update(task, completed=received)
    except HTTPError as error:
        error.close()
        raise _Failure(f"the server answered {error.code} {error.reason}") from error
    except URLError as error:
        raise _Failure(f"the server cannot be reached ({error.reason})") from error
    except TimeoutError as error:
        raise _Failure(f"no data arrived for {STALL_S:g} s, after {received:,} bytes") from error
    except ValueError as error:
        raise _Failure(f"{error} (ROOFTOP_WEIGHTS_URL takes http://, https:// and file:/// addresses)") from error
    except (OSError, HTTPException) as error:  # the connection broke
        raise _Failure(f"{error or type(error).__name__}, after {received:,} bytes") from error
    if received < length:
        raise _Failure(f"the connection closed after {received:,} of {length:,} bytes")


@contextmanager
def _progress_bar(name: str) -> Iterator[tuple[Progress, TaskID]]:
    """A progress bar; it shows nothing if stderr is not a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        yield bar, bar.add_task(name, total=None)
