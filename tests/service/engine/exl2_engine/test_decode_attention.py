from dataclasses import replace

import pytest
import torch

from cache_store.layout import KVLayout, KVType
from service.engine.exl2_engine import portable_attend
from service.engine.exl2_engine.kernels.attend import DecodeConfig, Sums, attend
from tests.service.engine.exl2_engine.attention_cases import Row, make_case, relative_error

TOLERANCE = 2e-3
KV_TYPES = list(KVType)
# Documents at a block's boundaries and between, groups without rows or without a document, rows that see nothing,
# a slot with several rows, tails that end at a tile's boundaries.
RAGGED = [
    (255, [Row(0, 63), Row(0, 64), Row(0, 65), Row(1, 0)]),
    (0, [Row(2, 7)]),
    (257, []),
    (256, [Row(3, 129)]),
    (1, [Row(4, 1)]),
    (0, [Row(3, 0)]),
]
FEW_ROWS = [(257, [Row(0, 63), Row(1, 0)]), (0, [Row(2, 7)])]


def layout_of(kv_type, head_dim=64, kv_heads=2):
    return KVLayout(n_layers=1, n_kv_heads=kv_heads, head_dim=head_dim, kv_type=kv_type)


def ragged_case(kv_type, head_dim=64, group_heads=3, groups=RAGGED, **options):
    options = {"padding": 2, "n_slots": 5, "tail_tokens": 130} | options
    return make_case(layout_of(kv_type, head_dim), group_heads, groups, **options)


def as_fp32(arguments):
    return tuple(x.float() if isinstance(x, torch.Tensor) and x.dtype == torch.float16 else x for x in arguments)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("kv_type", KV_TYPES)
def test_plain_torch_gives_the_attention_of_the_decoded_document_and_the_tail(kv_type, head_dim, biased):
    case = ragged_case(kv_type, head_dim, biased=biased)
    out = portable_attend.attend(*as_fp32(case.arguments()))
    assert out.dtype == torch.float32
    assert relative_error(out, case.reference()) < 5e-6
    assert relative_error(portable_attend.attend(*case.arguments()), case.reference()) < TOLERANCE


def test_plain_torch_decodes_a_long_document_in_parts(monkeypatch):
    monkeypatch.setattr(portable_attend, "_DECODED_VALUES", 2 * 64 * 256 * 2)
    case = make_case(layout_of(KVType.K8V4), 2, [(1281, [Row(0, 3), Row(1, 0)])])
    out = portable_attend.attend(*as_fp32(case.arguments()))
    assert relative_error(out, case.reference()) < 5e-6


@pytest.mark.parametrize("kv_type", KV_TYPES)
def test_the_kernels_give_the_attention_of_the_decoded_document_and_the_tail(kv_type):
    case = ragged_case(kv_type)
    assert relative_error(attend(*case.arguments()), case.reference()) < TOLERANCE


@pytest.mark.parametrize(
    ("kv_type", "head_dim", "group_heads", "biased"),
    [
        (KVType.FP16, 96, 1, True),
        (KVType.K8V8, 96, 4, False),
        (KVType.K8V4, 128, 5, False),
        (KVType.K4V4, 128, 1, True),
        (KVType.K4V4, 96, 7, False),
        (KVType.K8V4, 256, 2, True),
    ],
)
def test_the_kernels_know_every_head_dim_and_ratio_of_heads(kv_type, head_dim, group_heads, biased):
    case = ragged_case(kv_type, head_dim, group_heads, FEW_ROWS, biased=biased, seed=head_dim)
    assert relative_error(attend(*case.arguments()), case.reference()) < TOLERANCE


@pytest.mark.parametrize("tokens", [1, 127, 128, 129, 511, 512, 513, 1025])
@pytest.mark.parametrize("peel", [False, True])
def test_lengths_around_the_boundaries_of_tiles_and_blocks(tokens, peel):
    case = make_case(layout_of(KVType.K8V4, kv_heads=1), 2, [(tokens, [Row(0, 0), Row(1, 2)])], seed=tokens)
    config = DecodeConfig(128, 4, 2, Sums.TOKEN, peel=peel, registers=None, per_sm=1)
    assert relative_error(attend(*case.arguments(), config=config), case.reference()) < TOLERANCE


@pytest.mark.parametrize("sums", list(Sums))
@pytest.mark.parametrize("biased", [False, True])
def test_every_way_of_summing_weights(sums, biased):
    config = DecodeConfig(64, 4, 2, sums, peel=True, registers=None, per_sm=1)
    case = make_case(layout_of(KVType.K4V4, kv_heads=1), 3, [(300, [Row(0, 9)]), (192, [Row(1, 0)])], biased=biased)
    assert relative_error(attend(*case.arguments(), config=config), case.reference()) < TOLERANCE


def test_many_rows_of_one_sequence_take_several_tiles():
    rows = [Row(0, i + 1) for i in range(30)] + [Row(1, 70), Row(2, 5), Row(2, 6)]
    case = make_case(layout_of(KVType.K4V4, kv_heads=1), 5, [(300, rows), (0, [Row(3, 3)])], tail_tokens=80)
    assert relative_error(attend(*case.arguments()), case.reference()) < TOLERANCE


def test_a_long_tail_is_shared_among_programs():
    case = make_case(layout_of(KVType.K8V8, kv_heads=1), 2, [(0, [Row(0, 300)])], tail_tokens=310)
    assert relative_error(attend(*case.arguments()), case.reference()) < TOLERANCE


def test_bounds_of_a_captured_graph_above_the_true_lengths_change_nothing():
    case = ragged_case(KVType.K8V4)
    step = replace(case.step, max_group_rows=40, max_tokens=4096, max_tail=2048)
    assert relative_error(attend(step, *case.arguments()[1:]), case.reference()) < TOLERANCE


@pytest.mark.filterwarnings("ignore:All-NaN slice")
def test_a_scale_of_nan_reaches_the_output():
    case = make_case(layout_of(KVType.K8V4, kv_heads=1), 1, [(256, [Row(0, 4)])])
    scales = case.pool[:, 256 * 64 : 256 * 66]
    scales[:] = 0xFF
    assert attend(*case.arguments()).isnan().all()


def test_shapes_that_no_kernel_knows_are_refused():
    case = ragged_case(KVType.K8V4)
    with pytest.raises(ValueError, match="blocks of"):
        attend(*case.arguments()[:2], case.pool[:, :-32], *case.arguments()[3:])
    with pytest.raises(ValueError, match="FP16"):
        attend(*as_fp32(case.arguments()))
