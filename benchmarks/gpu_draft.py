"""A draft model on a card: what a guess of it takes, and how much faster answers are that it guesses well or badly.

    python -m benchmarks.gpu_draft [--dry] [--kv-type k8v4] [--contexts 64,8192,32768,131072] [--tokens 160]

The model is of 27B shape, the draft model of 1B, both of random weights and with the same vocabulary. Documents are
filled with random KV in both. Answers are told what to say, and the draft model's logits what it guesses: right as
often as a row says, by chance, and as sure of itself where it is wrong. Everything is computed: the draft model's
steps, its logits and what is made of them, the model's longer steps; when the draft model is asked, and for how many
guesses, is decided as it is served. Nothing can be looked up. Speeds are those of the scheduler, from the first token
to the last.

The bound of a speed is the best that any fixed number of guesses could give by the steps' measured times. That of a
step is the weights and the document's KV, each read once.
"""

import argparse
import random
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu_decode import context_name
from benchmarks.gpu_documents import filled
from benchmarks.gpu_lib import Result, Row, copy_ceiling, median, parse, spread
from benchmarks.gpu_models import Want, model_dir, opened, weights_read_nbytes
from benchmarks.gpu_speculation import Told
from cache_store.layout import KVType
from service.engine.drafts.drafter import Drafter
from service.engine.drafts.follower import Follower
from service.engine.protocol import Best, Rows, Runner
from service.engine.scheduler.loop import Scheduler
from service.engine.scheduler.sequence import Sequence as Answer

RIGHT = (0.9, 0.7, 0.5, 0.0)
"""How often the draft model's guesses are right."""
LEAST_GAIN = {0.9: 1.5, 0.7: 1.1}
"""How much faster answers have to be for it; with others they may be `MOST_SLOWER`."""
MOST_SLOWER = 0.03
PROMPT = list(range(3, 33))
FIRST_ID = 64
"""Of the script, whose tokens are even: a wrong guess is the odd number behind a right one."""
SURE, LARGEST = 1.0, 1e4
"""What the draft model is told to give its guesses: a probability, or where that is not asked for a logit."""
STEPS, WARM_UP = 40, 6
TURNS = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kv-type", default="k8v4")
    parser.add_argument("--contexts", default="64,8192,32768,131072")
    parser.add_argument("--tokens", type=int, default=160, help="of an answer")


class Telling:
    """A runner whose logits, computed as ever, say what comes next in the script, or where it is to be wrong another
    token. What was fed tells where in the script it is: each of its tokens stands there once."""

    def __init__(self, runner: Runner, script: Sequence[int], is_right: Sequence[bool]) -> None:
        self._runner = runner
        self._said = [token if right else token ^ 1 for token, right in zip(script, is_right, strict=True)]
        self._places = {token: i + 1 for i, token in enumerate(script)} | {PROMPT[-1] & ~1: 0}
        self.n_steps = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def forward(self, batch: Sequence[Rows]) -> list[Any]:
        self.n_steps += 1
        found = self._runner.forward(batch)
        return [self._told(rows, of_rows) for rows, of_rows in zip(batch, found, strict=True)]

    def _told(self, rows: Rows, found: Any) -> Any:
        said = [self._next(token) for token in rows.tokens[rows.logits_from :]]
        if isinstance(found, list):
            return [Best(token_id, is_finite=True, sure=SURE) for token_id in said]
        for token_id, row in zip(said, found, strict=True):
            row[token_id] = LARGEST
        return found

    def _next(self, token: int) -> int:
        place = self._places.get(token & ~1, 0)
        return self._said[place] if place < len(self._said) else 0


@dataclass(frozen=True, slots=True)
class Run:
    """One answer: tokens a second, tokens of a step of the model, steps of the draft model for it."""

    speed: float
    per_step: float
    n_draft_steps: float = 0.0


