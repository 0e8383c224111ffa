"""Random document chunks behind an encoded past, and their attention in FP64."""

import torch

from cache_store.codec import rotate
from cache_store.layout import BLOCK_TOKENS, KVType
from service.engine.exl2_engine import sdpa
from service.engine.exl2_engine.portable import PortableBackend


def random(*shape, seed=0, dtype=torch.float32, device="cpu"):
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=device).to(dtype)


def empty_pool(layout, n_blocks, device="cpu"):
    """Blocks of a byte that is neither a plausible code nor a plausible scale."""
    shape = (n_blocks, layout.record_nbytes(BLOCK_TOKENS))
    return torch.full(shape, 0xA5, dtype=torch.uint8, device=device)


def chunk(layout, n_past, n, heads, dtype=torch.float32, device="cpu"):
    """A random transformed chunk behind a random encoded past: q, k, v, pool, blocks."""
    kv_heads, d = layout.n_kv_heads, layout.head_dim
    pool = empty_pool(layout, layout.n_blocks(n_past) + 1, device)
    blocks = torch.arange(layout.n_blocks(n_past), 0, -1, dtype=torch.int32, device=device)
    past = random(2, n_past, kv_heads, d, device=device)
    PortableBackend(layout, device).encode(past[0], past[1], pool, blocks)
    new = (random(n, h, d, seed=i, dtype=dtype, device=device) for i, h in enumerate((heads, kv_heads, kv_heads), 1))
    return *new, pool, blocks


def exact_prefill(layout, q, k, v, pool, blocks, n_past, scale, *, causal=True):
    """FP64 attention ``[n, heads, d]`` over the past's decoded values and the chunk, transformed back."""
    shape = (layout.n_kv_heads, n_past, layout.head_dim)
    past_k, past_v = (torch.empty(shape, dtype=q.dtype, device=q.device) for _ in range(2))
    PortableBackend(layout, q.device).decode(pool, blocks, n_past, past_k, past_v)
    keys, values = (torch.cat((p, x.float().transpose(0, 1)), 1) for p, x in ((past_k, k), (past_v, v)))
    group = q.shape[1] // layout.n_kv_heads
    of_heads = (q.transpose(0, 1).split(group), keys, values)
    outs = [
        sdpa.exact(heads, key.expand(group, -1, -1), value.expand(group, -1, -1), scale, causal=causal)[0]
        for heads, key, value in zip(*of_heads, strict=True)
    ]
    out = torch.cat(outs).transpose(0, 1)
    return out if layout.kv_type is KVType.FP16 else rotate(out.float()).double()
