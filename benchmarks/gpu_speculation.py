"""Guessed tokens on a card: what a step of more rows of one sequence costs, what right guesses gain, and what looking
for guesses costs where there are none.

    python -m benchmarks.gpu_speculation [--dry] [--kv-type k8v4] [--contexts 64,8192,32768,131072] [--tokens 240]

Documents are filled with random KV and answers are told what to say, so that guesses are right as often as a pattern
says, whatever the model makes of them; logits are computed, copied and looked at as ever. Speeds are those of the
scheduler, from the first token to the last. The bound of a step is the weights and the document's KV, each read once.
"""

import argparse
import itertools
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_decode import context_name
from benchmarks.gpu_documents import filled
from benchmarks.gpu_lib import Result, Row, copy_ceiling, median, parse, spread
from benchmarks.gpu_models import Want, model_dir, opened, weights_read_nbytes
from cache_store.layout import KVType
from service.engine.drafts.costs import StepCosts
from service.engine.drafts.drafter import Drafter
from service.engine.drafts.lookup import DocumentLookup
from service.engine.drafts.planner import DraftPlanner
from service.engine.messages import Sampling
from service.engine.models.gate import kl_stats
from service.engine.protocol import Best, Rows, Runner
from service.engine.scheduler.loop import Scheduler
from service.engine.scheduler.sampling import Sampler
from service.engine.scheduler.sequence import Sequence as Answer

GAIN = 0.8
"""Of the tokens a step gives: how much faster an answer has to be."""
MOST_SLOWER = 0.03
"""Where nothing matches."""
PATTERNS: dict[str, tuple[int, tuple[int, ...]]] = {
    "3 guesses, all right": (3, (3,)),
    "7 guesses, all right": (7, (7,)),
    "7 guesses, 7, 2, 5 and 0 right in turn": (7, (7, 2, 5, 0)),
}
"""Guesses of each step, and how many of them are right, step by step."""
PROMPT = list(range(3, 33))
STEPS, WARM_UP = 40, 6
TURNS = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kv-type", default="k8v4")
    parser.add_argument("--contexts", default="64,8192,32768,131072")
    parser.add_argument("--tokens", type=int, default=240, help="of an answer")


class Told:
    """A sampler that looks at the logits as a greedy one does, and says what a script says."""

    def __init__(self, script: Sequence[int]) -> None:
        self._greedy = Sampler(Sampling(len(script), temperature=0.0))
        self._script = iter(script)
        self.only_best = True

    def pick(self, logits: torch.Tensor | Best) -> int:
        self._greedy.pick(logits)
        return next(self._script)


class Knowing:
    """A drafter that knows the script: as many of its guesses are right as `right` says, step by step."""

    def __init__(self, script: Sequence[int], n_drafts: int, right: Iterable[int]) -> None:
        self._script, self._n_drafts, self._right = script, n_drafts, itertools.cycle(right)
        self._at = 0

    def push(self, token_id: int) -> None:
        self._at += 1

    def draft(self, room: int) -> list[int]:
        """The rest are wrong: another token than the script's."""
        right = next(self._right)
        known = self._script[self._at : self._at + min(self._n_drafts, room)]
        return [token if i < right else token ^ 1 for i, token in enumerate(known)]


class Always:
    """A planner that takes every guess there is."""

    def __init__(self) -> None:
        self.costs = StepCosts()

    def plan(self, drafters: Sequence[Any], room: Sequence[int]) -> list[list[int]]:
        return [drafter.draft(n) if drafter else [] for drafter, n in zip(drafters, room, strict=True)]


@dataclass(frozen=True, slots=True)
class Run:
    """One answer: tokens a second, tokens of a step."""

    speed: float
    per_step: float