class Draft:
    def __init__(self, result: Result, main: Runner, draft: Runner, arguments: argparse.Namespace) -> None:
        self.result, self.main, self.draft, self.arguments = result, main, draft, arguments
        self.kv, self.most = str(main.layout.kv_type), max(main.limits.draft_tokens, 1)
        self.copy = copy_ceiling()
        even = range(FIRST_ID, min(main.limits.vocab_size, draft.limits.vocab_size) - 2, 2)
        self.script = random.Random(11).sample(even, arguments.tokens)

    def context(self, n_context: int, weights: tuple[int, int]) -> None:
        """All rows of one length. `weights`: bytes that a step of the model reads, and of the draft model."""
        scheduler = Scheduler(self.main)
        documents = [scheduler.run(filled, runner, n_context) for runner in (self.main, self.draft)]
        try:
            forward_s = scheduler.run(self._draft_step, documents[1], n_context, weights[1])
            steps = scheduler.run(self._main_steps, documents[0])
            scheduler.close()
            plain = median([self.answered(documents, None)[1].speed for _ in range(TURNS)])
            self._plain(n_context, plain, steps[1], weights[0])
            for right in RIGHT:
                self._answers(documents, n_context, right, plain, self._bound(steps, forward_s, right))
        finally:
            for runner, document in zip((self.main, self.draft), documents, strict=True):
                runner.free_document(document)

    def _draft_step(self, document: Any, n_context: int, weights: int) -> float:
        samples = timed(self.draft, document, 1, how_sure=True)
        seconds, nbytes = median(samples), weights + n_context * self.draft.layout.bytes_per_token
        bound = nbytes / self.copy
        self.result.raw[f"{self.kv} {n_context} draft step"] = seconds
        self.result.add(
            Row(
                f"{self.kv}, {context_name(n_context)}, a step of the draft model",
                f"{seconds * 1e3:.2f} ms, {nbytes / seconds / 1e9:.0f} GB/s",
                f"{spread(samples, 1e3)} ms",
                f"{bound * 1e3:.2f} ms ({bound / seconds:.0%} reached)",
            )
        )
        return seconds

    def _main_steps(self, document: Any) -> dict[int, float]:
        """Rows of one sequence -> seconds of the model's step."""
        counts = sorted({1, 2, 3, 4, 6, 8} & set(range(1, self.most + 2)))
        return {n: median(timed(self.main, document, n)) for n in counts}

    def _plain(self, n_context: int, speed: float, step_s: float, weights: int) -> None:
        bound = self.copy / (weights + n_context * self.main.layout.bytes_per_token)
        self.result.raw[f"{self.kv} {n_context} without"] = speed
        self.result.add(
            Row(
                f"{self.kv}, {context_name(n_context)}, without a draft model",
                f"{speed:.1f} tok/s",
                f"{self.arguments.tokens} tokens",
                f"{bound:.0f} tok/s",
                f"a step alone {step_s * 1e3:.2f} ms",
            )
        )

    def _bound(self, steps: dict[int, float], forward_s: float, right: float) -> float:
        """Tokens a second of the best fixed number of guesses, that are right with this chance."""
        return max(
            sum(right**i for i in range(n_rows)) / (step_s + (n_rows - 1) * forward_s)
            for n_rows, step_s in steps.items()
        )

    def _answers(self, documents: Sequence[Any], n_context: int, right: float, plain: float, bound: float) -> None:
        runs = self.answered(documents, right)[1:]
        speed = median([run.speed for run in runs])
        gain, least = speed / plain, LEAST_GAIN.get(right, 1 - MOST_SLOWER)
        what = f"{self.kv}, {context_name(n_context)}, guesses of the draft model right {right:.0%} of the time"
        self.result.raw[what] = [gain, runs[-1].per_step, runs[-1].n_draft_steps]
        self.result.add(
            Row(
                what,
                f"{speed:.1f} tok/s, {gain:.2f}x",
                f"{spread([run.speed for run in runs])} tok/s",
                f"{bound:.1f} tok/s ({speed / bound:.0%} reached)",
                f"{runs[-1].per_step:.2f} tokens a step, {runs[-1].n_draft_steps:.2f} steps of the draft model for it",
                f"at least {least:.2f}x",
                gain >= least,
            )
        )

    def answered(self, documents: Sequence[Any], right: float | None) -> list[Run]:
        """Answers one after another, the first to find out what guesses are worth; with `right` None without any."""
        n_right = round((right or 0.0) * len(self.script))
        is_right = [i < n_right for i in range(len(self.script))]
        random.Random(7).shuffle(is_right)
        telling: Any = Telling(self.draft, self.script, is_right)
        scheduler = Scheduler(self.main, draft=None if right is None else telling)
        if right is None:
            scheduler.planner = None
        try:
            return [self._answer(scheduler, documents, telling) for _ in range(1 + TURNS)]
        finally:
            scheduler.close()

    def _answer(self, scheduler: Scheduler, documents: Sequence[Any], telling: Telling) -> Run:
        slots = [scheduler.run(runner.new_tail) for runner in (self.main, self.draft)]
        told: Any = Told(self.script)
        answer = Answer(slots[0], documents[0], PROMPT, max_new=len(self.script), sampler=told, done=Future())
        answer.drafter = self._drafter(scheduler, slots[1], documents[1])
        before = telling.n_steps
        try:
            scheduler.submit(answer)
            done = answer.done.result(120)
        finally:
            for runner, slot in zip((self.main, self.draft), slots, strict=True):
                scheduler.run(runner.free_tail, slot)
        n, n_steps = len(done.sampled_ids) - 1, max(done.n_steps - 1, 1)
        return Run(n / (done.last_token_s - done.first_token_s), n / n_steps, (telling.n_steps - before) / n_steps)

    def _drafter(self, scheduler: Scheduler, slot: int, document: Any) -> Drafter | None:
        """As an answer has one, of whose tokens none stand anywhere."""
        if scheduler.planner is None or scheduler.drafting is None:
            return None
        room = self.draft.limits.tail_tokens
        follower = Follower(slot, document, scheduler.drafting.rates, room)
        return Drafter([], PROMPT, scheduler.planner.rates, lambda: follower)


