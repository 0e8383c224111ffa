"""What cards of sm_70 and sm_75 run: no BF16, no FP8, nothing of Ampere, no CUDA graph."""

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cache_store.layout import KVLayout, KVType
from service.engine.exl2_engine import loading, sdpa
from service.engine.exl2_engine.few_rows import all_products
from service.engine.exl2_engine.loading import Options, load_runner, make_runner
from service.engine.exl2_engine.plain import PlainModel
from service.engine.exl2_engine.pool import block_nbytes
from service.engine.exl2_engine.portable import PortableBackend
from service.engine.exl2_engine.sdpa import Method
from service.engine.exl2_engine.triton_backend import TritonBackend
from service.engine.models.card import load_card
from tests.service.engine.runner_parts import ask, log_probs

PLAIN_DTYPES = {torch.float16, torch.float32, torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool}
AMPERE = ("flash_attention", "cudnn_attention", "scaled_mm", "_int_mm", "bfloat16")
"""In names of operations that cards before Ampere lack."""


class Watch(TorchDispatchMode):
    """Notes the dtype of every tensor that an operation takes or gives, and the operations' names."""

    def __init__(self):
        super().__init__()
        self.dtypes, self.names = set(), set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.names.add(func.__name__)
        self.dtypes |= {x.dtype for x in tree_leaves((args, kwargs, out)) if isinstance(x, torch.Tensor)}
        return out


def half_runner(tiny_dir, kv_type):
    """The engine as on a card without Triton: weights, tails and rows in FP16, here on the processor."""
    card = load_card(tiny_dir)
    model = PlainModel.load(tiny_dir, torch.float16)
    options = Options(kv_type=kv_type, n_slots=6, tail_tokens=256, chunk_tokens=512, backend="portable")
    return make_runner(model, card, options, 24)


@pytest.mark.parametrize("kv_type", [KVType.FP16, KVType.K8V4])
def test_reading_and_asking_take_nothing_that_volta_lacks(tiny_dir, make_runner, ids, read_document, kv_type):
    tokens, question = ids(600), ids(9, seed=1)
    runner = half_runner(tiny_dir, kv_type)
    with Watch() as watch:
        document, _ = read_document(runner, tokens)
        logits = ask(runner, document, tokens, question)
    assert torch.float16 in watch.dtypes
    assert watch.dtypes <= PLAIN_DTYPES
    # The processor's own kernel, in FP32, stands in for `Method.EFFICIENT`, which Volta has.
    names = {name for name in watch.names if not name.startswith("_scaled_dot_product_flash_attention_for_cpu")}
    assert not [name for name in names if any(word in name for word in AMPERE)]
    whole = make_runner(kv_type)
    expected = log_probs(ask(whole, read_document(whole, tokens)[0], tokens, question))
    got = log_probs(logits)
    assert float((expected.exp() * (expected - got)).sum(-1).max()) < 1e-3


@pytest.mark.parametrize(
    ("capability", "tried"),
    [
        ((7, 0), [Method.EFFICIENT]),
        ((7, 5), [Method.EFFICIENT]),
        ((8, 6), [Method.FLASH, Method.EFFICIENT]),
        ((9, 0), [Method.CUDNN, Method.FLASH, Method.EFFICIENT]),
    ],
)
def test_a_kernel_that_a_generation_lacks_is_not_even_tried(monkeypatch, capability, tried):
    seen = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(sdpa, "works", lambda method, *_: seen.append(method))
    assert sdpa.best.__wrapped__(torch.device("cuda", 0), torch.float16, 128) is Method.PLAIN
    assert seen == tried


@pytest.mark.parametrize("capability", [(7, 0), (7, 5)])
def test_our_products_are_not_used_below_ampere(monkeypatch, capability):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert all_products([], [], "auto") == []
    with pytest.raises(ValueError, match="sm_80"):
        all_products([], [], "triton")


@pytest.mark.parametrize(("backend", "graphs"), [(PortableBackend, False), (TritonBackend, True)])
def test_steps_are_planned_as_captured_only_where_attention_can_be(tiny_dir, monkeypatch, backend, graphs):
    """What attention in plain torch reads back from the card cannot be captured: trying would poison the first step."""
    planned = []

    def on_card(model_dir, card, layout, options):
        planned.append(options.graphs)
        raise InterruptedError

    layout = load_card(tiny_dir).layout(KVType.K8V4)
    assert isinstance(layout, KVLayout)
    made = backend(layout, "cpu") if backend is PortableBackend else backend(layout)
    monkeypatch.setattr(loading, "check_card", lambda _: None)
    monkeypatch.setattr(loading, "select_backend", lambda *_: made)
    monkeypatch.setattr(loading, "plan", on_card)
    options = Options(kv_type=KVType.K8V4, pool_nbytes=24 * block_nbytes(layout))
    with pytest.raises(InterruptedError):
        load_runner(tiny_dir, options)
    with pytest.raises(InterruptedError):
        load_runner(tiny_dir, replace(options, graphs=False))
    assert planned == [graphs, False]
