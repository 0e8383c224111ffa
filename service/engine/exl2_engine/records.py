"""Records on disk and blocks in the pool: the same parts, but a block always has the strides of 256 tokens.

A record of fewer tokens (a document's last one) is tightly packed, so it is taken apart on the way in and put
together again on the way out. Full records are blocks as they are.
"""

import torch
from torch import Tensor

from cache_store.layout import KVLayout
from service.engine.exl2_engine.restore import spread


def part_ranges(layout: KVLayout, n_tokens: int) -> list[tuple[int, int]]:
    """Byte range of each part of a record of `n_tokens` tokens: codes and scales of keys, then of values."""
    ranges, at = [], 0
    for nbytes in layout.part_nbytes(n_tokens):
        ranges.append((at, at + nbytes))
        at += nbytes
    return ranges


def pack_partial(block: Tensor, n_tokens: int, layout: KVLayout) -> Tensor:
    """The record (uint8, one dim) of the first `n_tokens` tokens of a block. `restore.spread` is the way back."""
    record = torch.empty(layout.record_nbytes(n_tokens), dtype=torch.uint8, device=block.device)
    heads, whole = layout.n_kv_heads, layout.block_tokens
    for (a, b), (c, d) in zip(part_ranges(layout, whole), part_ranges(layout, n_tokens), strict=True):
        if a < b:
            record[c:d].view(heads, n_tokens, -1).copy_(block[a:b].view(heads, whole, -1)[:, :n_tokens])
    return record


def any_bad(blocks: Tensor, layout: KVLayout) -> Tensor:
    """Whether blocks ``[n, bytes]`` hold what must not be stored, as a bool tensor of no dims on their device: a
    scale that is NaN or infinite, or such a value where there are no scales. All 256 tokens of them are looked at."""
    kv = layout.kv_type
    ranges = part_ranges(layout, layout.block_tokens)
    checked = [ranges[0] if kv.key_bits == 16 else ranges[1], ranges[2] if kv.value_bits == 16 else ranges[3]]
    bad = torch.zeros((), dtype=torch.bool, device=blocks.device)
    for first, last in checked:
        values = blocks[:, first:last].contiguous().view(torch.float16)
        bad = bad | ~torch.isfinite(values).all()
    return bad


def unpack(records: Tensor, n_tokens: int, layout: KVLayout, blocks: Tensor) -> None:
    """Lay consecutive records of a layer (uint8, one dim, any device) out as blocks ``[>= n, bytes]``.

    The last record may be partial. Raises ValueError when the bytes are not those of `n_tokens` tokens.
    """
    full, rest = divmod(n_tokens, layout.block_tokens)
    nbytes = layout.record_nbytes(layout.block_tokens)
    if records.numel() != full * nbytes + layout.record_nbytes(rest):
        raise ValueError(f"{records.numel()} bytes are not the records of {n_tokens} tokens")
    blocks[:full].copy_(records[: full * nbytes].view(full, nbytes))
    if rest:
        spread(records[full * nbytes :].to(blocks.device), rest, layout, blocks[full])
