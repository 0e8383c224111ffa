# pyright: basic, reportIndexIssue=false, reportCallIssue=false
"""Launches decode attention: rows over their group's document and over their own tails, merged."""

from dataclasses import dataclass
from enum import IntEnum
from functools import cache

import torch
from torch import Tensor

from cache_store.layout import BLOCK_TOKENS, KVLayout, KVType
from service.engine.exl2_engine.kernels.decode import document_kernel
from service.engine.exl2_engine.kernels.merge import merge_kernel
from service.engine.exl2_engine.kernels.tails import tail_kernel
from service.engine.exl2_engine.slots import LayerSlots
from service.engine.exl2_engine.step import Step

LOG2_E = 1.4426950408889634
MAX_GROUP_HEADS = 128
_TAIL_TOKENS = 128
"""Tokens of a tail from which on a second program works on it."""


class Sums(IntEnum):
    """How the weights of a row are summed up: in every tile, at the end over the tokens of a tile, or by a product."""

    ROW = 0
    TOKEN = 1
    PRODUCT = 2


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """How `document_kernel` is compiled and spread over the card: tokens per iteration, warps, depth of the load
    pipeline, the way of summing, whether a document's last tile is a copy of the code of its own, the most registers
    (None for the compiler's choice), and the programs per multiprocessor that the number of splits aims at."""

    block_n: int
    warps: int
    stages: int
    sums: Sums
    peel: bool
    registers: int | None
    per_sm: int


def decode_config(kv_type: KVType, query_tile: int, head_dim: int, capability: int) -> DecodeConfig:
    """The default for queries in tiles of `query_tile` on a card of `capability` (90 for sm_90).

    Wide tiles need more warps for their registers; where they fill 64 rows, products of sm_90 read shared memory and
    need fewer.
    """
    wide = query_tile * padded(head_dim)
    from_shared = capability >= 90 and query_tile >= 64
    if from_shared and query_tile == 64 and head_dim <= 128 and kv_type is not KVType.FP16:
        return DecodeConfig(128, 4, 2, Sums.PRODUCT, peel=True, registers=None, per_sm=2)
    if wide >= 64 * 128 or query_tile == 128:
        return DecodeConfig(64, 8, 2, Sums.ROW, peel=from_shared, registers=None, per_sm=2)
    if query_tile > 16 or head_dim > 128 or kv_type is KVType.FP16:
        return DecodeConfig(64, 4, 3, Sums.ROW, peel=False, registers=None, per_sm=2)
    return DecodeConfig(128, 4, 2, Sums.TOKEN, peel=False, registers=None, per_sm=3)


def padded(n: int) -> int:
    """The power of two that holds n."""
    return 1 << (n - 1).bit_length()


def query_tile(max_queries: int, head_dim: int, capability: int) -> int:
    """Rows of a tile of queries: 16, 32, 64 or 128, as few as hold them, and no more than registers do.

    Heads of 64 keep to 32 rows on sm_90: from 64 rows on products there are whole warp groups', and with the 32 columns
    of half a head's 4-bit values Triton 3.6 compiles them wrongly (shared memory out of range, on the card only).
    """
    if capability >= 90 and padded(head_dim) <= 64:
        return min(32, max(16, padded(max_queries)))
    most = (128 if capability >= 90 else 64) * 128 // padded(head_dim)
    if capability >= 90 and padded(head_dim) == 128 and max_queries > 16:
        # Measured on an H200: 20 queries in a tile of 32 took a third longer than 40 in one of 64.
        max_queries = max(max_queries, 64)
    return min(128, most, max(16, padded(max_queries)))


def document_constants(
    layout: KVLayout, group_heads: int, tile: int, config: DecodeConfig, *, biased: bool, slots: bool, fast: bool
) -> dict[str, int | bool]:
    """What `document_kernel` is compiled for."""
    return {
        "LAYERS": layout.n_layers if slots else 1,
        "KV_HEADS": layout.n_kv_heads,
        "GROUP_HEADS": group_heads,
        "D": layout.head_dim,
        "D_PAD": padded(layout.head_dim),
        "K_BITS": layout.kv_type.key_bits,
        "V_BITS": layout.kv_type.value_bits,
        "BLOCK_M": tile,
        "BLOCK_N": config.block_n,
        "STAGES": config.stages,
        "HAS_BIAS": biased,
        "HAS_SLOTS": slots,
        "SUM": int(config.sums),
        "PEEL": config.peel,
        "FAST": fast,
    }


