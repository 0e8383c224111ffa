from unittest.mock import Mock

import pytest
import torch

from cache_store.layout import KVLayout, KVType
from service.engine.torch_engine.kv import DocumentKV, KVMemory, TailPool

N_LAYERS, KV_HEADS, D, N = 3, 2, 32, 21


def document(value_dtype: torch.dtype = torch.float32) -> DocumentKV:
    memory = KVMemory(KVLayout(N_LAYERS, KV_HEADS, D, KVType.FP16), torch.float32, value_dtype, torch.device("cpu"))
    made = DocumentKV(memory, N)
    generator = torch.Generator().manual_seed(1)
    for x in (made.k, made.v):
        x[:, :, :N] = torch.randn(N_LAYERS, KV_HEADS, N, D, generator=generator)
    made.n_tokens = N
    return made


def test_turned_layers_hold_the_same() -> None:
    turned, plain = document(), document()
    address = turned.stored[0].data_ptr()
    turned.turn(2)
    assert turned.n_turned == 2
    for layer in range(2):
        for x, y in zip(turned.turned(layer), (plain.k[layer], plain.v[layer]), strict=True):
            assert x.is_contiguous()
            assert torch.equal(x.transpose(1, 2), y)
    for layer in range(N_LAYERS):
        k, v = turned.layer(layer)
        assert torch.equal(k, plain.k[layer])
        assert torch.equal(v, plain.v[layer])
        assert k.is_contiguous()
    assert turned.stored[0].data_ptr() == address
    assert turned.nbytes == plain.nbytes


@pytest.mark.parametrize("name", ["k", "v"])
def test_who_reads_or_writes_all_layers_finds_them_as_they_were_filled(name: str) -> None:
    turned, plain = document(), document()
    turned.turn(1)
    turned.turn(9)
    assert turned.n_turned == N_LAYERS
    assert torch.equal(getattr(turned, name), getattr(plain, name))
    assert turned.n_turned == 0
    assert torch.equal(turned.k, plain.k)
    assert torch.equal(turned.v, plain.v)


def test_only_fp32_is_turned() -> None:
    assert document().can_turn
    assert not document(torch.bfloat16).can_turn


def test_a_freed_document_holds_nothing() -> None:
    freed = document()
    freed.turn(1)
    freed.free()
    assert (freed.nbytes, freed.n_tokens, freed.capacity, freed.n_turned) == (0, 0, 0, 0)


def test_a_tail_for_which_there_is_no_memory_costs_no_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = KVMemory(KVLayout(N_LAYERS, KV_HEADS, D, KVType.FP16), torch.float32, torch.float32, torch.device("cpu"))
    pool = TailPool(memory, 2, 8)
    with monkeypatch.context() as full:
        full.setattr(KVMemory, "empty", Mock(side_effect=MemoryError))
        for _ in range(3):
            with pytest.raises(MemoryError):
                pool.take()
    assert pool.used == 0
    assert sorted(pool.take() for _ in range(2)) == [0, 1]
