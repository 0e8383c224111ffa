"""What is needed to tell where answers look: queries out of a step, keys out of a document and a tail."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from service.engine.torch_engine.kv import DocumentKV, Tail
from service.engine.watch.masses import HeadKeys


def watched_queries(taken: Mapping[int, Tensor | None], heads: Sequence[tuple[int, int]], kv_heads: int) -> Tensor:
    """``[rows, len(heads), heads per KV head, head_dim]`` from what a `StepPlan` took of the layers of `heads`."""
    found: list[Tensor] = []
    for layer, head in heads:
        of_layer = taken[layer]
        assert of_layer is not None
        found.append(of_layer.unflatten(0, (kv_heads, -1))[head])
    return torch.stack(found).permute(2, 0, 1, 3)


def head_keys(document: DocumentKV, tail: Tail, layer: int, head: int) -> HeadKeys:
    """Keys of one head as they lie in memory."""
    slots = tail.k.new_empty(0, tail.k.shape[-1]) if document.slots is None else document.slots.keys[layer][head]
    is_turned = layer < document.n_turned
    keys = document.turned(layer)[0][head].t() if is_turned else document.stored[0][layer, head]
    return HeadKeys(lambda some: keys[some].float(), document.n_tokens, slots, tail.k[layer, head, : tail.length])
