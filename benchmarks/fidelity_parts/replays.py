"""Replays: what is fed behind a document to see which of its tokens are looked at, and what was looked at.

A replay reads the document once more in chunks, each behind a request. Nothing of it is kept but scores and, for the
fitted remainder, queries.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from benchmarks.fidelity_parts.documents import Document
from benchmarks.fidelity_parts.reader import KV, Reader, Replay

CHUNK_TOKENS = 1000
N_SINKS = 16
REQUEST = "Repeat the text exactly."


@dataclass(frozen=True, slots=True)
class Looked:
    """`scores`: float32 ``[layers, kv_heads, n]``, the largest attention probability each token got. `queries`: per
    layer ``[kv_heads, group, rows, head_dim]``, scaled, of all replayed tokens; `chunks`: the chunk each row is of."""

    scores: Tensor
    queries: list[Tensor]
    chunks: Tensor


@dataclass(frozen=True, slots=True)
class Wording:
    """How a chunk is asked for. ``chat``: as a user's request, answered with the chunk. ``plain``: the bare request
    and the chunk. ``questions``: a conversation that asks for every sentence by its first words."""

    style: str = "chat"
    chunk_tokens: int = CHUNK_TOKENS
    norm_aware: bool = False
    request: str = REQUEST


def replay(reader: Reader, document: Document, kv: KV, wording: Wording, *, keep_queries: bool = True) -> Looked:
    """Replay a whole document in chunks. Queries take much memory: without `keep_queries` there are none."""
    n = kv.n_tokens
    scores = torch.zeros(*kv.k.shape[:3], device=kv.k.device)
    queries: list[list[Tensor]] = []
    chunks: list[Tensor] = []
    for i, first in enumerate(range(0, n, wording.chunk_tokens)):
        last = min(first + wording.chunk_tokens, n)
        ids = replay_ids(reader, document, first, last, wording)
        start = max(first, N_SINKS)
        seen = torch.cat((torch.arange(N_SINKS), torch.arange(start, last))).to(kv.k.device)
        plan = Replay(kv, seen, N_SINKS, reader.output_weights if wording.norm_aware else None)
        reader.hidden(reader.tensor([ids]), n, plan)
        scores[:, :, start:last] = torch.stack(plan.scores)
        if keep_queries:
            queries.append(plan.queries)
        chunks.append(torch.full((len(ids),), i, device=kv.k.device))
    stacked = [torch.cat(of_layer, 2) for of_layer in zip(*queries, strict=True)]
    return Looked(scores, stacked, torch.cat(chunks))


def replay_ids(reader: Reader, document: Document, first: int, last: int, wording: Wording) -> list[int]:
    """Tokens fed behind the document for its tokens [first, last)."""
    chunk = document.ids[first:last]
    if wording.style == "plain":
        return reader.tokenizer.encode_plain(f"\n\n{wording.request}\n\n") + chunk
    if wording.style == "questions":
        return _conversation(reader, document, first, last)
    return reader.prompt.question(wording.request) + chunk


def _conversation(reader: Reader, document: Document, first: int, last: int) -> list[int]:
    ids: list[int] = []
    for begin, end in _sentences(reader, document, first, last):
        sentence = document.ids[begin:end]
        start = reader.tokenizer.decode(sentence[: max(3, len(sentence) // 3)]).strip()
        ids += reader.prompt.question(f"What does the document say about {start}?", follow_up=bool(ids)) + sentence
    return ids


def _sentences(reader: Reader, document: Document, first: int, last: int) -> list[tuple[int, int]]:
    """Ranges of tokens that together are [first, last), cut behind full stops and line ends, 8 to 64 tokens each."""
    cuts = [first]
    for i in range(first, last):
        piece = reader.tokenizer.decode([document.ids[i]], keep_control=True)
        n = i + 1 - cuts[-1]
        if n >= 64 or (n >= 8 and ("\n" in piece or piece.rstrip().endswith((".", "|", "?")))):
            cuts.append(i + 1)
    if cuts[-1] < last:
        cuts.append(last)
    return list(pairwise(cuts))
