"""`benchmarks/fleet_run.py` in small, and that it notices what is wrong."""

import threading
import time
from pathlib import Path

import pytest

from benchmarks.fleet_clients import Answer, Chat, Client, Tally, Wrong
from benchmarks.fleet_run import Load, Result, ask, measure, report
from tests.chaos.world import World

LOAD = Load(clients=4, documents=2, words=40, max_tokens=12, think_s=0.05)
FAKE = {"fake_from_kv": True, "fake_step_s": 0.01}


@pytest.mark.timeout(600)
def test_two_workers_and_two_apis_answer_as_a_single_node(tmp_path: Path) -> None:
    result = Result(2, 2, "fake", 4, LOAD)
    settings = {"fleet_heartbeat_s": 1.0, "lease_s": 10, "disconnect_grace_s": 60, "log_level": "warning"}
    with World(tmp_path, n_apis=2, n_workers=2, fake=FAKE, **settings) as world:
        measure(world, 3, LOAD, result)
        print(report(result))
        # Which worker answers, and who leaves in time, is up to the machine's load when so few are asked.
        by_chance = {"answered where the document was", "streams left and taken up again"}
        assert {name for name, *_, met in result.checks() if not met} <= by_chance
        document = world.apis[0].get("/v1/documents").json()["data"][0]["id"]
        wrong = Result(2, 2, "fake", 4, LOAD)
        ask(world.apis, [Chat(document, (("Who?", "nobody says this"),))], 5, LOAD, wrong)
        assert "a single node answers" in wrong.tally.wrong[0]
        client = Client(world.apis, wrong.tally, 1, max_tokens=4)
        with pytest.raises(Wrong, match="refused for good: 404"):
            client.chat(Chat("doc_none", ()))


def test_each_target_that_is_missed_is_told() -> None:
    here, brought = Answer("host", 5, 1, 0.1, 0.2), Answer("redis", 5, 0, 0.1, 0.2)
    good = Result(1, 2, "fake", 4, LOAD, 1.0, 1.0, 10, {"w": 10}, Tally([here] * 9 + [brought]))
    assert all(met for *_, met in good.checks())
    bad = Result(1, 2, "fake", 4, LOAD, 1.0, 1.0, 10, {"w": 10, "x": 5}, Tally([brought] * 3, 0, ["lost"], ["other"]))
    missed = [name for name, *_, met in bad.checks() if not met]
    assert missed == [name for name, *_ in bad.checks()][1:]
    assert "**no**" in report(bad)
    assert "other" in report(bad)
    assert bad.as_json()["missed"] == missed


def test_clients_end_when_one_has_found_something_wrong() -> None:
    stop, tally = threading.Event(), Tally()
    stop.set()
    Client([], tally, 1, max_tokens=4).run([Chat("doc", ())], time.monotonic() + 60, stop)
    assert tally == Tally()