class Speculation:
    def __init__(self, result: Result, runner: Runner, directory: Path, arguments: argparse.Namespace) -> None:
        self.result, self.runner, self.arguments = result, runner, arguments
        self.kv = str(runner.layout.kv_type)
        self.most = max(runner.limits.draft_tokens, 1)
        self.weights, self.copy = weights_read_nbytes(directory), copy_ceiling()
        self.scheduler = Scheduler(runner)
        # Even: a wrong guess is the odd number behind a right one, and stands nowhere.
        generator = torch.Generator().manual_seed(11)
        half = runner.limits.vocab_size // 2 - 2
        ids = torch.randint(2, half, (2048 + 2 * arguments.tokens,), generator=generator)
        self.tokens = (2 * ids).tolist()

    def context(self, n_context: int) -> None:
        document = self.scheduler.run(filled, self.runner, n_context)
        try:
            self.scheduler.run(self.steps, document, n_context)
            self.forced(document, n_context)
        finally:
            self.scheduler.run(self.runner.free_document, document)

    def steps(self, document: Any, n_context: int) -> None:
        """Rows of one sequence, 1 to all that a step takes, and what they would gain if all were right."""
        nbytes = self.weights + n_context * self.runner.layout.bytes_per_token
        slot, one = self.runner.new_tail(), 0.0
        self.runner.forward([Rows(slot, document, PROMPT, logits_from=len(PROMPT) - 1)])
        for n_rows in range(1, self.most + 2):
            samples = self._timed(slot, document, n_rows)
            seconds = median(samples)
            one = one or seconds
            self.result.raw[f"{self.kv} {n_context} rows {n_rows}"] = seconds
            gain = n_rows * one / seconds
            self.result.add(
                Row(
                    f"{self.kv}, {context_name(n_context)}, a step of {n_rows} rows of one sequence",
                    f"{seconds * 1e3:.2f} ms, {nbytes / seconds / 1e9:.0f} GB/s",
                    f"{spread(samples, 1e3)} ms",
                    f"{nbytes / self.copy * 1e3:.2f} ms ({nbytes / self.copy / seconds:.0%} reached)",
                    f"{seconds / one:.2f} times one row" if n_rows > 1 else "",
                    f"at most {1 / GAIN:.2f} times one row" if n_rows > 1 else "",
                    gain >= GAIN * n_rows if n_rows > 1 else None,
                )
            )
        self.runner.free_tail(slot)

    def _timed(self, slot: int, document: Any, n_rows: int) -> list[float]:
        """Seconds of steps that are taken back."""
        samples, length = [], self.runner.tail_length(slot)
        for i in range(WARM_UP + STEPS):
            started = time.perf_counter()
            tokens = [5 + (i + k) % 97 for k in range(n_rows)]
            self.runner.forward([Rows(slot, document, tokens, only_best=True)])
            samples.append(time.perf_counter() - started)
            self.runner.truncate_tail(slot, length)
        return samples[WARM_UP:]

    def forced(self, document: Any, n_context: int) -> None:
        """What guesses gain that are right as often as a pattern says, and those of a quotation as they are served."""
        script = self.tokens[1000 : 1000 + self.arguments.tokens]
        plain = self.answered(document, script, None, None)
        for name, (n_drafts, right) in PATTERNS.items():
            n = min(n_drafts, self.most)
            drafted = self.answered(document, script, Always(), Knowing(script, n, right))
            self._gain(f"{context_name(n_context)}, {name}", plain, drafted)
        planner = DraftPlanner(self.most)
        quoting = Drafter([DocumentLookup(self.tokens)], PROMPT, planner.rates)
        drafted = self.answered(document, script, planner, quoting)
        self._gain(f"{context_name(n_context)}, a quotation, guesses looked up and planned as served", plain, drafted)

    def _gain(self, what: str, plain: Run, drafted: Run) -> None:
        gain = drafted.speed / plain.speed
        self.result.raw[f"{self.kv} {what}"] = [gain, drafted.per_step]
        self.result.add(
            Row(
                f"{self.kv}, {what}",
                f"{drafted.speed:.1f} tok/s, {gain:.2f}x",
                f"{self.arguments.tokens} tokens",
                beside=f"{drafted.per_step:.2f} tokens a step, {gain / drafted.per_step:.2f} of that; "
                f"without {plain.speed:.1f} tok/s",
                target=f"at least {GAIN} x tokens a step",
                met=gain >= GAIN * drafted.per_step,
            )
        )

    def in_vain(self, n_context: int) -> None:
        """Nothing matches; or every third token follows two that stand in the document, and is another than there."""
        document, n = self.scheduler.run(filled, self.runner, n_context), self.arguments.tokens
        nothing = [token ^ 1 for token in self.tokens[1000 : 1000 + n]]
        misled = [token ^ (i % 3 == 2) for i, token in enumerate(self.tokens[1000 : 1000 + n])]
        try:
            self._in_vain(document, f"{context_name(n_context)}, nothing matches", nothing, MOST_SLOWER)
            self._in_vain(document, f"{context_name(n_context)}, every guess is wrong", misled, None)
        finally:
            self.scheduler.run(self.runner.free_document, document)

    def _in_vain(self, document: Any, what: str, script: Sequence[int], most: float | None) -> None:
        """The same answer with and without guesses, in turns."""
        planner, without, with_ = DraftPlanner(self.most), [], []
        for _ in range(TURNS):
            drafter = Drafter([DocumentLookup(self.tokens)], PROMPT, planner.rates)
            without.append(1 / self.answered(document, script, None, None).speed)
            with_.append(1 / self.answered(document, script, planner, drafter).speed)
        slower = median(with_) / median(without) - 1
        self.result.raw[f"{self.kv} {what}"] = slower
        self.result.add(
            Row(
                f"{self.kv}, {what}",
                f"{slower:+.1%} time",
                f"{spread(with_, 1e3)} ms a token",
                beside=f"without {spread(without, 1e3)}",
                target=f"at most {most:.0%} more" if most else "",
                met=slower <= most if most else None,
            )
        )

    def same(self, n_context: int) -> None:
        """Rows of one step against the same one by one; beside it what another sequence in the step changes."""
        document = self.scheduler.run(filled, self.runner, n_context)
        try:
            mean, noise = self.scheduler.run(self._differences, document)
        finally:
            self.scheduler.run(self.runner.free_document, document)
        limit = max(1e-3, 10 * noise)
        self.result.add(
            Row(
                f"{self.kv}, {context_name(n_context)}, rows of one step against the same one by one",
                f"KL {mean:.1e}",
                beside=f"{noise:.1e} from another sequence in the step",
                target=f"at most {limit:.0e}",
                met=mean <= limit,
                must=True,
            )
        )

    def _differences(self, document: Any) -> tuple[float, float]:
        runner, rows, found = self.runner, self.tokens[: self.most + 1], []
        slots = [runner.new_tail() for _ in range(2)]
        for slot in slots:
            runner.forward([Rows(slot, document, PROMPT, logits_from=len(PROMPT) - 1)])
        found.append(torch.cat([runner.forward([Rows(slots[0], document, [t])])[0] for t in rows]))
        for beside in (False, True):
            runner.truncate_tail(slots[0], len(PROMPT))
            if beside:
                batches = [[Rows(slot, document, [token]) for slot in slots] for token in rows]
                found.append(torch.cat([runner.forward(batch)[0] for batch in batches]))
            else:
                found.append(runner.forward([Rows(slots[0], document, rows)])[0])
        for slot in slots:
            runner.free_tail(slot)
        return kl_stats(found[0], found[1]).mean, kl_stats(found[0], found[2]).mean

    def answered(self, document: Any, script: Sequence[int], planner: Any, drafter: Any) -> Run:
        """An answer that says `script`."""
        self.scheduler.planner = planner
        slot = self.scheduler.run(self.runner.new_tail)
        told: Any = Told(script)
        answer = Answer(slot, document, PROMPT, max_new=len(script), sampler=told, drafter=drafter, done=Future())
        try:
            self.scheduler.submit(answer)
            done = answer.done.result(120)
        finally:
            self.scheduler.run(self.runner.free_tail, slot)
        n = len(done.sampled_ids) - 1
        return Run(n / (done.last_token_s - done.first_token_s), n / max(done.n_steps - 1, 1))