def timed(runner: Runner, document: Any, n_rows: int, *, how_sure: bool = False) -> list[float]:
    """Seconds of steps of rows of one sequence, that are taken back; on the scheduler's thread."""
    slot, samples = runner.new_tail(), []
    runner.forward([Rows(slot, document, PROMPT, logits_from=len(PROMPT) - 1)])
    for i in range(WARM_UP + STEPS):
        started = time.perf_counter()
        tokens = [5 + (i + k) % 97 for k in range(n_rows)]
        runner.forward([Rows(slot, document, tokens, only_best=True, how_sure=how_sure)])
        samples.append(time.perf_counter() - started)
        runner.truncate_tail(slot, len(PROMPT))
    runner.free_tail(slot)
    return samples[WARM_UP:]


def measure(result: Result, arguments: argparse.Namespace, directory: Path, draft_dir: Path) -> None:
    contexts = [int(n) for n in arguments.contexts.split(",")]
    tail = len(PROMPT) + arguments.tokens + 64
    want = Want(KVType(arguments.kv_type), 3, tail, max(contexts) + 4096, draft_tokens=7)
    weights = weights_read_nbytes(directory), weights_read_nbytes(draft_dir)
    with opened(draft_dir, want) as small, opened(directory, want) as big:
        made = Draft(result, big.runner, small.runner, arguments)
        result.note(f"A copy on this card moves {made.copy / 1e9:.0f} GB/s, read and written bytes counted.")
        result.note(
            f"A step reads {weights[0] / 1e9:.2f} GB of the model's weights, {weights[1] / 1e9:.2f} GB of the draft's."
        )
        for n in contexts:
            result.attempt(f"at {n}", lambda n=n: made.context(n, weights), needs_s=20)


def main() -> None:
    arguments = parse(__doc__, add_arguments)
    if arguments.dry:
        arguments.contexts, arguments.tokens = "64,512", min(arguments.tokens, 40)
    result = Result("draft", "benchmarks/gpu_draft.py", arguments)
    measure(result, arguments, model_dir(arguments, "big"), model_dir(arguments, "draft"))


if __name__ == "__main__":
    main()
