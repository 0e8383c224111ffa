"""Which tokens a question brings back: spans found by index heads, by bounds of keys, or by words."""

import math
import re
from collections import Counter
from contextlib import suppress

import torch
from torch import Tensor

from benchmarks.fidelity_parts.documents import Asked, Document
from benchmarks.fidelity_parts.reader import KV, Ask, Enough, Kept, Reader

SPAN_TOKENS = 32
INDEX_HEADS = ((18, 2), (17, 1))
QUEST_LAYERS = range(8, 24)


def question_queries(
    reader: Reader, kv: KV, kept: Kept, questions: list[Asked], layers: tuple[int, ...]
) -> dict[int, Tensor]:
    """Scaled queries of the questions' own rows over what is kept: layer -> ``[b, kv_heads, group, m, d]``, NaN in the
    rows of shorter questions."""
    m = max(q.n_question for q in questions)
    ids = [q.ids[: q.n_question] + [0] * (m - q.n_question) for q in questions]
    plan = Ask(kv, kept, hear=layers, stop=True)
    with suppress(Enough):
        reader.hidden(reader.tensor(ids), kv.n_tokens, plan)
    lengths = torch.tensor([q.n_question for q in questions], device=kv.k.device)
    surplus = torch.arange(m, device=kv.k.device)[None] >= lengths[:, None]
    return {layer: heard.masked_fill(surplus[:, None, None, :, None], torch.nan) for layer, heard in plan.heard.items()}


def index_scores(kv: KV, queries: dict[int, Tensor]) -> Tensor:
    """How much each question looks at each span with the index heads: ``[b, spans]``. The exact attention probability
    over all tokens, the largest of the rows, the mean of query heads and index heads."""
    found = []
    for layer, head in INDEX_HEADS:
        scores = torch.einsum("bgmd,nd->bgmn", queries[layer][:, head], kv.k[layer, head])
        mass = _by_span(scores.softmax(-1), 0.0).sum(-1)
        found.append(mass.nan_to_num(0).amax(2).mean(1))
    return torch.stack(found).mean(0)


def quest_scores(kv: KV, queries: dict[int, Tensor]) -> Tensor:
    """Quest's bounds (Tang et al., 2024): the largest score that a key within the channel-wise bounds of a span could
    have, as a softmax over spans, the largest over rows and heads, the mean of the layers. ``[b, spans]``."""
    found = []
    for layer, q in queries.items():
        keys = kv.k[layer].transpose(1, 2)
        low = _by_span(keys, torch.inf).amin(-1).transpose(1, 2)
        high = _by_span(keys, -torch.inf).amax(-1).transpose(1, 2)
        bound = torch.einsum("bhgmd,hsd->bhgms", q.clamp_min(0), high) + torch.einsum(
            "bhgmd,hsd->bhgms", q.clamp_max(0), low
        )
        found.append(bound.softmax(-1).nan_to_num(0).amax((1, 2, 3)))
    return torch.stack(found).mean(0)


def _by_span(x: Tensor, fill: float) -> Tensor:
    """``[..., n] -> [..., spans, SPAN_TOKENS]``."""
    surplus = -x.shape[-1] % SPAN_TOKENS
    return torch.nn.functional.pad(x, (0, surplus), value=fill).unflatten(-1, (-1, SPAN_TOKENS))


def chosen(scores: Tensor, always: Tensor, n_tokens: int, neighbours: int = 1) -> Tensor:
    """The best spans, each followed by its neighbours, of at most `n_tokens` tokens that are not resident: bool
    ``[b, n]``."""
    n = len(always)
    out = torch.zeros(len(scores), n, dtype=torch.bool)
    resident = always.cpu()
    for row, order in enumerate(scores.argsort(dim=-1, descending=True).tolist()):
        left = n_tokens
        for span in (s for best in order for s in (best, *_around(best, neighbours, scores.shape[1]))):
            new = torch.zeros(n, dtype=torch.bool)
            new[span * SPAN_TOKENS : (span + 1) * SPAN_TOKENS] = True
            new &= ~resident & ~out[row]
            size = int(new.sum())
            if 0 < size <= left:
                out[row] |= new
                left -= size
            if left < SPAN_TOKENS:
                break
    return out.to(always.device)


def _around(span: int, neighbours: int, n_spans: int) -> list[int]:
    near = [span + sign * away for away in range(1, neighbours + 1) for sign in (-1, 1)]
    return [s for s in near if 0 <= s < n_spans]


def bm25_ids(reader: Reader, document: Document, question: Asked, n_tokens: int) -> list[int]:
    """A document of `n_tokens` tokens made of the paragraphs that fit a question's words best (Robertson, 1994), in
    their order: the same number of rows as the others keep, but read afresh for every question."""
    overhead = reader.prompt.document_overhead
    paragraphs = document.text.split("\n\n")
    words = [_words(p) for p in paragraphs]
    asked = _words(reader.tokenizer.decode(question.ids[: question.n_question]))
    seen = Counter(word for paragraph in words for word in set(paragraph))
    mean = sum(map(len, words)) / len(words)
    scores = [_bm25(Counter(w), len(w) / mean, asked, seen, len(words)) for w in words]
    room, taken = n_tokens - overhead, set()
    for i in sorted(range(len(words)), key=lambda i: -scores[i]):
        size = len(reader.tokenizer.encode_plain(paragraphs[i])) + 1
        if size <= room:
            taken.add(i)
            room -= size
    return reader.prompt.document("\n\n".join(paragraphs[i] for i in sorted(taken))).ids


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def _bm25(counts: Counter[str], length: float, asked: list[str], seen: Counter[str], n: int) -> float:
    score = 0.0
    for word in set(asked):
        rarity = math.log(1 + (n - seen[word] + 0.5) / (seen[word] + 0.5))
        score += rarity * counts[word] * 2.2 / (counts[word] + 1.2 * (0.25 + 0.75 * length))
    return score
