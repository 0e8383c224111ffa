"""How often what a question needs is among the tokens that are fetched for it.

    python benchmarks/recall.py [--write] [--documents 12] [--segments 1024 2048 3072] [--device cpu]

Reads documents of public text with planted facts in segments, asks for the facts over the first 16 and the last 256
tokens alone, and looks whether the whole sentence with the answer is in the chosen spans. With `--write` the tables go
to docs/recall.md. The model is computed in FP32, on a CPU about half a minute per document and length of segments when
the machine has nothing else to do; what was computed is kept in `--cache`.
"""

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from recall_cases import FACTS_EACH, N_TOKENS, SINKS, WINDOW, Case, Question, Reader, prompts
from recall_page import Table, page
from recall_texts import WORDINGS
from torch import Tensor

from cache_store.segments import Segments
from service.cli.config import read_settings
from service.engine.fetch.choose import LEAST_GAIN, LEAST_SHARE, choose_spans
from service.engine.fetch.index import CANDIDATES, POWER, SPAN_TOKENS, KeyIndex, Look, figures_of_head
from service.engine.index_heads import load_index_heads
from service.engine.models.card import load_card

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "recall.md"
BUDGETS = (64, 96, 128, 192, 256, 384, 512)
SHARES = (0.0, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7)
SEGMENT = 2048
COMPARED = 3
"""Other ways to choose are compared over every third question."""

Combine = Callable[[Tensor], Tensor]
"""From masses ``[n_heads, heads per KV head, rows, n_spans]`` to a figure per span."""


@dataclass(frozen=True)
class Way:
    """How spans are scored and chosen. `neighbours` None: the sentences that a span lies in come with it.
    `least_share` and `least_gain`: of the best span's figure, 0 of it where ways are compared over all that fit."""

    budget: int = 256
    least_share: float = 0.0
    least_gain: float = 1.0
    span_tokens: int = SPAN_TOKENS
    neighbours: int | None = None
    n_heads: int = 99
    own_rows: bool = True
    combine: Combine = lambda masses: figures_of_head(masses).mean(0)


@dataclass(frozen=True)
class Shelf:
    """One or several documents as one: their segments one after the other. `firsts` are the tokens where they begin,
    `starts` those where sentences do."""

    index: KeyIndex
    segments: Segments
    firsts: list[int]
    starts: list[int]

    @classmethod
    def of(cls, reader: Reader, cases: Sequence[Case], segment_tokens: int) -> "Shelf":
        firsts = [N_TOKENS * number for number in range(len(cases))]
        index = KeyIndex(reader.layout, N_TOKENS * len(cases), reader.heads)
        for first, case in zip(firsts, cases, strict=True):
            for layer, records in case.records.items():
                index.add(layer, first, memoryview(records), N_TOKENS)
        starts = [first + start for first, case in zip(firsts, cases, strict=True) for start in case.starts]
        return cls(index, Segments(segment_tokens, SINKS), firsts, starts)

    @property
    def resident(self) -> list[tuple[int, int]]:
        """The ends of every document: what its questions have seen shall not be found."""
        ends = [((first, first + SINKS), (first + N_TOKENS - WINDOW, first + N_TOKENS)) for first in self.firsts]
        return [part for both in ends for part in both]


