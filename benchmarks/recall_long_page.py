"""The page that `recall_long.py` writes."""

from collections import defaultdict


def page(figures: dict) -> str:
    """`figures` as `recall_long.py --out` writes them."""
    kept = figures["retention"]
    results = figures["results"]
    return _PAGE.format(
        machine=figures["machine"],
        model=figures["model"],
        engine=figures["engine"],
        kv_type=figures["kv_type"],
        n_facts=figures["n_facts"],
        questions=figures.get("per_fact", 2) * figures["n_facts"],
        **kept,
        memory="\n".join(map(_memory, results)),
        right="\n".join(map(_right, results)),
        columns=" | ".join(_wordings(results[0])),
        dashes="| ".join("---: " for _ in _wordings(results[0])),
        wordings="\n".join(line for result in results for line in _by_wording(result)),
    )


def _share(part: int, whole: int) -> str:
    return f"{part} of {whole} ({100 * part / whole:.1f} %)"


def _memory(result: dict) -> str:
    share = 100 * result["resident_tokens"] / result["tokens"]
    return (
        f"| {result['tokens']:,} | {result['resident_tokens']:,} ({share:.2f} %) | "
        f"{result['resident_nbytes'] / 1e6:.1f} MB | {result['index_nbytes'] / 1e6:.1f} MB | "
        f"{result['cold_nbytes'] / 1e6:,.0f} MB | {result['build_s']:.1f} s |"
    )


def _right(result: dict) -> str:
    answers, whole = result["answers"], result.get("whole", [])
    n, right = len(answers), sum(a["right"] for a in answers)
    beside = sum(a["right"] for a in whole)
    ratio = f"{100 * right / beside:.0f} %" if beside else "not asked"
    return (
        f"| {result['tokens']:,} | {_share(sum(a['found'] for a in answers), n)} | {_share(right, n)} | "
        f"{_share(beside, len(whole)) if whole else 'not asked'} | {ratio} | "
        f"{_median([a['ttft_ms'] for a in answers]):.0f} ms, {_median([a['fetch_ms'] for a in answers]):.0f} ms |"
    )


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def _wordings(result: dict) -> list[str]:
    return list(dict.fromkeys(a["wording"] for a in result["answers"]))


def _by_wording(result: dict) -> list[str]:
    """A line for the document, one for its excerpts."""
    lines = []
    for what, key in (("document", "answers"), ("excerpts kept whole", "whole")):
        rights: dict[str, list[bool]] = defaultdict(list)
        for answer in result.get(key, []):
            rights[answer["wording"]].append(answer["right"])
        if rights:
            cells = " | ".join(f"{sum(rights[w])} of {len(rights[w])}" for w in _wordings(result))
            lines.append(f"| {result['tokens']:,}, {what} | {cells} |")
    return lines


_PAGE = """# Documents longer than the model's context

Written by `benchmarks/recall_long.py`; do not edit.

{machine}. Model {model} with a context of 8,192 tokens, engine {engine}, KV {kv_type}.

Text that comes with every Python (the language reference, docstrings of the standard library), none of it twice, with
{n_facts} planted sentences at equal distances in four wordings, so that each tenth of a document has every wording.
{questions} questions a document, answered freely at temperature 0; one is right when the value asked for is in the
answer. The documents are kept in segments of {segment_tokens:,} tokens: {sink_tokens} sinks, {summary_tokens} summary
tokens and the last {window_tokens} tokens are resident, and a question fetches at most {fetch_tokens} more.

## Memory

| tokens of the document | resident | resident KV | index | cold KV on disk | time to build |
| ---: | ---: | ---: | ---: | ---: | ---: |
{memory}

## Answers

*Excerpts*: the same questions over parts of the same text that the model's context holds whole, about 6,000 tokens
each. What this small model does not answer there, it would not with a full cache of any length.

| tokens | the whole sentence fetched | right | right in excerpts kept whole | ratio | first token, fetching |
| ---: | ---: | ---: | ---: | ---: | ---: |
{right}

Only spans with at least half of the best span's figure are fetched, and those that add something to them ([by
share](recall.md#by-share-of-the-best)). When the budget of 256 tokens was always filled, 75, 77 and 66 of 80 were
right, with the sentence fetched every time: in each of the 14 wrong answers at 400,000 tokens but two the model took a
name, a code or all of another sentence of the same kind. With 128 tokens, filled, 74 were right there, with 384 tokens
59. With a share of 0.4, 0.5, 0.6 and 0.7 alone there were 75, 77, 79 and 80 (78 each at 24,000 tokens; with 0.7 a
sentence was missed). The share was taken from the table of recall, where 0.6 begins to lose sentences, not from this.

The torch engine on a CPU (FP32), whose sinks need not be whole pages of 256 tokens, keeps 272 tokens of the document of
23,966, 1.13 %: the sentence was fetched for 80 of 80 questions, and 76 answers were right (95 %).

The demo model's adapter was trained on documents read in this way
([how](../examples/demo_model/README.md#how-it-was-trained)), with other texts, things and wordings; the adapter before
it had only seen whole documents and was right for 40, 44 and 39 of 80 (excerpts: 53 and 62), with the budget filled and
the sentence fetched 79, 80 and 77 times.

Tried with that earlier adapter, over three documents of 6,144 tokens (FP32 on an H200, 36 questions in the three
wordings that are not the sentence's own; whole: 23 right): read in one segment and fetched from 22, a document that
fits the context loses nothing; read in segments of 2,048 tokens 15, of 4,096 tokens 19. A gap before the question, of
256 positions: 16 and 20; of 1,024 positions: 18 and 16. 64 sinks in place of 16: 17. Segments rotated to their true
places: 15. 256 summary tokens and the gap: 19. 128, 512 or 1,024 tokens fetched in place of 256: no better. The
sentence is found less often in long documents with longer segments (6,144 tokens: 65 of 80 at 400,000), so they stay
at 2,048.

## By wording

| right | {columns} |
| --- | {dashes}|
{wordings}
"""
