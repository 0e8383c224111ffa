"""How often both places that a question needs are among the tokens that are fetched for it, in one round and in two.

    python benchmarks/recall_places.py [--write] [--documents 6] [--together]

Plants the sentences of `recall_chains.py` in the texts of `recall.py`, asks over the first 16 and the last 256 tokens,
and looks whether both whole sentences are among 256 fetched tokens. Two rounds are those of
`service.engine.host.fetching`. The questions of `recall.py`, which need one place, are asked as well: their documents
are read once, half a minute each on an idle CPU, and kept in `--cache`, like all that is computed.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from recall_cases import KV_TYPE, N_TOKENS, SINKS, WINDOW, Reader, prompts
from recall_chains import Asked, two_place_parts
from recall_page import Table
from recall_texts import planted, texts

from cache_store.segments import Segments
from service.cli.config import read_settings
from service.engine.fetch.choose import LEAST_SHARE, Choices, best_passage, choose_among
from service.engine.fetch.index import KeyIndex, Look, looks_among
from service.engine.fetch.recurring import SECOND_WEIGHT, join, recurring
from service.engine.index_heads import load_index_heads
from service.engine.models.card import load_card
from service.engine.protocol import Rows

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "two-places.md"
SEGMENTS = Segments(2048, SINKS)
N_CHAINS = 10
WEIGHTS = (0.3, 0.5, 0.7, 1.0)
KINDS = {"chained": "the first names what the second is about", "both": "two things are asked", "one": "one place"}
Range = tuple[int, int]
Queries = Callable[[list[int]], torch.Tensor]


@dataclass(frozen=True)
class Document:
    """`queries` of any tokens that follow its ends. `questions`: text, kind, and the ranges that must be fetched."""

    ids: list[int]
    records: dict[int, bytes]
    questions: list[tuple[str, str, list[Range]]]
    queries: Queries


@dataclass(frozen=True)
class Shelf:
    """Documents as one, one behind the other."""

    index: KeyIndex
    ids: np.ndarray
    starts: list[int]

    @classmethod
    def of(cls, reader: Reader, documents: Sequence[Document]) -> "Shelf":
        ids = [token for document in documents for token in document.ids]
        index = KeyIndex(reader.layout, len(ids), reader.heads)
        for number, document in enumerate(documents):
            for layer, records in document.records.items():
                index.add(layer, number * N_TOKENS, memoryview(records), N_TOKENS)
        starts = [
            number * N_TOKENS + start
            for number, document in enumerate(documents)
            for start in reader.find_starts(np.array(document.ids)).tolist()
        ]
        return cls(index, np.array(ids), starts)

    @property
    def resident(self) -> list[Range]:
        firsts = range(0, len(self.ids), N_TOKENS)
        ends = [((first, first + SINKS), (first + N_TOKENS - WINDOW, first + N_TOKENS)) for first in firsts]
        return [part for both in ends for part in both]

    def look(self, queries: torch.Tensor, taken: Sequence[Range] = ()) -> Look:
        return looks_among([self.index], queries, [[*self.resident, *taken]])[0]

    def fetched(self, look: Look, tokens: int, least_share: float = LEAST_SHARE) -> set[int]:
        spans = choose_among([self._choices(look)], fetch_tokens=tokens, least_share=least_share)
        return {token for span in spans for token in range(span.first, span.first + span.n_tokens)}

    def second(self, look: Look, question: list[int], queries: Queries) -> Look | None:
        """A look at what the best passage names; None when it names nothing that stands elsewhere."""
        _, first, last = best_passage([self._choices(look)])
        named = [place - first for place in recurring([self.ids], 0, first, last, question)]
        if not named:
            return None
        rows = queries(self.ids[first:last].tolist())[:, :, named]
        return self.look(rows, [(first, last)])

    def _choices(self, look: Look) -> Choices:
        return Choices(look, SEGMENTS, len(self.ids), self.resident, self.starts)


class Found:
    """Shares of questions by kind and way."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], list[bool]] = defaultdict(list)

    def ask(self, reader: Reader, shelf: Shelf, document: Document, first_token: int) -> None:
        for text, kind, needs in document.questions:
            wanted = {token + first_token for first, last in needs for token in range(first, last)}
            question = reader.template.question(text)
            look = shelf.look(document.queries(question))
            second = shelf.second(look, question, document.queries)
            self._found[kind, "second"].append(second is not None)
            for tokens in (128, 256, 512):
                self._found[kind, f"one {tokens}"].append(wanted <= shelf.fetched(look, tokens))
                self._found[kind, f"full {tokens}"].append(wanted <= shelf.fetched(look, tokens, least_share=0.0))
            for weight in WEIGHTS:
                joined = look if second is None else join([look], [second], weight)[0]
                self._found[kind, f"two {weight}"].append(wanted <= shelf.fetched(joined, 256))

    def n(self, kind: str) -> int:
        return len(self._found[kind, "second"])

    def share(self, kind: str, way: str) -> float:
        return sum(self._found[kind, way]) / max(self.n(kind), 1)


