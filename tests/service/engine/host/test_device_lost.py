"""A device that answers nothing any more: the engine's thread ends, whatever is open can be asked for again."""

import time

import pytest

from service.engine.messages import AnswerText, BuildRequest, DocumentRef
from service.engine.scheduler.errors import SchedulerClosed

OTHER = DocumentRef("own", "other")


def wait_for(holds) -> None:
    until = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.002)


@pytest.fixture
def streaming(lab):
    """An answer under way, and its events."""
    lab.start(step_delay_s=0.003, layer_delay_s=0.02)
    lab.build()
    events, future = lab.ask_later(max_tokens=500)
    wait_for(lambda: any(isinstance(e, AnswerText) for e in events))
    return events, future


def test_a_stream_ends_with_an_error_that_invites_to_ask_again(lab, streaming):
    events, future = streaming
    lab.runner.lost = True
    future.result(60)
    failed = lab.failed(events)
    assert (failed.code, failed.retryable) == ("engine_lost", True)
    lab.host.wait_ended()
    assert not lab.host.alive
    with pytest.raises(SchedulerClosed):
        lab.host.check()


def test_a_build_and_a_stream_end_together_and_both_go_on_in_the_next_process(lab, streaming):
    events, future = streaming
    tokens = [5 * i % 251 for i in range(160)]
    built: list = []
    building = lab.host.build(BuildRequest("b2", OTHER, tokens), built.append)
    wait_for(lambda: bool(built))
    lab.runner.lost = True
    building.result(60)
    future.result(60)
    assert lab.failed(built).code == lab.failed(events).code == "engine_lost"
    assert lab.failed(built).retryable
    lab.host.wait_ended()
    lab.host.close()
    lab.start()
    assert lab.build(OTHER, tokens)[-1].resumed_tokens > 0
    lab.done(lab.ask())


def test_an_error_that_the_device_survives_ends_one_request_only(lab, streaming):
    events, future = streaming
    lab.runner.prefill_chunk = lambda *_: 1 / 0
    failed = lab.failed(lab.build(OTHER, [1, 2, 3], name="b2"))
    assert failed.code == "internal"
    assert lab.host.alive
    lab.host.cancel("a")
    future.result(60)
    lab.done(events)
