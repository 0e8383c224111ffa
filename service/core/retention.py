"""From a wish and a document's length to what stays in memory of it, and how it is read.

A document that fits is kept whole. Another one is *windowed*: read in segments, all of its KV kept on disk, and only
its first tokens (sinks), a number of chosen ones (summary) and its last ones (window) in memory.
"""

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from service.core.wishes import AUTOMATIC, FULL, PRESETS, Kept, Wish
from service.engine.messages import EngineInfo, Retention
from service.errors import Invalid, TooLong

DEFAULT_WINDOWED = "small"
"""Not `balanced`: what is fetched carries the answers. Of ten questions about facts in 19,700 tokens of real text the
demo model answered nine with `small` and eight with `balanced`, which takes six times the memory."""
SEGMENT_MULTIPLE = 256
QUESTION_GAP = 256
"""Positions that an engine leaves free at most between chosen tokens and a question."""
FETCH_TOKENS = 256
"""A question brings back at most so many tokens of what is not in memory."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """The operator's: `room_tokens` of the context stay free for question and answer, a segment has at most
    `segment_tokens`, a windowed document at most `max_document_tokens`. `model` is how commands call the model."""

    room_tokens: int
    segment_tokens: int = 2048
    max_document_tokens: int = 1_000_000
    model: str = "NAME"


class Policy(msgspec.Struct, frozen=True):
    """What was chosen for a document. `preset`: `full`, `balanced`, `small` or `custom`; `automatic`: nobody asked
    for it. A document that is kept whole has no numbers."""

    preset: str
    automatic: bool
    sink_tokens: int = 0
    summary_tokens: int = 0
    window_tokens: int = 0
    segment_tokens: int = 0
    n_segments: int = 1
    fetch_tokens: int = 0

    @property
    def is_windowed(self) -> bool:
        return self.preset != FULL

    @property
    def n_kept(self) -> int:
        """Tokens in memory of a windowed document."""
        return self.sink_tokens + self.summary_tokens + self.window_tokens

    @property
    def retention(self) -> Retention | None:
        """For the engine."""
        if not self.is_windowed:
            return None
        return Retention(
            self.sink_tokens, self.summary_tokens, self.window_tokens, self.segment_tokens, self.fetch_tokens
        )

    def n_read_at_once(self, n_tokens: int) -> int:
        """Tokens in memory while it is read."""
        return self.sink_tokens + self.segment_tokens if self.segment_tokens else n_tokens

    def end(self, n_tokens: int) -> int:
        """The position behind its longest segment."""
        return self.sink_tokens + self.segment_tokens if self.segment_tokens else n_tokens

    def next_position(self, n_tokens: int) -> int:
        """Where a question begins."""
        gap = QUESTION_GAP if self.summary_tokens and self.segment_tokens else 0
        return self.end(n_tokens) + gap

    def stored(self) -> dict[str, Any]:
        """For the document's row, and for people."""
        return msgspec.to_builtins(self)


def stored_policy(stored: dict[str, Any] | None) -> Policy:
    """Of a document's row; documents of before there was a choice are kept whole."""
    return Policy(FULL, automatic=True) if stored is None else msgspec.convert(stored, Policy)


def check_wish(wish: Wish, info: EngineInfo, bounds: Bounds) -> None:
    """Raises Invalid for a wish that no document could have with this model and this budget."""
    if wish.kept is None:
        return
    if not info.n_index_heads:
        raise Invalid(
            f"Retention `{wish.preset}` keeps a part of a document in memory and finds the rest by the model's index "
            f"heads, which {why_no_heads(info, bounds)}, or leave `retention` out.",
            code="no_index_heads",
            param="retention",
        )
    kept = _rounded(wish.kept, info)
    if not _most_segment(kept, info, bounds):
        if not _most_sinks(kept, info, bounds):
            raise Invalid(
                f"The model's context and memory hold {_most_resident(info, bounds):,} tokens beside question and "
                f"answer: too little to read a document in parts of {SEGMENT_MULTIPLE}. It has to be kept whole.",
                param="retention",
            )
        raise Invalid(
            f"sink_tokens is {_asked(wish.kept.sink_tokens, kept.sink_tokens)}; it must be at most "
            f"{_most_sinks(kept, info, bounds)}, so that segments of the document fit the model's context behind them.",
            param="retention",
        )
    most = _most_resident(info, bounds)
    if kept.n_tokens > most:
        raise Invalid(
            f"sink_tokens, summary_tokens and window_tokens are {kept.n_tokens} together; at most {most} tokens of a "
            "document can stay in memory. Ask for less.",
            param="retention",
        )


def resolve(n_tokens: int, wish: Wish, info: EngineInfo, bounds: Bounds) -> Policy:
    """The policy of a document of `n_tokens` tokens. Without a wish it is kept whole if that fits, else as
    `DEFAULT_WINDOWED`.

    Raises TooLong or Invalid with the numbers, and what to do.
    """
    automatic, fits = wish.preset == AUTOMATIC, _fits_whole(n_tokens, info, bounds)
    if fits and (wish.kept is None or n_tokens <= _rounded(wish.kept, info).n_tokens):
        return Policy(FULL, automatic)  # also where the wish would keep every token
    chosen = _chosen(info, bounds) if automatic else wish
    if chosen is None or chosen.kept is None:
        raise TooLong(f"{_why_not_whole(n_tokens, info, bounds)} {_advice(info, bounds)}", param="file")
    check_wish(chosen, info, bounds)
    if n_tokens > bounds.max_document_tokens:
        raise TooLong(
            f"The document has {n_tokens:,} tokens, and this server reads at most {bounds.max_document_tokens:,} of "
            "one (PREREAD_MAX_DOCUMENT_TOKENS). Upload it in parts.",
            code="document_too_long",
            param="file",
        )
    return _windowed(n_tokens, chosen.preset, automatic, _rounded(chosen.kept, info), info, bounds)