def measure(result: Result, arguments: argparse.Namespace, directory: Path) -> None:
    contexts = [int(n) for n in arguments.contexts.split(",")]
    tail = len(PROMPT) + arguments.tokens + 64
    want = Want(KVType(arguments.kv_type), 3, tail, max(contexts) + 4096, draft_tokens=7)
    with opened(directory, want) as open_:
        made = Speculation(result, open_.runner, directory, arguments)
        try:
            result.note(f"A copy on this card moves {made.copy / 1e9:.0f} GB/s, read and written bytes counted.")
            middle = contexts[min(1, len(contexts) - 1)]
            result.attempt("rows of one step", lambda: made.same(middle), needs_s=2)
            result.attempt("in vain", lambda: made.in_vain(middle), needs_s=4)
            for n in contexts:
                result.attempt(f"at {n}", lambda n=n: made.context(n), needs_s=5)
        finally:
            made.scheduler.close()


def main() -> None:
    arguments = parse(__doc__, add_arguments)
    if arguments.dry:
        arguments.contexts, arguments.tokens = "64,512", min(arguments.tokens, 40)
    result = Result("speculation", "benchmarks/gpu_speculation.py", arguments)
    measure(result, arguments, model_dir(arguments, "big"))


if __name__ == "__main__":
    main()
