"""Records on disk and blocks in the pool: the same parts, but a block always has the strides of 256 tokens.

A record of fewer tokens (a document's last one) is tightly packed, so it is taken apart on the way in and put
together again on the way out. Full records are blocks as they are.
"""

import torch
from torch import Tensor

from cache_store.layout import KVLayout


def part_ranges(layout: KVLayout, n_tokens: int) -> list[tuple[int, int]]:
    """Byte range of each part of a record of `n_tokens` tokens: codes and scales of keys, then of values."""
    ranges, at = [], 0
    for nbytes in layout.part_nbytes(n_tokens):
        ranges.append((at, at + nbytes))
        at += nbytes
    return ranges


def unpack_partial(record: Tensor, n_tokens: int, layout: KVLayout) -> Tensor:
    """A whole block (uint8, one dim) from the record of fewer tokens; the tokens after them are zero."""
    block = torch.zeros(layout.record_nbytes(layout.block_tokens), dtype=torch.uint8, device=record.device)
    for whole, packed in _parts(block, record, n_tokens, layout):
        whole[:, :n_tokens] = packed
    return block


def pack_partial(block: Tensor, n_tokens: int, layout: KVLayout) -> Tensor:
    """The record (uint8, one dim) of the first `n_tokens` tokens of a block."""
    record = torch.empty(layout.record_nbytes(n_tokens), dtype=torch.uint8, device=block.device)
    for whole, packed in _parts(block, record, n_tokens, layout):
        packed.copy_(whole[:, :n_tokens])
    return record


def _parts(block: Tensor, record: Tensor, n_tokens: int, layout: KVLayout) -> list[tuple[Tensor, Tensor]]:
    """Views ``[n_kv_heads, 256, bytes]`` and ``[n_kv_heads, n_tokens, bytes]`` of each part."""
    heads = layout.n_kv_heads
    pairs = zip(part_ranges(layout, layout.block_tokens), part_ranges(layout, n_tokens), strict=True)
    return [
        (block[a:b].view(heads, layout.block_tokens, -1), record[c:d].view(heads, n_tokens, -1))
        for (a, b), (c, d) in pairs
        if a < b
    ]


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


def write_records(pool: Tensor, layout: KVLayout, blocks: Tensor, records: Tensor, n_tokens: int) -> None:
    """Store consecutive records of a layer (uint8, one dim, any device) as blocks of ``[n_blocks, bytes]``.

    The last record may be partial. Raises ValueError when the bytes or `blocks` are not those of `n_tokens` tokens.
    """
    full, rest = divmod(n_tokens, layout.block_tokens)
    nbytes = layout.record_nbytes(layout.block_tokens)
    expected = full * nbytes + (layout.record_nbytes(rest) if rest else 0)
    if records.numel() != expected or len(blocks) != full + bool(rest):
        raise ValueError(
            f"{n_tokens} tokens are {expected} bytes in {full + bool(rest)} blocks, not {records.numel()} bytes in "
            f"{len(blocks)} blocks"
        )
    if full:
        pool.index_copy_(0, blocks[:full].long(), records[: full * nbytes].view(full, nbytes).to(pool.device))
    if rest:
        block = unpack_partial(records[full * nbytes :], rest, layout)
        pool.index_copy_(0, blocks[full:].long(), block[None].to(pool.device))


def as_tensor(records: bytes | bytearray | memoryview) -> Tensor:
    """Bytes as a uint8 tensor of one dim on the CPU, without a copy where they can be written to."""
    view = memoryview(records)
    return torch.frombuffer(bytearray(view) if view.readonly else view, dtype=torch.uint8)