def usable(policy: Policy, n_tokens: int, info: EngineInfo, bounds: Bounds) -> bool:
    """Whether a document can still be kept so, with the model and the budget there are now."""
    if not policy.is_windowed:
        return _fits_whole(n_tokens, info, bounds)
    return (
        info.n_index_heads > 0
        and policy.sink_tokens % info.sink_multiple == 0
        and (info.has_slots or not policy.summary_tokens)
        and policy.next_position(n_tokens) + bounds.room_tokens <= info.max_context
        and policy.n_read_at_once(n_tokens) <= _most_resident(info, bounds)
        and policy.n_kept <= _most_resident(info, bounds)
    )


def _windowed(n_tokens: int, preset: str, automatic: bool, kept: Kept, info: EngineInfo, bounds: Bounds) -> Policy:
    segment, n_segments = 0, 1
    if not _fits_whole(n_tokens, info, bounds):
        most = _most_segment(kept, info, bounds)
        # Of about equal length: a short last segment would have little to look at.
        segment = _up(-(-n_tokens // -(-n_tokens // most)), SEGMENT_MULTIPLE)
        n_segments = -(-n_tokens // segment)
    return Policy(
        preset, automatic, kept.sink_tokens, kept.summary_tokens, kept.window_tokens, segment, n_segments, FETCH_TOKENS
    )


def _chosen(info: EngineInfo, bounds: Bounds) -> Wish | None:
    """What is chosen without a wish; None when that cannot be had."""
    wish = Wish(DEFAULT_WINDOWED, PRESETS[DEFAULT_WINDOWED])
    with suppress(Invalid):
        check_wish(wish, info, bounds)
        return wish
    return None


def _fits_whole(n_tokens: int, info: EngineInfo, bounds: Bounds) -> bool:
    return n_tokens <= _most_resident(info, bounds)


def _most_resident(info: EngineInfo, bounds: Bounds) -> int:
    """How many tokens of a document can be in memory, also while it is read: what the context leaves, and what the
    device holds."""
    most = max(0, info.max_context - bounds.room_tokens)
    return min(most, info.resident_tokens) if info.resident_tokens else most


def _most_segment(kept: Kept, info: EngineInfo, bounds: Bounds) -> int:
    """The longest segment behind these sinks, a multiple of 256 that holds them; 0 when there is none."""
    gap = QUESTION_GAP if kept.summary_tokens else 0
    behind = min(_most_resident(info, bounds), info.max_context - bounds.room_tokens - gap)
    most = min(bounds.segment_tokens, behind - kept.sink_tokens) // SEGMENT_MULTIPLE * SEGMENT_MULTIPLE
    return most if most >= max(kept.sink_tokens, SEGMENT_MULTIPLE) else 0


def _most_sinks(kept: Kept, info: EngineInfo, bounds: Bounds) -> int:
    counts = range(0, bounds.segment_tokens + 1, info.sink_multiple)
    fitting = (n for n in counts if _most_segment(msgspec.structs.replace(kept, sink_tokens=n), info, bounds))
    return max(fitting, default=0)


def _rounded(kept: Kept, info: EngineInfo) -> Kept:
    """With sinks as this engine can keep them, and without a summary where it keeps none."""
    return Kept(
        _up(kept.sink_tokens, info.sink_multiple), kept.summary_tokens if info.has_slots else 0, kept.window_tokens
    )


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _asked(asked: int, used: int) -> str:
    return str(asked) if asked == used else f"{asked}, which this engine rounds up to {used}"


def _why_not_whole(n_tokens: int, info: EngineInfo, bounds: Bounds) -> str:
    context = max(0, info.max_context - bounds.room_tokens)
    if 0 < info.resident_tokens < context:
        return f"The document has {n_tokens:,} tokens, and the memory for documents holds {info.resident_tokens:,}."
    return (
        f"The document has {n_tokens:,} tokens. The model's context is {info.max_context:,}, of which "
        f"{bounds.room_tokens:,} are kept for question and answer, so {context:,} can be kept whole."
    )


def _advice(info: EngineInfo, bounds: Bounds) -> str:
    if _chosen(info, bounds) is not None:
        return "Upload it with retention `balanced` or `small`, or without: then a part of it stays in memory."
    if info.n_index_heads:
        return "Upload a shorter part, or serve a model with a longer context or more memory."
    return (
        "A longer one can be kept in part with the model's index heads, which find the rest of it, and "
        f"{why_no_heads(info, bounds)}, then upload it again."
    )


def why_no_heads(info: EngineInfo, bounds: Bounds) -> str:
    """The rest of a sentence about index heads where there are none: why, and what to do."""
    if info.engine == "llamacpp":
        return "llama.cpp does not give: serve the model with another engine (PREREAD_ENGINE)"
    return f"are not known: run `preread models index-heads {bounds.model}` and start the server again"
