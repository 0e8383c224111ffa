"""A `Runner` without a model. Its KV bytes chain over the tokens and its logits hash the bytes it holds, so
that KV which was damaged, swapped, cut or never loaded changes the answer. See `fake_rows` for the bytes."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
import xxhash

from cache_store.fingerprint import Fingerprint
from cache_store.layout import KVLayout, KVType
from cache_store.pieces import Buffers
from cache_store.slots import Counts, slot_layout, stored_rows
from service.engine.fake_rows import FakeDocument, FakeRows, FakeTail, key_pattern, stored_form
from service.engine.protocol import HostCopies, Rows, RunnerLimits
from service.engine.watch.masses import HeadKeys, Looks, looks_of
from service.engine.watch.queries import KeptQueries

SCRIPT_LOGIT = 1e4
QUERY_HEADS = 2
"""Query heads of a KV head."""


class FakeRunner:
    """Deterministic stand-in for a model.

    `script`: token ids that every answer consists of; without it the argmax follows from the stored bytes.
    `step_delay_s` passes in each forward and `row_delay_s` for each of its rows, `layer_delay_s` in each layer of a
    document chunk, `load_delay_s` for each block of a layer that is loaded.
    Raises RuntimeError when a second thread calls it, or when a freed document or tail is used.
    """

    name = "fake"
    compute_dtype = "float32"
    device = torch.device("cpu")
    tier = "host"

    def __init__(
        self,
        *,
        script: Sequence[int] = (),
        vocab_size: int = 512,
        n_layers: int = 2,
        n_kv_heads: int = 1,
        block_tokens: int = 256,
        chunk_tokens: int = 256,
        n_slots: int = 8,
        tail_tokens: int = 1024,
        max_context: int = 16384,
        sink_multiple: int = 1,
        ragged_slots: bool = True,
        draft_tokens: int = 0,
        kv_type: KVType = KVType.K4V4,
        step_delay_s: float = 0.0,
        layer_delay_s: float = 0.0,
        row_delay_s: float = 0.0,
        load_delay_s: float = 0.0,
        weights: str = "fake",
    ) -> None:
        self.script = list(script)
        self.step_delay_s = step_delay_s
        self.layer_delay_s = layer_delay_s
        self.row_delay_s = row_delay_s
        self.load_delay_s = load_delay_s
        self.layout = KVLayout(n_layers, n_kv_heads, 32, kv_type, block_tokens)
        limits = (max_context, chunk_tokens, n_slots, tail_tokens, vocab_size, sink_multiple, ragged_slots)
        self.limits = RunnerLimits(*limits, draft_tokens)
        self.fingerprint = Fingerprint(
            weights=weights, quantization="none", tokenizer="fake", template="fake", rope="none",
            kv=f"{kv_type}-1", engine="fake-2", compute_dtype="float32", chunking=str(chunk_tokens),
        )  # fmt: skip
        self.load_buffers: Buffers | None = None
        self.host_copies: HostCopies | None = None
        self.poisoned: set[int] = set()
        """Tokens after which the logits are NaN."""
        self.forwards: list[list[int]] = []
        """Rows of each sequence in each forward, for tests that ask how steps were made up."""
        self.n_documents = 0
        self.lost = False
        """Set by a test that plays a device which answers nothing any more: calls then fail."""
        self.watched_heads: Sequence[tuple[int, int]] = ()
        self._kept = KeptQueries()
        self._rows = FakeRows(self.layout)
        self._no_document = FakeDocument(self._rows.empty(0), [0] * n_layers)
        self._tails: dict[int, FakeTail] = {}
        self._thread: int | None = None

    @property
    def n_tails(self) -> int:
        return len(self._tails)

    def usable(self) -> bool:
        return not self.lost

    def document_nbytes(self, n_tokens: int, n_slot_rows: int = 0) -> int:
        return self.layout.n_layers * n_tokens * self._rows.token_nbytes + n_slot_rows * self._rows.width

    def new_document(self, n_tokens: int) -> FakeDocument:
        self._check_thread()
        self.n_documents += 1
        return FakeDocument(self._rows.empty(n_tokens), [0] * self.layout.n_layers)

    def prepare_document(self, n_tokens: int) -> None:
        """Nothing to prepare."""

    def prefill_chunk(
        self, document: FakeDocument, tokens: Sequence[int], between_layers: Callable[[], None] | None = None
    ) -> list[list[memoryview]]:
        self._check_document(document)
        first, n = document.n_tokens, len(tokens)
        if (first - document.prefix) % self.limits.chunk_tokens or n > self.limits.chunk_tokens:
            raise ValueError(f"a chunk of {n} tokens at {first} is off the chunk boundaries")
        if document.next_position != first:
            raise ValueError("a document of rows that were picked cannot go on")
        chain = self._rows.chain(document.rows[:, :, :first])
        document.rows[:, :, first : first + n] = stored_form(self._rows.make(tokens, first, chain))
        for _ in range(self.layout.n_layers):
            time.sleep(self.layer_delay_s)
            if between_layers is not None:
                between_layers()
        self._complete(document, first + n)
        return self._rows.encode(document.rows[:, :, first : first + n])

    def load_blocks(
        self, document: FakeDocument, layer: int, first_token: int, records: memoryview, n_tokens: int
    ) -> None:
        self._check_document(document)
        time.sleep(self.load_delay_s * self.layout.n_blocks(n_tokens))
        rows = self._rows.decode(memoryview(records).cast("B"), n_tokens)
        document.rows[layer, :, first_token : first_token + n_tokens] = rows
        document.loaded[layer] += n_tokens

    def new_slots(self, document: FakeDocument, counts: Counts) -> None:
        self._check_document(document)
        if not self.limits.ragged_slots or [len(n) for n in counts] != [self.layout.n_kv_heads] * self.layout.n_layers:
            raise ValueError("there are no such slots")
        document.slots, document.slot_counts = [None] * len(counts), [list(n) for n in counts]

    def load_slots(self, document: FakeDocument, layer: int, records: memoryview) -> None:
        self._check_document(document)
        counts = document.slot_counts[layer]
        rows = FakeRows(slot_layout(self.layout)).decode(records, sum(map(stored_rows, counts)))[0]
        firsts = np.cumsum([0, *map(stored_rows, counts)])
        document.slots[layer] = [rows[first : first + n] for first, n in zip(firsts, counts, strict=False)]

    def finish_load(
        self,
        document: FakeDocument,
        n_tokens: int,
        *,
        next_position: int | None = None,
        last_position: int | None = None,
    ) -> None:
        self._check_document(document)
        if document.loaded != [n_tokens] * self.layout.n_layers:
            raise ValueError(f"loaded {document.loaded} tokens per layer, not {n_tokens}")
        if None in document.slots:
            raise ValueError("the slots of a layer are not loaded")
        self._complete(document, n_tokens, next_position, last_position)

    def keep_prefix(self, document: FakeDocument, n_tokens: int) -> None:
        self._check_document(document)
        consecutive = document.next_position == document.n_tokens
        if n_tokens % self.limits.sink_multiple or not 0 <= n_tokens <= document.n_tokens or not consecutive:
            raise ValueError(f"cannot keep {n_tokens} of a document's {document.n_tokens} tokens")
        document.rows[:, :, n_tokens:] = 0
        self._complete(document, n_tokens)
        document.prefix = n_tokens

    def replay(
        self,
        document: FakeDocument,
        tokens: Sequence[int],
        sinks: int,
        first: int,
        last: int,
        between_layers: Callable[[], None] | None = None,
    ) -> torch.Tensor:
        """Scores by hashing: below 0.5 for a token that `tokens` does not repeat, above for one that it does."""
        self._check_document(document)
        if not 0 <= sinks <= first < last <= document.n_tokens:
            raise ValueError(f"sinks {sinks} and tokens {first} to {last} of a document of {document.n_tokens}")
        scores = np.empty((self.layout.n_layers, self.layout.n_kv_heads, last - first), np.float32)
        for layer, out in enumerate(scores):
            out[:] = self._rows.scores(document.rows, layer, sinks, first, last, set(tokens))
            if between_layers is not None:
                between_layers()
        return torch.from_numpy(scores)

    def question_queries(self, rows: Rows, heads: Sequence[tuple[int, int]]) -> torch.Tensor:
        """Of each token the pattern of its key, so that the document's spans with that token are found."""
        self._check_document(rows.document)
        self._check_refed(rows)
        if self._tails[rows.slot].n_tokens + len(rows.tokens) - rows.refeed > self.limits.tail_tokens:
            raise ValueError(f"a tail holds at most {self.limits.tail_tokens} tokens")
        dim = self.layout.head_dim
        patterns = [[key_pattern(t, layer, head, dim) for t in rows.tokens] for layer, head in heads]
        queries = torch.from_numpy(np.array(patterns, np.float32).reshape(len(heads), 1, len(rows.tokens), dim))
        return queries.repeat(1, QUERY_HEADS, 1, 1)

    def watch_tail(self, slot: int) -> None:
        self._check_thread()
        self._kept.begin(slot)

    def tail_looks(self, slot: int, document: FakeDocument, pieces: Sequence[int]) -> Looks:
        """Each token looks at the same tokens of the document, of its slots and of its tail."""
        self._check_document(document)
        queries, tail = self._kept.last(slot, sum(pieces)), self._tails[slot]
        self._kept.end(slot)
        keys = [self._head_keys(document, tail, layer, head) for layer, head in self.watched_heads]
        return looks_of(list(queries), keys, pieces)

    def _head_keys(self, document: FakeDocument, tail: FakeTail, layer: int, head: int) -> HeadKeys:
        def keys(rows: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(self._rows.keys(rows))

        own = document.slots[layer] if document.slots else None
        slots = torch.empty(0, self.layout.head_dim) if own is None else keys(own[head])
        rows = document.rows[layer, head, : document.n_tokens]
        return HeadKeys(lambda some: keys(rows[some]), len(rows), slots, keys(tail.rows[layer, head, : tail.n_tokens]))

    def free_document(self, document: FakeDocument) -> None:
        self._check_document(document)
        document.freed = True
        self.n_documents -= 1

    def new_tail(self) -> int:
        self._check_thread()
        free = next((s for s in range(self.limits.n_slots) if s not in self._tails), None)
        if free is None:
            raise RuntimeError("no free tail slot")
        self._tails[free] = FakeTail(self._rows.empty(self.limits.tail_tokens))
        return free

    def free_tail(self, slot: int) -> None:
        self._check_thread()
        self._kept.end(slot)
        del self._tails[slot]

    def tail_length(self, slot: int) -> int:
        return self._tails[slot].n_tokens

    def truncate_tail(self, slot: int, n_tokens: int) -> None:
        self._check_thread()
        tail = self._tails[slot]
        if n_tokens > tail.n_tokens:
            raise ValueError(f"cannot cut a tail of {tail.n_tokens} tokens to {n_tokens}")
        self._kept.drop(slot, tail.n_tokens - n_tokens)
        tail.cut(n_tokens)

    def export_tail(self, slot: int, first: int, last: int) -> list[list[memoryview]]:
        self._check_thread()
        tail = self._tails[slot]
        if not 0 <= first <= last <= tail.n_tokens:
            raise ValueError(f"tokens {first}..{last} of a tail of {tail.n_tokens}")
        tail.rows[:, :, first:last] = stored_form(tail.rows[:, :, first:last])
        return self._rows.encode(tail.rows[:, :, first:last])

    def import_tail(
        self, slot: int, blocks: Sequence[Sequence[bytes | memoryview]], n_tokens: int, *, fetched: bool = False
    ) -> None:
        self._check_thread()
        tail = self._tails[slot]
        first, last = tail.n_tokens, tail.n_tokens + n_tokens
        if last > self.limits.tail_tokens:
            raise ValueError(f"a tail holds at most {self.limits.tail_tokens} tokens")
        if fetched and tail.n_fetched:
            raise ValueError("the tail has fetched rows already")
        for layer in range(self.layout.n_layers):
            records = memoryview(b"".join(bytes(block[layer]) for block in blocks))
            tail.rows[layer, :, first:last] = self._rows.decode(records, n_tokens)
        tail.n_tokens = last
        if fetched:
            tail.fetched = (first, last)

    def drop_fetched(self, slot: int) -> None:
        self._check_thread()
        tail = self._tails[slot]
        (first, last), n = tail.fetched, tail.n_tokens
        tail.rows[:, :, first : n - tail.n_fetched] = tail.rows[:, :, last:n].copy()
        tail.n_tokens, tail.fetched = n - tail.n_fetched, (0, 0)

    def forward(self, batch: Sequence[Rows]) -> list[torch.Tensor]:
        self._check_thread()
        time.sleep(self.step_delay_s + self.row_delay_s * sum(len(rows.tokens) for rows in batch))
        self.forwards.append([len(rows.tokens) for rows in batch])
        for rows in batch:
            if rows.slot in self._kept and self.watched_heads:
                wanted = rows.tokens[rows.logits_from :]
                of_wanted = replace(rows, tokens=wanted, refeed=rows.refeed and len(wanted) == len(rows.tokens))
                queries = self.question_queries(of_wanted, self.watched_heads).permute(2, 0, 1, 3)
                self._kept.add([rows.slot], queries, [len(wanted)])
        return [self._forward_one(rows) for rows in batch]

    def _complete(
        self, document: FakeDocument, n_tokens: int, next_position: int | None = None, last_position: int | None = None
    ) -> None:
        document.loaded = [n_tokens] * self.layout.n_layers
        document.n_tokens = n_tokens
        document.next_position = n_tokens if next_position is None else next_position
        document.last_position = document.next_position - 1 if last_position is None else last_position
        document.digest = xxhash.xxh3_64_intdigest(
            np.ascontiguousarray(document.rows[:, :, :n_tokens]).data,
            seed=xxhash.xxh3_64_intdigest(b"%d %d" % (document.next_position, document.last_position)),
        )
        for of_layer in document.slots:
            for own in of_layer or ():
                document.digest = xxhash.xxh3_64_intdigest(own.tobytes(), seed=document.digest)

    def _forward_one(self, rows: Rows) -> torch.Tensor:
        self._check_document(rows.document)
        self._check_refed(rows)
        tail, out = self._tails[rows.slot], []
        document = rows.document or self._no_document
        for i, token in enumerate(rows.tokens):
            refed = rows.refeed and i == 0
            if not refed:
                self._append(tail, document, token)
            if i >= rows.logits_from:
                out.append(self._logits(document, None if refed else tail, token))
        self._follow_script(tail, rows, out)
        return torch.stack(out) if out else torch.empty(0, self.limits.vocab_size)

    def _follow_script(self, tail: FakeTail, rows: Rows, out: list[torch.Tensor]) -> None:
        """Raise the next scripted token after a prompt's last row and after each row that follows, drafts among them:
        several rows of which all logits are wanted are drafts when an answer is under way."""
        if not out or (rows.refeed and len(rows.tokens) == 1):
            tail.answered = -1
            return
        is_prompt = rows.refeed or rows.logits_from > 0 or (len(rows.tokens) > 1 and tail.answered < 0)
        if is_prompt:
            tail.answered = -1
        for of_row in out[-1:] if is_prompt else out:
            tail.answered += 1
            if self.script:
                of_row[self.script[min(tail.answered, len(self.script) - 1)]] += SCRIPT_LOGIT

    def _check_refed(self, rows: Rows) -> None:
        document = rows.document
        if rows.refeed and self._rows.token_of(document.rows, document.n_tokens - 1) != rows.tokens[0]:
            raise ValueError("the re-fed token is not the document's last one")

    def _append(self, tail: FakeTail, document: FakeDocument, token: int) -> None:
        if tail.n_tokens >= self.limits.tail_tokens:
            raise ValueError(f"a tail holds at most {self.limits.tail_tokens} tokens")
        position = document.next_position + tail.n_tokens - tail.n_fetched
        made = self._rows.make([token], position, self._seen(tail, document))
        tail.rows[:, :, tail.n_tokens] = made[:, :, 0]
        tail.n_tokens += 1

    def _seen(self, tail: FakeTail, document: FakeDocument) -> int:
        """What the next row chains to: the last row, and the fetched ones while they are there."""
        first, last = tail.fetched
        before = tail.rows[:, :, last : tail.n_tokens] if tail.n_tokens > last else tail.rows[:, :, :first]
        if not before.shape[2]:
            before = document.rows[:, :, : document.n_tokens]
        chain = self._rows.chain(before)
        if tail.n_fetched:
            fetched = np.ascontiguousarray(tail.rows[:, :, first:last])
            chain = xxhash.xxh3_64_intdigest(fetched.data, seed=chain)
        return chain

    def _logits(self, document: FakeDocument, tail: FakeTail | None, token: int) -> torch.Tensor:
        seed = document.digest
        if tail is not None and tail.n_tokens:
            held = np.ascontiguousarray(tail.rows[:, :, : tail.n_tokens])
            seed = xxhash.xxh3_64_intdigest(held.data, seed=seed)
        logits = np.random.Generator(np.random.SFC64(seed)).standard_normal(self.limits.vocab_size, np.float32)
        if token in self.poisoned:
            logits[:] = np.nan
        return torch.from_numpy(logits * 4)

    def _check_document(self, document: FakeDocument | None) -> None:
        self._check_thread()
        if document is not None and document.freed:
            raise RuntimeError("the document was freed")

    def _check_thread(self) -> None:
        if self.lost:
            raise RuntimeError("the device is lost")
        self._thread = self._thread or threading.get_ident()
        if threading.get_ident() != self._thread:
            raise RuntimeError("a runner belongs to one thread")


class ByteDecoder:
    """Tokens below 256 are bytes of UTF-8, the rest have no text: a tokenizer where there is none."""

    END = 256
    """The token that ends an answer."""

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b""
