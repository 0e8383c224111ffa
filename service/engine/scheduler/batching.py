"""What one step consists of: a row of every decoding sequence, and rows of prompts up to a budget."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from service.engine.protocol import Rows
from service.engine.scheduler.sequence import Sequence

CANARY_ROWS = 64
"""A first chunk longer than this is fed after its re-fed row: the logits of all its rows would cost more than
a step of one row."""


@dataclass(frozen=True, slots=True)
class Part:
    """What a sequence adds to a step. `canary`: its first row is the document's last token."""

    sequence: Sequence
    rows: Rows
    canary: bool


def compose(sequences: Seq[Sequence], budget: int) -> list[Part]:
    """The next step: decoding sequences take part, prompts in order of arrival while the budget lasts."""
    parts = []
    for sequence in sequences:
        if sequence.n_left == 0:
            parts.append(Part(sequence, Rows(sequence.slot, sequence.document, sequence.sampled[-1:]), False))
        elif budget > 0:
            part = _prompt_part(sequence, budget)
            budget -= len(part.rows.tokens)
            parts.append(part)
    return parts


def _prompt_part(sequence: Sequence, budget: int) -> Part:
    refeed = sequence.refeed and sequence.n_fed == 0
    canary = refeed and sequence.on_canary is not None
    n = min(budget, sequence.n_left)
    if canary and n > CANARY_ROWS:
        n = 1
    tokens = sequence.tokens[sequence.n_fed : sequence.n_fed + n]
    samples = n == sequence.n_left and sequence.max_new > 0
    logits_from = 0 if canary else n - 1 if samples else n
    return Part(sequence, Rows(sequence.slot, sequence.document, tokens, refeed, logits_from), canary)
