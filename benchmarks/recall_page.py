"""The page that `recall.py` writes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """`rows`: a label and shares, one per column."""

    label: str
    columns: Sequence[str]
    rows: Sequence[tuple[str, Sequence[float]]]

    @property
    def text(self) -> str:
        head = f"| {self.label} | {' | '.join(self.columns)} |"
        line = f"| --- |{' ---: |' * len(self.columns)}"
        body = [f"| {name} | {' | '.join(f'{100 * share:.1f} %' for share in shares)} |" for name, shares in self.rows]
        return "\n".join([head, line, *body])


def page(facts: Mapping[str, object], tables: Mapping[str, Table]) -> str:
    """The whole page. `facts` are put into the text by their names."""
    text = _PAGE.format(**facts, **{name: table.text for name, table in tables.items()})
    return text if len(tables["by_segment"].rows) > 1 else text.split("\n## By length of segments")[0]


_PAGE = """# Recall of what is fetched

Written by `benchmarks/recall.py`; do not edit. A windowed document answers from what is resident and from what is
fetched for the question. This page says how often the sentence with the answer, all of it, is among what is fetched.

Questions whose answer needs two places of a document: [Two places](two-places.md).

Model: {model}. Its index heads (layer/KV head): {heads}; they were found in
other text, with other facts and other wordings.

{documents} documents of {tokens:,} tokens each, from the text that comes with every Python (chapters of the language
reference, docstrings of packages), cut into segments of {segment:,} tokens; {questions} questions about planted
sentences, in {wordings} wordings. A question is computed over the first {sinks} tokens and the last {window} only, and
none of the answers is there. *Alone*: the document by itself, {tokens:,} tokens. *As one*: all of them as one document
of {together:,} tokens, with {planted} planted sentences that share their words ("the harbour archive", "the harbour
cellar", "the mill archive").

## By tokens fetched

*All that fit*: spans in the order of their figures until the budget is full. *As built*: those that have at least
{least_share} of the best one's figure, or add at least {least_gain} of it to what came before: other words of the
question look at them. Passages that only look alike add little, since the same words look at them, and less.

{by_budget}

## By share of the best

A budget of {budget} tokens, and only spans with at least this share of the best span's figure; as built, also those
that add something, which questions about [two places](two-places.md) need. A question that one place answers then
brings little else: what only looks like the answer misleads a model ([answers](long-documents.md#answers)), takes
memory and has to be read.

{by_share}

## By wording, {budget} tokens at most

{by_wording}

## What comes with a span

The best spans come with what is around them. Sentences: from where a sentence begins to where one ends, at most 48
tokens on either side. This table and the next are over every third question, with all that fit the budget.

{by_span}

## How a question's look becomes one figure per span

The softmax over all keys of an index head gives each row of the question a probability for each span. Rows and heads
are joined by the mean of p to the power of 0.7. What else was tried, over the same spans:

{by_score}

## By length of segments

{by_segment}
"""
