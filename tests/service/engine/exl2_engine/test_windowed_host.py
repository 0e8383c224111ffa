"""Windowed documents in a whole engine over the card's runner, on a CPU: sinks of a whole block."""

import pytest

from cache_store.layout import KVType
from service.engine.messages import Retention
from tests.service.engine.together_host import (
    check_all_rows_of_one_document_are_that_document,
    check_several_documents,
)
from tests.service.engine.windowed_host import WindowedHost, check_a_killed_build_goes_on, check_restarts_change_nothing

RETENTION = Retention(sink_tokens=256, summary_tokens=60, window_tokens=100, segment_tokens=512, fetch_tokens=96)


@pytest.fixture
def desk(make_runner, ids, tmp_path):
    desks = []

    def make(kv_type) -> WindowedHost:
        def runner():
            return make_runner(kv_type, n_blocks=16, chunk_tokens=256)

        desks.append(WindowedHost(runner, tmp_path / "store", ids(1200), RETENTION, [(1, 0), (2, 1)]))
        return desks[-1]

    yield make
    for one in desks:
        one.host.close()


@pytest.mark.parametrize("kv_type", [KVType.FP16, KVType.K8V4, KVType.K4V4])
def test_restarts_change_nothing(desk, kv_type):
    check_restarts_change_nothing(desk(kv_type))


def test_a_killed_build_goes_on_to_the_same_bytes(desk):
    check_a_killed_build_goes_on(desk(KVType.K8V4), [256, 768, 1024])


def test_no_block_of_the_pool_is_lost(desk):
    one = desk(KVType.K8V4)
    one.build()
    one.ask([5, 6])
    one.host._context.scheduler.run(lambda: None)
    assert one.runner.pool.n_free == 16 - 2 - 2, "two are for rows, two for slots"


def test_several_documents(desk):
    check_several_documents(desk(KVType.K8V4))


def test_all_rows_of_one_document_are_that_document(desk, monkeypatch):
    check_all_rows_of_one_document_are_that_document(desk(KVType.K8V4), monkeypatch)
