"""Citations point at the right page, quote it verbatim, and stay away where nothing supports the answer."""

import json
import random
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pypdf import PdfReader

from service.core.citations import Citation, PageIndex, PageText, cite

CONTRACT = Path("examples/contract")
PAGES = [
    PageText(n, text)
    for n, text in enumerate(
        [
            "1. Parties\nThis lease is made between Orla Fennimore (the landlord) and Bram Oyelaran\n(the tenant).",
            "2. Rent\nThe monthly rent is EUR 4,200, payable in advance on the\nthird day of each month. "
            "A late payment costs 5 percent of the rent.",
            "3. Notice\nEither party may end the lease with ninety days of notice, given in\nwriting to the other.",
            "4. 附录\n甲方应于每月五日前向乙方支付租金人民币四千二百元。\n乙方不得转租房屋。本合同有效期为三年。",
            "Nothing more is agreed. The annex lists Tarrowmere, Kestwick and Dunholme as storage places.",
        ],
        start=1,
    )
]


@pytest.fixture(scope="module")
def index() -> PageIndex:
    return PageIndex(PAGES)


def ask(index: PageIndex, answer: str, question: str = "") -> list[Citation]:
    return cite(answer, index, document_id="doc_1", question=question).citations


@pytest.mark.parametrize(
    ("answer", "page"),
    [
        ("The monthly rent is EUR 4,200, payable in advance on the third day of each month.", 2),
        ("The rent is 4200 EUR per month.", 2),
        ("The landlord is Orla Fennimore.", 1),
        ("It can be ended with ninety days of notice.", 3),
        ("租金为每月人民币四千二百元。", 4),
        ("合同有效期三年。", 4),
        ("Kestwick.", 5),
    ],
)
def test_answer_is_traced_to_its_page(index: PageIndex, answer: str, page: int) -> None:
    citation = ask(index, answer)[0]
    assert citation.document_id == "doc_1"
    assert citation.page == page
    assert citation.quote in PAGES[page - 1].text
    assert 0.5 <= citation.score <= 1


def test_verbatim_scores_one_and_a_wrong_number_clearly_less(index: PageIndex) -> None:
    assert ask(index, "A late payment costs 5 percent of the rent.")[0].score == 1.0
    wrong = ask(index, "A late payment costs 17 percent of the rent.")
    assert not wrong or wrong[0].score < 0.8


def test_the_question_decides_between_equal_matches() -> None:
    pages = [PageText(n, f"The {thing} takes 30 days.") for n, thing in enumerate(("audit", "repair", "appeal"), 1)]
    index = PageIndex(pages)
    assert [c.page for c in ask(index, "30 days.", "How long does the repair take?")] == [2]
    assert [c.page for c in ask(index, "30 days.", "How long does the appeal take?")] == [3]


def test_a_sentence_that_joins_two_places_cites_both(index: PageIndex) -> None:
    answer = "Bram Oyelaran may end the lease with ninety days of notice."
    assert {c.page for c in ask(index, answer)} == {1, 3}


def test_each_passage_is_cited_once_for_a_sentence(index: PageIndex) -> None:
    answer = "The landlord is Orla Fennimore. The tenant is Bram Oyelaran. Orla Fennimore is the landlord."
    found = ask(index, answer)
    assert {c.quote for c in found} == {PAGES[0].text.split("\n", 1)[1]}
    assert [answer[c.answer_start : c.answer_end] for c in found] == [f"{s}." for s in answer[:-1].split(". ")]


WIDE = PageText(
    1,
    "🏛️ 序言 — préambule\n"
    "𠮷田さんは毎月5日に家賃を払う。 The 🐈 costs 1,275 pounds 👩‍👩‍👧 a year. 合同有效期为三年。\nE\u0301té est fini.",
)


