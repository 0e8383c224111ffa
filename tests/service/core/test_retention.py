"""Which policy a document gets."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.core.retention import Bounds, Policy, check_wish, resolve, stored_policy, usable
from service.core.wishes import Kept, Wish, parse_wish
from service.engine.fake import FakeEngine
from service.engine.messages import EngineInfo, Retention
from service.errors import Invalid, TooLong

BOUNDS = Bounds(room_tokens=768, model="mine")
FULL = Policy("full", automatic=True)


def info(**changes: Any) -> EngineInfo:
    return msgspec.structs.replace(FakeEngine(max_context=8192).info, **changes)


def wish(sink: int = 16, summary: int = 0, window: int = 256) -> Wish:
    return Wish("custom", Kept(sink, summary, window))


@pytest.mark.parametrize(
    ("n_tokens", "changes", "policy"),
    [
        (7424, {}, FULL),
        (7425, {}, Policy("small", True, 16, 0, 256, 2048, 4, 256)),
        (20_000, {}, Policy("small", True, 16, 0, 256, 2048, 10, 256)),
        (8200, {}, Policy("small", True, 16, 0, 256, 1792, 5, 256)),
        (7000, {"resident_tokens": 7000}, FULL),
        (7001, {"resident_tokens": 7000}, Policy("small", True, 16, 0, 256, 1792, 4, 256)),
        (7001, {"resident_tokens": 1024}, Policy("small", True, 16, 0, 256, 768, 10, 256)),
        (7001, {"resident_tokens": 272}, Policy("small", True, 16, 0, 256, 256, 28, 256)),
        (20_000, {"sink_multiple": 256}, Policy("small", True, 256, 0, 256, 2048, 10, 256)),
        (7424, {"n_index_heads": 0}, FULL),
    ],
)
def test_without_a_wish_the_length_decides(n_tokens, changes, policy):
    assert resolve(n_tokens, Wish(), info(**changes), BOUNDS) == policy


def test_a_wish_is_followed_also_where_the_document_would_fit():
    assert resolve(5000, parse_wish("small"), info(), BOUNDS) == Policy("small", False, 16, 0, 256, 0, 1, 256)
    assert resolve(5000, parse_wish("full"), info(), BOUNDS) == Policy("full", False)


def test_a_document_of_which_every_token_would_be_kept_is_kept_whole():
    assert resolve(1552, parse_wish("balanced"), info(), BOUNDS) == Policy("full", False)
    assert resolve(1553, parse_wish("balanced"), info(), BOUNDS).is_windowed


@pytest.mark.parametrize(
    ("n_tokens", "text", "changes", "words"),
    [
        (7425, "full", {}, ["7,425", "8,192", "768", "7,424 can be kept whole", "`balanced` or `small`"]),
        (7001, "full", {"resident_tokens": 7000}, ["7,001", "memory for documents holds 7,000", "`balanced`"]),
        (7425, "", {"n_index_heads": 0}, ["7,425", "8,192", "`preread models index-heads mine`", "upload it again"]),
        (7425, "full", {"n_index_heads": 0}, ["7,425", "`preread models index-heads mine`"]),
        (1_000_001, "", {}, ["1,000,001", "at most 1,000,000", "PREREAD_MAX_DOCUMENT_TOKENS", "in parts"]),
        (1_000_001, "small", {}, ["1,000,001"]),
        (9000, "", {"resident_tokens": 200}, ["memory for documents holds 200", "shorter part"]),
        (9000, "", {"max_context": 900}, ["context is 900", "768", "shorter part"]),
    ],
)
def test_what_cannot_be_kept_is_refused_with_the_numbers_and_what_to_do(n_tokens, text, changes, words):
    with pytest.raises(Invalid) as refused:
        resolve(n_tokens, parse_wish(text), info(**changes), BOUNDS)
    for word in words:
        assert word in refused.value.detail
    assert isinstance(refused.value, TooLong)


@pytest.mark.parametrize(
    ("asked", "changes", "code", "words"),
    [
        (wish(), {"n_index_heads": 0}, "no_index_heads", "preread models index-heads mine"),
        (wish(), {"max_context": 900}, "invalid", "hold 132 tokens beside .* parts of 256"),
        (wish(sink=2049), {}, "invalid", "sink_tokens is 2049; it must be at most 2048"),
        (wish(sink=2049), {"sink_multiple": 256}, "invalid", "2049, which this engine rounds up to 2304; .* 2048"),
        (wish(sink=700), {"max_context": 1600}, "invalid", "at most 320"),
        (wish(summary=7000, window=500), {}, "invalid", "7516 together; at most 7424"),
        (wish(window=10**30), {}, "invalid", "together; at most 7424"),
        (wish(summary=700), {"resident_tokens": 900}, "invalid", "972 together; at most 900"),
    ],
)
def test_a_wish_that_no_document_can_have(asked, changes, code, words):
    with pytest.raises(Invalid, match=words) as refused:
        check_wish(asked, info(**changes), BOUNDS)
    assert (refused.value.code, refused.value.param) == (code, "retention")


@pytest.mark.parametrize("text", ["", "full", "balanced", "small"])
def test_presets_are_wishes_that_can_be_had(text):
    check_wish(parse_wish(text), info(), BOUNDS)


@given(
    n_tokens=st.integers(1, 300_000),
    sink=st.integers(4, 600),
    summary=st.sampled_from([0, 300]),
    window=st.integers(1, 900),
    multiple=st.sampled_from([1, 256]),
    segment=st.integers(256, 5000),
    context=st.sampled_from([2048, 4096, 8192]),
)
def test_segments_lie_within_the_context_and_hold_every_token(
    n_tokens, sink, summary, window, multiple, segment, context
):
    engine, bounds = info(max_context=context, sink_multiple=multiple), Bounds(512, segment)
    try:
        policy = resolve(n_tokens, wish(sink, summary, window), engine, bounds)
    except Invalid:
        return
    assert policy.next_position(n_tokens) + 512 <= context
    assert usable(policy, n_tokens, engine, bounds)
    assert stored_policy(policy.stored()) == policy
    if policy.segment_tokens:
        assert policy.segment_tokens % 256 == 0
        assert policy.sink_tokens <= policy.segment_tokens <= max(segment, 256)
        assert policy.sink_tokens % multiple == 0
        assert (policy.n_segments - 1) * policy.segment_tokens < n_tokens <= policy.n_segments * policy.segment_tokens
        last = n_tokens - (policy.n_segments - 1) * policy.segment_tokens
        assert last > policy.segment_tokens - 256 * policy.n_segments  # none is a mere remainder


def test_a_policy_that_cannot_be_kept_to_any_more():
    windowed = resolve(20_000, parse_wish("balanced"), info(), BOUNDS)
    assert usable(windowed, 20_000, info(), BOUNDS)
    assert usable(windowed, 20_000, info(max_context=100_000), BOUNDS)
    for changes in (
        {"n_index_heads": 0},
        {"max_context": 2700},
        {"resident_tokens": 1000},
        {"sink_multiple": 256},
    ):
        assert not usable(windowed, 20_000, info(**changes), BOUNDS)
    assert not usable(FULL, 7425, info(), BOUNDS)
    assert usable(FULL, 7424, info(), BOUNDS)


def test_what_the_engine_is_told():
    assert FULL.retention is None
    assert stored_policy(None) == FULL
    policy = resolve(20_000, parse_wish("balanced"), info(), BOUNDS)
    assert policy.retention == Retention(16, 1024, 512, 2048, 256)
    assert (policy.next_position(20_000), policy.n_kept) == (16 + 2048 + 256, 1552)
    assert resolve(5000, parse_wish("small"), info(), BOUNDS).next_position(5000) == 5000


def test_where_the_engine_keeps_no_summary_none_is_asked_for():
    without, asked = info(has_slots=False), wish(16, 1024, 512)
    assert resolve(20_000, asked, without, BOUNDS).summary_tokens == 0
    policy = resolve(20_000, asked, info(), BOUNDS)
    assert policy.summary_tokens == 1024
    assert usable(policy, 20_000, info(), BOUNDS)
    assert not usable(policy, 20_000, without, BOUNDS)
