"""Reading a document in a process of its own, which can be stopped whatever the file does to it.

Parsers run over files from strangers: one may loop, exhaust memory or crash the interpreter. So no parser
runs in the caller's process. It gets the pages one by one, and kills the parser's whole process group when a
limit is reached, when it is cancelled, or when it is done.
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from ingest.errors import IngestError, ParseCancelled, ParserCrashed, ParserTimeout, rebuild
from ingest.limits import ParseLimits
from ingest.model import Document, Page
from ingest.wire import (
    Finished,
    Message,
    Opened,
    PageRead,
    ParseRequest,
    Refused,
    Started,
    pack_request,
    receive,
)

Progress = Callable[[int, int], None]
"""Called with (pages done, pages in all), first with 0 done when the file is open."""

_PACKAGE_ROOT = str(Path(__file__).resolve().parent.parent)


async def parse(
    path: str | os.PathLike[str],
    *,
    limits: ParseLimits | None = None,
    password: str | None = None,
    on_progress: Progress | None = None,
    cancel: asyncio.Event | None = None,
) -> Document:
    """The document in the file at `path`.

    Raises an IngestError for anything wrong with the file or over the limits, ParseCancelled once `cancel`
    is set, OSError when the file cannot be opened. However it ends (also by cancellation of the task), no
    process is left behind.
    """
    limits = limits or ParseLimits()
    if not os.access(path, os.R_OK):
        raise FileNotFoundError(f"cannot read {os.fspath(path)!r}")
    request = ParseRequest(os.path.abspath(path), password, limits)
    async with _parser_process(request) as process:
        return await _Reader(process, limits, cancel or asyncio.Event(), on_progress).document()


@contextlib.asynccontextmanager
async def _parser_process(request: ParseRequest) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "ingest.worker"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env=_environment(),
        start_new_session=True,
    )
    assert process.stdin is not None
    try:
        with contextlib.suppress(ConnectionError):
            process.stdin.write(pack_request(request))
            await process.stdin.drain()
        yield process
    finally:
        _kill_group(process)
        process.stdin.close()
        await asyncio.shield(process.wait())


def _environment() -> dict[str, str]:
    """As little as can be. Tesseract is found by the path of whoever starts the server."""
    passed = {name: os.environ[name] for name in ("TESSDATA_PREFIX",) if name in os.environ}
    path = os.environ.get("PATH", os.defpath)
    return {**passed, "PYTHONPATH": _PACKAGE_ROOT, "PATH": path, "LANG": "C.UTF-8", "MALLOC_ARENA_MAX": "1"}


def _kill_group(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


class _Reader:
    """Collects one parser's messages within its deadlines."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        limits: ParseLimits,
        cancel: asyncio.Event,
        on_progress: Progress | None,
    ) -> None:
        self._process = process
        self._limits = limits
        self._cancel = cancel
        self._on_progress = on_progress
        self._deadline = asyncio.get_running_loop().time() + limits.wall_s
        self._opened: Opened | None = None
        self._pages: list[Page] = []
        self._started = False

    async def document(self) -> Document:
        while True:
            match await self._next_message():
                case Started():
                    self._started = True
                case Opened() as opened:
                    self._opened = opened
                    self._report()
                case PageRead(number, label, text):
                    self._pages.append(Page(number, label, text))
                    self._report()
                case Refused(code, params):
                    raise rebuild(code, params)
                case Finished(warnings):
                    return self._finish(warnings)

    def _report(self) -> None:
        if self._on_progress and self._opened:
            self._on_progress(len(self._pages), self._opened.n_pages)

    def _finish(self, warnings: list[str]) -> Document:
        if self._opened is None or len(self._pages) != self._opened.n_pages:
            raise ParserCrashed("incomplete answer")
        return Document(self._opened.media_type, tuple(self._pages), self._opened.title, tuple(warnings))

    async def _next_message(self) -> Message:
        assert self._process.stdout is not None
        reading = asyncio.ensure_future(receive(self._process.stdout))
        cancelling = asyncio.ensure_future(self._cancel.wait())
        try:
            await asyncio.wait({reading, cancelling}, timeout=self._patience(), return_when=asyncio.FIRST_COMPLETED)
            if self._cancel.is_set():
                raise ParseCancelled
            if not reading.done():
                raise self._timeout()
            message = self._decoded(reading)
        finally:
            for task in (reading, cancelling):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, ValueError):
                    await task
        if message is None:
            raise self._death(await self._process.wait())
        return message

    @staticmethod
    def _decoded(reading: "asyncio.Future[Message | None]") -> Message | None:
        try:
            return reading.result()
        except ValueError:
            raise ParserCrashed("unreadable answer") from None

    def _patience(self) -> float:
        left = max(0.0, self._deadline - asyncio.get_running_loop().time())
        return min(left, self._limits.page_wall_s) if self._started else left

    def _timeout(self) -> IngestError:
        whole = asyncio.get_running_loop().time() >= self._deadline
        seconds = self._limits.wall_s if whole else self._limits.page_wall_s
        return ParserTimeout(self._where(), f"{seconds:g} s" + (" for the whole document" if whole else ""))

    def _death(self, status: int) -> IngestError:
        if status == -signal.SIGXCPU:
            return ParserTimeout(self._where(), f"{self._limits.cpu_s} s of processor time")
        try:
            return ParserCrashed(signal.Signals(-status).name if status < 0 else f"exit status {status}")
        except ValueError:
            return ParserCrashed(f"signal {-status}")

    def _where(self) -> str:
        if self._opened is None:
            return "the file's structure"
        return f"page {len(self._pages) + 1} of {self._opened.n_pages}"
