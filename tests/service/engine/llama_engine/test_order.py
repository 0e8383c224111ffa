"""Where rows lie: every sequence in the order of its positions, in a cache that finds cells as llama.cpp's does."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from cache_store.layout import KVLayout, KVType
from service.engine.llama_engine import order
from service.engine.llama_engine.context import DecodeFailed
from service.engine.llama_engine.places import COPIES, LlamaTail
from service.engine.llama_engine.runner import LlamaRunner
from service.engine.llama_engine.sizes import N_OWN
from service.engine.llama_engine.state import Bytes, StateFormat
from service.engine.protocol import Rows, RunnerLimits

LAYOUT = KVLayout(2, 1, 32, KVType.K8V8, block_tokens=8)
CHUNK, STEP = 8, 4
N_DOCUMENTS, N_SLOTS, TAIL = 64, 3, 12
CELLS = (N_DOCUMENTS, N_SLOTS * (TAIL + 1))


class FakeContext:
    """`llama_kv_cache` with one stream: `find_slot`, `seq_rm`, `seq_cp` and states as it has them. A row's keys are its
    token, its values its position."""

    def __init__(self, n_cells: int) -> None:
        self._form = StateFormat(LAYOUT)
        self.sequences: list[set[int]] = [set() for _ in range(n_cells)]
        self.positions = np.zeros(n_cells, np.int32)
        self.tokens = np.zeros(n_cells, np.uint8)
        self.head = 0
        self.broken = False

    def cells_of(self, sequence: int) -> list[int]:
        return [cell for cell, owners in enumerate(self.sequences) if sequence in owners]

    def _find(self, n: int) -> list[int]:
        used = sum(map(bool, self.sequences))
        head = 0 if self.head > used + 2 * n else self.head
        size = len(self.sequences)
        found = [cell % size for cell in range(head, head + size) if not self.sequences[cell % size]][:n]
        if len(found) < n:
            raise DecodeFailed("no room")
        self.head = found[-1] + 1
        return found

    def decode(self, tokens: Any, positions: Any, sequences: Any, wanted: Any) -> torch.Tensor:
        if self.broken:
            raise DecodeFailed("broken")
        for cell, token, position, sequence in zip(self._find(len(tokens)), tokens, positions, sequences, strict=True):
            self.tokens[cell], self.positions[cell] = token, position
            self.sequences[cell] = {int(sequence)}
        return torch.zeros(int(wanted.sum()), 1)

    def _within(self, first: int, last: int) -> Iterator[int]:
        for cell, position in enumerate(self.positions):
            if position >= first and (last < 0 or position < last):
                yield cell

    def remove(self, sequence: int, first: int = -1, last: int = -1) -> None:
        freed = []
        for cell in self._within(first, last):
            if sequence in self.sequences[cell]:
                self.sequences[cell].discard(sequence)
                freed += [] if self.sequences[cell] else [cell]
        self.head = min([self.head, *freed])

    def share(self, source: int, target: int, first: int = -1, last: int = -1) -> None:
        for cell in self._within(first, last):
            if source in self.sequences[cell]:
                self.sequences[cell].add(target)

    def state(self, sequence: int) -> Bytes:
        cells = self.cells_of(sequence)
        state = self._form.new(len(cells))
        state[16 : 16 + 12 * len(cells)].view("<i4").reshape(-1, 3)[:, 0] = self.positions[cells]
        rows = self._form.rows(state, len(cells))
        rows.keys[:] = self.tokens[cells][None, :, None]
        rows.values[:] = 0
        return state

    def set_state(self, sequence: int, state: Bytes) -> None:
        self.remove(sequence)
        n = int(state[12:16].view("<i4")[0])
        cells = self._find(n)
        self.positions[cells] = state[16 : 16 + 12 * n].view("<i4").reshape(-1, 3)[:, 0]
        self.tokens[cells] = self._form.rows(state, n).keys[0, :, 0]
        for cell in cells:
            self.sequences[cell] = {sequence}


class Service:
    """A runner that is used at random, and what its sequences must hold."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.context: Any = FakeContext(sum(CELLS))
        limits = RunnerLimits(64, CHUNK, N_SLOTS, TAIL, 256, n_documents=8)
        nothing: Any = None
        self.runner = LlamaRunner(self.context, LAYOUT, limits, nothing, CELLS, name="fake", step_tokens=STEP)
        self.documents: list[tuple[Any, list[int]]] = []
        self.building: tuple[Any, list[int]] | None = None
        self.tails: dict[int, tuple[Any, list[int]]] = {}

    def tokens(self, n: int) -> list[int]:
        return [self.random.randrange(1, 256) for _ in range(n)]

    @property
    def room(self) -> int:
        taken = [*self.documents, *([self.building] if self.building else [])]
        return N_DOCUMENTS - sum(document.capacity for document, _ in taken)

    def step(self) -> None:
        self.random.choice(
            [
                self.load,
                self.build,
                self.build,
                self.drop,
                self.ask,
                self.ask,
                self.ask,
                self.cut,
                self.fail,
                self.cancel,
                self.swap,
            ]
        )()
        self.check()

    def load(self, n_loaded: int | None = None) -> Any:
        n = self.random.randint(1, 24)
        if n > self.room:
            return None
        tokens, document = self.tokens(n), self.runner.new_document(n)
        self._put(document, tokens, n)
        self.documents.append((document, tokens))
        return document

    def _put(self, document: Any, tokens: list[int], n: int) -> None:
        form = StateFormat(LAYOUT)
        rows = form.rows(form.new(n), n)
        rows.keys[:], rows.values[:] = np.array(tokens[:n], np.uint8)[None, :, None], 0
        for layer in range(LAYOUT.n_layers):
            records = memoryview(b"".join(bytes(block[layer]) for block in form.records(rows)))
            self.runner.load_blocks(document, layer, 0, records, n)
        self.runner.finish_load(document, n)

    def build(self) -> None:
        """The next chunk, other work in between; a build may go on from its first chunk."""
        if self.building is None:
            n = self.random.randint(9, 24)
            if n > self.room:
                return
            self.building = self.runner.new_document(n), self.tokens(n)
            if self.random.random() < 0.5:
                self._put(*self.building, CHUNK)
            return
        document, tokens = self.building
        between = self.random.choice([self.ask, self.load, self.drop, self.cut])
        self.runner.prefill_chunk(document, tokens[document.n_tokens :][:CHUNK], between)
        if document.n_tokens == document.capacity:
            self.documents.append(self.building)
            self.building = None

    def drop(self) -> None:
        if self.documents:
            document, _ = self.documents.pop(self.random.randrange(len(self.documents)))
            self.runner.free_document(document)
            for slot in [slot for slot, (of, _) in self.tails.items() if of is document]:
                self.runner.free_tail(slot)
                del self.tails[slot]

    def swap(self) -> None:
        """Another copy of a document, to which the tails behind it go over."""
        if self.documents:
            index = self.random.randrange(len(self.documents))
            gone, tokens = self.documents[index]
            self.runner.free_document(gone)
            again = self.runner.new_document(len(tokens))
            self._put(again, tokens, len(tokens))
            self.documents[index] = again, tokens
            for slot, (document, tail) in self.tails.items():
                if document is gone:
                    self.runner.truncate_tail(slot, kept := min(len(tail), TAIL - 1))
                    self.runner.forward([Rows(slot, again, [9])])
                    self.tails[slot] = again, [*tail[:kept], 9]

    def ask(self) -> None:
        if len(self.tails) < N_SLOTS and self.documents:
            document, tokens = self.random.choice(self.documents)
            slot, new = self.runner.new_tail(), self.tokens(self.random.randint(1, 4))
            self.runner.forward([Rows(slot, document, [tokens[-1], *new], refeed=True)])
            self.tails[slot] = document, new
        batch = [slot for slot, (_, tail) in self.tails.items() if len(tail) < TAIL and self.random.random() < 0.8]
        if batch:
            new = {slot: self.tokens(1) for slot in batch}
            self.runner.forward([Rows(slot, self.tails[slot][0], new[slot]) for slot in batch])
            for slot in batch:
                self.tails[slot][1].extend(new[slot])

    def cut(self) -> None:
        if self.tails:
            slot = self.random.choice(list(self.tails))
            if self.random.random() < 0.5:
                self.runner.free_tail(slot)
                del self.tails[slot]
            else:
                kept = self.random.randint(0, len(self.tails[slot][1]))
                self.runner.truncate_tail(slot, kept)
                del self.tails[slot][1][kept:]

    def fail(self) -> None:
        """What fails leaves everything as it was."""
        self.context.broken = True
        if self.building is not None:
            document, tokens = self.building
            with pytest.raises(DecodeFailed):
                self.runner.prefill_chunk(document, tokens[document.n_tokens :][:CHUNK])
        for slot in [slot for slot, (_, tail) in self.tails.items() if len(tail) < TAIL]:
            document, _ = self.tails[slot]
            with pytest.raises(DecodeFailed):
                self.runner.forward([Rows(slot, document, [1])])
        self.context.broken = False

    def cancel(self) -> None:
        """A chunk ends after one of its steps."""
        if self.building is not None:
            document, tokens = self.building
            with pytest.raises(KeyError):
                self.runner.prefill_chunk(document, tokens[document.n_tokens :][:CHUNK], self._stop)

    def _stop(self) -> None:
        raise KeyError("cancelled")

    def check(self) -> None:
        for document, tokens in [*self.documents, *([self.building] if self.building else [])]:
            self._holds(document.sequence, tokens[: document.n_tokens])
        tails: dict[int, LlamaTail] = self.runner._tails
        for slot, (document, tail) in self.tails.items():
            tokens = next(tokens for other, tokens in self.documents if other is document)
            self._holds(tails[slot].sequence, [*tokens, *tail])
        assert self.context.cells_of(COPIES) == []

    def _holds(self, sequence: int, tokens: list[int]) -> None:
        cells = self.context.cells_of(sequence)
        assert self.context.tokens[cells].tolist() == tokens
        assert self.context.positions[cells].tolist() == list(range(len(tokens)))