class Scored:
    """Questions on a shelf; masses are computed once per question and size of span."""

    def __init__(self, on: Shelf, asked: Iterable[tuple[int, Question]]) -> None:
        self.on = on
        self.asked = list(asked)
        self._masses: dict[tuple[int, int], Tensor] = {}

    def every(self, n: int) -> "Scored":
        return Scored(self.on, self.asked[::n])

    def found(self, way: Way) -> list[bool]:
        """For each question: whether the whole sentence is fetched."""
        return [self._found(number, way) for number in range(len(self.asked))]

    def share(self, way: Way, wording: str = "") -> float:
        found = self.found(way)
        kept = [ok for ok, (_, question) in zip(found, self.asked, strict=True) if question.wording.startswith(wording)]
        return sum(kept) / len(kept)

    def n_fetched(self, way: Way) -> float:
        """Tokens that are fetched for a question, on average."""
        return sum(len(self._fetched(number, way)) for number in range(len(self.asked))) / len(self.asked)

    def _found(self, number: int, way: Way) -> bool:
        document, question = self.asked[number]
        first, last = (self.on.firsts[document] + token for token in question.fact)
        return self._fetched(number, way).issuperset(range(first, last))

    def _fetched(self, number: int, way: Way) -> set[int]:
        question = self.asked[number][1]
        masses = self._of(number, way.span_tokens)[: way.n_heads]
        if way.own_rows:
            masses = masses[:, :, slice(*question.rows)]
        spans = choose_spans(
            _look(masses, way),
            self.on.segments,
            self.on.index.n_tokens,
            resident=self.on.resident,
            fetch_tokens=way.budget,
            starts=self.on.starts if way.neighbours is None else (),
            span_tokens=way.span_tokens,
            neighbours=way.neighbours or 0,
            least_share=way.least_share,
            least_gain=way.least_gain,
        )
        return {token for span in spans for token in range(span.first, span.first + span.n_tokens)}

    def _of(self, number: int, span_tokens: int) -> Tensor:
        key = number, span_tokens
        if key not in self._masses:
            queries = self.asked[number][1].queries
            self._masses[key] = self.on.index.masses(queries, span_tokens, self.on.resident)
        return self._masses[key]


def _look(masses: Tensor, way: Way) -> Look:
    """As the product looks, from masses that are known already."""
    figures = way.combine(masses)
    if not way.least_share:
        return Look.of(figures)
    places = figures.topk(min(CANDIDATES, len(figures))).indices
    rows = masses[..., places].flatten(0, 2)
    return Look(figures, places, rows.pow(POWER) / len(rows))


Parts = tuple[list[Scored], list[Scored]]
"""Each document alone, and all of them as one."""
COLUMNS = ("alone", "as one")
BOUNDED = ("alone, all that fit", "alone, as built", "as one, all that fit", "as one, as built")
SHARE_COLUMNS = (*COLUMNS, "of the 256 tokens used, alone", "as one")
AS_BUILT = Way(least_share=LEAST_SHARE, least_gain=LEAST_GAIN)
BOUNDS = {f"{share}": Way(least_share=share) for share in SHARES} | {"as built": AS_BUILT}
PAIRS = ("alone, 128 tokens", "alone, 256", "as one, 128", "as one, 256")
SPANS = {
    "16 tokens, sentences": Way(),
    "16 tokens, none around": Way(neighbours=0),
    "16 tokens, 1 on either side": Way(neighbours=1),
    "16 tokens, 2 on either side": Way(neighbours=2),
    "32 tokens, sentences": Way(span_tokens=32),
    "32 tokens, 1 on either side": Way(span_tokens=32, neighbours=1),
    "64 tokens, sentences": Way(span_tokens=64),
    "64 tokens, none around": Way(span_tokens=64, neighbours=0),
}
SCORES = {
    "mean of p to the 0.7": Way(),
    "the same, of all rows of the prompt, with the template's": Way(own_rows=False),
    "the same, the first index head alone": Way(n_heads=1),
    "mean of p": Way(combine=lambda masses: masses.mean((0, 1, 2))),
    "mean of the square root of p": Way(combine=lambda masses: masses.sqrt().mean((0, 1, 2))),
    "largest p of the rows": Way(combine=lambda masses: masses.amax(2).mean((0, 1))),
    "mean of the three largest p of the rows": Way(
        combine=lambda masses: masses.topk(min(3, masses.shape[2]), dim=2).values.mean((0, 1, 2))
    ),
    "larger of the heads": Way(combine=lambda masses: figures_of_head(masses).amax(0)),
    "product of the heads": Way(combine=lambda masses: figures_of_head(masses).clamp_min(1e-7).log().mean(0).exp()),
}


