"""What was measured, whether it is as promised, and the closing table."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

Row = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class Reading:
    """A document that was read. `prefill_s`: from the start of its prefill to the end of it."""

    n_pages: int
    n_tokens: int
    kv_type: str
    snapshot_nbytes: int
    prefilled_tokens: int
    prefill_s: float
    total_s: float

    @classmethod
    def of(cls, document: dict[str, Any], *, prefill_s: float, total_s: float) -> "Reading":
        snapshot = document["snapshot"]
        return cls(
            n_pages=document["page_count"],
            n_tokens=document["token_count"],
            kv_type=snapshot["kv_type"],
            snapshot_nbytes=snapshot["nbytes"],
            prefilled_tokens=snapshot["prefilled_tokens"],
            prefill_s=prefill_s,
            total_s=total_s,
        )


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer as it was streamed. `first_text_s`: from sending the question to the first text, here."""

    question: str
    text: str
    first_text_s: float
    reused_tokens: int
    prefilled_tokens: int
    source: str
    restore_ms: float
    miss_reason: str | None
    pages: tuple[int, ...]

    @classmethod
    def of(cls, body: dict[str, Any], *, question: str, first_text_s: float) -> "Answer":
        usage, cache = body["usage"], body["cache"]
        return cls(
            question=question,
            text=body["answer"],
            first_text_s=first_text_s,
            reused_tokens=usage["reused_tokens"],
            prefilled_tokens=usage["prefilled_tokens"],
            source=cache["source"],
            restore_ms=cache["restore_ms"],
            miss_reason=cache["miss_reason"],
            pages=tuple(dict.fromkeys(citation["page"] for citation in body["citations"])),
        )


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the demo. The counters are the engine's own, of document tokens that went through prefill."""

    reading: Reading
    before: Sequence[Answer]
    after: Answer
    counter_before: int
    counter_after: int

    @property
    def resident_s(self) -> float:
        """Time to first text while the document's KV was in memory: the median of the first server's answers."""
        return median(answer.first_text_s for answer in self.before)

    @property
    def reprefill_s(self) -> float:
        """Time to first text if the document had to be prefilled again."""
        return self.reading.prefill_s + self.resident_s

    @property
    def ratio(self) -> float:
        return self.reprefill_s / self.after.first_text_s


def wrong_answers(answers: Sequence[Answer], expected: dict[str, Sequence[str]]) -> list[str]:
    """A sentence for each answer that has none of the values its question asks for (`expected`)."""
    found = []
    for answer in answers:
        values = expected[answer.question]
        if not any(value.lower() in answer.text.lower() for value in values):
            wanted = " or ".join(map(repr, values))
            found.append(f"{answer.question!r} was answered without {wanted}: {answer.text!r}")
    return found


def broken_promises(run: Run) -> list[str]:
    """A sentence for each thing about the restart that is not as promised."""
    found = []
    if run.after.reused_tokens < run.reading.n_tokens:
        found.append(
            f"After the restart {run.after.reused_tokens:,} tokens were reused, the document has "
            f"{run.reading.n_tokens:,} (reason: {run.after.miss_reason or 'none given'})."
        )
    if run.counter_after:
        found.append(f"After the restart the engine prefilled {run.counter_after:,} tokens of the document.")
    if run.after.source != "disk":
        found.append(f"After the restart the snapshot came from {run.after.source!r} instead of the disk.")
    return found


def token_rows(run: Run) -> list[Row]:
    """What was computed: label, before the restart, after it."""
    reading, last, after = run.reading, run.before[-1], run.after
    prefilled = reading.prefilled_tokens + sum(answer.prefilled_tokens for answer in run.before)
    return [
        ("Document tokens", f"{reading.n_tokens:,}", f"{reading.n_tokens:,}"),
        ("Questions asked", str(len(run.before)), "1"),
        ("Prefilled tokens", f"{prefilled:,}", f"{after.prefilled_tokens:,}"),
        ("  of the document (engine's counter)", f"{run.counter_before:,}", f"{run.counter_after:,}"),
        ("Reused tokens (last question)", f"{last.reused_tokens:,}", f"{after.reused_tokens:,}"),
        ("Document's KV from (last question)", last.source, after.source),
        ("Restore (last question)", f"{last.restore_ms:.0f} ms", f"{after.restore_ms:.0f} ms"),
    ]


def time_rows(run: Run) -> list[tuple[str, str]]:
    """Times to the first text of an answer, as the client saw them."""
    return [
        ("From the snapshot, server restarted", f"{run.after.first_text_s:.2f} s"),
        ("By prefilling the document again (*)", f"{run.reprefill_s:.2f} s"),
        ("Ratio", f"{run.ratio:.0f}x"),
    ]


def footnote(run: Run) -> str:
    """How the figures came about."""
    return (
        f"(*) Measured in this run: {run.reading.prefill_s:.2f} s from the start of the document's prefill to its "
        f"end, plus {run.resident_s:.2f} s, the median time to first text of the {len(run.before)} questions "
        "before the restart. The snapshot "
        f"({run.reading.snapshot_nbytes / 1e6:.0f} MB, KV type {run.reading.kv_type}) was written just before, so "
        "the operating system may have had it in its page cache."
    )