@pytest.mark.parametrize("seed", range(12))
def test_whatever_comes_and_goes_each_sequence_lies_in_the_order_of_its_positions(seed: int, monkeypatch):
    monkeypatch.setattr(order, "FEW_CELLS", 6)
    monkeypatch.setattr(order, "FILL_NBYTES", 3 * LAYOUT.bytes_per_token)
    service = Service(seed)
    for _ in range(200):
        service.step()
    assert service.documents or service.tails or service.building


def test_without_the_order_a_question_would_come_before_its_document():
    """The fake finds cells as llama.cpp does: this is what it is for."""
    context = FakeContext(32)
    row = np.ones(1, np.int32)
    for sequence in (N_OWN, N_OWN + 1):
        context.decode(row, 0 * row, sequence * row, row > 1)
    context.remove(N_OWN)
    context.decode(row, row, (N_OWN + 1) * row, row > 1)
    assert context.positions[context.cells_of(N_OWN + 1)].tolist() == [1, 0]


def test_what_tails_left_is_taken_back_so_that_attention_passes_few_cells(monkeypatch):
    monkeypatch.setattr(order, "FEW_CELLS", 6)
    service = Service(0)
    document = service.load()
    service.runner.forward([Rows(service.runner.new_tail(), document, [1])])
    for _ in range(40):
        slot = service.runner.new_tail()
        service.runner.forward([Rows(slot, document, [1, 2, 3])])
        service.runner.free_tail(slot)
    assert document.capacity + 1 < _n_used(service) <= document.capacity + 1 + 6 + 3


