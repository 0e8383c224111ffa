"""Many at once: refusals that say when to come back, fair turns, memory that stays."""

import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import psutil
import pytest

from tests.e2e.server import Server, until

DOCUMENT = b"The ferry to Inchcolm leaves at 9.40 from the east pier.\n\n" * 8
N_SESSIONS, QUEUE_LIMIT, MAX_BATCH = 50, 8, 4
MIB = 1 << 20


@dataclass
class Served:
    """How one of many clients fared. `waited_s` is from its first try to its answer."""

    waited_s: float
    refused: int
    queue_s: float
    work_s: float


@pytest.fixture(scope="module")
def server(serve_all) -> Server:
    return serve_all(
        fake={"fake_script": [97] * 300, "fake_step_s": 0.01}, queue_limit=QUEUE_LIMIT, max_batch=MAX_BATCH
    )


@pytest.fixture(scope="module")
def document_id(server: Server) -> str:
    return server.ready(DOCUMENT)["id"]


def ask_until_answered(server: Server, session_id: str, start: threading.Barrier) -> Served:
    start.wait()
    began, refused = time.monotonic(), 0
    while (response := server.question(session_id, max_tokens=30)).status_code != 200:
        assert response.status_code == 429, response.text
        assert response.json()["error"]["code"] == "queue_full"
        assert 1 <= int(response.headers["retry-after"]) <= 120
        refused += 1
        time.sleep(int(response.headers["retry-after"]))
    timings = response.json()["timings"]
    waited_s, queue_s = time.monotonic() - began, timings["queue_ms"] / 1e3
    return Served(waited_s, refused, queue_s, timings["total_ms"] / 1e3 - queue_s)


@pytest.mark.alone
def test_fifty_questions_at_once_on_a_queue_of_eight(server: Server, document_id: str):
    sessions = [server.session(document_id) for _ in range(N_SESSIONS)]
    processes = [psutil.Process(server.pid), server.engine()]
    server.ask(sessions[0], max_tokens=30)
    before = [process.memory_info().rss for process in processes]
    start = threading.Barrier(N_SESSIONS)
    with ThreadPoolExecutor(N_SESSIONS) as pool:
        served = list(pool.map(lambda session_id: ask_until_answered(server, session_id, start), sessions))
    grown = [process.memory_info().rss - rss for process, rss in zip(processes, before, strict=True)]
    assert sum(one.refused > 0 for one in served) >= N_SESSIONS - QUEUE_LIMIT - MAX_BATCH
    assert max(grown) < 48 * MIB
    work_s = statistics.mean(one.work_s for one in served)
    # A fair wait: everyone ahead is served once; refused clients come back on whole seconds.
    fair_s = N_SESSIONS * work_s / MAX_BATCH + 1
    assert max(one.waited_s for one in served) <= 3 * fair_s
    assert max(one.queue_s for one in served) <= 3 * (QUEUE_LIMIT / MAX_BATCH) * work_s
    until(lambda: server.engine_stat("running") + server.engine_stat("waiting") == 0, "answers go on")
    assert server.engine_stat("document_references") == 0


@pytest.mark.alone
def test_sessions_within_the_queue_take_turns(server: Server, document_id: str):
    """Clients that ask again at once: nobody is served a second time before the others had their turn."""
    sessions = [server.session(document_id) for _ in range(QUEUE_LIMIT - 1)]
    until_s = time.monotonic() + 5

    def keep_asking(session_id: str) -> int:
        n = 0
        while time.monotonic() < until_s:
            server.ask(session_id, max_tokens=20)
            n += 1
        return n

    with ThreadPoolExecutor(len(sessions)) as pool:
        answered = list(pool.map(keep_asking, sessions))
    assert max(answered) <= 3 * min(answered), answered
