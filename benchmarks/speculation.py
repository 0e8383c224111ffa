"""What guessing tokens from the document gains, what it costs where nothing matches, and that answers stay the same.

    python -m benchmarks.speculation [--questions 500] [--dtype float32] [--only rows same quotes nothing] [--write]

Every question is asked twice, with drafts and without, one right after the other by the same engine in this process,
so that other work on the machine meets both. Writes the figures into docs/speculation.md. Ends with status 1 when an
answer differs by more than rounding explains, quotations come at less than 1.8 tokens a step, or drafts cost more than
3 % where nothing matches.
"""

import argparse
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import torch

from benchmarks.bench_report import ROOT, machine, table, write_section
from benchmarks.speculation_questions import FORMS, QUOTING, TEXTS, Asked, questions
from service.cli.config import read_settings
from service.engine.digests import digest_of
from service.engine.factory import EngineConfig, open_host
from service.engine.host import answer as host_answer
from service.engine.messages import (
    AnswerDone,
    AnswerRequest,
    AnswerText,
    BuildDone,
    BuildRequest,
    DocumentRef,
    Sampling,
)
from service.engine.models.card import load_card
from service.engine.prompt import PromptTemplate
from service.engine.protocol import Rows
from service.engine.scheduler.sampling import Sampler
from service.engine.tokenizer import Tokenizer

PAGE = ROOT / "docs" / "speculation.md"
LEAST_TOKENS_A_STEP = 1.8
MOST_SLOWER = 0.03
SHORT, LONG = 32, 64
"""Tokens of an answer at most: of those that are compared, and of quotations."""
ROUNDS = 15
HOT = Sampling(max_tokens=LONG, temperature=1.6, seed=7)
"""Answers that quote nothing: the same random text with drafts and without."""


def _ref(text: str) -> DocumentRef:
    return DocumentRef("bench", re.sub(r"\W", "-", text))


class GapSampler(Sampler):
    """Keeps how far the likeliest token is ahead of the next one."""

    gaps: ClassVar[list[float]] = []

    def pick(self, logits: torch.Tensor) -> int:
        first, second = torch.topk(logits, 2).values.tolist()
        self.gaps.append(first - second)
        return super().pick(logits)


@dataclass
class Reply:
    done: AnswerDone
    tokens: list[int]
    text: str
    gaps: list[float]

    @property
    def seconds(self) -> float:
        """From the first token to the last."""
        return (self.done.completion_tokens - 1) / max(self.done.decode_tokens_per_s, 1e-9)


@dataclass
class Pair:
    """A question's answers with drafts and without."""

    asked: Asked
    drafted: Reply
    plain: Reply

    @property
    def first_difference(self) -> int | None:
        one, other = self.drafted.tokens, self.plain.tokens
        if one == other:
            return None
        return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))

    @property
    def ratio(self) -> float:
        """Seconds of a token with drafts, as a multiple of one without."""
        both = ((reply.seconds, max(reply.done.completion_tokens - 1, 1)) for reply in (self.drafted, self.plain))
        (mine, n), (other, m) = both
        return (mine / n) / (other / m)