def _n_used(service: Any) -> int:
    return sum(map(bool, service.context.sequences))


def test_what_the_last_tail_left_is_empty_at_once():
    service = Service(0)
    document = service.load()
    slots = [service.runner.new_tail() for _ in range(2)]
    for slot in slots:
        service.runner.forward([Rows(slot, document, [1, 2, 3])])
    service.runner.free_tail(slots[0])
    assert _n_used(service) == document.capacity + 6
    service.runner.free_tail(slots[1])
    assert _n_used(service) == document.capacity
    service.ask()
    service.check()


def test_documents_from_disk_are_put_together_in_the_same_memory():
    service = Service(0)
    at: list[int] = []
    for n_tokens in (24, 16, 24):
        document = service.runner.new_document(n_tokens)
        service._put(document, service.tokens(n_tokens), n_tokens)
        memory = service.runner._memory
        assert memory is not None
        assert len(memory) == StateFormat(LAYOUT).nbytes(24)
        at.append(memory.ctypes.data)
    assert len(set(at)) == 1


def test_a_document_that_is_too_large_is_refused_and_tails_stay():
    service = Service(1)
    service.load()
    service.ask()
    with pytest.raises(DecodeFailed, match="no room for a document"):
        service.runner.prefill_chunk(service.runner.new_document(N_DOCUMENTS), service.tokens(CHUNK))
    service.check()