class Kept:
    """Queries of one document, computed once."""

    def __init__(self, reader: Reader, path: Path, resident: Callable[[], Any]) -> None:
        self._reader, self._path, self._resident = reader, path, resident
        self._known: dict[str, torch.Tensor] = torch.load(path, weights_only=True) if path.exists() else {}
        self._document: Any = None

    def __call__(self, ids: list[int]) -> torch.Tensor:
        key = " ".join(map(str, ids))
        if key not in self._known:
            runner = self._reader.runner
            self._document = self._document or self._resident()
            slot = runner.new_tail()
            rows = Rows(slot, self._document, ids)
            self._known[key] = runner.question_queries(rows, self._reader.heads).to(torch.float16)
            runner.free_tail(slot)
            torch.save(self._known, self._path)
        return self._known[key].to(torch.float32)


def documents_of(reader: Reader, n: int) -> list[Document]:
    parts = zip(range(n), texts()[::2], two_place_parts(n, N_CHAINS), strict=False)
    return [_document(reader, number, text, *part) for number, text, part in parts]


def _document(reader: Reader, number: int, text: str, sentences: list[Any], asked: list[Asked]) -> Document:
    starts = reader.template.document(text).starts
    room = N_TOKENS - WINDOW - 30 * len(sentences)
    whole, places = planted(text, sentences, starts[2 * SINKS], starts[room])
    tokens = reader.template.document(whole)
    ranges = []
    for begin, end in places:
        of = [n for n, start in enumerate(tokens.starts, tokens.first_text) if begin <= start < end]
        ranges.append((of[0], of[-1] + 1))
    ids, blocks = tokens.ids[:N_TOKENS], reader.blocks(f"places-{number}", tokens.ids[:N_TOKENS], SEGMENTS)
    records = {layer: b"".join(block[layer] for block in blocks) for layer in sorted({at for at, _ in reader.heads})}
    # of the chained questions those of every second chain: as many as there are of the other kind
    chosen = [one for i, one in enumerate(asked) if one.kind == "both" or not i // 2 % 2]
    questions = [(one.text, one.kind, [ranges[place] for place in one.needs]) for one in chosen]
    kept = Kept(reader, reader.folder / f"places-{number}-queries.pt", lambda: reader.resident(blocks, SEGMENTS))
    return Document(ids, records, questions, kept)


def ordinary_of(reader: Reader, n: int, beside: Document) -> list[Document]:
    """Documents and questions of `recall.py`. What is computed again stands behind the ends of `beside`, so that they
    need not be read once more."""
    made = []
    for number, prompt in enumerate(prompts(reader.template, n)):
        case = reader.case(number, prompt, SEGMENTS.segment_tokens)
        known = {tuple(reader.template.question(q.text)): q.queries for q in case.questions}

        def queries(ids: list[int], known: dict[tuple[int, ...], torch.Tensor] = known) -> torch.Tensor:
            return known[tuple(ids)] if tuple(ids) in known else beside.queries(ids)

        questions = [(question.text, "one", [question.fact]) for question in case.questions]
        made.append(Document(prompt.ids, case.records, questions, queries))
    return made


def tables_of(alone: Found, together: Found | None) -> Table:
    ways = {f"one round, {n} tokens, all that fit": f"full {n}" for n in (128, 256, 512)}
    ways |= {f"one round, {n}": f"one {n}" for n in (128, 256, 512)}
    ways |= {f"two rounds, 256, weight {weight}": f"two {weight}" for weight in WEIGHTS}
    ways["a second round was taken"] = "second"
    shelves = {"alone": alone} | ({"as one": together} if together else {})
    columns = [f"{kind}, {name}" for kind in KINDS for name in shelves]
    rows = [
        (name, [found.share(kind, way) for kind in KINDS for found in shelves.values()]) for name, way in ways.items()
    ]
    return Table("", columns, rows)


def main() -> None:
    arguments = _arguments()
    torch.set_num_threads(arguments.threads)
    reader = Reader(arguments.model, load_index_heads(arguments.model), arguments.cache, arguments.device)
    with torch.inference_mode():
        documents = documents_of(reader, arguments.documents)
        groups = [documents, ordinary_of(reader, arguments.ordinary, documents[0])]
        alone, together = Found(), Found() if arguments.together else None
        for group in groups:
            for document in group:
                alone.ask(reader, Shelf.of(reader, [document]), document, 0)
            if together:
                shelf = Shelf.of(reader, group)
                for number, document in enumerate(group):
                    together.ask(reader, shelf, document, number * N_TOKENS)
    table = tables_of(alone, together)
    facts = {"model": load_card(arguments.model).source, "kv_type": KV_TYPE.value, "documents": len(documents)}
    facts |= {"tokens": N_TOKENS, "n": {kind: alone.n(kind) for kind in KINDS}}
    print(json.dumps(facts | {"rows": table.rows}))
    if arguments.write:
        names = {f"n_{kind}": alone.n(kind) for kind in KINDS}
        PAGE.write_text(
            _PAGE.format(**facts, **names, table=table.text, ordinary=arguments.ordinary, second_weight=SECOND_WEIGHT),
            "utf-8",
        )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=read_settings().model_dir)
    parser.add_argument("--documents", type=int, default=6)
    parser.add_argument("--ordinary", type=int, default=12, help="documents of recall.py")
    parser.add_argument("--together", action="store_true", help="ask over all documents as one as well")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--cache", type=Path, default=ROOT / ".cache" / "recall")
    parser.add_argument("--write", action="store_true", help="write docs/two-places.md")
    return parser.parse_args()


