"""The figures of docs/citations.md from answers that are made up."""

from benchmarks import citation_page
from benchmarks.citation_cases import REAL, Case, contract
from benchmarks.citation_page import Asked, Cost, Document, Run, enough, page_of, supports, tallies
from service.engine.messages import Look, PieceLooks

PAGES = [
    (1, "The rent is EUR 4,200 a month.", 10, 30),
    (2, "Plants are cared for by the tenant.", 30, 50),
    (3, "Nothing more is agreed here.", 50, 70),
]
CASES = [
    Case("How much is the rent?", ("4,200",), ("rent is EUR",)),
    Case("Who looks after the garden?", ("renter",), ("cared  for by",)),
    Case("Who owns it?", ("does not say",)),
    Case("How long is it?", ("years",), page=3),
]


def looked(answer: str, page: int, mass: float = 0.5) -> list[PieceLooks]:
    return [PieceLooks(len(answer), mass + 0.1, [Look(PAGES[page - 1][2], 20, mass), Look(0, 10, 0.1)])]


def asked(case: Case, answer: str, page: int, right=True) -> Asked:
    return Asked(case.question, answer, right, looked(answer, page), [page])


DOCUMENT = Document(
    "doc",
    "A lease",
    "",
    PAGES,
    [
        asked(CASES[0], "The rent is EUR 4,200.", 3),  # looks at the wrong page, the words are right
        asked(CASES[1], "Whoever is the renter does.", 2),
        asked(CASES[2], "The document does not say.", 1),
        asked(CASES[3], "It is purple.", 1, right=False),
    ],
)


def test_words_attention_and_both_are_counted_apart() -> None:
    found = tallies(DOCUMENT, CASES)
    assert [(t.n, t.first, t.found, t.good, t.pages) for t in found.values()] == [
        (2, 1, 1, 1, 1),
        (2, 1, 1, 1, 2),
        (2, 2, 2, 2, 2),
    ]
    assert [(t.refusals, t.n_refusals) for t in found.values()] == [(0, 1), (1, 1), (0, 1)]


def test_a_page_holds_a_fact_whatever_its_lines() -> None:
    case = Case("?", ("x",), ("eﬃcient table-driven",))
    assert case.holds(1, "An effi-\ncient  Table-Driven one")
    assert not case.holds(1, "An efficient one")
    assert Case("?", ("x",), page=4).holds(4, "")


def test_the_page_says_what_was_measured(monkeypatch) -> None:
    assert len(contract().cases) == 40
    assert all(len(source.cases) >= 12 and all(case.facts for case in source.cases) for source in REAL)
    monkeypatch.setattr(citation_page, "cases_of", lambda run: [CASES])
    run = Run("a machine", "demo", "k8v4", [DOCUMENT], Cost(0.011, 0.004, 0.02, 8))
    text = page_of(run)
    assert "| A lease, 3 pages, 70 tokens, 4 questions | both | 2 | 100.0% | 100.0% | 100.0% | 0 of 1 |" in text
    assert "Of the 4 answers 1 are wrong. 1 of these are cited" in text
    assert supports(run) == ([0.0, 0.5], [0.5])
    assert enough(run)
    run.cost.finding = 0.06
    assert not enough(run)
