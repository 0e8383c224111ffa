"""A few rows on a document against softmax attention in FP64 over the same keys."""

import math

import pytest
import torch
from torch import Tensor

from cache_store.layout import KVLayout, KVType
from service.engine.torch_engine import products
from service.engine.torch_engine.attention import causal_mask
from service.engine.torch_engine.few import TURNED_A_STEP, FewRows, Share, TailRows, few_rows
from service.engine.torch_engine.kv import DocumentKV, KVMemory, Tail
from service.engine.torch_engine.scratch import Scratch

CPU = torch.device("cpu")
N_LAYERS, GROUP, D = 3, 3, 32


def memory(kv_heads: int, value_dtype: torch.dtype = torch.float32) -> KVMemory:
    return KVMemory(KVLayout(N_LAYERS, kv_heads, D, KVType.FP16), torch.float32, value_dtype, CPU)


def filled(x: Tensor, seed: int) -> None:
    x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)))


def document_of(kv: KVMemory, n: int) -> DocumentKV:
    document = DocumentKV(kv, n)
    filled(document.k[:, :, :n], 1)
    filled(document.v[:, :, :n], 2)
    document.n_tokens = n
    return document


def share_of(kv: KVMemory, first: int, n: int, past: int, *, refeed: bool = False) -> Share:
    tail = Tail(kv, 64)
    filled(tail.k, 10 + first)
    filled(tail.v, 20 + first)
    tail.length = past
    return Share(TailRows(tail, n - refeed), first, n, causal_mask(n, past, refeed=refeed, device=CPU))


def expected(layer: int, q: Tensor, document: DocumentKV, share: Share) -> Tensor:
    """Attention of one sequence's rows ``[heads, n, d]``, in FP64, over repeated heads."""
    n = document.n_tokens
    k = torch.cat((document.k[layer, :, :n], share.tail.keys[layer]), 1).repeat_interleave(GROUP, 0).double()
    v = torch.cat((document.v[layer, :, :n], share.tail.values[layer]), 1).repeat_interleave(GROUP, 0).double()
    scores = q.double() @ k.transpose(1, 2)
    if share.mask is not None:
        scores[:, :, n:] += share.mask
    return torch.softmax(scores, -1) @ v


@pytest.mark.parametrize("kv_heads", [1, 3, 4])
@pytest.mark.parametrize("n", [1, 7, 8, 250])
@pytest.mark.parametrize("n_turned", [0, 1, 2])
@pytest.mark.parametrize("n_pieces", [1, 2, 4])
def test_rows_of_several_sequences_attend_to_document_and_own_tail(
    kv_heads: int, n: int, n_turned: int, n_pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "pieces", lambda *_: n_pieces)
    kv, scratch = memory(kv_heads), Scratch()
    document, turned = document_of(kv, n), document_of(kv, n)
    turned.turn(n_turned)
    shares = [share_of(kv, 0, 1, 5), share_of(kv, 1, 3, 0), share_of(kv, 4, 2, 30, refeed=True)]
    rows = FewRows(turned, shares, kv_heads * GROUP, kv_heads, scratch)
    assert turned.n_turned == n_turned
    q = torch.randn(kv_heads * GROUP, 6, D, generator=torch.Generator().manual_seed(3))
    for layer in range(N_LAYERS):
        out = rows.attend(layer, q)
        for share in shares:
            own = slice(share.first, share.first + share.n)
            want = expected(layer, q[:, own], document, share)
            torch.testing.assert_close(out[:, own].double(), want, rtol=1e-5, atol=1e-5)


def test_what_an_earlier_step_left_in_the_memory_is_not_seen() -> None:
    kv, scratch = memory(3), Scratch()
    q = torch.randn(3 * GROUP, 1, D, generator=torch.Generator().manual_seed(4))
    document = document_of(kv, 37)
    share = share_of(kv, 0, 1, 9)
    alone = FewRows(document, [share], 3 * GROUP, 3, Scratch()).attend(0, q)
    for buffer in ("products", "weights", "side", "p"):
        scratch.take(buffer, (100_000,), torch.float32, CPU).fill_(math.nan)
    assert torch.equal(FewRows(document, [share], 3 * GROUP, 3, scratch).attend(0, q), alone)


def test_groups_of_one_step_share_the_memory() -> None:
    """As in a step: all groups are made, then each attends in a layer before any does in the next."""
    kv, scratch = memory(3), Scratch()
    groups = []
    for n in (37, 20):
        document, shares = document_of(kv, n), [share_of(kv, 0, 1, 9), share_of(kv, 1, 4, 2)]
        groups.append((document, shares, FewRows(document, shares, 3 * GROUP, 3, scratch)))
    q = torch.randn(3 * GROUP, 5, D, generator=torch.Generator().manual_seed(6))
    for layer in range(N_LAYERS):
        for document, shares, rows in groups:
            out = rows.attend(layer, q)
            for share in shares:
                own = slice(share.first, share.first + share.n)
                want = expected(layer, q[:, own], document, share)
                torch.testing.assert_close(out[:, own].double(), want, rtol=1e-5, atol=1e-5)


def test_values_may_be_bfloat16() -> None:
    document = document_of(memory(3, torch.bfloat16), 40)
    share = share_of(memory(3), 0, 1, 4)
    q = torch.randn(3 * GROUP, 1, D, generator=torch.Generator().manual_seed(5))
    out = FewRows(document, [share], 3 * GROUP, 3, Scratch()).attend(1, q)
    assert document.n_turned == 0
    torch.testing.assert_close(out.double(), expected(1, q, document, share), rtol=2e-2, atol=2e-2)


def test_steps_of_single_rows_turn_the_document_and_questions_do_not() -> None:
    kv = memory(3)
    document = document_of(kv, 40)
    FewRows(document, [share_of(kv, 0, 1, 4), share_of(kv, 1, 2, 4)], 3 * GROUP, 3, Scratch())
    assert document.n_turned == 0
    FewRows(document, [share_of(kv, 0, 1, 4), share_of(kv, 1, 1, 4)], 3 * GROUP, 3, Scratch())
    assert document.n_turned == TURNED_A_STEP
    FewRows(document, [share_of(kv, 0, 1, 4)], 3 * GROUP, 3, Scratch())
    assert document.n_turned == N_LAYERS


def test_how_many_rows_are_few_depends_on_what_they_hold() -> None:
    plain, bfloat16 = document_of(memory(3), 40), document_of(memory(3, torch.bfloat16), 40)
    assert few_rows(plain, 24, 9)
    assert not few_rows(plain, 25, 9)
    assert not few_rows(plain, 24, 9000)
    assert few_rows(plain, 8, 9000)
    assert few_rows(bfloat16, 8, 9)
    assert not few_rows(bfloat16, 9, 9)


@pytest.mark.parametrize(("kv_heads", "threads", "wanted"), [(3, 1, 1), (3, 2, 2), (8, 2, 1), (3, 4, 4), (3, 16, 4)])
def test_pieces_give_every_thread_as_much(kv_heads: int, threads: int, wanted: int) -> None:
    assert products.pieces(kv_heads, threads) == wanted