_PAGE = """# Two places

Written by `benchmarks/recall_places.py`; do not edit. Some questions need two places of a document. This page says how
often both sentences, all of them, are among what is fetched, as [Recall](recall.md) does for one.

Model: {model}, index in {kv_type}. {documents} documents of {tokens:,} tokens, 20 planted sentences in each.

- *chained* ({n_chained} questions in ten wordings): the first sentence names what the second is about. "The keeper of
  the mill archive is Agnes Novak." and far away "Agnes Novak can be reached at extension 4417.", and the question:
  "Which extension reaches the keeper of the mill archive?"
- *both* ({n_both} questions): "Who is the keeper of the mill archive, and who unlocks the ferry cellar every morning?"
- *one* ({n_one} questions): the ordinary questions of {ordinary} documents of [Recall](recall.md); the passage of a
  second round was computed behind the ends of another document.

{table}

One round finds two things that the question names. It does not find what only the first sentence names: there is no
word of the question in the second but the kind of thing, and more tokens help little. In a second round the best
passage is computed like a question, behind the same rows, when it has a pair of tokens that the question has not and
that stands at 1 to 7 other places. Only the rows of these pairs count; the best they find gets the weight above
of the best that the question finds, and since other rows look at them, they add as much to what the question finds: so
they come ([by share](recall.md#by-share-of-the-best)). All share the same {budget} tokens. The product's weight is
{second_weight}.

`PREREAD_FETCH_ROUNDS` is 1 unless it is set: a second round takes a pass over 20 to 110 tokens more, as deep as the
question's: by the count of tokens finding takes about twice as long as in one round, or longer; it was not timed.
Whether something stands elsewhere does not tell the ordinary questions from the others: a second round was taken for
them too.

## What was tried and left out

On the first 20 chained questions of two documents, where one round of 256 tokens found 35 %: the fetched passage in
front of the question, and the question's rows alone: 35 %; the passage's rows too, at half weight: 35 %, at the same
weight: 55 %; the fetched rows in the tail and the question computed again: 35 %; all rows of the passage behind the
question, as if they were the beginning of an answer: 45 %. A question's rows look for the question, whatever stands
before them, and so do most rows of a passage: what helps is to count the few that name something else.

Fetching again in mid-answer was tried by a stand-in only: the sentences of the best passage behind the question, as if
the answer began with them, and all of their rows looking. On 40 chained questions of four documents the
second place was found at 82.5 %, against 90 % for the rows of pairs that stand elsewhere, which need no answer to
have begun. It would take a look into the index every few tokens, and it would change what the answer sees while it is
written. So it is not built. No answer was decoded for this.
""".replace("{budget}", "256")


if __name__ == "__main__":
    main()
