"""From tokens that an engine says were looked at to pages of an index."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence

from service.core.citations.attention import AnswerAttention, AnswerPiece, PageLook
from service.engine.messages import Look, PieceLooks

PageRanges = Sequence[tuple[int, int, int]]
"""Of each page of an index, in its order, the number of its document and the tokens [first, last) there. Those of a
document follow each other."""


def attention_of(pieces: Sequence[PieceLooks], pages: PageRanges) -> AnswerAttention:
    """Pages are numbered as in `pages`. What fell on tokens of no page, such as the prompt's, does not count."""
    begins = [(document, first) for document, first, _ in pages]
    return AnswerAttention([_piece(piece, pages, begins) for piece in pieces])


def _piece(piece: PieceLooks, pages: PageRanges, begins: Sequence[tuple[int, int]]) -> AnswerPiece:
    looks = [found for look in piece.looks for found in _on_pages(look, pages, begins)]
    told = sum(look.mass for look in piece.looks)
    on_pages = sum(look.mass for look in looks)
    return AnswerPiece(piece.end, max(piece.mass - (told - on_pages), on_pages), looks)


def _on_pages(look: Look, pages: PageRanges, begins: Sequence[tuple[int, int]]) -> Iterator[PageLook]:
    """The parts of a look on each page it touches."""
    until = look.first + look.n_tokens
    for number in range(max(bisect_right(begins, (look.document, look.first)) - 1, 0), len(pages)):
        document, start, end = pages[number]
        first, last = max(look.first, start), min(until, end)
        if document == look.document and first < last:
            n, length = last - first, end - start
            yield PageLook(number, (first - start) / length, (last - start) / length, look.mass * n / look.n_tokens)
        elif (document, start) >= (look.document, until):
            return