def test_what_is_loaded_of_a_document_that_goes_on_is_copied_in_parts(monkeypatch):
    monkeypatch.setattr(order, "FILL_NBYTES", 3 * LAYOUT.bytes_per_token)
    service = Service(3)
    service.building = service.runner.new_document(24), service.tokens(24)
    sizes: list[int] = []
    set_state = service.context.set_state
    monkeypatch.setattr(service.context, "set_state", lambda *given: sizes.append(len(given[1])) or set_state(*given))
    service._put(*service.building, 2 * CHUNK)
    service.check()
    assert max(sizes) == StateFormat(LAYOUT).nbytes(3)


@pytest.mark.parametrize("n_before", range(3))
def test_rows_that_cannot_be_put_back_end_the_engine(n_before: int, monkeypatch):
    """Whichever state fails while a document comes: its own, or that of one of two tails."""
    service = Service(2)
    first, second = service.load(), service.load()
    for _ in range(2):
        service.runner.forward([Rows(service.runner.new_tail(), second, [1, 2, 3])])
    service.runner.free_document(first)
    left, set_state = [n_before], service.context.set_state

    def fails(*given: Any) -> None:
        if left[0] == 0:
            raise DecodeFailed("no memory")
        left[0] -= 1
        set_state(*given)

    monkeypatch.setattr(service.context, "set_state", fails)
    n, runner = first.capacity + 1, service.runner
    assert runner.usable()
    with pytest.raises(DecodeFailed, match="no memory"):
        service._put(runner.new_document(n), service.tokens(n), n)
    assert not runner.usable()


def test_a_document_that_comes_back_to_its_place_is_one_state_and_moves_no_tail(monkeypatch):
    service = Service(2)
    first, second = service.load(), service.load()
    slot = service.runner.new_tail()
    service.runner.forward([Rows(slot, second, [1, 2, 3])])
    tail = service.context.cells_of(service.runner._tails[slot].sequence)
    put: list[int] = []
    set_state = service.context.set_state
    monkeypatch.setattr(service.context, "set_state", lambda *given: put.append(given[0]) or set_state(*given))
    service.runner.free_document(first)
    again = service.runner.new_document(first.capacity)
    service._put(again, service.documents[0][1], first.capacity)
    assert put == [again.sequence]
    assert again.cells.tolist() == list(range(first.capacity))
    assert service.context.cells_of(service.runner._tails[slot].sequence) == tail
