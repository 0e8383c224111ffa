"""The engine process: ``python -m service.engine.remote.server --config FILE --socket PATH``.

It loads the model, listens on a Unix socket that only its user can open, says READY on its standard output,
and serves until SIGTERM (then it drains) or the end of its standard input (then its parent is gone).
"""

import argparse
import asyncio
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from cache_store.errors import CacheStoreError
from service.collector import starting
from service.engine.factory import EngineConfig, open_host
from service.engine.mailbox import Mailbox
from service.engine.messages import PROTOCOL_VERSION, Failed, is_last
from service.engine.models.errors import ModelError
from service.engine.remote import wire
from service.engine.scheduler.cancel import Reason
from service.engine.scheduler.errors import SchedulerClosed

if TYPE_CHECKING:
    from service.engine.host.host import EngineHost

log = logging.getLogger("service.engine.server")

_FORESEEN = (ModelError, CacheStoreError, ValueError, OSError)
"""A sentence says all about these: no traceback."""
NOT_SENT = "what came of it could not be sent"
EXIT_ORPHANED = 1
LAST_WORDS_S = 0.5

Call = wire.Release | wire.ReleaseSession | wire.Stats | wire.Check


class Connection:
    """One client. Requests it leaves open are cancelled when it goes."""

    def __init__(self, host: "EngineHost", writer: asyncio.StreamWriter) -> None:
        self._host = host
        self._writer = writer
        self._mailbox = Mailbox(asyncio.get_running_loop(), self._write_all)
        self._open: set[str] = set()
        self._calls: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader) -> None:
        self._write(wire.Hello(PROTOCOL_VERSION, self._host.info))
        try:
            while (message := await wire.read_frame(reader, wire.to_server)) is not None:
                self._handle(message)
        except (OSError, wire.FrameRefused) as error:
            log.warning("a connection broke: %s", error)
        finally:
            for request_id in list(self._open):
                self._host.cancel(request_id, Reason.CLOSED)

    def _handle(self, message: wire.ToServer) -> None:
        match message:
            case wire.Build():
                self._start(message, self._host.build)
            case wire.Answer():
                self._start(message, self._host.answer)
            case wire.Cancel():
                reason = Reason.CLOSED if message.closed else Reason.ASKED
                self._host.cancel(message.request_id, reason)
            case wire.Ping():
                self._write(wire.Reply(message.call))
            case _:
                task = asyncio.create_task(self._call(message))
                self._calls.add(task)
                task.add_done_callback(self._calls.discard)

    def _start(self, message: wire.Build | wire.Answer, start: Callable[[Any, Callable[[Any], None]], Any]) -> None:
        call, request_id = message.call, message.request.request_id
        self._open.add(request_id)
        done = start(message.request, lambda event: self._post(wire.Event(call, event)))
        done.add_done_callback(lambda _: self._open.discard(request_id))

    async def _call(self, message: Call) -> None:
        self._write(await asyncio.to_thread(self._reply, message))

    def _reply(self, message: Call) -> wire.Reply:
        host = self._host
        try:
            match message:
                case wire.Release():
                    return wire.Reply(message.call, released=host.release(message.document))
                case wire.ReleaseSession():
                    host.release_session(message.session_id)
                    return wire.Reply(message.call)
                case wire.Stats():
                    return wire.Reply(message.call, stats=host.stats())
                case wire.Check():
                    return wire.Reply(message.call, milliseconds=host.check())
        except SchedulerClosed as error:
            return wire.Reply(message.call, error=str(error))

    def _post(self, message: wire.FromServer) -> None:
        """Write from any thread; the socket's buffer grows rather than the engine waits for a slow reader."""
        self._mailbox.post(message)

    def _write(self, message: wire.FromServer) -> None:
        self._write_all([message])

    def _write_all(self, messages: Sequence[wire.FromServer]) -> None:
        if not self._writer.is_closing():
            self._writer.write(b"".join(map(_frame, messages)))


def _frame(message: wire.FromServer) -> bytes:
    """One that is too large, or is no Unicode, does not take others with it; whoever waits for it is told."""
    try:
        return wire.frame(message)
    except (wire.FrameRefused, ValueError):
        log.exception("a message was not sent")
    match message:
        case wire.Event() if is_last(message.event):
            return wire.frame(wire.Event(message.call, Failed("internal", NOT_SENT)))
        case wire.Reply():
            return wire.frame(wire.Reply(message.call, error=NOT_SENT))
    return b""


async def serve(host: "EngineHost", socket: Path, drain_s: float) -> None:
    """Serve until SIGTERM or the end of the engine's thread; then drain, and close."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    writers: set[asyncio.StreamWriter] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.add(writer)
        try:
            await Connection(host, writer).serve(reader)
        finally:
            writers.discard(writer)
            writer.close()

    mask = os.umask(0o177)
    try:
        server = await asyncio.start_unix_server(connected, socket)
    finally:
        os.umask(mask)
    sys.stdout.write(f"{wire.READY}\n")
    sys.stdout.flush()
    ended = asyncio.create_task(asyncio.to_thread(host.wait_ended))
    ended.add_done_callback(lambda _: stop.set())
    await stop.wait()
    server.close()
    await asyncio.to_thread(host.drain, drain_s)
    await asyncio.gather(*map(_flush, list(writers)))
    await asyncio.to_thread(host.close)
    await ended


async def _flush(writer: asyncio.StreamWriter) -> None:
    """Close a connection once its last events are on their way."""
    writer.close()
    with suppress(OSError, TimeoutError):
        await asyncio.wait_for(writer.wait_closed(), LAST_WORDS_S)


def _die_with_parent() -> None:
    """End at once when the standard input ends: nothing durable is in this process."""
    while os.read(0, 1024):
        pass
    os._exit(EXIT_ORPHANED)


def main() -> int:
    """Run the engine process; its exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parser = argparse.ArgumentParser(prog="preread-engine")
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--socket", type=Path, required=True)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    try:
        config = msgspec.json.decode(arguments.config.read_bytes(), type=EngineConfig)
        with starting():
            host = open_host(config)
    except Exception as error:
        log.error("the engine cannot start: %s", error, exc_info=not isinstance(error, _FORESEEN))
        return wire.EXIT_CONFIG
    asyncio.run(serve(host, arguments.socket, config.drain_s))
    return 0


if __name__ == "__main__":
    sys.exit(main())
