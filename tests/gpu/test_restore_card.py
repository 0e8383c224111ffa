"""On the card: copies beside computing arrive whole, in order, and out of memory that is used again at once."""

import numpy as np
import pytest
import torch

from cache_store.layout import KVLayout, KVType
from service.engine.exl2_engine.copies import CopyStream
from service.engine.exl2_engine.host_copies import BlockCopies
from service.engine.exl2_engine.host_memory import HostMemory
from service.engine.exl2_engine.pool import BlockPool
from service.engine.exl2_engine.restore import BlockLoader, spread

pytestmark = pytest.mark.gpu

LAYOUT = KVLayout(n_layers=4, n_kv_heads=8, head_dim=128, kv_type=KVType.K8V4)
ROW = LAYOUT.record_nbytes(256)
LONG = 200_000_000
"""Clock cycles of the card, about a tenth of a second."""


@pytest.fixture
def device():
    return torch.device("cuda:0")


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.inference_mode():
        yield


def make(device, n_blocks=96, ring_nbytes=8 << 20):
    pool = BlockPool(LAYOUT, n_blocks, device)
    return pool, BlockLoader(pool.layers, LAYOUT, CopyStream(device), ring_nbytes=ring_nbytes)


def records(n, seed=0):
    return np.random.default_rng(seed).integers(0, 256, n * ROW, dtype=np.uint8)


def load(loader, document, layer, first_block, data, n_tokens):
    """Through the ring, whose memory is spoiled as soon as it comes back."""
    memory = loader.buffers.take(len(data), wait=True)
    memory[:] = data.tobytes()
    loader.load(document.block_ids, layer, first_block * 256, memory, n_tokens)
    loader.buffers.give_back(memory)


def test_a_ring_of_few_slots_loses_nothing(device):
    pool, loader = make(device)
    pool.take(256 * 7)
    document = pool.take(256 * 80)
    loader.begin()
    expected = [records(80, seed) for seed in range(4)]
    for first in range(0, 80, 2):
        for layer, data in enumerate(expected):
            load(loader, document, layer, first, data[first * ROW : (first + 2) * ROW], 512)
    loader.end()
    for pooled, data in zip(pool.layers, expected, strict=True):
        found = pooled[document.block_ids].clone()
        assert torch.equal(found.cpu().flatten(), torch.from_numpy(data))
    assert loader.buffers.n_free == loader.buffers.n_slots


def test_a_slot_stays_taken_until_its_copy_is_over(device):
    """Copies that have to wait for a long step: who reads ahead has to wait too, and spoils nothing."""
    pool, loader = make(device)
    document = pool.take(256 * 40)
    torch.cuda._sleep(LONG)
    loader.begin()
    data = records(40)
    for first in range(0, 40, 4):
        load(loader, document, 0, first, data[first * ROW : (first + 4) * ROW], 1024)
    loader.end()
    assert torch.equal(pool.layers[0][document.block_ids].cpu().flatten(), torch.from_numpy(data))


def test_copies_wait_for_steps_that_read_what_they_overwrite(device):
    pool, loader = make(device)
    pool.layers[0].fill_(7)
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    before = pool.layers[0].clone()
    document = pool.take(256 * 8)
    loader.begin()
    load(loader, document, 0, 0, records(4), 1024)
    loader.end()
    assert before.eq(7).all()
    assert torch.equal(pool.layers[0][document.block_ids[:4]].cpu().flatten(), torch.from_numpy(records(4)))


def test_what_is_computed_next_waits_for_copies_that_were_given_up(device):
    pool, loader = make(device, ring_nbytes=64 << 20)
    for i in range(5):
        document = pool.take(256 * 90)
        loader.begin()
        for layer in range(4):
            load(loader, document, layer, 0, records(16, i), 16 * 256)
        loader.end()  # as in `free_document`
        pool.give_back(document)
        for pooled in pool.layers:
            pooled.fill_(i)
        assert all(pooled.eq(i).all() for pooled in pool.layers)


@pytest.mark.parametrize("kv_type", list(KVType))
@pytest.mark.parametrize("n_tokens", [1, 100, 255])
def test_a_partial_block_is_laid_out_as_on_the_processor(device, kv_type, n_tokens):
    layout = KVLayout(1, 8, 128, kv_type)
    pool = BlockPool(layout, 4, device)
    loader = BlockLoader(pool.layers, layout, CopyStream(device), ring_nbytes=16 << 20)
    pool.layers[0].fill_(255)
    nbytes = layout.record_nbytes(n_tokens)
    data = np.random.default_rng(1).integers(0, 256, nbytes, dtype=np.uint8)
    document = pool.take(n_tokens)
    loader.begin()
    load(loader, document, 0, 0, data, n_tokens)
    loader.end()
    expected = torch.empty(layout.record_nbytes(256), dtype=torch.uint8)
    spread(torch.from_numpy(data), n_tokens, layout, expected)
    assert torch.equal(pool.layers[0][document.block_ids[0]].cpu(), expected)


@pytest.mark.parametrize("readonly", [False, True])
def test_ordinary_memory_may_be_used_again_at_once(device, readonly):
    pool, loader = make(device)
    document = pool.take(256 * 40)
    torch.cuda._sleep(LONG)
    loader.begin()
    data = records(40)
    scratch = bytearray(4 * ROW)
    for first in range(0, 40, 4):
        scratch[:] = data[first * ROW : (first + 4) * ROW].tobytes()
        view = memoryview(bytes(scratch)) if readonly else memoryview(scratch)
        loader.load(document.block_ids, 0, first * 256, view, 1024)
        if not readonly:
            scratch[:] = bytes(len(scratch))
    loader.end()
    assert torch.equal(pool.layers[0][document.block_ids].cpu().flatten(), torch.from_numpy(data))


def test_documents_go_to_host_memory_and_back_while_the_card_computes(device):
    pool, _ = make(device)
    memory = HostMemory(ROW, 64 << 20, device, slab_nbytes=4 << 20)
    memory.wait_allocated()
    copies = BlockCopies(pool.layers, LAYOUT, CopyStream(device), memory)
    n_blocks, n_tokens = 30, 30 * 256 - 100
    document = pool.take(n_tokens)
    torch.cuda._sleep(LONG)
    contents = [torch.randint(0, 256, (n_blocks, ROW), dtype=torch.uint8, device=device) for _ in range(4)]
    for pooled, content in zip(pool.layers, contents, strict=True):
        pooled[document.block_ids] = content
    held = copies.take(n_tokens)
    assert held is not None
    for layer in range(4):
        copies.copy_out(document, held, layer)
    copies.mark().wait()
    pool.give_back(document)
    for pooled in pool.layers:
        pooled.zero_()
    others = [pool.take(256) for _ in range(40)]
    for other in others[::2]:
        pool.give_back(other)
    back = pool.take(n_tokens)
    assert back.block_ids != list(range(back.block_ids[0], back.block_ids[0] + n_blocks)), "blocks should lie apart"
    torch.cuda._sleep(LONG)
    for layer in range(4):
        copies.copy_in(held, back, layer)
    copies.mark().wait()
    for pooled, content in zip(pool.layers, contents, strict=True):
        assert torch.equal(pooled[back.block_ids], content)
    copies.give_back(held)
    copies.close()
