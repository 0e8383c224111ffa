"""A windowed document in front of the demo model: a fact that only the cold snapshot has is found, before and after a
restart."""

import pytest
from msgspec.structs import replace

from service.engine.digests import digest_of
from service.engine.factory import EngineConfig, open_host
from service.engine.messages import (
    AnswerDone,
    AnswerRequest,
    AnswerStarted,
    AnswerText,
    BuildDone,
    BuildRequest,
    DocumentRef,
    Retention,
    Sampling,
    TurnRef,
)
from service.engine.models.card import load_card
from service.engine.models.gate import gate_text
from service.engine.prompt import PromptTemplate
from service.engine.tokenizer import Tokenizer

pytestmark = [pytest.mark.model, pytest.mark.long, pytest.mark.timeout(600)]
DOC = DocumentRef("own", "doc")
FACT = "The keeper of the Rosehill pump is Edda Malkin, and its access code is KV-417."
QUESTIONS = ("Who is the keeper of the Rosehill pump?", "What is the access code of the Rosehill pump?")
N_TOKENS = 2200
RETENTION = Retention(sink_tokens=16, summary_tokens=64, window_tokens=192, segment_tokens=1024, fetch_tokens=192)
INDEX_HEADS = [(18, 2), (17, 1)]
"""As found on other documents: the test does not depend on whether the model's directory names any."""


class Asked:
    """One answer, and what the next question of the session needs of it."""

    def __init__(self, events: list) -> None:
        assert isinstance(events[0], AnswerStarted), events[0]
        assert isinstance(events[-1], AnswerDone), events[-1]
        self.started, self.done = events[0], events[-1]
        self.text = "".join(event.text for event in events if isinstance(event, AnswerText))

    def turn(self, kv_id: str) -> TurnRef:
        return TurnRef(kv_id, self.done.token_ids, self.started.spans)


class Desk:
    """One engine after another over one store, and the document in the demo model's tokens."""

    def __init__(self, model_dir, store_dir) -> None:
        self._config = EngineConfig(
            store_dir=str(store_dir), model_dir=str(model_dir), compute_dtype="float32", free_floor_nbytes=0
        )
        self.template = PromptTemplate(load_card(model_dir).prompt, Tokenizer.load(model_dir))
        text = gate_text()
        self.ids = self.template.document(_with_fact(f"{text}\n\n{text}", len(text) // 3)).ids[:N_TOKENS]
        self.host = open_host(self._config)

    def restart(self) -> None:
        self.host.close()
        self.host = open_host(self._config)

    def build(self) -> BuildDone:
        events: list = []
        self.host.build(BuildRequest("b", DOC, self.ids, RETENTION), events.append).result()
        assert isinstance(events[-1], BuildDone), events[-1]
        return events[-1]

    def ask(self, question: str, after: Asked | None = None, *, session="s", kv_id="", retention=RETENTION) -> Asked:
        events, future = self.ask_later(question, after, session=session, kv_id=kv_id, retention=retention)
        future.result()
        return Asked(events)

    def ask_later(self, question: str, after: Asked | None, *, session: str, kv_id="", retention=RETENTION):
        turns, pending = ([after.turn("first")], after.done.pending_ids) if after else ([], [])
        events: list = []
        prompt = self.template.question(question, pending_ids=pending)
        request = AnswerRequest(
            session, session, DOC, digest_of(self.ids), len(self.ids), turns, prompt, Sampling(28), kv_id,
            retention=retention,
        )  # fmt: skip
        return events, self.host.answer(request, events.append)


def _with_fact(text: str, about: int) -> str:
    place = text.index(". ", about) + 2
    return f"{text[:place]}{FACT} {text[place:]}"


@pytest.fixture(scope="module")
def desk(demo_model, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("service.engine.index_heads.load_index_heads", lambda _: INDEX_HEADS)
        desk = Desk(demo_model, tmp_path_factory.mktemp("store"))
        yield desk
        desk.host.close()


def test_a_fact_in_the_cold_part_is_found_before_and_after_a_restart(desk):
    done = desk.build()
    assert (done.n_tokens, done.prefilled_tokens, done.resident_tokens) == (N_TOKENS, N_TOKENS, 16 + 64 + 192)
    assert done.index_nbytes == N_TOKENS * 2 * (64 + 4)
    first = desk.ask(QUESTIONS[0], session="a", kv_id="first")
    assert "Edda Malkin" in first.text
    second = desk.ask(QUESTIONS[1], first, session="a")
    assert "KV-417" in second.text
    assert (first.started.reused_tokens, first.started.first_pass_tokens) == (N_TOKENS, first.started.prefilled_tokens)
    unfetched = desk.ask(QUESTIONS[1], session="b", retention=replace(RETENTION, fetch_tokens=0))
    assert "KV-417" not in unfetched.text  # 64 slots may keep a name, not every character of a code
    desk.restart()
    again = desk.ask(QUESTIONS[0], session="c")
    assert (again.started.source, again.started.restored_tokens) == ("disk", 272)
    follow_up = desk.ask(QUESTIONS[1], first, session="d")
    assert (follow_up.started.miss_reason, follow_up.started.restored_tokens) == (None, len(first.done.token_ids))
    for one, other in ((again, first), (follow_up, second)):
        assert (one.done.token_ids, one.started.spans) == (other.done.token_ids, other.started.spans)
    assert desk.host.stats().document_prefill_tokens_total == 0


def test_sessions_at_once_are_answered_as_each_alone(desk):
    desk.build()
    alone = [desk.ask(question, session=f"alone {question}") for question in QUESTIONS]
    together = [desk.ask_later(question, None, session=f"together {question}") for question in QUESTIONS]
    for (events, future), one in zip(together, alone, strict=True):
        future.result()
        other = Asked(events)
        assert (other.text, other.started.spans) == (one.text, one.started.spans)
