"""What the answers' citations come to, by words, by attention and by both: the page docs/citations.md."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from benchmarks.bench_report import table
from benchmarks.citation_cases import SOURCES, Case
from service.core.citations import PageIndex, PageText, cite
from service.core.citations.attention import MIN_MASS, AnswerAttention
from service.core.citations.looks import attention_of
from service.core.citations.text import sentences
from service.engine.messages import PieceLooks

AT_LEAST = 0.9
AT_MOST = 0.05


class Asked(msgspec.Struct):
    """An answer, and what was looked at. `cited`: pages, as the service gave them."""

    question: str
    answer: str
    right: bool
    looks: list[PieceLooks]
    cited: list[int]


class Document(msgspec.Struct):
    """`pages`: number, text, and tokens [first, last) of each."""

    id: str
    name: str
    package: str
    pages: list[tuple[int, str, int, int]]
    asked: list[Asked]


class Cost(msgspec.Struct):
    """`processor`: how much more processor time an answer takes, the median of `n`; `finding`: what is found when an
    answer is over, as a share of its decoding, `worst` the largest."""

    processor: float
    finding: float
    worst: float
    n: int


class Run(msgspec.Struct):
    machine: str
    model: str
    kv_type: str
    documents: list[Document]
    cost: Cost


Cite = Callable[[Asked], list[int]]


class Methods:
    """Pages that an answer's citations name, in their order."""

    def __init__(self, document: Document) -> None:
        self._index = PageIndex([PageText(i, text) for i, (_, text, _, _) in enumerate(document.pages)])
        self._tokens = [(0, first, last) for *_, first, last in document.pages]
        self._numbers = [number for number, *_ in document.pages]

    def by_words(self, asked: Asked) -> list[int]:
        return self._cited(asked, None)

    def by_both(self, asked: Asked) -> list[int]:
        return self._cited(asked, attention_of(asked.looks, self._tokens))

    def by_attention(self, asked: Asked) -> list[int]:
        """The page of each sentence that had most of its attention, when that is enough."""
        attention, pages = attention_of(asked.looks, self._tokens), []
        for start, end in sentences(asked.answer):
            looked = attention.of(start, end)
            best = max(range(len(self._numbers)), key=looked.share, default=None)
            if best is not None and looked.supports(best):
                pages.append(self._numbers[best])
        return pages

    def _cited(self, asked: Asked, attention: AnswerAttention | None) -> list[int]:
        found = cite(asked.answer, self._index, document_id="", question=asked.question, attention=attention)
        return [self._numbers[citation.page] for citation in found.citations]


@dataclass(slots=True)
class Tally:
    """Of right answers with a fact: how many, how many whose first citation has it, how many with one that has it; and
    of all of their citations how many have it. `refusals` that are cited all the same, of `n_refusals`."""

    n: int = 0
    first: int = 0
    found: int = 0
    pages: int = 0
    good: int = 0
    n_refusals: int = 0
    refusals: int = 0

    def add(self, case: Case, pages: Sequence[tuple[int, bool]]) -> None:
        """`pages` that were cited, and whether they have the fact."""
        if not case.has_answer:
            self.n_refusals += 1
            self.refusals += bool(pages)
            return
        self.n += 1
        self.first += bool(pages) and pages[0][1]
        self.found += any(has for _, has in pages)
        self.pages += len(pages)
        self.good += sum(has for _, has in pages)

    @property
    def row(self) -> list[str]:
        def share(part: int, of: int) -> str:
            return f"{part / of:.1%}" if of else "-"

        counts = share(self.first, self.n), share(self.found, self.n), share(self.good, self.pages)
        return [f"{self.n}", *counts, f"{self.refusals} of {self.n_refusals}"]


METHODS = ("words alone", "attention alone", "both")


def tallies(document: Document, cases: Sequence[Case]) -> dict[str, Tally]:
    """Over the right answers about one document."""
    methods = Methods(document)
    ways = dict(zip(METHODS, (methods.by_words, methods.by_attention, methods.by_both), strict=True))
    texts = {number: text for number, text, *_ in document.pages}
    found = {name: Tally() for name in METHODS}
    for case, asked in zip(cases, document.asked, strict=True):
        if asked.right:
            for name, way in ways.items():
                pages = dict.fromkeys(way(asked))
                found[name].add(case, [(page, case.holds(page, texts[page])) for page in pages])
    return found


def cases_of(run: Run) -> list[Sequence[Case]]:
    """Of each document of a run."""
    of_names = {source.name: source.cases for source in SOURCES}
    return [of_names[document.name] for document in run.documents]


def enough(run: Run) -> bool:
    """Whether of the right answers about each document enough cite a page with the fact first, at little cost."""
    found = [tallies(*each)["both"] for each in zip(run.documents, cases_of(run), strict=True)]
    return all(t.first >= AT_LEAST * t.n for t in found) and max(run.cost.processor, run.cost.finding) < AT_MOST


