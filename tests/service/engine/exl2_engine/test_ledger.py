from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cache_store.layout import KVLayout, KVType
from service.engine.exl2_engine.footprint import MIB, reserved_nbytes, weights_footprint
from service.engine.exl2_engine.graph_sizes import step_rows
from service.engine.exl2_engine.ledger import Sizes, plan_memory
from service.engine.exl2_engine.meter import Mark, compare, error
from service.engine.ledger import GIB, CardMemory, MemoryPlanRefused
from service.engine.models.weights import TensorSpan

WIDTHS = {"I32": 4, "I16": 2, "F16": 2, "F32": 4, "BF16": 2}
CONFIG: dict[str, Any] = {
    "hidden_size": 5120,
    "intermediate_size": 21504,
    "num_hidden_layers": 64,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 152064,
}
H200 = CardMemory(free=139 * GIB, total=140 * GIB)
SIZES = Sizes(max_context=131072, n_slots=9, tail_tokens=2048)


def span(name: str, dtype: str, *shape: int) -> TensorSpan:
    n = WIDTHS[dtype]
    for size in shape:
        n *= size
    return TensorSpan(name, dtype, shape, Path("x"), 0, n)


def exl2_linear(name: str, n_in: int, n_out: int, bits: int) -> list[TensorSpan]:
    groups = n_in // 128
    return [
        span(f"{name}.q_weight", "I32", n_in * bits // 32, n_out),
        span(f"{name}.q_scale", "I32", groups, n_out // 8),
        span(f"{name}.q_scale_max", "F16", groups),
        span(f"{name}.q_groups", "I16", 2 * groups),
        span(f"{name}.q_invperm", "I32", n_in),
    ]


def exl2_27b() -> list[TensorSpan]:
    spans = exl2_linear("lm_head", 5120, 152064, 6)
    spans += [span("model.embed_tokens.weight", "F16", 152064, 5120), span("model.norm.weight", "F16", 5120)]
    shapes = {"self_attn.q_proj": (5120, 5120), "self_attn.k_proj": (5120, 1024), "self_attn.v_proj": (5120, 1024)}
    shapes |= {"self_attn.o_proj": (5120, 5120), "mlp.gate_proj": (5120, 21504), "mlp.up_proj": (5120, 21504)}
    shapes |= {"mlp.down_proj": (21504, 5120)}
    for layer in range(64):
        for name, (n_in, n_out) in shapes.items():
            spans += exl2_linear(f"model.layers.{layer}.{name}", n_in, n_out, 4)
        spans.append(span(f"model.layers.{layer}.input_layernorm.weight", "F16", 5120))
        spans.append(span(f"model.layers.{layer}.post_attention_layernorm.weight", "F16", 5120))
    return spans


def layout(kv_type: KVType = KVType.K8V4) -> KVLayout:
    return KVLayout(64, 8, 128, kv_type)


def test_weights_of_a_27b_model_are_counted_as_exllamav2_holds_them() -> None:
    found = weights_footprint(exl2_27b(), share_head=True)
    in_all = sum(map(sum, (found.layers, found.embedding, found.head)))
    matrices = 64 * (2 * 5120 * 5120 + 2 * 5120 * 1024 + 3 * 5120 * 21504)
    assert sum(found.embedding) == 152064 * 5120 * 2
    assert matrices / 2 * 1.0078 < sum(found.layers) < matrices / 2 * 1.015  # codes, scales of 4 bits per 128
    assert 0.75 * 152064 * 5120 < sum(found.head) < 0.79 * 152064 * 5120
    assert in_all < 15.5e9
    assert (found.largest_matrix, found.head_matrix) == (5120 * 21504, 5120 * 152064)


def test_the_order_of_a_down_projection_is_not_kept() -> None:
    plain = weights_footprint(exl2_linear("model.layers.0.mlp.up_proj", 256, 64, 4), share_head=True)
    down = weights_footprint(exl2_linear("model.layers.0.mlp.down_proj", 256, 64, 4), share_head=True)
    assert sum(plain.layers) - sum(down.layers) == 2 * 256 * 2


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
def test_plain_weights_become_fp16_padded_to_32_outputs(dtype: str) -> None:
    spans = [span("model.layers.0.self_attn.q_proj.weight", dtype, 40, 100)]
    spans += [span("model.layers.0.self_attn.q_proj.bias", dtype, 40), span("model.embed_tokens.weight", dtype, 7, 100)]
    found = weights_footprint(spans, share_head=False)
    assert found.layers == (64 * 100 * 2, 40 * 2)
    assert found.head == found.embedding == (7 * 100 * 2,)
    assert not found.quantized
    assert weights_footprint(spans, share_head=True).head == ()


def test_gptq_keeps_its_index_and_gets_an_order() -> None:
    spans = [
        span("model.layers.0.mlp.down_proj.qweight", "I32", 32, 64),
        span("model.layers.0.mlp.down_proj.qzeros", "I32", 2, 8),
        span("model.layers.0.mlp.down_proj.scales", "F32", 2, 64),
        span("model.layers.0.mlp.down_proj.g_idx", "I32", 256),
    ]
    assert sum(weights_footprint(spans, share_head=True).layers) == 32 * 64 * 4 + 64 + 256 + 1024 + 2 * 512


def test_the_allocator_rounds_as_torch_does() -> None:
    assert reserved_nbytes([]) == 0
    assert reserved_nbytes([1] * 10) == 2 * MIB
    assert reserved_nbytes([3 * MIB]) == 20 * MIB
    assert reserved_nbytes([10 * MIB, 11 * MIB + 1]) == 22 * MIB


def test_the_lines_add_up_to_the_card_within_a_block() -> None:
    ledger = plan_memory(exl2_27b(), CONFIG, layout(), SIZES, H200)
    total = sum(line.nbytes for line in ledger.lines)
    rounding = 64 * 2 * MIB
    assert total <= H200.total < total + ledger.block_nbytes + rounding
    assert ledger.announced_nbytes == total - GIB - SIZES.reserve_nbytes
    assert ledger.block_nbytes == layout().bytes_per_token * 256
    assert ledger.pool_tokens == ledger.pool_blocks * 256 > 131072
    assert ledger.nbytes("tails") == 9 * 2048 * 64 * 8 * 128 * 2 * 2
    assert "documents (block pool)" in ledger.table()


def test_smaller_kv_types_hold_more() -> None:
    blocks = {t: plan_memory(exl2_27b(), CONFIG, layout(t), SIZES, H200).pool_blocks for t in KVType}
    assert blocks[KVType.K4V4] > blocks[KVType.K8V4] > blocks[KVType.K8V8] > blocks[KVType.FP16]


def test_a_context_that_cannot_fit_is_refused_with_the_plan() -> None:
    small = CardMemory(free=32 * GIB, total=32 * GIB)
    with pytest.raises(MemoryPlanRefused, match="context of 131,072 tokens does not fit") as refused:
        plan_memory(exl2_27b(), CONFIG, layout(), SIZES, small)
    assert "weights: layers" in str(refused.value)
    assert "PREREAD_MAX_CONTEXT" in str(refused.value)
    assert plan_memory(exl2_27b(), CONFIG, layout(), SIZES, small, require_context=False).pool_tokens > 2048


def test_a_model_that_cannot_fit_is_refused_whatever_the_context() -> None:
    card = CardMemory(free=16 * GIB, total=16 * GIB)
    with pytest.raises(MemoryPlanRefused, match="the model does not fit the card"):
        plan_memory(exl2_27b(), CONFIG, layout(), SIZES, card, require_context=False)


def test_unquantized_layers_need_no_scratch() -> None:
    spans = [span("model.layers.0.mlp.up_proj.weight", "F16", 64, 64), span("model.embed_tokens.weight", "F16", 64, 64)]
    ledger = plan_memory(spans, CONFIG, layout(), SIZES, H200)
    assert [line.nbytes for line in ledger.lines if "scratch" in line.name] == [0]


def test_less_for_documents_can_be_asked_for() -> None:
    wanted = 4096 * 256 * layout().bytes_per_token
    ledger = plan_memory(exl2_27b(), CONFIG, layout(), replace(SIZES, pool_nbytes=wanted), H200)
    assert ledger.pool_blocks == 4096
    everything = plan_memory(exl2_27b(), CONFIG, layout(), SIZES, H200)
    assert wanted <= everything.announced_nbytes
    assert ledger.nbytes("load", "tails", "work") == everything.nbytes("load", "tails", "work")


def test_more_at_once_takes_more_memory() -> None:
    def taken(**changes: Any) -> int:
        return plan_memory(exl2_27b(), CONFIG, layout(), replace(SIZES, **changes), H200).nbytes(
            "load", "tails", "work"
        )

    base = taken()
    assert taken(n_slots=10) - base == 2048 * 64 * 8 * 128 * 2 * 2
    assert taken(chunk_tokens=8192) > base
    assert taken(graph_rows=tuple(step_rows(8, 0, 5))) == base > taken(graph_rows=())
    with_drafts = step_rows(8, 7, 5)
    outputs = (16 + 3) * 6 * 152064 * SIZES.graph_contexts
    assert outputs < taken(graph_rows=tuple(with_drafts)) - base < outputs + 128 * MIB
    assert taken(max_dq_elements=1 << 20) < base
    assert taken(index_nbytes=512 * MIB) - base == 512 * MIB
    assert taken(share_head=False) == base  # this head is not the embedding


def test_a_measured_peak_is_set_beside_the_plan() -> None:
    ledger = plan_memory(exl2_27b(), CONFIG, layout(), SIZES, H200)
    start = Mark("before", 0, 0, GIB)
    load = Mark("load", 13 * GIB, 14 * GIB, 15 * GIB)
    used = GIB + ledger.announced_nbytes
    peak = Mark("peak", 100 * GIB, used - 2 * GIB, used)
    assert error(ledger, start, peak) == 0
    assert "error of the peak: +0.00 %" in compare(ledger, [start, load], peak)
