"""Finds a model's index heads by planting facts in the bundled text and asking for them.

Two documents are read, each with facts of its own. On the first heads are chosen, on the second they are judged.
"""

from collections.abc import Sequence

import torch

from service.engine.index_heads import HEADS_VERSION, IndexHead, IndexHeads
from service.engine.index_heads_probe import Case, Planted, ask_all
from service.engine.models.source import Progress, silent
from service.engine.prompt import PromptTemplate
from service.engine.protocol import Runner

MOST_HEADS = 4
LEAST_GAIN = 0.02
"""Of the mean lead: below it, another head is not worth its memory."""
SECOND_KEEPS = 0.8
"""Of the first head's mean lead, what must be left with a second: two are surer where there is much that is alike. In
twelve documents read as one the demo model's first head alone has 86 % of the sentences among what is fetched, with a
second 96 %, though over a short text its lead is larger alone."""
_MOST_LEAD = 3.0
STAGE = "finding index heads"


def find_index_heads(
    runner: Runner, template: PromptTemplate, weights: str, *, progress: Progress = silent
) -> IndexHeads:
    """The index heads of a runner's model, the best one first. `weights`: the digest that is recorded with them.

    `progress` is told (stage, questions asked, questions in all). Raises EngineRefused when the model's context is too
    short to plant anything in.
    """
    heads = [(layer, head) for layer in range(runner.layout.n_layers) for head in range(runner.layout.n_kv_heads)]
    documents = [Planted.make(runner, template, part) for part in range(2)]
    total = sum(document.n_questions for document in documents)
    cases: list[list[Case]] = []
    for document in documents:
        done = sum(map(len, cases))
        cases.append([])
        for case in ask_all(runner, template, document, heads):
            cases[-1].append(case)
            progress(STAGE, done + len(cases[-1]), total)
    return _record(heads, cases[0], cases[1], weights)


def _record(
    heads: Sequence[tuple[int, int]], choosing: Sequence[Case], judging: Sequence[Case], weights: str
) -> IndexHeads:
    chosen = choose_heads(choosing)
    _, together, in_first_two = figures_of(judging, chosen)
    return IndexHeads(
        format_version=HEADS_VERSION,
        weights=weights,
        heads=[IndexHead(*heads[place], round(figures_of(judging, [place])[1], 4)) for place in chosen],
        mean_reciprocal_rank=round(together, 4),
        in_first_two=round(in_first_two, 4),
        n_questions=len(judging),
    )


def choose_heads(cases: Sequence[Case]) -> list[int]:
    """The heads, by their place among all, that find the facts best together: the best one, then whichever helps it
    most, and so on. A second is taken also where it takes away a little.

    They are compared by their mean lead and not by ranks: in a text of few spans many heads rank the right one first,
    and those with the larger lead go on doing so in a long document.
    """
    chosen: list[int] = []
    best = float("-inf")
    while len(chosen) < MOST_HEADS:
        others = [place for place in range(len(cases[0].figures)) if place not in chosen]
        if not others:
            break
        quality, place = max((figures_of(cases, [*chosen, place])[0], -place) for place in others)
        if quality < (SECOND_KEEPS * best if len(chosen) == 1 else best + LEAST_GAIN):
            break
        best = quality
        chosen.append(-place)
    return chosen


def figures_of(cases: Sequence[Case], places: Sequence[int]) -> tuple[float, float, float]:
    """Of some heads together, over questions: the mean lead of the best of the right spans, its mean reciprocal rank,
    and how often it is the first or second.

    The lead over the best other span is the logarithm of the probabilities' ratio, at most 3 either way: a head that is
    sure shall not make up for one that is lost.
    """
    leads: list[torch.Tensor] = []
    ranks: list[torch.Tensor] = []
    for case in cases:
        figures = case.figures[list(places)].double().mean(0)
        right = figures[case.right].max()
        others = torch.cat((figures[: case.right.start], figures[case.right.stop :]))
        lead = (right.clamp_min(1e-12) / others.max().clamp_min(1e-12)).log()
        leads.append(lead.clamp(-_MOST_LEAD, _MOST_LEAD))
        ranks.append((others > right).sum() + 1)
    rank = torch.stack(ranks).double()
    return float(torch.stack(leads).mean()), float((1 / rank).mean()), float((rank <= 2).double().mean())