def parts_of(reader: Reader, cases: Sequence[Case], segment_tokens: int) -> Parts:
    asked = [(number, question) for number, case in enumerate(cases) for question in case.questions]
    alone = [
        Scored(Shelf.of(reader, [case], segment_tokens), [(0, question) for question in case.questions])
        for case in cases
    ]
    return alone, [Scored(Shelf.of(reader, cases, segment_tokens), asked)]


def shares(parts: Parts, ways: Iterable[Way], wording: str = "") -> list[float]:
    """Alone and as one, for each way."""
    return [sum(scored.share(way, wording) for scored in shelves) / len(shelves) for shelves in parts for way in ways]


def _by_share(parts: Parts, way: Way) -> list[float]:
    used = [sum(scored.n_fetched(way) for scored in shelves) / len(shelves) / way.budget for shelves in parts]
    return [*shares(parts, [way]), *used]


def tables_of(parts: Parts) -> dict[str, Table]:
    def pairs(ways: dict[str, Way]) -> Table:
        rows = [(name, shares(some, [replace(way, budget=b) for b in (128, 256)])) for name, way in ways.items()]
        return Table("", PAIRS, rows)

    some = [part.every(COMPARED) for part in parts[0]], [part.every(COMPARED) for part in parts[1]]

    by_budget = [
        (f"{budget}", shares(parts, [replace(way, budget=budget) for way in (Way(), AS_BUILT)])) for budget in BUDGETS
    ]
    by_wording = [(f"{w.name}: {w.what}", shares(parts, [AS_BUILT], w.name)) for w in WORDINGS]
    return {
        "by_budget": Table("tokens at most", BOUNDED, by_budget),
        "by_share": Table("share", SHARE_COLUMNS, [(name, _by_share(parts, way)) for name, way in BOUNDS.items()]),
        "by_wording": Table("wording", COLUMNS, by_wording),
        "by_span": pairs(SPANS),
        "by_score": pairs(SCORES),
    }


def main() -> None:
    arguments = _arguments()
    torch.set_num_threads(arguments.threads)
    heads = load_index_heads(arguments.model)
    reader = Reader(arguments.model, heads, arguments.cache, arguments.device)
    texts = prompts(reader.template, arguments.documents)

    def read(segment_tokens: int) -> Parts:
        return parts_of(reader, [reader.case(n, t, segment_tokens) for n, t in enumerate(texts)], segment_tokens)

    parts = read(SEGMENT)
    tables = tables_of(parts)
    lengths, both = sorted({SEGMENT, *arguments.segments}), [replace(AS_BUILT, budget=n) for n in (128, 256)]
    rows = [(f"{n:,}", shares(parts if n == SEGMENT else read(n), both)) for n in lengths]
    tables["by_segment"] = Table("tokens of a segment", PAIRS, rows)
    facts = {
        "model": load_card(arguments.model).source,
        "heads": ", ".join(f"{layer}/{head}" for layer, head in heads),
        "documents": len(texts), "tokens": N_TOKENS, "segment": SEGMENT, "sinks": SINKS, "window": WINDOW,
        "questions": sum(len(scored.asked) for scored in parts[0]), "wordings": len(WORDINGS),
        "together": N_TOKENS * len(texts), "planted": FACTS_EACH * len(texts), "budget": Way().budget,
        "least_share": LEAST_SHARE, "least_gain": LEAST_GAIN,
    }  # fmt: skip
    if arguments.write:
        PAGE.write_text(page(facts, tables), "utf-8")
    print(json.dumps(facts | {name: table.rows for name, table in tables.items()}))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=read_settings().model_dir)
    parser.add_argument("--documents", type=int, default=12)
    parser.add_argument("--segments", type=int, nargs="*", default=[1024, 2048, 3072], help="lengths to compare")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--cache", type=Path, default=ROOT / ".cache" / "recall")
    parser.add_argument("--write", action="store_true", help="write docs/recall.md")
    return parser.parse_args()


if __name__ == "__main__":
    main()
