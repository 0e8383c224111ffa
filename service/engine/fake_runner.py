"""A `Runner` without a model. Its KV bytes chain over the tokens and its logits hash the bytes it holds, so
that KV which was damaged, swapped, cut or never loaded changes the answer."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import xxhash

from cache_store.fingerprint import Fingerprint
from cache_store.layout import KVLayout, KVType
from cache_store.pieces import Buffers
from service.engine.protocol import HostCopies, Rows, RunnerLimits

CHAIN_NBYTES = 8
"""A token's row begins with the hash of everything up to it, then its token id and its position."""
SCRIPT_LOGIT = 1e4


@dataclass(slots=True)
class FakeDocument:
    """Rows of bytes per layer, ``[n_layers, capacity, row]``, and how many tokens are complete."""

    rows: np.ndarray
    loaded: list[int]
    n_tokens: int = 0
    digest: int = 0
    freed: bool = False

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes


@dataclass(slots=True)
class FakeTail:
    rows: np.ndarray
    n_tokens: int = 0
    answered: int = -1


class FakeRunner:
    """Deterministic stand-in for a model.

    `script`: token ids that every answer consists of; without it the argmax follows from the stored bytes.
    `step_delay_s` passes in each forward, `layer_delay_s` in each layer of a document chunk.
    Raises RuntimeError when a second thread calls it, or when a freed document or tail is used.
    """

    name = "fake"
    compute_dtype = "float32"
    tier = "host"

    def __init__(
        self,
        *,
        script: Sequence[int] = (),
        vocab_size: int = 512,
        n_layers: int = 2,
        block_tokens: int = 256,
        chunk_tokens: int = 256,
        n_slots: int = 8,
        tail_tokens: int = 1024,
        max_context: int = 16384,
        kv_type: KVType = KVType.K4V4,
        step_delay_s: float = 0.0,
        layer_delay_s: float = 0.0,
        weights: str = "fake",
    ) -> None:
        self.script = list(script)
        self.step_delay_s = step_delay_s
        self.layer_delay_s = layer_delay_s
        self.layout = KVLayout(n_layers, 1, 32, kv_type, block_tokens)
        self.limits = RunnerLimits(max_context, chunk_tokens, n_slots, tail_tokens, vocab_size)
        self.fingerprint = Fingerprint(
            weights=weights, quantization="none", tokenizer="fake", template="fake", rope="none",
            kv=f"{kv_type}-1", engine="fake-1", compute_dtype="float32", chunking=str(chunk_tokens),
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
        self._part_widths = self.layout.part_nbytes(1)
        self._row = sum(self._part_widths)
        self._no_document = FakeDocument(np.zeros((n_layers, 0, self._row), np.uint8), [0] * n_layers)
        self._tails: dict[int, FakeTail] = {}
        self._thread: int | None = None

    @property
    def n_tails(self) -> int:
        return len(self._tails)

    def usable(self) -> bool:
        return not self.lost

    def document_nbytes(self, n_tokens: int) -> int:
        return self.layout.n_layers * n_tokens * self._row

    def new_document(self, n_tokens: int) -> FakeDocument:
        self._check_thread()
        self.n_documents += 1
        n_layers = self.layout.n_layers
        return FakeDocument(np.zeros((n_layers, n_tokens, self._row), np.uint8), [0] * n_layers)

    def prepare_document(self, n_tokens: int) -> None:
        """Nothing to prepare."""

    def prefill_chunk(
        self, document: FakeDocument, tokens: Sequence[int], between_layers: Callable[[], None] | None = None
    ) -> list[list[memoryview]]:
        self._check_document(document)
        first, n = document.n_tokens, len(tokens)
        if first % self.limits.chunk_tokens or n > self.limits.chunk_tokens:
            raise ValueError(f"a chunk of {n} tokens at {first} is off the chunk boundaries")
        chain = _last_chain(document.rows[0, :first])
        for layer, rows in enumerate(self._rows_of(tokens, first, chain)):
            document.rows[layer, first : first + n] = _stored_form(rows)
            time.sleep(self.layer_delay_s)
            if between_layers is not None:
                between_layers()
        self.finish_load(document, first + n, recompute=True)
        return self._encode(document.rows[:, first : first + n])

    def load_blocks(
        self, document: FakeDocument, layer: int, first_token: int, records: memoryview, n_tokens: int
    ) -> None:
        self._check_document(document)
        rows = self._decode(memoryview(records).cast("B"), n_tokens)
        document.rows[layer, first_token : first_token + n_tokens] = rows
        document.loaded[layer] += n_tokens

    def finish_load(self, document: FakeDocument, n_tokens: int, *, recompute: bool = False) -> None:
        self._check_document(document)
        if not recompute and document.loaded != [n_tokens] * self.layout.n_layers:
            raise ValueError(f"loaded {document.loaded} tokens per layer, not {n_tokens}")
        document.n_tokens = n_tokens
        document.digest = xxhash.xxh3_64_intdigest(np.ascontiguousarray(document.rows[:, :n_tokens]).data)

    def free_document(self, document: FakeDocument) -> None:
        self._check_document(document)
        document.freed = True
        self.n_documents -= 1

    def new_tail(self) -> int:
        self._check_thread()
        free = next((s for s in range(self.limits.n_slots) if s not in self._tails), None)
        if free is None:
            raise RuntimeError("no free tail slot")
        shape = (self.layout.n_layers, self.limits.tail_tokens, self._row)
        self._tails[free] = FakeTail(np.zeros(shape, np.uint8))
        return free

    def free_tail(self, slot: int) -> None:
        self._check_thread()
        del self._tails[slot]

    def tail_length(self, slot: int) -> int:
        return self._tails[slot].n_tokens

    def truncate_tail(self, slot: int, n_tokens: int) -> None:
        self._check_thread()
        tail = self._tails[slot]
        if n_tokens > tail.n_tokens:
            raise ValueError(f"cannot cut a tail of {tail.n_tokens} tokens to {n_tokens}")
        tail.n_tokens = n_tokens

    def export_tail(self, slot: int, first: int, last: int) -> list[list[memoryview]]:
        self._check_thread()
        tail = self._tails[slot]
        if not 0 <= first <= last <= tail.n_tokens:
            raise ValueError(f"tokens {first}..{last} of a tail of {tail.n_tokens}")
        tail.rows[:, first:last] = _stored_form(tail.rows[:, first:last])
        return self._encode(tail.rows[:, first:last])

    def import_tail(self, slot: int, blocks: Sequence[Sequence[bytes | memoryview]], n_tokens: int) -> None:
        self._check_thread()
        tail = self._tails[slot]
        for layer in range(self.layout.n_layers):
            records = memoryview(b"".join(bytes(block[layer]) for block in blocks))
            tail.rows[layer, tail.n_tokens : tail.n_tokens + n_tokens] = self._decode(records, n_tokens)
        tail.n_tokens += n_tokens

    def forward(self, batch: Sequence[Rows]) -> list[torch.Tensor]:
        self._check_thread()
        time.sleep(self.step_delay_s)
        self.forwards.append([len(rows.tokens) for rows in batch])
        return [self._forward_one(rows) for rows in batch]

    def _forward_one(self, rows: Rows) -> torch.Tensor:
        self._check_document(rows.document)
        tail, out = self._tails[rows.slot], []
        document = rows.document or self._no_document
        for i, token in enumerate(rows.tokens):
            if rows.refeed and i == 0:
                self._check_refed(document, token)
            else:
                self._append(tail, document, token)
            if i >= rows.logits_from:
                out.append(self._logits(document, tail, token))
        self._follow_script(tail, rows, out)
        return torch.stack(out) if out else torch.empty(0, self.limits.vocab_size)

    def _follow_script(self, tail: FakeTail, rows: Rows, out: list[torch.Tensor]) -> None:
        """Raise the next scripted token after a prompt's last row and after each single row that follows."""
        if not out or (rows.refeed and len(rows.tokens) == 1):
            tail.answered = -1
            return
        tail.answered = 0 if len(rows.tokens) > 1 else tail.answered + 1
        if self.script:
            out[-1][self.script[min(tail.answered, len(self.script) - 1)]] += SCRIPT_LOGIT

    def _check_refed(self, document: FakeDocument, token: int) -> None:
        if _token_at(document.rows[0, document.n_tokens - 1]) != token:
            raise ValueError("the re-fed token is not the document's last one")

    def _append(self, tail: FakeTail, document: FakeDocument, token: int) -> None:
        if tail.n_tokens >= self.limits.tail_tokens:
            raise ValueError(f"a tail holds at most {self.limits.tail_tokens} tokens")
        before = tail.rows[0, : tail.n_tokens] if tail.n_tokens else document.rows[0, : document.n_tokens]
        position = document.n_tokens + tail.n_tokens
        for layer, row in enumerate(self._rows_of([token], position, _last_chain(before))):
            tail.rows[layer, tail.n_tokens] = row[0]
        tail.n_tokens += 1

    def _logits(self, document: FakeDocument, tail: FakeTail, token: int) -> torch.Tensor:
        held = np.ascontiguousarray(tail.rows[:, : tail.n_tokens])
        seed = xxhash.xxh3_64_intdigest(held.data, seed=document.digest) if held.size else document.digest
        logits = np.random.Generator(np.random.SFC64(seed)).standard_normal(self.limits.vocab_size, np.float32)
        if token in self.poisoned:
            logits[:] = np.nan
        return torch.from_numpy(logits * 4)

    def _rows_of(self, tokens: Sequence[int], first: int, chain: int) -> list[np.ndarray]:
        """Raw rows of consecutive tokens per layer; their lowest bit is set, which storing loses."""
        heads = np.zeros((len(tokens), 16), np.uint8)
        for i, token in enumerate(tokens):
            chain = xxhash.xxh3_64_intdigest(int(token).to_bytes(8, "little"), seed=chain)
            heads[i] = np.array([chain, token | ((first + i) << 32)], "<u8").view(np.uint8)
        width = -(-self._row // 16)
        tiled = np.tile(heads, (1, width))[:, : self._row]
        salt = np.arange(16, self._row)
        layers = []
        for layer in range(self.layout.n_layers):
            rows = tiled.copy()
            rows[:, 16:] ^= ((salt + 31 * layer + 1) % 256).astype(np.uint8)
            rows[:, -1] |= 1
            layers.append(rows)
        return layers

    def _encode(self, rows: np.ndarray) -> list[list[memoryview]]:
        step = self.layout.block_tokens
        return [
            [memoryview(self._record(layer[first : first + step])) for layer in rows]
            for first in range(0, rows.shape[1], step)
        ]

    def _record(self, rows: np.ndarray) -> bytes:
        edges = np.cumsum(self._part_widths)[:-1]
        return b"".join(part.tobytes() for part in np.split(rows, edges, axis=1))

    def _decode(self, records: memoryview, n_tokens: int) -> np.ndarray:
        """Rows of consecutive records. Raises ValueError when their size is not that of `n_tokens`."""
        if len(records) != n_tokens * self._row:
            raise ValueError(f"{len(records)} bytes are not {n_tokens} tokens")
        out, at = np.empty((n_tokens, self._row), np.uint8), 0
        for first in range(0, n_tokens, self.layout.block_tokens):
            n, column = min(self.layout.block_tokens, n_tokens - first), 0
            for width in self._part_widths:
                part = np.frombuffer(records, np.uint8, n * width, at).reshape(n, width)
                out[first : first + n, column : column + width] = part
                at, column = at + n * width, column + width
        return out

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


def _stored_form(rows: np.ndarray) -> np.ndarray:
    """What encoding and decoding leaves of raw rows: as with a real codec, not everything."""
    stored = rows.copy()
    stored[..., -1] &= 0xFE
    return stored


def _last_chain(rows: np.ndarray) -> int:
    return int.from_bytes(rows[-1, :CHAIN_NBYTES].tobytes(), "little") if len(rows) else 0


def _token_at(row: np.ndarray) -> int:
    return int.from_bytes(row[CHAIN_NBYTES : CHAIN_NBYTES + 4].tobytes(), "little")


class ByteDecoder:
    """Tokens below 256 are bytes of UTF-8, the rest have no text: a tokenizer where there is none."""

    END = 256
    """The token that ends an answer."""

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b""
