"""Asks a real installation: an open loop of streamed questions, each in a session of its own."""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from benchmarks.capacity_parts.sim_worker import Served
from benchmarks.capacity_parts.trace import Asked

LONGEST_S = 120.0
SOURCES = {"host": "resident", "gpu": "resident", "none": "computed"}
"""The fake engine computes in the machine's memory, and calls it so."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A streamed answer. `gap_s`: between its tokens, in the mean; `end_s`: after the last one until it was over."""

    source: str
    restore_s: float
    first_s: float
    total_s: float
    gap_s: float = 0.0
    end_s: float = 0.0


class Asker:
    """Over one API process. A context manager."""

    def __init__(self, url: str) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self._client = httpx.AsyncClient(base_url=url, timeout=LONGEST_S, limits=limits, trust_env=False)

    async def __aenter__(self) -> "Asker":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def session(self, document_id: str) -> str:
        response = await self._client.post("/v1/sessions", json={"document_ids": [document_id]})
        assert response.status_code == 201, response.text
        return response.json()["id"]

    async def ask(self, session: str, question: str, tokens: int) -> Reply | None:
        """None: it was refused, because too many wait."""
        body = {"question": question, "stream": True, "max_tokens": tokens}
        began, times, name = time.monotonic(), list[float](), ""
        async with self._client.stream("POST", f"/v1/sessions/{session}/questions", json=body) as response:
            if response.status_code == 429:
                return None
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if line.startswith("event: "):
                    name = line.removeprefix("event: ")
                    times += [time.monotonic()] if name == "token" else []
                elif line.startswith("data: ") and name in ("done", "error"):
                    return _reply(name, json.loads(line.removeprefix("data: ")), began, times)
        raise AssertionError("a stream ended without its last event")


def _reply(name: str, body: dict[str, Any], began: float, times: list[float]) -> Reply:
    assert name == "done", body
    ended, source = time.monotonic(), str(body["cache"]["source"])
    gap = (times[-1] - times[0]) / max(body["usage"]["completion_tokens"] - 1, 1)
    restore_s = body["cache"]["restore_ms"] / 1e3
    return Reply(SOURCES.get(source, source), restore_s, times[0] - began, times[-1] - began, gap, ended - times[-1])


async def open_loop(url: str, trace: Sequence[Asked], document_ids: Sequence[str], question: str) -> list[Served]:
    """Ask each question when it is due, whatever becomes of those before."""
    async with Asker(url) as asker:
        sessions = await _sessions(asker, [document_ids[asked.document] for asked in trace])
        began = time.monotonic()

        async def one(asked: Asked, session: str) -> Served:
            await asyncio.sleep(began + asked.at - time.monotonic())
            reply = await asker.ask(session, question, asked.answer_tokens)
            if reply is None:
                return Served(asked.at)
            return Served(asked.at, reply.source, reply.first_s, reply.total_s)

        return list(await asyncio.gather(*(one(*each) for each in zip(trace, sessions, strict=True))))


async def _sessions(asker: Asker, document_ids: Sequence[str]) -> list[str]:
    gate = asyncio.Semaphore(4)

    async def one(document_id: str) -> str:
        async with gate:
            return await asker.session(document_id)

    return await asyncio.gather(*map(one, document_ids))