def supports(run: Run) -> tuple[list[float], list[float]]:
    """The attention that the page with the fact had, of right answers; and the most that any page had, of refusals."""
    of_facts: list[float] = []
    of_refusals: list[float] = []
    for document, cases in zip(run.documents, cases_of(run), strict=True):
        tokens = [(0, first, last) for *_, first, last in document.pages]
        for case, asked in zip(cases, document.asked, strict=True):
            looked = attention_of(asked.looks, tokens).of(0, max(len(asked.answer), 1))
            masses = [looked.mass(i) for i in range(len(tokens))]
            if asked.right and case.has_answer:
                good = [m for m, (n, text, *_) in zip(masses, document.pages, strict=True) if case.holds(n, text)]
                of_facts.append(max(good, default=0.0))
            elif asked.right:
                of_refusals.append(max(masses))
    return sorted(of_facts), sorted(of_refusals)


def page_of(run: Run) -> str:
    """The page of the documentation."""
    rows: list[list[object]] = []
    sums = {name: Tally() for name in METHODS}
    for document, cases in zip(run.documents, cases_of(run), strict=True):
        of_methods = tallies(document, cases)
        label = (
            f"{document.name}, {len(document.pages)} pages, {document.pages[-1][-1]:,} tokens, {len(cases)} questions"
        )
        for name, tally in of_methods.items():
            rows.append([label, name, *tally.row])
            for field in Tally.__slots__:
                setattr(sums[name], field, getattr(sums[name], field) + getattr(tally, field))
    rows += [list[object](["all", name, *tally.row]) for name, tally in sums.items()]
    header = ("document", "cited by", "right answers", "first citation", "recall", "precision", "refusals cited")
    facts, refusals = supports(run)
    wrong = [asked for document in run.documents for asked in document.asked if not asked.right]
    return INTRO.format(
        model=run.model,
        kv_type=run.kv_type,
        machine=run.machine,
        table=table(header, rows),
        mass=MIN_MASS,
        least=facts[len(facts) // 20] if facts else 0.0,
        median=facts[len(facts) // 2] if facts else 0.0,
        refusals=f"; no page had more than {refusals[-1]:.2f} in a refusal" if refusals else "",
        processor=run.cost.processor,
        finding=run.cost.finding,
        worst=run.cost.worst,
        n=run.cost.n,
        n_wrong=len(wrong),
        n_all=sum(len(document.asked) for document in run.documents),
        n_wrong_cited=sum(bool(asked.cited) for asked in wrong),
    )


INTRO = """# Citations

Written by `benchmarks/citations.py`; do not edit.

Every sentence of an answer is looked for in the documents, in two ways:

- **by its words**: the share of its words, numbers and pairs of neighbouring words (each weighted by how rare it is
  in the document) that one passage of a page holds. That is `score`, 1.0 for a verbatim quote. From 0.5 on the
  passage is cited.
- **by attention**: what the model looked at while it wrote the sentence, in its index heads, the few that look for
  the place which answers a question ([how they are found](how-it-works.md#long-documents)). Decoding keeps their
  queries; when the answer is over, their attention is computed once for all of its tokens, over everything that the
  answer could see: rows in memory, [summary slots](glossary.md), and what was fetched. `attention` is the page's
  share of what fell on pages. A page on which at least {mass:.0%} of everything fell supports the sentence, whatever
  its words.

Both together: attention decides between passages that agree about as well, and finds the page when the words differ;
the quote is then the sentence of that page which agrees best, near the place that was looked at, and `score` stays
what its words deserve. A citation with a low `score` and a high `attention` is a paraphrase, or a claim that its page
does not make: read the quote. `unsupported` are sentences that claim something and were found in neither way.
Sentences that say that the document has no answer are never cited. With `PREREAD_CITATION_ATTENTION=false`, in
engines without index heads and in answers of earlier versions `attention` is null, and words alone decide.

## How often the page is right

Model: {model}, KV type {kv_type}. Right answers to questions whose fact stands in the document. *First citation*: the
first page that is cited has the fact. *Recall*: one of the cited pages has it. *Precision*: so many of all cited
pages have it. *Refusals cited*: right answers that the document does not say it, which were given a page all the
same. The questions about the manuals were written before any answer was seen; the manuals are installed by `apt-get
install libtasn1-doc zlib1g-dev bzip2-doc`, and are longer than the model's context but for the contract.

{table}

Of the {n_all} answers {n_wrong} are wrong. {n_wrong_cited} of these are cited: a citation says where an answer comes
from, and not that it is right.

The page with the fact had {median:.2f} of everything that was looked at in the median, {least:.2f} or more in 19 of
20 right answers{refusals}. Heads of another model may give less to the page that they look for; where
that is under {mass:.0%}, attention still decides between passages, and words whether there is a citation.

## What it costs

{n} answers with and without it, in turns, in one run: {processor:+.1%} processor time in the median, for the whole
answer with its question. What is computed when an answer is over takes {finding:.2%} of the time of its decoding in
the median, {worst:.2%} at most. Measured on {machine}.
"""
