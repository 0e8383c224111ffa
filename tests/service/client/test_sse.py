"""Events as they are read from bytes that are cut anywhere."""

import json
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from service.client.sse import Parser

TEXTS = ["Gebühr", "a\u2028b\x85c", "😀", ""]


@given(cuts=st.lists(st.integers(0, 400), max_size=12), newline=st.sampled_from(["\n", "\r\n"]))
def test_events_are_the_same_wherever_the_body_is_cut(cuts, newline):
    frames = [
        f"id: {n}\nevent: token\ndata: {json.dumps({'text': t}, ensure_ascii=False)}\n\n" for n, t in enumerate(TEXTS)
    ]
    body = "".join([": still here\n\n", *frames]).replace("\n", newline).encode()
    edges = sorted({0, len(body), *(cut for cut in cuts if cut < len(body))})
    parser = Parser()
    comment, *read = [event for a, b in pairwise(edges) for event in parser.feed(body[a:b])]
    assert (comment.name, comment.data) == ("comment", b"still here")
    assert [json.loads(event.data)["text"] for event in read] == TEXTS
    assert [event.id for event in read] == ["0", "1", "2", "3"]
    assert {event.name for event in read} == {"token"}


def test_an_event_that_was_not_finished_does_not_count():
    assert list(Parser().feed(b'data: {"a": 1}\n')) == []


def test_an_event_without_a_name_is_a_message_and_data_may_have_lines():
    (event,) = Parser().feed(b"data:one\ndata: two\nretry: 5\n\n")
    assert (event.name, event.id, event.data) == ("message", "", b"one\ntwo")
