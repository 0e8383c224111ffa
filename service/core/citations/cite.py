"""Citations of an answer, sentence by sentence."""

from service.core.citations.align import hint_of, passages
from service.core.citations.index import PageIndex
from service.core.citations.model import Citation, Cited, Range
from service.core.citations.text import sentences


def cite(answer: str, index: PageIndex, *, document_id: str, question: str = "") -> Cited:
    """Citations of an answer, in its order, each passage once for a sentence.

    None for sentences that say the document has no answer, or that carry too little to point anywhere; those that no
    passage supports well enough are `unsupported`.
    """
    cited, hint = Cited(), hint_of(question, index)
    for start, end in sentences(answer):
        found = passages(answer[start:end], index, hint)
        if found is None:
            continue
        matches, score = found
        if not matches:
            cited.unsupported.append(Range(start, end))
        for match in matches:
            quote = index.quote(match.first, match.last)
            where = (start, end, quote.start, quote.end)
            cited.citations.append(Citation(document_id, quote.page, quote.text, round(score, 3), *where))
    return cited
