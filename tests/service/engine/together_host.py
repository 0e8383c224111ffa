"""What tests of several documents over a real runner share."""

import pytest

from service.engine.digests import digest_of
from service.engine.host import together
from service.engine.messages import (
    AnswerDone,
    AnswerRequest,
    AnswerStarted,
    BuildDone,
    BuildRequest,
    DocumentRef,
    PartRef,
    Sampling,
    TurnRef,
)
from tests.service.engine.windowed_host import DOC, WindowedHost

OTHER = DocumentRef("own", "other")


def other_tokens(desk: WindowedHost) -> list[int]:
    return [*desk.tokens[:8], *reversed(desk.tokens[100:440])]


def build_other(desk: WindowedHost) -> BuildDone:
    events: list = []
    desk.host.build(BuildRequest("o", OTHER, other_tokens(desk)), events.append).result()
    assert isinstance(events[-1], BuildDone), events[-1]
    return events[-1]


def ask(desk: WindowedHost, parts: list[PartRef], prompt, turns=(), *, session: str, kv_id="", fetch_tokens=96):
    events: list = []
    request = AnswerRequest(
        f"q{session}", session, parts[0].document, "", sum(part.n_tokens for part in parts), list(turns), list(prompt),
        Sampling(6), kv_id, parts=parts, fetch_tokens=fetch_tokens,
    )  # fmt: skip
    desk.host.answer(request, events.append).result()
    assert isinstance(events[0], AnswerStarted), events[0]
    assert isinstance(events[-1], AnswerDone), events[-1]
    return events[0], events[-1]


def check_several_documents(desk: WindowedHost) -> None:
    """A windowed document and a whole one together: a question and a follow-up, and both again from the next engine."""
    desk.build()
    build_other(desk)
    other, n = other_tokens(desk), len(desk.tokens)
    parts = [
        PartRef(DOC, digest_of(desk.tokens), n, [(0, 256), (n - 70, n)], desk.retention),
        PartRef(OTHER, digest_of(other), len(other), [(8, 40), (len(other) - 50, len(other))]),
    ]
    first = ask(desk, parts, [5, 6, 7], session="s", kv_id="k1")
    assert (first[0].restored_tokens, first[0].reused_tokens) == (256 + 70 + 32 + 50, n + len(other))
    assert sum(span.n_tokens for span in first[0].spans) <= 96
    turns = [TurnRef("k1", first[1].token_ids, first[0].spans)]
    prompt = [*first[1].pending_ids, 9, 8]
    second = ask(desk, parts, prompt, turns, session="s")
    desk.restart()
    again = ask(desk, parts, [5, 6, 7], session="x")
    follow_up = ask(desk, parts, prompt, turns, session="y")
    for one, expected in ((again, first), (follow_up, second)):
        assert (one[0].spans, one[1].token_ids) == (expected[0].spans, expected[1].token_ids)
    assert follow_up[0].miss_reason is None
    assert desk.host.stats().document_prefill_tokens_total == 0


def check_all_rows_of_one_document_are_that_document(desk: WindowedHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gathered rows stand and count as those that were computed: without the gap an answer over all rows of a document
    is the answer over the document."""
    monkeypatch.setattr(together, "QUESTION_GAP", 0)
    build_other(desk)
    other = other_tokens(desk)
    part = PartRef(OTHER, digest_of(other), len(other), [(0, 100), (100, len(other))])
    gathered = ask(desk, [part], [5, 6, 7], session="g")
    events: list = []
    request = AnswerRequest("w", "w", OTHER, digest_of(other), len(other), [], [5, 6, 7], Sampling(6))
    desk.host.answer(request, events.append).result()
    assert gathered[0].spans == []
    assert gathered[1].token_ids == events[-1].token_ids
