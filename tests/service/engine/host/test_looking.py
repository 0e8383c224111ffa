"""Where an answer looked, as the engine tells it: its pieces, and the tokens of its documents."""

import numpy as np
import pytest

from service.engine.host.looking import Pieces
from service.engine.messages import DocumentRef, SpanRef
from service.engine.scheduler.detokenizer import Detokenizer
from service.engine.scheduler.sequence import AnswerWriter
from service.engine.scheduler.stops import StopStrings
from tests.service.engine.host.windowed import MARK, N_TOKENS, RETENTION, with_mark

HEADS = [(1, 0), (0, 0)]
OTHER = DocumentRef("own", "other")


class Texts:
    """Each id is one of some texts."""

    texts = ("The fee", " is 1,275", " pounds.", " It is", " due", " soon")

    def decode(self, ids):
        return "".join(self.texts[i] for i in ids)


@pytest.fixture
def watched():
    def prepare(runner):
        runner.watched_heads = HEADS

    return prepare


def written(ids) -> AnswerWriter:
    writer = AnswerWriter(Detokenizer(Texts()), StopStrings(()), lambda text: None)
    for token_id in ids:
        writer.push(token_id)
    return writer


def test_pieces_end_where_sentences_may():
    writer = written(range(6))
    assert Pieces.of(writer, 6) == Pieces([3, 3], [24, 39])
    assert Pieces.of(writer, 7) == Pieces([3, 4], [24, 39])  # what ends the answer has no text
    assert Pieces.of(written([0] * 70), 70).n_tokens == [32, 32, 6]
    assert Pieces.of(written([]), 1) == Pieces([], [])


def looked(done, number=0):
    """Tokens of a document that the answer looked at most, as pairs of place and attention."""
    return [(look.first, look.mass) for look in done.looks[0].looks if look.document == number]


def test_an_answer_says_where_it_looked(lab, watched):
    tokens = list(range(10, 210))
    lab.start(prepare=watched, script=[150, 151, 20])
    lab.build(tokens=tokens)
    done = lab.done(lab.ask(tokens=tokens, prompt=(1, 2, 150), max_tokens=3))
    # Its rows are the prompt's last token and the two sampled first: 150 twice, then 151.
    (piece,) = done.looks
    assert piece.end == len("<150><151><20>")
    assert 0 < looked(done)[0][1] <= piece.mass <= 1
    assert looked(done)[0][0] == 140 // 16 * 16
    assert sum(mass for _, mass in looked(done)) <= piece.mass + 1e-3
    assert done.looks_ms > 0


def test_nothing_is_said_where_nothing_is_watched(lab):
    lab.start(script=[150])
    lab.build()
    assert lab.done(lab.ask()).looks == []


def test_fetched_tokens_and_slots_of_a_windowed_document_are_told(lab, watched):
    at = 517
    lab.start(prepare=watched, script=[MARK] * 3, heads=HEADS)
    tokens = with_mark(at)
    lab.build(tokens=tokens, retention=RETENTION)
    events = lab.ask(tokens=tokens, retention=RETENTION, prompt=(1, 2, MARK), max_tokens=3)
    fetched = lab.started(events).spans
    assert any(span.first <= at < span.first + span.n_tokens for span in fetched)
    done = lab.done(events)
    assert looked(done)[0][0] == at // 16 * 16
    assert all(0 <= first < N_TOKENS for first, _ in looked(done))
    # After a restart, in a follow-up that computes nothing of the turn before: the same place again.
    lab.start(prepare=watched, script=[MARK] * 3, heads=HEADS)
    turns = {"tokens": tokens, "retention": RETENTION, "max_tokens": 3}
    again = lab.done(lab.follow(done, **turns) if not fetched else follow_with_spans(lab, done, fetched, turns))
    assert looked(again)[0][0] == at // 16 * 16


def follow_with_spans(lab, done, spans: list[SpanRef], more):
    from service.engine.messages import TurnRef

    turn = TurnRef("kv1", done.token_ids, spans)
    return lab.ask([*done.pending_ids, 8, MARK], [turn], kv_id="kv2", **more)


def test_slots_are_known_by_their_tokens(lab, watched):
    lab.start(prepare=watched, script=[MARK] * 3, heads=[])
    tokens = [MARK if 300 <= i < 316 else token for i, token in enumerate(with_mark(300))]
    lab.build(tokens=tokens, retention=RETENTION)
    done = lab.done(lab.ask(tokens=tokens, retention=RETENTION, prompt=(1, MARK), max_tokens=3))
    places = [np.asarray(p) for entry in lab.host._context.residency._entries.values() for p in entry.slot_places]
    assert len(places) == len(HEADS)
    assert sum(map(len, places)) > 0
    # A replay finds that the marks are repeated, so that some of them are slots; nothing else looks like the answer.
    assert any(((p >= 300) & (p < 316)).any() for p in places)
    assert looked(done)[0][0] in (288, 304)
    lab.start(prepare=watched, script=[MARK] * 3, heads=[])
    again = lab.done(lab.ask(tokens=tokens, retention=RETENTION, prompt=(1, MARK), max_tokens=3, session="t"))
    assert again.looks == done.looks  # read from the disk
