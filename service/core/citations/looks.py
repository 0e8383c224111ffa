"""From tokens that an engine says were looked at to pages of an index."""

from collections.abc import Iterator, Sequence

from service.core.citations.attention import AnswerAttention, AnswerPiece, PageLook
from service.engine.messages import Look, PieceLooks

PageRanges = Sequence[tuple[int, int, int]]
"""Of each page of an index, in its order, the number of its document and the tokens [first, last) there."""


def attention_of(pieces: Sequence[PieceLooks], pages: PageRanges) -> AnswerAttention:
    """Pages are numbered as in `pages`. What fell on tokens of no page, such as the prompt's, does not count."""
    return AnswerAttention([_piece(piece, pages) for piece in pieces])


def _piece(piece: PieceLooks, pages: PageRanges) -> AnswerPiece:
    looks = [found for look in piece.looks for found in _on_pages(look, pages)]
    told = sum(look.mass for look in piece.looks)
    on_pages = sum(look.mass for look in looks)
    return AnswerPiece(piece.end, max(piece.mass - (told - on_pages), on_pages), looks)


def _on_pages(look: Look, pages: PageRanges) -> Iterator[PageLook]:
    """The parts of a look on each page it touches."""
    for number, (document, start, end) in enumerate(pages):
        first, last = max(look.first, start), min(look.first + look.n_tokens, end)
        if document == look.document and first < last:
            n, length = last - first, end - start
            yield PageLook(number, (first - start) / length, (last - start) / length, look.mass * n / look.n_tokens)