def attend(
    step: Step,
    q: Tensor,
    pool: Tensor,
    tail_k: Tensor,
    tail_v: Tensor,
    scale: float,
    layout: KVLayout,
    bias: Tensor | None = None,
    slots: LayerSlots | None = None,
    *,
    config: DecodeConfig | None = None,
) -> Tensor:
    """`KVBackend.attend` in FP16. `config` replaces the default of `document_kernel`.

    Makes no synchronization and can be captured in a CUDA graph. Raises ValueError for shapes that the kernels do
    not know.
    """
    rows, heads, dim = q.shape
    group_heads = _checked_group_heads(q, pool, tail_k, layout)
    if step.slot_first is not None and (slots is None or bias is not None):
        raise ValueError("slots of a step must be given, and have no bias")
    capability = _capability(q.device)
    tile = query_tile(step.max_group_rows * group_heads, dim, capability)
    chosen = config or decode_config(layout.kv_type, tile, dim, capability)
    row_tiles = -(-step.max_group_rows * group_heads // tile)
    splits = _document_splits(step, layout.n_kv_heads * row_tiles, chosen, q.device)
    tail_splits = _tail_splits(step, layout.n_kv_heads, q.device)
    parts = torch.empty((splits + tail_splits, rows, heads, dim), dtype=torch.float32, device=q.device)
    lse = torch.empty((splits + tail_splits, rows, heads), dtype=torch.float32, device=q.device)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if not rows:
        return out
    q = q.contiguous()
    if splits:
        _attend_documents(step, q, pool, bias, slots, parts, lse, scale, layout, splits, row_tiles, tile, chosen)
    if tail_splits:
        _attend_tails(step, q, tail_k, tail_v, parts, lse, scale, layout, splits, tail_splits)
    merge_kernel[(heads, rows)](
        parts,
        lse,
        step.group_rows,
        out,
        rows,
        step.n_groups,
        splits + tail_splits,
        HEADS=heads,
        D=dim,
        D_PAD=padded(dim),
        EVEN_ODD=layout.kv_type.value_bits == 4,
        ROTATED=layout.kv_type is not KVType.FP16,
        BLOCK_S=16 if splits + tail_splits <= 16 else 64,
        num_warps=4 if dim <= 128 and splits + tail_splits <= 16 else 8,
    )
    return out


def _attend_documents(
    step: Step,
    q: Tensor,
    pool: Tensor,
    bias: Tensor | None,
    slots: LayerSlots | None,
    parts: Tensor,
    lse: Tensor,
    scale: float,
    layout: KVLayout,
    splits: int,
    row_tiles: int,
    tile: int,
    config: DecodeConfig,
) -> None:
    rows, heads, _ = q.shape
    # Without slots nothing is read through these.
    first = step.group_rows if step.slot_first is None else step.slot_first
    has_slots = step.slot_first is not None
    records, table, layer = slots if has_slots and slots is not None else (pool[None], first, 0)
    constants = document_constants(
        layout, heads // layout.n_kv_heads, tile, config, biased=bias is not None, slots=has_slots, fast=q.is_cuda
    )
    document_kernel[(splits, layout.n_kv_heads, step.n_groups * row_tiles)](
        q,
        pool,
        q if bias is None else bias,
        step.group_rows,
        step.group_tokens,
        step.block_tables,
        parts,
        lse,
        first,
        table,
        records,
        rows,
        row_tiles,
        scale * LOG2_E,
        pool.stride(0),
        step.block_tables.stride(0),
        layer,
        records.shape[1],
        **constants,
        num_warps=config.warps,
        maxnreg=config.registers,
    )


def _attend_tails(
    step: Step,
    q: Tensor,
    tail_k: Tensor,
    tail_v: Tensor,
    parts: Tensor,
    lse: Tensor,
    scale: float,
    layout: KVLayout,
    first_split: int,
    splits: int,
) -> None:
    rows, heads, dim = q.shape
    group_heads = heads // layout.n_kv_heads
    tile = max(16, 64 if rows > 16 else 0, padded(group_heads))
    tail_kernel[(splits, layout.n_kv_heads, rows)](
        q,
        tail_k,
        tail_v,
        step.slots,
        step.tail_end,
        step.group_rows,
        parts,
        lse,
        rows,
        step.n_groups,
        first_split,
        scale * LOG2_E,
        tail_k.stride(0),
        tail_k.stride(1),
        KV_HEADS=layout.n_kv_heads,
        GROUP_HEADS=group_heads,
        D=dim,
        D_PAD=padded(dim),
        EVEN_ODD=layout.kv_type.value_bits == 4,
        BLOCK_M=tile,
        BLOCK_N=32 if dim > 128 else 64,
        STAGES=2,
        num_warps=8 if tile * dim > 64 * 64 else 4,
    )


def _document_splits(step: Step, programs: int, config: DecodeConfig, device: torch.device) -> int:
    """Shares of a document: enough for every multiprocessor when one group has the card, from bounds known here.

    Groups are not counted: in a captured graph most of them may be empty.
    """
    most = -(-step.max_tokens // BLOCK_TOKENS)
    return min(most, max(1, _multiprocessors(device) * config.per_sm // programs))


def _tail_splits(step: Step, kv_heads: int, device: torch.device) -> int:
    """Shares of a tail: a few where rows alone do not fill the card."""
    few_rows = max(1, 2 * _multiprocessors(device) // (kv_heads * max(1, step.n_rows)))
    return min(8, few_rows, -(-step.max_tail // _TAIL_TOKENS))


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@cache
def _capability(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)
    return major * 10 + minor


def _checked_group_heads(q: Tensor, pool: Tensor, tail_k: Tensor, layout: KVLayout) -> int:
    group_heads, rest = divmod(q.shape[1], layout.n_kv_heads)
    if rest or not 0 < group_heads <= MAX_GROUP_HEADS or not 32 <= layout.head_dim <= 256:
        raise ValueError(f"{q.shape[1]} query heads, {layout.n_kv_heads} KV heads of {layout.head_dim}: not supported")
    if pool.shape[1] != layout.record_nbytes(BLOCK_TOKENS) or layout.block_tokens != BLOCK_TOKENS:
        raise ValueError(f"blocks of {pool.shape[1]} bytes do not hold {BLOCK_TOKENS} tokens of {layout}")
    if q.dtype != torch.float16 or tail_k.dtype != torch.float16 or tail_k.stride()[2:] != (q.shape[2], 1):
        raise ValueError("queries and tails must be FP16, a tail's tokens side by side")
    return group_heads
