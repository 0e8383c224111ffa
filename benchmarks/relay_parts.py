"""The processes of `benchmarks.relay` beside the product's own: a worker without a model, a bare application, a load.

python -m benchmarks.relay_parts worker URL STREAMS TOKENS TOKEN_DELAY_S
python -m benchmarks.relay_parts bare PORT STREAMS TOKENS TOKEN_DELAY_S
python -m benchmarks.relay_parts client URL STREAMS          (prints what it took as JSON)
python -m benchmarks.relay_parts load PORT PATHS.json        (prints what it saw as JSON)
"""

import asyncio
import itertools
import json
import socket
import statistics
import sys
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
import uvloop

from service.engine.digests import digest_of
from service.engine.fake import FakeEngine
from service.engine.fleet.client import FleetClient
from service.engine.fleet.worker import FleetWorker, Place
from service.engine.messages import AnswerEvent, AnswerRequest, AnswerText, BuildRequest, DocumentRef, Failed, Sampling

PIECE = "~ab "
"""A token. Its first character is in nothing else that is sent."""


class Together(FakeEngine):
    """Begins to speak when `n_streams` answers are there: what questions cost before is not to be measured."""

    def __init__(self, n_streams: int, n_tokens: int, delay_s: float) -> None:
        super().__init__([PIECE] * n_tokens, token_delay_s=delay_s, max_batch=n_streams)
        self._barrier = asyncio.Barrier(n_streams)

    async def answer(self, request: AnswerRequest) -> AsyncIterator[AnswerEvent]:
        await self._barrier.wait()
        async for event in super().answer(request):
            yield event


async def worker(url: str, n_streams: int, n_tokens: int, delay_s: float) -> None:
    """A worker whose engine says a token every `delay_s`, in as many answers as there are."""
    engine = Together(n_streams, n_tokens, delay_s)
    await FleetWorker(url, engine, Place("bench")).run(asyncio.Event(), 0)


def bare(port: int, n_streams: int, n_tokens: int, delay_s: float) -> None:
    """The least that an ASGI application does to stream: the same events, as bytes, at the same pace."""
    barrier = asyncio.Barrier(n_streams)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        await barrier.wait()
        for n in range(1, n_tokens + 1):
            await asyncio.sleep(delay_s)
            data = f'id: {len(PIECE) * n}\r\nevent: token\r\ndata: {{"text":"{PIECE}"}}\r\n\r\n'.encode()
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    uvicorn.run(app, port=port, log_config=None, access_log=False, http="h11", lifespan="off")


async def client(url: str, n_streams: int) -> dict[str, float]:
    """What the fleet's client alone takes for a token, without HTTP: processor time while all answers run."""
    fleet = FleetClient(url)
    await fleet.start(60)
    document, token_ids = DocumentRef("bench", "client"), [1] * 512
    async for _ in fleet.build(BuildRequest("bench-build", document, token_ids)):
        pass
    n_tokens, running, marks = 0, 0, []

    async def follow(name: str) -> None:
        nonlocal n_tokens, running
        request = AnswerRequest(name, name, document, digest_of(token_ids), len(token_ids), [], [1], Sampling(10**6))
        is_first = True
        async for event in fleet.answer(request):
            if isinstance(event, Failed):
                sys.exit(f"an answer failed: {event}")
            if isinstance(event, AnswerText):
                n_tokens += 1
                running += is_first
                if is_first and running == n_streams:
                    marks.append((time.process_time(), n_tokens))
                is_first = False
        marks.append((time.process_time(), n_tokens))

    await asyncio.gather(*(follow(f"bench-{n}") for n in range(n_streams)))
    await fleet.close()
    (began, before), (ended, after) = marks[:2]
    return {"tokens": after - before, "cpu_us": (ended - began) / (after - before) * 1e6}


class Stream(asyncio.Protocol):
    """One streamed answer: how many tokens came, and when."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self.counts: list[tuple[float, int]] = []
        self.last = b""
        self.is_closing = False
        self.is_whole = False
        self.ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.began = time.monotonic()
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        closing = min((at for at in (data.find(b"event: citation"), data.find(b"event: done")) if at >= 0), default=-1)
        tokens = data if closing < 0 else data[:closing]
        if not self.is_closing and (n := tokens.count(b"~")):
            self.counts.append((time.monotonic(), n))
        self.is_closing = self.is_closing or closing >= 0
        self.last = data
        self.is_whole = self.is_whole or data.endswith(b"0\r\n\r\n")

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


async def load(port: int, requests: list[list[str]]) -> dict[str, Any]:
    """Ask all at once; `requests` are paths and bodies."""
    loop = asyncio.get_running_loop()
    streams: list[Stream] = []
    for path, body in requests:
        head = (
            f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        _, stream = await loop.create_connection(partial(Stream, (head + body).encode()), "127.0.0.1", port)
        streams.append(stream)
    await asyncio.gather(*(stream.ended for stream in streams))
    failed = [stream.last[-300:] for stream in streams if not stream.counts or b"error" in stream.last]
    if failed:
        sys.exit(f"{len(failed)} answers failed: {failed[0]!r}")
    # While all of them run: what a question costs before and after its answer is not what is asked here.
    begin, end = max(stream.counts[0][0] for stream in streams), min(stream.counts[-1][0] for stream in streams)
    steady = [[(at, n) for at, n in stream.counts if begin <= at <= end] for stream in streams]
    gaps = [b[0] - a[0] for counts in steady for a, b in itertools.pairwise(counts)]
    return {
        "each": sorted({sum(n for _, n in stream.counts) for stream in streams}),
        "whole": sum(stream.is_whole for stream in streams),
        "begin": begin,
        "end": end,
        "tokens": sum(n for counts in steady for _, n in counts),
        "events": sum(len(counts) for counts in steady),
        "gap_p50_s": statistics.median(gaps),
        "gap_p99_s": statistics.quantiles(gaps, n=100)[-1],
        "gap_max_s": max(gaps),
    }


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def main(arguments: list[str]) -> None:
    match arguments:
        case ["worker", url, n_streams, n_tokens, delay_s]:
            asyncio.run(worker(url, int(n_streams), int(n_tokens), float(delay_s)))
        case ["bare", port, n_streams, n_tokens, delay_s]:
            bare(int(port), int(n_streams), int(n_tokens), float(delay_s))
        case ["client", url, n_streams]:
            print(json.dumps(uvloop.run(client(url, int(n_streams)))))
        case ["load", port, path]:
            print(json.dumps(asyncio.run(load(int(port), json.loads(Path(path).read_text())))))


if __name__ == "__main__":
    main(sys.argv[1:])
