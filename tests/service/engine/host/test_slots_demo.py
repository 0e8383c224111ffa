"""A quarter of a document's rows in front of the demo model, nothing fetched: chosen head by head they answer, as the
first and last tokens they do not."""

import pytest

from service.engine.messages import BuildDone, BuildRequest, Retention
from tests.service.engine.host.test_windowed_demo import DOC, QUESTIONS, Desk

pytestmark = [pytest.mark.model, pytest.mark.long, pytest.mark.timeout(600)]
N_TOKENS = 1500
CHOSEN = Retention(sink_tokens=16, summary_tokens=295, window_tokens=64, fetch_tokens=0)
ENDS = Retention(sink_tokens=16, summary_tokens=0, window_tokens=359, fetch_tokens=0)


@pytest.fixture(scope="module")
def desk(demo_model, tmp_path_factory):
    desk = Desk(demo_model, tmp_path_factory.mktemp("store"))
    desk.ids = desk.ids[:N_TOKENS]
    yield desk
    desk.host.close()


def keep(desk, retention) -> BuildDone:
    events: list = []
    desk.host.build(BuildRequest("b", DOC, desk.ids, retention), events.append).result()
    assert isinstance(events[-1], BuildDone), events[-1]
    assert events[-1].resident_tokens == N_TOKENS // 4
    return events[-1]


def answers(desk, retention, session) -> list[str]:
    return [desk.ask(q, session=f"{session} {q}", retention=retention).text for q in QUESTIONS]


def test_slots_of_each_head_answer_where_the_ends_do_not(desk):
    keep(desk, ENDS)
    name, code = answers(desk, ENDS, "ends")
    assert "Edda Malkin" not in name
    assert "KV-417" not in code
    done = keep(desk, CHOSEN)
    assert (done.prefilled_tokens, done.summary_tokens) == (0, 295)
    chosen = answers(desk, CHOSEN, "chosen")
    assert "Edda Malkin" in chosen[0]
    assert "KV-417" in chosen[1]
    stats = desk.host.stats()
    assert stats.resident_nbytes == 30 * 3 * (80 + 295) * 64 * 2 * 4
    desk.restart()
    assert answers(desk, CHOSEN, "again") == chosen
    assert desk.host.stats().resident_nbytes == stats.resident_nbytes
