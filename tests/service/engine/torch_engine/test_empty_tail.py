"""A probe re-feeds only the document's last token: its tail has no tokens, alone and beside other questions."""

import pytest
import torch

from cache_store.layout import KVLayout, KVType
from service.engine.torch_engine import attention
from service.engine.torch_engine.kv import DocumentKV, KVMemory, Tail
from service.engine.torch_engine.plan import Group, SequenceRows, StepPlan

HEADS, KV_HEADS, HEAD_DIM, DOCUMENT = 6, 3, 32, 20
CPU = torch.device("cpu")


@pytest.fixture
def memory() -> KVMemory:
    layout = KVLayout(n_layers=1, n_kv_heads=KV_HEADS, head_dim=HEAD_DIM, kv_type=KVType.FP16)
    return KVMemory(layout, torch.float32, torch.float32, CPU)


@pytest.fixture
def document(memory: KVMemory) -> DocumentKV:
    document = DocumentKV(memory, DOCUMENT)
    generator = torch.Generator().manual_seed(5)
    for x in (document.k, document.v):
        x[:, :, :DOCUMENT] = torch.randn(1, KV_HEADS, DOCUMENT, HEAD_DIM, generator=generator)
    document.n_tokens = DOCUMENT
    return document


def probe(memory: KVMemory, first: int) -> SequenceRows:
    return SequenceRows(Tail(memory, 8), first, 1, True, attention.causal_mask(1, 0, refeed=True, device=CPU))


def over_document(q: torch.Tensor, document: DocumentKV) -> torch.Tensor:
    """The reference: softmax attention of one row over the document alone."""
    k, v = (x[0, :, :DOCUMENT].repeat_interleave(HEADS // KV_HEADS, 0) for x in (document.k, document.v))
    return torch.softmax(q @ k.transpose(1, 2), -1) @ v


@pytest.mark.parametrize("n_question", [0, 4, 40], ids=["alone", "few rows", "many rows"])
def test_a_probe_attends_to_the_document_only(memory, document, n_question):
    generator = torch.Generator().manual_seed(6)
    n = 1 + n_question
    q = torch.randn(HEADS, n, HEAD_DIM, generator=generator)
    k, v = (torch.randn(KV_HEADS, n, HEAD_DIM, generator=generator) for _ in "kv")
    members = [probe(memory, 0)]
    if n_question:
        mask = attention.causal_mask(n_question, 0, refeed=False, device=CPU)
        members.append(SequenceRows(Tail(memory, 64), 1, n_question, False, mask))
    out = StepPlan([Group(document, members)], None).attend(0, q, k, v, 1.0)
    assert out.shape == q.shape
    torch.testing.assert_close(out[:, :1], over_document(q[:, :1], document), rtol=1e-5, atol=1e-5)
    assert bool(torch.isfinite(out).all())
