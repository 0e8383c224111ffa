"""`make chaos` in small: every fault once, and that the visitors notice what is wrong."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from random import Random

import pytest

from tests.chaos import faults
from tests.chaos.asking import Violation
from tests.chaos.cases import FAULTS, Case
from tests.chaos.chaos import Chaos
from tests.chaos.visitor import Visitor
from tests.chaos.world import World

pytestmark = pytest.mark.storm

OF_ONE_LOSS = {"kill_worker", "lose_worker_disk", *(f"object_store_{kind}" for kind in ("500", "503", "cut", "wrong"))}
WORKER_LOST = Case(
    partial(faults.object_store_fails, ("500", "503", "cut", "wrong")), "all of these at once", again=True
)
ELSEWHERE = {"stop_worker", "kill_engine", "hang_engine", "kill_api"}
"""Of slow starts: test_fleet.py, test_engine_loss.py, test_remote.py and test_replicas.py have them."""
STORMS = (
    ("flush_redis", "fill_redis", "stall_redis", "refuse_redis", "reset_redis", "kill_redis"),
    ("redis_cannot_save", "fail_over_redis", "clocks_apart"),
    ("stall_postgres", "refuse_postgres", "reset_postgres", "kill_postgres", "fill_postgres_disk", "fill_api_disk"),
    ("stale_listings", "fill_object_store", "stall_object_store", "refuse_object_store", "reset_object_store"),
    ("fill_worker_disk", "api_clock_ahead", "api_clock_behind", "worker_clock_ahead", "worker_clock_behind"),
    ("freeze_api", "two_workers", "freeze_worker"),
    ("a_worker_and_its_disk_are_lost", "kill_object_store"),
)


@pytest.fixture(scope="module")
def chaos(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chaos]:
    with World(tmp_path_factory.mktemp("chaos"), n_apis=2, n_workers=1, stall_s=1.0) as world:
        yield Chaos(world, Random(5))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("storm", STORMS, ids=lambda storm: storm[0])
def test_nothing_is_lost(chaos: Chaos, storm: tuple[str, ...]) -> None:
    """Every fault of the matrix once. Those that need a worker to start anew share one."""
    cases = [FAULTS.get(name, WORKER_LOST) for name in storm]
    assert chaos.storm(cases).n_answers


def test_every_case_is_in_a_storm() -> None:
    named = {name for storm in STORMS for name in storm}
    assert FAULTS.keys() - named == OF_ONE_LOSS | ELSEWHERE


def test_visitors_notice_what_is_wrong(chaos: Chaos) -> None:
    chaos.ask_again()
    known = chaos.documents[-1]
    assert known.answers[0] != known.answers[1]
    visitor = Visitor(chaos.world, 1)
    with pytest.raises(Violation, match="wrong"):
        visitor.ask(replace(known, answers=known.answers[::-1]))
    with pytest.raises(Violation, match="refused for good: 404"):
        visitor.ask(replace(known, document_id="doc_none"))
