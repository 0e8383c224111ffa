"""Attention finds pages where words differ, decides between equal passages, and never cites what it did not look at."""

import pytest

from service.core.citations import AnswerAttention, AnswerPiece, PageIndex, PageLook, PageText, cite
from service.core.citations.attention import MIN_MASS
from service.core.citations.looks import attention_of
from service.engine.messages import Look, PieceLooks

PAGES = [
    PageText(1, "1. Rent\nThe monthly rent is EUR 4,200. It is payable in advance on the third day of each month."),
    PageText(2, "2. Garden\nThe garden is kept by the tenant. Trees are cut every autumn by a trained gardener."),
    PageText(3, "3. Notice\nEither party may end the lease with ninety days of notice. The audit takes 30 days."),
    PageText(4, "4. Repairs\nThe repair takes 30 days. Nothing more is agreed. The roof is of slate."),
]


@pytest.fixture(scope="module")
def index() -> PageIndex:
    return PageIndex(PAGES)


def looking(answer: str, page: int, mass: float, *, first=0.0, last=1.0, rest=0.05) -> AnswerAttention:
    return AnswerAttention([AnswerPiece(len(answer), mass + rest, [PageLook(page, first, last, mass)])])


def ask(index, answer, attention=None, question=""):
    return cite(answer, index, document_id="d", question=question, attention=attention)


def test_other_words_are_found_by_attention(index) -> None:
    answer = "Whoever rents looks after the plants outside."
    assert ask(index, answer).citations == []
    found = ask(index, answer, looking(answer, 2, 0.4, first=0.1, last=0.4))
    (citation,) = found.citations
    assert (citation.page, citation.quote) == (2, "The garden is kept by the tenant.")
    assert citation.score < 0.5
    assert citation.attention == pytest.approx(0.4 / 0.45, abs=1e-3)
    assert PAGES[1].text[citation.page_start : citation.page_end] == citation.quote
    assert found.unsupported == []


def test_the_score_stays_that_of_the_words(index) -> None:
    answer = "The monthly rent is EUR 4,200."
    (alone,), (both,) = (ask(index, answer, a).citations for a in (None, looking(answer, 1, 0.5)))
    assert (alone.score, alone.attention) == (1.0, None)
    assert (both.score, both.page, both.quote) == (1.0, 1, alone.quote)


def test_it_decides_between_equal_passages(index) -> None:
    answer = "It takes 30 days."
    for page in (3, 4):
        assert [c.page for c in ask(index, answer, looking(answer, page, 0.3)).citations] == [page]


def test_a_word_alone_can_be_cited(index) -> None:
    assert ask(index, "Yes.").citations == []
    (citation,) = ask(index, "Yes.", looking("Yes.", 4, 0.4, first=0.75)).citations
    assert (citation.page, citation.quote) == (4, "The roof is of slate.")


def test_a_little_attention_supports_nothing(index) -> None:
    answer = "Whoever rents looks after the plants outside."
    found = ask(index, answer, looking(answer, 2, MIN_MASS - 0.01))
    assert found.citations == []
    assert [answer[r.start : r.end] for r in found.unsupported] == [answer]
    assert ask(index, "Yes.", looking("Yes.", 4, 0.1)).unsupported == []


@pytest.mark.parametrize("answer", ["The document does not say.", "The lease does not mention a deposit."])
def test_refusals_are_never_cited(index, answer) -> None:
    found = ask(index, answer, looking(answer, 2, 0.6))
    assert (found.citations, found.unsupported) == ([], [])


def test_each_sentence_has_its_own_attention(index) -> None:
    answer = "Plants belong to whoever rents. Anyone can leave after a season."
    end = answer.index(".") + 1
    pieces = [
        AnswerPiece(end, 0.5, [PageLook(2, 0.1, 0.4, 0.5)]),
        AnswerPiece(len(answer), 0.5, [PageLook(3, 0.1, 0.5, 0.5)]),
    ]
    found = ask(index, answer, AnswerAttention(pieces))
    assert [(c.page, answer[c.answer_start : c.answer_end]) for c in found.citations] == [
        (2, answer[:end]),
        (3, answer[end + 1 :]),
    ]


def test_tokens_become_pages_of_their_document() -> None:
    pages = [(0, 10, 110), (0, 110, 110), (0, 110, 310), (1, 10, 90)]
    piece = PieceLooks(30, 0.9, [Look(96, 32, 0.4), Look(0, 10, 0.2), Look(32, 16, 0.1, 1)])
    looked = attention_of([piece], pages).of(0, 30)
    # 14 of 32 tokens are on the first page, 18 on the third; the prompt's tokens are on none and do not count.
    assert looked.share(0) == pytest.approx(0.4 * 14 / 32 / 0.7)
    assert looked.share(2) == pytest.approx(0.4 * 18 / 32 / 0.7)
    assert looked.share(3) == pytest.approx(0.1 / 0.7)
    assert looked.share(1) == 0
    assert looked.supports(2)
    assert not looked.supports(3)


def test_nothing_was_looked_at() -> None:
    index = PageIndex([PageText(1, ""), PageText(2, "The roof is of slate.")])
    assert ask(index, "Yes.", AnswerAttention([])).citations == []
    assert ask(index, "Yes.", looking("Yes.", 1, 0.9)).citations == []
    assert ask(PageIndex([]), "Yes.", looking("Yes.", 1, 0.9)).citations == []
