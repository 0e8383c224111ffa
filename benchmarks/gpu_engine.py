"""A whole engine (host, scheduler, runner) with a clock on every event that a client would see."""

import itertools
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cache_store.store import SnapshotStore
from service.engine.digests import digest_of
from service.engine.host.host import EngineHost
from service.engine.messages import (
    AnswerDone,
    AnswerRequest,
    AnswerStarted,
    AnswerText,
    BuildRequest,
    DocumentRef,
    Failed,
    Retention,
    Sampling,
    is_last,
)
from service.engine.protocol import Runner

WAIT_S = 300.0
_numbers = itertools.count()


class Letters:
    """A decoder that gives every token one letter, so that every token is an event."""

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(97 + i % 26) for i in ids)

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([97 + token_id % 26])


@dataclass(slots=True)
class Request:
    """A build or an answer under way: its events with the seconds at which they came."""

    request_id: str
    started: float
    events: list[tuple[float, Any]] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    def take(self, event: Any) -> None:
        self.events.append((time.perf_counter(), event))
        if is_last(event):
            self.ended.set()

    def wait(self, timeout_s: float = WAIT_S) -> Any:
        """The last event. Raises TimeoutError."""
        if not self.ended.wait(timeout_s):
            raise TimeoutError(f"request {self.request_id} has not ended after {timeout_s:.0f} s")
        return self.events[-1][1]

    @property
    def token_times(self) -> list[float]:
        return [at for at, event in list(self.events) if isinstance(event, AnswerText)]

    @property
    def first_token_s(self) -> float:
        """From the request to the first piece of text."""
        return self.token_times[0] - self.started

    @property
    def seconds(self) -> float:
        return self.events[-1][0] - self.started

    @property
    def source(self) -> AnswerStarted:
        """Where the document came from. Raises StopIteration when the answer never started."""
        return next(event for _, event in self.events if isinstance(event, AnswerStarted))

    def wait_tokens(self, n: int, timeout_s: float = 60.0) -> None:
        """Until `n` tokens have come. Raises TimeoutError."""
        until = time.perf_counter() + timeout_s
        while len(self.token_times) < n:
            if self.ended.is_set() or time.perf_counter() > until:
                raise TimeoutError(f"{len(self.token_times)} of {n} tokens came: {self.events[-1:]}")
            time.sleep(0.001)


@dataclass(frozen=True, slots=True)
class Text:
    """A document: its name and tokens."""

    ref: DocumentRef
    ids: list[int]

    @classmethod
    def numbered(cls, name: str, n_tokens: int, vocab: int) -> "Text":
        """Tokens that follow from the name."""
        seed = sum(name.encode()) * 7919 + 1
        return cls(DocumentRef("bench", name), [(seed + i * 31) % (vocab - 2) for i in range(n_tokens)])


class Engine:
    """An `EngineHost` over a runner and a store, with `build` and `ask` as a client would call them."""

    def __init__(
        self, runner: Runner, directory: Path, *, budget_nbytes: int, max_batch: int = 8, **windowed: Any
    ) -> None:
        """`windowed`: `index_heads` and `replay_ids` of `EngineHost`."""
        self.runner = runner
        self.directory = directory
        self.store = SnapshotStore(directory)
        self.host = EngineHost(
            runner,
            self.store,
            Letters(),
            frozenset(),
            resident_budget_nbytes=budget_nbytes,
            max_batch=max_batch,
            **windowed,
        )

    def build(self, text: Text, retention: Retention | None = None) -> Request:
        request = Request(f"build-{next(_numbers)}", time.perf_counter())
        self.host.build(BuildRequest(request.request_id, text.ref, text.ids, retention), request.take)
        return request

    def ask(
        self,
        text: Text,
        *,
        n_prompt: int = 30,
        max_tokens: int = 4,
        session: str = "",
        retention: Retention | None = None,
    ) -> Request:
        """A question of `n_prompt` tokens in a session of its own."""
        name = f"ask-{next(_numbers)}"
        request = Request(name, time.perf_counter())
        prompt = [(17 * i + 3) % 251 for i in range(n_prompt)]
        self.host.answer(
            AnswerRequest(
                name,
                session or name,
                text.ref,
                digest_of(text.ids),
                len(text.ids),
                [],
                prompt,
                Sampling(max_tokens),
                retention=retention,
            ),
            request.take,
        )
        return request

    def answered(self, text: Text, **options: Any) -> Request:
        """`ask`, waited for. Raises RuntimeError when it fails."""
        request = self.ask(text, **options)
        expect(request, AnswerDone)
        return request

    def close(self) -> None:
        self.host.close()


def expect(request: Request, kind: type) -> Any:
    """The last event of a request, which must be of this kind. Raises RuntimeError."""
    last = request.wait()
    if not isinstance(last, kind):
        what = f"{last.code}: {last.detail}" if isinstance(last, Failed) else str(last)
        raise RuntimeError(f"{request.request_id} ended with {what}")
    return last
