"""Compaction of a long document on the card: its segments prefilled, and replayed for the scores of their tokens."""

import itertools
from typing import Any

import torch

from benchmarks.gpu_decode import context_name
from benchmarks.gpu_lib import ON_CARD, Row, spread
from benchmarks.gpu_windowed_lib import PROMPT_TOKENS, Bench, numbers, seconds
from ingest.compaction import select_ragged

REPLAY_LIMIT = 2.0


class Compaction(Bench):
    """Measurements of prefill and replay."""

    def compaction(self) -> None:
        """Segment after segment prefilled and replayed, as long as there is time."""
        runner, sizes = self.runner, self.sizes
        n_segments = -(-sizes.document // sizes.segment)
        document = runner.new_document(sizes.sinks + sizes.segment)
        prefill, replay, scores = [], [], []
        memory = Memory()
        try:
            for k in range(n_segments):
                if k and self.result.left_s < 1.2 * (prefill[-1] + replay[-1]) + 8:
                    break
                ids = numbers(sizes.segment, runner.limits.vocab_size, k)
                prefill.append(seconds(lambda k=k, ids=ids: self.prefill(document, ids, first=k == 0)))
                with memory:
                    replay.append(seconds(lambda k=k, ids=ids: scores.append(self.replay(document, ids, first=k == 0))))
        finally:
            runner.free_document(document)
        self.compaction_rows(prefill, replay, n_segments)
        self.result.add(
            Row(
                "memory that a replay takes at its peak",
                f"{memory.peak / 2**20:.0f} MiB",
                beside="beside weights, documents and tails",
            )
        )
        self.select(torch.cat(scores, 2), sum(prefill), sum(replay))

    def prefill(self, document: Any, ids: list[int], *, first: bool) -> None:
        if not first:
            self.runner.keep_prefix(document, self.sizes.sinks)
        chunk = self.runner.limits.chunk_tokens
        for at in range(0, len(ids), chunk):
            self.runner.prefill_chunk(document, ids[at : at + chunk])

    def replay(self, document: Any, ids: list[int], *, first: bool) -> torch.Tensor:
        """Scores ``[n_layers, n_kv_heads, tokens]`` of a segment, replayed in equal pieces that fit a chunk."""
        sinks, n = 0 if first else self.sizes.sinks, len(ids)
        n_pieces = -(-n // (self.runner.limits.chunk_tokens - PROMPT_TOKENS))
        bounds = [n * i // n_pieces for i in range(n_pieces + 1)]
        prompt = numbers(PROMPT_TOKENS, 250, 9)
        found = [
            self.runner.replay(document, [*prompt, *ids[a:b]], sinks, sinks + a, sinks + b)
            for a, b in itertools.pairwise(bounds)
        ]
        return torch.cat(found, 2)

    def compaction_rows(self, prefill: list[float], replay: list[float], n_segments: int) -> None:
        sizes, n = self.sizes, len(prefill) * self.sizes.segment
        whole = "" if len(prefill) == n_segments else f"NOT run whole: {len(prefill)} of {n_segments} segments"
        self.result.raw["compaction_s"] = {"prefill": prefill, "replay": replay}
        what = f"{context_name(n)} in segments of {context_name(sizes.segment)} behind {sizes.sinks} sinks"
        self.result.add(
            Row(
                f"prefill of {what}",
                f"{n / sum(prefill):.0f} tok/s, {sum(prefill):.1f} s",
                f"{spread(prefill)} s",
                beside=whole,
            )
        )
        times = sum(replay) / sum(prefill)
        self.result.add(
            Row(
                f"replay of {what}",
                f"{n / sum(replay):.0f} tok/s, {sum(replay):.1f} s",
                f"{spread(replay)} s",
                beside=f"{times:.2f} times the prefill",
                target=f"at most {REPLAY_LIMIT:.0f} times",
                met=times <= REPLAY_LIMIT,
            )
        )

    def select(self, scores: torch.Tensor, prefill_s: float, replay_s: float) -> None:
        """Rows chosen from all scores, on the CPU."""
        n_slots = min(self.sizes.resident - self.sizes.sinks, scores.shape[2]) // 2
        spent = seconds(lambda: select_ragged(scores, n_slots))
        share = (spent + replay_s) / prefill_s
        self.result.add(
            Row(
                f"compaction of {context_name(scores.shape[2])}: replay, then rows chosen, {n_slots} a head on average",
                f"{share:.2f} times the prefill",
                f"choosing {spent:.2f} s",
                target=f"at most {REPLAY_LIMIT:.0f} times",
                met=share <= REPLAY_LIMIT,
            )
        )


class Memory:
    """The most that torch held on the card inside, beyond what it held before."""

    def __init__(self) -> None:
        self.peak = 0

    def __enter__(self) -> None:
        if ON_CARD:
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()

    def __exit__(self, *_: object) -> None:
        if ON_CARD:
            self.peak = max(self.peak, torch.cuda.max_memory_allocated() - self._before)
