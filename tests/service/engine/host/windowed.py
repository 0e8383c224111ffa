"""What tests of windowed documents share."""

import threading

from service.engine.messages import BuildDone, BuildProgress, BuildRequest, Retention

N_TOKENS = 1000
TOKENS = [(i * i + 7 * i) % 251 + 2 for i in range(N_TOKENS)]
RETENTION = Retention(sink_tokens=8, summary_tokens=24, window_tokens=40, segment_tokens=256, fetch_tokens=96)
N_ROWS = 8 + 24 + 40
MARK = 300
"""A token that stands only where a test puts it."""


def with_mark(at: int) -> list[int]:
    """A document with the mark at one place, so that a question that names it finds its span."""
    return [*TOKENS[:at], MARK, *TOKENS[at + 1 :]]


def built(events) -> BuildDone:
    assert isinstance(events[-1], BuildDone), events[-1]
    return events[-1]


def build_until(lab, reached, end, tokens=TOKENS, retention=RETENTION) -> list:
    """Begin a build, and call `end` once a progress event is as `reached` says; the events of the build."""
    events: list = []
    there = threading.Event()

    def emit(event) -> None:
        events.append(event)
        if isinstance(event, BuildProgress) and reached(event):
            there.set()

    future = lab.host.build(BuildRequest("b", lab.DOC, list(tokens), retention), emit)
    assert there.wait(20)
    end()
    future.result(20)
    return events
