"""What one step consists of: a row of every decoding sequence, and rows of prompts up to a budget; without prompts also
drafts of what comes next, where they pay."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from service.engine.drafts.planner import DraftPlanner
from service.engine.protocol import Rows
from service.engine.scheduler.sequence import Sequence

CANARY_ROWS = 64
"""A first chunk longer than this is fed after its re-fed row: the logits of all its rows would cost more than
a step of one row."""


@dataclass(frozen=True, slots=True)
class Part:
    """What a sequence adds to a step. `canary`: its first row is the document's last token. `drafts`: the last rows are
    guesses, to be taken back where another token is sampled."""

    sequence: Sequence
    rows: Rows
    canary: bool
    drafts: Seq[int] = ()


def compose(sequences: Seq[Sequence], budget: int, planner: DraftPlanner | None = None) -> list[Part]:
    """The next step: decoding sequences take part, prompts in order of arrival while the budget lasts."""
    if planner is not None and sequences and not any(sequence.n_left for sequence in sequences):
        return _drafting(sequences, planner)
    parts = []
    for sequence in sequences:
        if sequence.n_left == 0:
            parts.append(Part(sequence, _decoding(sequence, sequence.sampled[-1:]), False))
        elif budget > 0:
            part = _prompt_part(sequence, budget)
            budget -= len(part.rows.tokens)
            parts.append(part)
    return parts


def _drafting(sequences: Seq[Sequence], planner: DraftPlanner) -> list[Part]:
    """A step without prompts. No drafts are computed that an answer has no room for."""
    room = [sequence.max_new - len(sequence.sampled) - 1 for sequence in sequences]
    parts = []
    for sequence, drafts in zip(sequences, planner.plan([s.drafter for s in sequences], room), strict=True):
        parts.append(Part(sequence, _decoding(sequence, [sequence.sampled[-1], *drafts]), False, drafts))
    return parts


def _decoding(sequence: Sequence, tokens: Seq[int]) -> Rows:
    sampler = sequence.sampler
    return Rows(sequence.slot, sequence.document, tokens, only_best=sampler is not None and sampler.only_best)


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