@dataclass
class Desk:
    """An engine in this process, and the texts that it has read."""

    dtype: str
    folder: Path
    read: dict[str, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        model = read_settings().model_dir
        config = EngineConfig(store_dir=str(self.folder), model_dir=str(model), compute_dtype=self.dtype, max_batch=1)
        self.host = open_host(config)
        self.scheduler, self.runner = self.host._context.scheduler, self.host._context.runner
        self.planner = self.scheduler.planner
        self.prompts = PromptTemplate(load_card(model).prompt, Tokenizer.load(model))

    def ids(self, text: str) -> list[int]:
        """The tokens of a text, which is read the first time; with a planner, or nothing could be looked up in it."""
        if text not in self.read:
            self.scheduler.planner = self.planner
            ids = self.prompts.document((ROOT / text).read_text("utf-8")).ids
            events: list[object] = []
            self.host.build(BuildRequest(text, _ref(text), ids), events.append).result()
            if not isinstance(events[-1], BuildDone):
                raise SystemExit(f"{text} was not read: {events[-1]}")
            self.read[text] = ids
        return self.read[text]

    def ask(self, asked: Asked, sampling: Sampling, *, drafts: bool) -> Reply:
        ids, events = self.ids(asked.text), []
        self.scheduler.planner = self.planner if drafts else None
        request = AnswerRequest(
            "ask", "ask", _ref(asked.text), digest_of(ids), len(ids), [],
            self.prompts.question(asked.question), sampling,
        )  # fmt: skip
        GapSampler.gaps = []
        self.host.answer(request, events.append).result()
        self.host.release_session("ask")
        done = events[-1]
        if not isinstance(done, AnswerDone):
            raise SystemExit(f"{asked.question} was not answered: {done}")
        tokens = [*done.token_ids[len(request.prompt_ids) :], *done.pending_ids]
        text = "".join(event.text for event in events if isinstance(event, AnswerText))
        return Reply(done, tokens, text, GapSampler.gaps)

    def pairs(self, what: str, asked: Sequence[Asked], sampling: Sampling) -> list[Pair]:
        """Both answers to each question, with drafts first every other time; the first pair is for warming up."""
        self.ask(asked[0], sampling, drafts=True)
        found = []
        for i, one in enumerate(asked):
            replies = {drafts: self.ask(one, sampling, drafts=drafts) for drafts in (bool(i % 2), not i % 2)}
            found.append(Pair(one, replies[True], replies[False]))
            if (i + 1) % 20 == 0:
                print(f"{what}: {i + 1} of {len(asked)}", flush=True)
        return found


def rows_section(desk: Desk) -> str:
    """What a step of several rows takes, behind the longest text."""
    asked = Asked(TEXTS[0], "Who pays?")
    desk.ask(asked, Sampling(max_tokens=2), drafts=False)
    with desk.host._context.residency.held(
        _ref(asked.text), digest_of(desk.ids(asked.text)), len(desk.ids(asked.text)),
        lambda _: None, host_answer.CancelToken(),
    ) as (document, _):  # fmt: skip
        slot, spent = (
            desk.scheduler.run(desk.runner.new_tail),
            {n: [] for n in range(1, desk.runner.limits.draft_tokens + 2)},
        )
        for repeat in range(ROUNDS + 1):
            for n, seconds in spent.items():
                started = time.perf_counter()
                desk.scheduler.run(desk.runner.forward, [Rows(slot, document.handle, [5] * n)])
                if repeat:
                    seconds.append(time.perf_counter() - started)
                desk.scheduler.run(desk.runner.truncate_tail, slot, 0)
        desk.scheduler.run(desk.runner.free_tail, slot)
    base = spent[1]
    ratios = [[s / b for s, b in zip(seconds, base, strict=True)] for seconds in spent.values()]
    medians = [statistics.median(of_n) for of_n in ratios]
    text = table(["rows of a step", *spent], [["times one row", *(f"{ratio:.2f}" for ratio in medians)]])
    return f"A step over {len(desk.ids(asked.text)):,} tokens, median of {ROUNDS}, in turns:\n\n{text}"


def same_section(desk: Desk, asked: Sequence[Asked]) -> tuple[str, bool]:
    n, host_answer.Sampler = len(asked), GapSampler
    pairs = desk.pairs("same", asked, Sampling(max_tokens=SHORT))
    host_answer.Sampler = Sampler
    noise, differing = 0.0, [pair for pair in pairs if pair.first_difference is not None]
    for pair in pairs:
        end = pair.first_difference
        both = list(zip(pair.drafted.gaps, pair.plain.gaps, strict=False))[
            : len(pair.plain.gaps) if end is None else end
        ]
        noise = max([noise, *(abs(a - b) for a, b in both)])
    at = [pair.plain.gaps[pair.first_difference or 0] for pair in differing]
    beyond = [gap for gap in at if gap > noise]
    for pair in differing:
        print(f"{pair.asked}: {pair.drafted.text!r}, without drafts {pair.plain.text!r}")
    rows = [
        ("answers, greedy, with drafts and without", n),
        ("identical, token by token", n - len(differing)),
        ("most that the gap between the two likeliest tokens changed", f"{noise:.2g}"),
        ("answers that differ where the gap was larger than that", len(beyond)),
        ("tokens a step", f"{tokens_a_step(pairs):.2f}"),
        ("drafts that were right", accepted(pairs)),
    ]
    return table((f"{desk.runner.compute_dtype}", ""), rows), not beyond


def tokens_a_step(pairs: Sequence[Pair]) -> float:
    return sum(p.drafted.done.completion_tokens for p in pairs) / sum(p.drafted.done.steps for p in pairs)


def accepted(pairs: Sequence[Pair]) -> str:
    right, all_ = (sum(getattr(p.drafted.done, f"{kind}_tokens") for p in pairs) for kind in ("accepted", "drafted"))
    return f"{right:,} of {all_:,}"


def times_section(desk: Desk, what: str, asked: Sequence[Asked], sampling: Sampling) -> tuple[str, float, float]:
    """Figures of one kind of answer; tokens a step, and seconds of all tokens as a multiple of those without drafts."""
    pairs = [pair for pair in desk.pairs(what, asked, sampling) if pair.plain.done.completion_tokens > 4]
    ratios = sorted(pair.ratio for pair in pairs)
    low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
    ratio, steps = statistics.median(ratios), tokens_a_step(pairs)
    rows = [
        ("answers", len(pairs)),
        ("tokens a step", f"{steps:.2f}"),
        ("drafts that were right", accepted(pairs)),
        ("time of a token with drafts, by that without: median, middle half", f"{ratio:.3f}, {low:.3f} to {high:.3f}"),
        ("tokens a second, with drafts by without", f"{1 / ratio:.2f}x"),
    ]
    return table((what, ""), rows), steps, ratio


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=500)
    parser.add_argument("--timed", type=int, default=40, help="questions whose answers are timed, of each kind")
    parser.add_argument("--texts", type=int, default=len(TEXTS), help="how many of the texts are asked about")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--only", nargs="+", default=["rows", "same", "quotes", "nothing"])
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    parts, good = [f"{machine()}; the demo model in {arguments.dtype}, KV type k8v4, one answer at a time."], True
    texts = TEXTS[: arguments.texts]
    with tempfile.TemporaryDirectory() as folder:
        desk = Desk(arguments.dtype, Path(folder))
        if "rows" in arguments.only:
            parts.append(rows_section(desk))
        if "same" in arguments.only:
            text, same = same_section(desk, questions(arguments.questions, texts=texts))
            parts.append(text)
            good &= same
        for kind in (kind for kind in ("quotes", "nothing") if kind in arguments.only):
            quoting = kind == "quotes"
            asked = questions(arguments.timed, QUOTING if quoting else FORMS, texts)
            what = "quotations" if quoting else f"random text (temperature {HOT.temperature}), nothing matches"
            text, steps, ratio = times_section(desk, what, asked, Sampling(max_tokens=LONG) if quoting else HOT)
            parts.append(text)
            good &= steps >= LEAST_TOKENS_A_STEP if quoting else ratio <= 1 + MOST_SLOWER
        desk.host.close()
    print("\n\n".join(parts))
    if arguments.write:
        write_section(f"speculation {arguments.dtype}", "\n\n".join(parts), PAGE)
    sys.exit(not good)


if __name__ == "__main__":
    main()
