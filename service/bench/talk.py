"""Documents of random tokens and questions about them, through the calls that the service makes."""

import asyncio
import random
import time
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from service.engine.digests import digest_of
from service.engine.local import LocalEngine
from service.engine.messages import (
    AnswerDone,
    AnswerRequest,
    AnswerStarted,
    AnswerText,
    BuildDone,
    BuildRequest,
    DocumentRef,
    Failed,
    Sampling,
)
from service.engine.protocol import EngineLost

QUESTION_TOKENS = 24
FIRST_TOKENS = 2
"""Of an answer of which only the first one counts."""
TRIES = 8
LEAST_ID = 32
"""Lower ids are often those of control tokens."""


@dataclass(frozen=True, slots=True)
class Answered:
    """One answer: where its document came from, seconds to its first text and of its restore, tokens, and when each of
    its texts came (of one clock; one at least)."""

    source: str
    first_s: float
    restore_s: float
    tokens: int
    texts: list[float]

    @property
    def began(self) -> float:
        return self.texts[0]

    @property
    def ended(self) -> float:
        return self.texts[-1]

    def tokens_until(self, moment: float) -> float:
        """Tokens behind those of the first text. How many a text has is not known: each counts as much as the others,
        and between two of them by time."""
        if moment >= self.ended:
            return self.tokens - 1
        if moment <= self.began:
            return 0.0
        i = bisect_right(self.texts, moment)
        before, after = self.texts[i - 1], self.texts[i]
        return (self.tokens - 1) * (i - 1 + (moment - before) / (after - before)) / (len(self.texts) - 1)


class Talk:
    """Builds and answers for `owner` over an open engine; tokens are below `vocab_size`."""

    def __init__(self, engine: LocalEngine, owner: str, vocab_size: int, seed: int = 0) -> None:
        self.engine = engine
        self._owner = owner
        self._vocab_size = max(vocab_size, LEAST_ID + 1)
        self._seed = seed
        self._documents: dict[str, list[int]] = {}
        self._asked = 0

    def ref(self, name: str) -> DocumentRef:
        return DocumentRef(self._owner, name)

    async def build(self, name: str, context: int) -> BuildDone:
        """Read a document of `context` tokens. Raises EngineLost when it was not read."""
        ids = self._documents.setdefault(name, self._tokens(context, name))
        request = BuildRequest(f"build-{name}", self.ref(name), ids)
        event = [event async for event in self.engine.build(request)][-1]
        if not isinstance(event, BuildDone):
            raise EngineLost(f"a document of {context} tokens was not read: {_why(event)}")
        return event

    async def ask(self, name: str, max_tokens: int) -> Answered:
        """Ask one question. Raises EngineLost when it was not answered."""
        self._asked += 1
        ids, who = self._documents[name], f"ask-{self._asked}"
        question = self._tokens(QUESTION_TOKENS, who)
        request = AnswerRequest(
            who, who, self.ref(name), digest_of(ids), len(ids), [], question, Sampling(max_tokens=max_tokens)
        )
        started = time.perf_counter()
        texts: list[float] = []
        source, restore_s = "", 0.0
        async for event in self.engine.answer(request):
            if isinstance(event, AnswerStarted):
                source, restore_s = event.source, event.restore_ms / 1e3
            elif isinstance(event, AnswerText):
                texts.append(time.perf_counter())
            elif isinstance(event, AnswerDone):
                await self.engine.release_session(who)
                texts = texts or [started + event.ttft_ms / 1e3]
                return Answered(source, texts[0] - started, restore_s, event.completion_tokens, texts)
            elif isinstance(event, Failed):
                raise EngineLost(f"a question was not answered: {_why(event)}")
        raise EngineLost("an answer ended without its end")

    async def all_at_once(self, names: Sequence[str], max_tokens: int) -> list[Answered]:
        """A question about each of these documents."""
        return await asyncio.gather(*(self.ask(name, max_tokens) for name in names))

    async def together(self, names: Sequence[str], max_tokens: int) -> float:
        """Tokens a second while all of these answers run: from when the last of them has its first text to when the
        first of them ends."""
        answers = await self._long_answers(names, max_tokens)
        began, ended = _all_run(answers)
        return sum(a.tokens_until(ended) - a.tokens_until(began) for a in answers) / (ended - began)

    async def _long_answers(self, names: Sequence[str], max_tokens: int) -> list[Answered]:
        """To other questions when one ended its answer early, or before another began: a few tokens are no figure."""
        why = ""
        for _ in range(TRIES):
            answers = await self.all_at_once(names, max_tokens)
            began, ended = _all_run(answers)
            if not all(2 * answer.tokens > max_tokens for answer in answers):
                why = f"the model ends its answers before {max_tokens} tokens: ask for fewer"
            elif ended <= began:
                why = "an answer was over before the last one had begun: ask for more tokens"
            else:
                return answers
        raise EngineLost(f"{why} (--answer-tokens)")

    def _tokens(self, n: int, name: str) -> list[int]:
        """Random tokens, the same in every run: speed does not depend on what they say."""
        chosen = random.Random(f"{self._seed}/{name}")  # noqa: S311
        return [chosen.randrange(LEAST_ID, self._vocab_size) for _ in range(n)]


def _all_run(answers: Sequence[Answered]) -> tuple[float, float]:
    """From when to when; the end is before the beginning when they never do."""
    return max(answer.began for answer in answers), min(answer.ended for answer in answers)


def _why(event: object) -> str:
    return event.detail if isinstance(event, Failed) else "it said nothing"