@pytest.mark.parametrize(
    ("answer", "sentence", "quote"),
    [
        ("👍🏽! The 🐈 costs 1,275 pounds.", "The 🐈 costs 1,275 pounds.", "The 🐈 costs 1,275 pounds 👩‍👩‍👧 a year."),
        ("👍 好的。合同有效期三年。", "合同有效期三年。", "合同有效期为三年。"),
        ("😀\n\n𠮷田さんは家賃を払う。", "𠮷田さんは家賃を払う。", "𠮷田さんは毎月5日に家賃を払う。"),
    ],
)
def test_places_count_code_points(answer: str, sentence: str, quote: str) -> None:
    (citation,) = ask(PageIndex([WIDE]), answer)
    assert answer[citation.answer_start : citation.answer_end] == sentence
    assert WIDE.text[citation.page_start : citation.page_end] == citation.quote == quote


def test_a_sentence_that_is_nowhere_is_said_to_be(index: PageIndex) -> None:
    answer = "The landlord is Orla Fennimore. Photosynthesis converts sunlight into energy. Yes. It does not say."
    found = cite(answer, index, document_id="doc_1")
    assert [answer[r.start : r.end] for r in found.unsupported] == ["Photosynthesis converts sunlight into energy."]
    assert [answer[c.answer_start : c.answer_end] for c in found.citations] == ["The landlord is Orla Fennimore."]


@pytest.mark.parametrize(
    "answer",
    [
        "The document does not say.",
        "The document does not mention the deposit or the monthly rent.",
        "I could not find the answer in the lease.",
        "文件没有提到租金。",
        "Yes.",
        "",
        "   \n",
        "…!?",
        "Photosynthesis converts sunlight into chemical energy.",
    ],
)
def test_nothing_supports_nothing(index: PageIndex, answer: str) -> None:
    assert ask(index, answer, "What is the monthly rent?") == []


@pytest.mark.parametrize("pages", [[], [PageText(1, "")], [PageText(1, " \n ")], [PageText(1, "word")]])
def test_documents_with_next_to_no_text(pages: list[PageText]) -> None:
    assert isinstance(ask(PageIndex(pages), "The rent is 4,200."), list)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(max_size=200), max_size=4), st.text(max_size=120))
def test_any_text_gives_verbatim_quotes_and_scores_in_range(texts: list[str], answer: str) -> None:
    pages = [PageText(n, text) for n, text in enumerate(texts, 1)]
    for citation in ask(PageIndex(pages), answer, answer):
        assert citation.quote == pages[citation.page - 1].text[citation.page_start : citation.page_end]
        assert citation.quote
        assert answer[citation.answer_start : citation.answer_end].strip()
        assert 0 <= citation.score <= 1


def test_every_fact_of_the_example_contract_is_found() -> None:
    reader = PdfReader(CONTRACT / "contract.pdf")
    index = PageIndex([PageText(n, page.extract_text()) for n, page in enumerate(reader.pages, 1)])
    wrong = []
    for item in json.loads((CONTRACT / "questions.json").read_text()):
        for answer in (item["values"][0] + ".", f"It is {item['values'][0]}."):
            found = [c.page for c in ask(index, answer, item["question"])][:1]
            if found != ([] if item["unanswerable"] else [item["page"]]):
                wrong.append((item["id"], answer, found))
    assert wrong == []


@pytest.mark.alone
def test_four_hundred_pages_are_fast() -> None:
    """Generous bounds (about ten times what was measured), to catch a quadratic turn only."""
    random.seed(1)
    words = [f"w{int(random.paretovariate(0.6))}" for _ in range(20_000)]
    pages = [
        PageText(n, " ".join(random.choice(words) + ("." if i % 15 == 14 else "") for i in range(500)))
        for n in range(1, 401)
    ]
    began = time.perf_counter()
    index = PageIndex(pages)
    built = time.perf_counter()
    citations = ask(index, pages[99].text[:900])
    assert citations
    assert citations[0].page == 100
    assert built - began < 6
    assert time.perf_counter() - built < 0.5
