"""A question about a windowed document on the card, to its first token, by its parts."""

import shutil
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_decode import context_name
from benchmarks.gpu_documents import plant_snapshot, random_records
from benchmarks.gpu_lib import Row, copy_ceiling, median, spread
from benchmarks.gpu_windowed_lib import QUESTION_TOKENS, Bench, index_heads, numbers, seconds
from cache_store.keys import SnapshotKey
from cache_store.rows import take_rows
from cache_store.store import SnapshotStore
from service.engine.fetch.choose import choose_spans
from service.engine.fetch.index import KeyIndex, Look
from service.engine.messages import DocumentRef, SpanRef
from service.engine.protocol import Rows

ADDED_LIMIT = 1.1
REPEATS = 7


class Question(Bench):
    """Measurements of a question that fetches."""

    def question(self) -> None:
        """Time to the first token of a question that fetches, by its parts."""
        n_cold = min(self.sizes.document, self.sizes.segment)
        root = self.work / "windowed-store"
        shutil.rmtree(root, ignore_errors=True)
        try:
            store, ref = SnapshotStore(root), DocumentRef("bench", "cold")
            plant_snapshot(store, self.runner, ref, numbers(n_cold, 250))
            key = SnapshotKey(ref.owner_id, "document", ref.document_id)
            with store.open(key, self.runner.fingerprint, self.runner.layout) as reader:
                with self.resident(self.sizes.document) as document:
                    self.ask(document, self.index(), reader, n_cold)
        finally:
            shutil.rmtree(root, ignore_errors=True)

    def index(self) -> KeyIndex:
        layout = self.runner.layout
        index = KeyIndex(layout, self.sizes.document, index_heads(layout))
        records = memoryview(random_records(layout, self.sizes.document))
        for layer in index.layers:
            index.add(layer, 0, records, self.sizes.document)
        index.move_to(self.runner.device)
        return index

    def ask(self, document: Any, index: KeyIndex, reader: Any, n_cold: int) -> None:
        parts: dict[str, list[float]] = {}
        plain: list[float] = []
        rows = Rows(0, document, numbers(QUESTION_TOKENS, 250, 3), logits_from=QUESTION_TOKENS - 1)
        for _ in range(REPEATS + 2):
            rows.slot = self.runner.new_tail()
            try:
                plain.append(seconds(lambda: self.runner.forward([rows])))
                self.runner.truncate_tail(rows.slot, 0)
                for name, spent in self.fetch_and_answer(rows, index, reader, n_cold).items():
                    parts.setdefault(name, []).append(spent)
            finally:
                self.runner.free_tail(rows.slot)
        warm = {name: found[2:] for name, found in parts.items()}
        self.question_rows(warm, plain[2:], index)

    def fetch_and_answer(self, rows: Rows, index: KeyIndex, reader: Any, n_cold: int) -> dict[str, float]:
        """Seconds of each part."""
        runner, sizes = self.runner, self.sizes
        found, spent = {}, {}

        def part(name: str, work: Callable[[], object]) -> None:
            spent[name] = seconds(lambda: found.update({name: work()}))

        part("first pass", lambda: runner.question_queries(rows, index.heads))
        part("scoring", lambda: index.scores(found["first pass"]))
        part("choosing", lambda: self.choose(found["scoring"]))
        spans: list[SpanRef] = found["choosing"]
        places = [(span.first + i) % n_cold for span in spans for i in range(span.n_tokens)]
        blocks = sorted({place // 256 for place in places})
        part("reading", lambda: reader.read_blocks(blocks))
        part("slicing", lambda: self.sliced(found["reading"], blocks, places))
        part("copying", lambda: runner.import_tail(rows.slot, found["slicing"], len(places), fetched=True))
        part("second pass", lambda: runner.forward([rows]))
        self.result.raw["fetched"] = f"{len(places)} tokens in {len(spans)} spans of {len(blocks)} blocks"
        spent["dropping"] = seconds(lambda: runner.drop_fetched(rows.slot))
        if runner.tail_length(rows.slot) != QUESTION_TOKENS or len(places) > sizes.fetch:
            raise RuntimeError(f"{runner.tail_length(rows.slot)} rows are left of {QUESTION_TOKENS}")
        return spent

    def choose(self, scores: torch.Tensor) -> list[SpanRef]:
        sizes = self.sizes
        segments, n = sizes.segments(sizes.document), sizes.document
        ends = [(0, sizes.sinks), (n - sizes.resident // 2, n)]
        return choose_spans(Look.of(scores), segments, n, resident=ends, fetch_tokens=sizes.fetch, least_share=0.0)

    def sliced(
        self, records: list[list[memoryview]], blocks: Sequence[int], places: Sequence[int]
    ) -> list[list[memoryview]]:
        """The rows at these places of a document, as records ``[block][layer]``."""
        at = {block: i for i, block in enumerate(blocks)}
        rows = np.array([at[place // 256] * 256 + place % 256 for place in places])
        n, layout = 256 * len(blocks), self.runner.layout
        layers = [take_rows([block[layer] for block in records], n, layout, rows) for layer in range(layout.n_layers)]
        return [list(block) for block in zip(*layers, strict=True)]

    def question_rows(self, parts: dict[str, list[float]], plain: list[float], index: KeyIndex) -> None:
        ms = {name: 1e3 * median(found) for name, found in parts.items()}
        one_pass = 1e3 * median(plain)
        deepest, n_layers = index.layers[-1] + 1, self.runner.layout.n_layers
        fetched = self.result.raw["fetched"]
        words = {
            "first pass": f"layers 1 to {deepest} of {n_layers}",
            "scoring": f"{len(index.heads)} index heads, {index.nbytes / 1e6:.0f} MB on {index.device}, every token",
            "reading": "from the page cache, verified",
            "copying": f"to the card, decoded; {fetched}",
            "dropping": "when the answer is over",
        }
        bandwidth = copy_ceiling()
        once = f"{1e3 * index.nbytes / bandwidth:.2f} ms to read the keys once at {bandwidth / 1e9:.0f} GB/s"
        for name, found in parts.items():
            bound = once if name == "scoring" else ""
            figures = f"{ms[name]:.2f} ms", f"{spread(found, 1e3)} ms"
            self.result.add(Row(f"question: {name}", *figures, bound=bound, beside=words.get(name, "")))
        total = sum(ms.values()) - ms["dropping"]
        copy = ms["reading"] + ms["slicing"] + ms["copying"]
        added = total - one_pass - copy
        what = (
            f"question of {QUESTION_TOKENS} tokens to its first token, document of {context_name(self.sizes.document)}"
        )
        self.result.add(
            Row(
                what,
                f"{total:.1f} ms",
                beside=f"one pass without a fetch {one_pass:.1f} ms; added {added:.1f} ms, and {copy:.1f} ms to copy",
                target=f"added at most {ADDED_LIMIT} passes, copying apart",
                met=added <= ADDED_LIMIT * one_pass,
            )
        )
