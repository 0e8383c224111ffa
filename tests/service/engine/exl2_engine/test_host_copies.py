"""Documents' blocks to host memory and back, without a card."""

import random
from dataclasses import dataclass

import pytest
import torch

from cache_store.layout import KVLayout, KVType
from service.engine.exl2_engine.copies import CopyStream
from service.engine.exl2_engine.host_copies import BlockCopies
from service.engine.exl2_engine.host_memory import HostMemory, Rows

CPU = torch.device("cpu")
LAYOUT = KVLayout(n_layers=3, n_kv_heads=1, head_dim=32, kv_type=KVType.K4V4)
ROW = LAYOUT.record_nbytes(256)


@dataclass
class Document:
    block_ids: list[int]


def make_memory(n_rows: int, rows_per_slab: int = 4) -> HostMemory:
    memory = HostMemory(ROW, n_rows * ROW, CPU, slab_nbytes=rows_per_slab * ROW)
    memory.wait_allocated()
    return memory


def numbers(rows: Rows) -> list[tuple[int, int]]:
    return [(slab, first + i) for slab, first, n in rows.extents for i in range(n)]


@pytest.mark.parametrize("block_ids", [[0, 1, 2, 3, 4], [9, 2, 3, 4, 0], [7]])
@pytest.mark.parametrize("rows_per_slab", [1, 4, 100])
def test_a_document_comes_back_as_it_left_into_other_blocks(block_ids: list[int], rows_per_slab: int) -> None:
    pools = [torch.randint(0, 256, (16, ROW), dtype=torch.uint8) for _ in range(LAYOUT.n_layers)]
    copies = BlockCopies(pools, LAYOUT, CopyStream(CPU), make_memory(100, rows_per_slab))
    n_tokens = 256 * len(block_ids) - 100
    before = [pool[block_ids].clone() for pool in pools]
    other = copies.take(300)
    memory = copies.take(n_tokens)
    assert other is not None
    assert memory is not None
    assert copies.nbytes_of(n_tokens) == len(block_ids) * LAYOUT.n_layers * ROW
    for layer in range(LAYOUT.n_layers):
        copies.copy_out(Document(block_ids), memory, layer)
    copies.mark().wait()
    for pool in pools:
        pool.zero_()
    back = [15, 5, 6, 11, 12][: len(block_ids)]
    for layer in range(LAYOUT.n_layers):
        copies.copy_in(memory, Document(back), layer)
    for pool, expected in zip(pools, before, strict=True):
        assert torch.equal(pool[back], expected)
        assert pool.sum() == pool[back].sum()
    copies.give_back(memory)
    copies.give_back(other)
    assert copies.used_nbytes == 0
    copies.close()


def test_rows_are_handed_out_once_and_join_again() -> None:
    memory, choose = make_memory(64, 8), random.Random(5)
    held: list[Rows] = []
    for _ in range(400):
        n = choose.randrange(1, 20)
        if (rows := memory.take(n)) is not None:
            assert sum(len(part) for part in rows.parts(0, n)) == n
            held.append(rows)
        elif held:
            memory.give_back(held.pop(choose.randrange(len(held))))
        taken = [number for rows in held for number in numbers(rows)]
        assert len(taken) == len(set(taken))
        assert memory.used_nbytes == len(taken) * ROW
    for rows in held:
        memory.give_back(rows)
    whole = memory.take(64)
    assert whole is not None
    assert [n for _, _, n in whole.extents] == [8] * 8
    assert memory.take(1) is None


def test_parts_of_rows_follow_their_order() -> None:
    memory = make_memory(12, 4)
    rows = memory.take(10)
    assert rows is not None
    for i, row in enumerate(row for part in rows.parts(0, 10) for row in part):
        row.fill_(i)
    for first in range(10):
        for n in range(1, 10 - first + 1):
            found = torch.cat(list(rows.parts(first, n)))[:, 0].tolist()
            assert found == list(range(first, first + n))


def test_memory_that_the_machine_does_not_have_is_not_pinned(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Low:
        available = 16 * ROW

    monkeypatch.setattr("psutil.virtual_memory", Low)
    memory = make_memory(1000, 4)
    assert memory.allocated_nbytes == 12 * ROW
    assert "of host memory are free" in caplog.text


def test_running_out_while_allocating_keeps_what_there_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = iter([torch.empty(4 * ROW, dtype=torch.uint8)])

    def allocate(nbytes: int, device: torch.device) -> torch.Tensor:
        if (memory := next(made, None)) is None:
            raise RuntimeError("CUDA error: out of memory")
        return memory

    monkeypatch.setattr("service.engine.exl2_engine.host_memory.host_memory", allocate)
    memory = make_memory(100, 4)
    assert memory.take(5) is None
    assert memory.take(4) is not None
    assert "no more host memory" in caplog.text
