"""Answers with drafts: several rows of a sequence in a step, some of which are taken back, and the same row by row."""

import torch

from service.engine.exl2_engine.pool import BlockPool
from service.engine.exl2_engine.rows import StepShape, pack, plan_rows, unpack
from service.engine.exl2_engine.tails import Tails
from service.engine.protocol import Rows

PROMPTS = (5, 70, 2)
"""Tokens of each sequence's prompt."""
STEPS = [
    [(3, 4), (0, 0), (0, 2)],
    [(1, 0), (3, 0), (0, 0)],
    [(0, 7), (1, 1), (2, 0)],
]
"""Of each step, for each sequence: how many drafts are right and how many behind them are wrong."""


def one_by_one(steps):
    """The same tokens without drafts; None where a sequence has none left."""
    counts = [sum(1 + right for right, _ in of_sequence) for of_sequence in zip(*steps, strict=True)]
    return [[(0, 0) if i < n else None for n in counts] for i in range(max(counts))]


def begin(runner, documents, texts):
    """Slots whose tails hold the prompts."""
    slots = [runner.new_tail() for _ in documents]
    batch = [
        Rows(slot, document, text[:n], logits_from=n - 1)
        for slot, document, text, n in zip(slots, documents, texts, PROMPTS, strict=True)
    ]
    runner.forward(batch)
    return slots


def answer(runner, documents, texts, steps, slots, wrong):
    """What every sequence's rows gave, without those of wrong drafts, which are tokens of `wrong`."""
    found = [[] for _ in slots]
    for step in steps:
        parts = [(i, *drafts) for i, drafts in enumerate(step) if drafts is not None]
        starts = [runner.tail_length(slot) for slot in slots]
        batch = [
            Rows(slots[i], documents[i], [*texts[i][starts[i] : starts[i] + 1 + right], *wrong[:n_wrong]])
            for i, right, n_wrong in parts
        ]
        for (i, right, _), out in zip(parts, runner.forward(batch), strict=True):
            found[i].append(out[: 1 + right])
            runner.truncate_tail(slots[i], starts[i] + 1 + right)
    return [torch.cat(of_sequence) for of_sequence in found]


class OneLayer:
    """One layer of attention with the methods of a runner that `answer` needs: a token's queries, keys and values are
    random, before RoPE, in FP16. `padded`: in steps of the size of a captured graph."""

    def __init__(self, backend, *, group_heads=5, n_document=300, padded=False, vocab=512, device="cpu"):
        self.backend, self.layout = backend, backend.layout
        heads, dim = self.layout.n_kv_heads, self.layout.head_dim
        place = torch.device(device)
        self.pool = BlockPool(self.layout, 4, place)
        self.tails = Tails(self.layout, 4, 128, torch.float16, place)
        generator = torch.Generator().manual_seed(1)
        shapes = [(vocab, heads * group_heads, dim), (vocab, heads, dim), (vocab, heads, dim)]
        self.values = [torch.randn(shape, generator=generator).half().to(place) for shape in shapes]
        self.inv_freq = (1e4 ** -(torch.arange(0, dim, 2) / dim)).to(place)
        self.document = self.pool.take(n_document)
        k, v = (torch.randn((n_document, heads, dim), generator=generator).half().to(place) for _ in range(2))
        backend.encode(k, v, self.pool.layers[0], self.document.blocks)
        self.document.n_tokens = n_document
        self._padded = padded

    def new_tail(self):
        return self.tails.take()

    def tail_length(self, slot):
        return self.tails.length(slot)

    def truncate_tail(self, slot, n_tokens):
        self.tails.truncate(slot, n_tokens)

    def forward(self, batch):
        plan = plan_rows(batch, self.tails)
        shape = StepShape.of(plan)
        if self._padded and plan.n_rows <= 16:
            shape = StepShape(16, 16, 4, 16, 1024, 128)
        packed = unpack(pack(plan, shape, pinned=False).to(self.pool.device), shape)
        out = self._attend(packed)[: plan.n_rows]
        for rows in batch:
            self.tails.extend(rows.slot, len(rows.tokens))
        return plan.by_sequence(out[packed.wanted[: len(plan.wanted)].long()])

    def _attend(self, packed):
        step, tail_k, tail_v = packed.step, self.tails.k[0], self.tails.v[0]
        q, k, v = (values[packed.ids.long()] for values in self.values)
        fused = getattr(self.backend, "fused_append", None)
        if fused is not None:
            q = fused(q, k, v, step, self.inv_freq, 1.0, tail_k, tail_v)
        else:
            q, k = (self.backend.rope_and_rotate(x, step.positions, self.inv_freq, 1.0) for x in (q, k))
            self.backend.append(step, k, self.backend.rotate(v), tail_k, tail_v)
        return self.backend.attend(step, q, self.pool.layers[0], tail_k, tail_v, self.layout.head_dim**-0.5)
