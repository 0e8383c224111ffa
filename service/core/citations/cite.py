"""Citations of an answer, sentence by sentence: by its words, and by what the model looked at where that is known."""

from service.core.citations.align import MIN_SCORE, Finding, find, hint_of
from service.core.citations.attention import AnswerAttention, SentenceAttention
from service.core.citations.index import PageIndex
from service.core.citations.model import Citation, Cited, Range
from service.core.citations.text import sentences


def cite(
    answer: str,
    index: PageIndex,
    *,
    document_id: str,
    question: str = "",
    attention: AnswerAttention | None = None,
) -> Cited:
    """Citations of an answer, in its order, each passage once for a sentence.

    A sentence is cited where a passage agrees with its words, or where a page had enough of its attention; attention
    also decides between passages that agree about as well. None for sentences that say the document has no answer. What
    neither finds is `unsupported`, unless it says too little to be found.
    """
    cited, of_question = Cited(), hint_of(question, index)
    for start, end in sentences(answer):
        looked = attention.of(start, end) if attention is not None else None
        hint = of_question if looked is None else of_question + looked.hint(index)
        found = find(answer[start:end], index, hint)
        if found.refuses or not index.n_sentences:
            continue
        citations = _citations(found, index, looked, (start, end), document_id)
        cited.citations.extend(citations)
        if not citations and found.says_enough:
            cited.unsupported.append(Range(start, end))
    return cited


def _citations(
    found: Finding, index: PageIndex, looked: SentenceAttention | None, where: tuple[int, int], document_id: str
) -> list[Citation]:
    citations: list[Citation] = []
    for match in found.matches:
        quote = index.quote(match.first, match.last)
        by_words = found.says_enough and found.score >= MIN_SCORE
        if not by_words and (looked is None or not looked.supports(quote.page)):
            continue
        share = None if looked is None else round(looked.share(quote.page), 3)
        places = (*where, quote.start, quote.end)
        score = found.score if by_words else match.score
        citations.append(Citation(document_id, quote.page, quote.text, round(score, 3), *places, share))
    return citations
