"""One sequence in the batch: the rows it has to prefill, then the tokens it samples, then its result."""

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from service.engine.drafts.drafter import Drafter
from service.engine.scheduler.detokenizer import Detokenizer
from service.engine.scheduler.sampling import Sampler
from service.engine.scheduler.stops import StopStrings

_BREAKS = frozenset(".!?;。！？｡；\n")


@dataclass(frozen=True, slots=True)
class SequenceResult:
    """`finish_reason`: `stop`, `length`, `cancelled`, or `prefilled` when nothing was to be sampled.

    `computed_ids`: tokens whose KV the sequence added to its tail; the last sampled one is not among them.
    `n_prefilled`: those of them that went through prefill. Times are `time.monotonic()` seconds, 0 for never.
    `n_steps`: steps in which tokens were sampled; `n_drafted` guessed tokens were computed in them, and `n_accepted` of
    these were what was sampled.
    """

    finish_reason: str
    computed_ids: list[int]
    sampled_ids: list[int]
    n_prefilled: int
    first_token_s: float
    last_token_s: float
    n_steps: int = 0
    n_drafted: int = 0
    n_accepted: int = 0


class AnswerWriter:
    """Sampled tokens to the text that may be shown: characters whole, stop strings held back.

    `ends`: of each token the characters of the text through it; `breaks`: whether a sentence or line may end in it.
    """

    def __init__(self, detokenizer: Detokenizer, stops: StopStrings, emit: Callable[[str], object]) -> None:
        self._detokenizer = detokenizer
        self._stops = stops
        self._emit = emit
        self.ends: list[int] = []
        self.breaks: list[bool] = []

    def push(self, token_id: int) -> bool:
        """Show what `token_id` completed; whether it completed a stop string."""
        new = self._detokenizer.push(token_id)
        self.ends.append((self.ends[-1] if self.ends else 0) + len(new))
        self.breaks.append(not _BREAKS.isdisjoint(new))
        text, stopped = self._stops.push(new)
        self._show(text)
        return stopped

    def finish(self) -> None:
        """Show what was held back; nothing, when a stop string ended the answer."""
        text, _ = self._stops.push(self._detokenizer.finish())
        self._show(text + self._stops.finish())

    def _show(self, text: str) -> None:
        """Without character 0, which PostgreSQL cannot keep: the stored answer has to be the one that was shown."""
        if text:
            self._emit(text.replace("\0", "\ufffd"))


@dataclass(slots=True, eq=False)
class Sequence:
    """`tokens` are fed first, with `refeed` the document's last one in front of them; then at most `max_new`
    are sampled (0: none). `on_canary` gets the logits of the re-fed row before any token is sampled; what it
    raises ends the sequence. `drafter` guesses what comes next. Only the scheduler's thread changes a sequence,
    but for `cancelled`."""

    slot: int
    document: Any
    tokens: list[int]
    refeed: bool = False
    max_new: int = 0
    sampler: Sampler | None = None
    writer: AnswerWriter | None = None
    end_ids: frozenset[int] = frozenset()
    on_canary: Callable[[Any], None] | None = None
    drafter: Drafter | None = None
    cancelled: bool = False
    done: "Future[SequenceResult]" = field(default_factory=Future)
    n_fed: int = 0
    sampled: list[int] = field(default_factory=list)
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    n_steps: int = 0
    n_drafted: int = 0
    n_accepted: int = 0

    @property
    def n_left(self) -> int:
        """Rows still to prefill."""
        return len(self.tokens) - self.n_fed

    def accept(self, token_id: int) -> str | None:
        """Take a sampled token; the finish reason if it was the last one."""
        self.last_token_s = time.monotonic()
        self.first_token_s = self.first_token_s or self.last_token_s
        self.sampled.append(token_id)
        if self.drafter is not None:
            self.drafter.push(token_id)
        if token_id in self.end_ids:
            return "stop"
        if self.writer is not None and self.writer.push(token_id):
            return "stop"
        return "length" if len(self.sampled) >= self.max_new else None

    def guess_no_more(self) -> None:
        if self.drafter is not None:
            self.drafter.end()
        self.drafter = None

    def finish(self, reason: str) -> None:
        """Show the rest of the text and give the result."""
        if self.writer is not None:
            self.writer.finish()
        fed = self.tokens[int(self.refeed) : self.n_fed]
        computed = fed + self.sampled[:-1]
        times = self.first_token_s, self.last_token_s
        drafts = self.n_steps, self.n_drafted, self.n_accepted
        self.done.set_result(SequenceResult(reason, computed, self.sampled, len(fed), *times, *drafts))
