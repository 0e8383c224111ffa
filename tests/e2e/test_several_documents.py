"""Three documents in one session of a real server: each question finds the document that answers it, after a restart
too, and the session ends with any of them. Others, whose snapshots are damaged meanwhile, are read again."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from tests.e2e.damage import FEW
from tests.e2e.damaged import KEEPERS, Damaged, expect_right_and_tidy, story
from tests.e2e.long_text import paragraphs
from tests.e2e.server import Server, files_below

pytestmark = [pytest.mark.model, pytest.mark.long, pytest.mark.timeout(600)]
TITLES = ("Lease of the boat house", "Report on the lighthouse", "Minutes of the garden club")
FACTS = (
    ("The keeper of the Rosehill pump is Edda Malkin.", "The annual rent of the boat house is 8,400 pounds."),
    ("The lighthouse of Norrvik was built by Ansel Brandt.", "The lamp of Norrvik is cleaned by Ines Okafor."),
    ("The garden club elected Piotr Semenov as its treasurer.", "The club meets in the Larch Room every Monday."),
)
QUESTIONS = (
    ("How much is the annual rent of the boat house?", 0, "8,400"),
    ("Who built the lighthouse of Norrvik?", 1, "Ansel Brandt"),
    ("Who is the treasurer of the garden club?", 2, "Piotr Semenov"),
)
DAMAGES = FEW[::2]
"""Some of each sort: what is read again does not depend on what the model computes (`test_damaged_snapshots`)."""
FOLLOW_UP = ("In which room does the club meet?", 2, "Larch Room")


def texts() -> Iterator[bytes]:
    """Markdown with two facts between other paragraphs, which are of another subject in each."""
    for title, (first, second), begin in zip(TITLES, FACTS, (0, 120, 240), strict=True):
        others = list(islice(paragraphs(), begin, begin + 6))
        parts = [f"# {title}", *others[:2], first, *others[2:4], second, *others[4:]]
        yield "\n\n".join(parts).encode()


def ask(server: Server, session_id: str, ids: list[str], question: tuple[str, int, str]) -> dict:
    """The answer, which must be right, and name the document."""
    text, document, right = question
    answer = server.ask(session_id, text, max_tokens=40)
    assert right in answer["answer"], (text, answer["answer"])
    assert [citation["document_id"] for citation in answer["citations"]] == [ids[document]]
    assert right in answer["citations"][0]["quote"]
    assert ids[document] in {part["document_id"] for part in answer["provenance"] if part["mode"] == "fetched"}
    assert answer["notice"] is None
    return answer


def test_three_documents_in_one_session_and_damaged_ones(serve, demo_model: Path):
    # In BF16 rows of several guesses and single ones may round to another word, and how many guesses a step has follows
    # from what was answered before: less after the restart.
    server: Server = serve(model=demo_model, compute_dtype="float32")
    read = [server.ready(text, f"{title}.md") for title, text in zip(TITLES, texts(), strict=True)]
    ids, n_tokens = [body["id"] for body in read], sum(body["token_count"] for body in read)

    def session(*ids: str) -> str:
        response = server.request("POST", "/v1/sessions", json={"document_ids": ids})
        assert (response.status_code, response.json()["document_ids"]) == (201, list(ids))
        return response.json()["id"]

    session_id = session(*ids)
    answers = [ask(server, session_id, ids, question) for question in QUESTIONS]
    assert answers[0]["usage"]["document_tokens"] == answers[0]["usage"]["reused_tokens"] == n_tokens
    assert 0 < answers[0]["cache"]["restored_tokens"] < n_tokens
    fork = server.request("POST", f"/v1/sessions/{session_id}/fork").json()
    assert fork["document_ids"] == ids
    expected = ask(server, session_id, ids, FOLLOW_UP)
    damaged = Damaged(server, DAMAGES, [story(n, 4) for n in range(len(DAMAGES))])
    server.stop()
    damaged.apply()
    server.start()

    follow_up = ask(server, fork["id"], ids, FOLLOW_UP)
    assert follow_up["answer"] == expected["answer"]
    assert follow_up["provenance"] == expected["provenance"]
    assert (follow_up["cache"]["source"], follow_up["cache"]["miss_reason"]) == ("disk", None)
    assert follow_up["usage"]["reused_tokens"] == expected["usage"]["reused_tokens"] > n_tokens
    assert server.engine_stat("document_prefill_tokens_total") == 0
    again = ask(server, session(*reversed(ids)), ids, QUESTIONS[1])
    assert again["usage"]["prefilled_tokens"] < 40
    assert server.engine_stat("document_prefill_tokens_total") == 0

    pair = session(*ids[:2])
    assert server.request("DELETE", f"/v1/documents/{ids[2]}").status_code == 200
    assert [path for path in files_below(server.store) if ids[2] in path] == []
    for gone in (session_id, fork["id"]):
        assert server.question(gone, FOLLOW_UP[0]).status_code == 404
    ask(server, pair, ids, QUESTIONS[0])

    cases = damaged.ask_again()
    for keeper, damage in zip(KEEPERS, DAMAGES, strict=False):
        assert keeper in cases[damage.name].after["answer"]
        expect_right_and_tidy(cases[damage.name], damage)
