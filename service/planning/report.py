"""A plan as text for a terminal."""

from collections.abc import Iterator

from service.engine.ledger import Ledger
from service.planning.plan import Plan
from service.planning.search import Setting

_GB = 1e9


def report(plan: Plan, ledger: Ledger) -> str:
    """All of a plan, verdict first."""
    return "\n".join(_lines(plan, ledger))


def _lines(plan: Plan, ledger: Ledger) -> Iterator[str]:
    model, card, wanted = plan.model, plan.card, plan.wanted
    yield f"{model['name']}: {model['weights']}, {model['n_parameters'] / 1e9:.2f}B parameters"
    yield (
        f"{card['name']}: {card['memory_nbytes'] / 2**30:.1f} GiB, {card['bandwidth_gbps']:.0f} GB/s, "
        f"{card['architecture']}, {_dtypes(card['dtypes'])}; {card['engine']} engine"
    )
    how = f"{wanted['rows']:,} rows of it in memory" if wanted["windowed"] else "kept whole"
    yield f"document of {wanted['context']:,} tokens, {how}; KV {wanted['kv_type']}; {wanted['users']} at once"
    if wanted["draft_model"]:
        yield f"draft model: {wanted['draft_model']}, with as many tokens of documents"
    yield ""
    yield "FITS" if plan.fits else "DOES NOT FIT"
    yield from (f"  {problem}" for problem in plan.problems)
    yield from ("", "Memory", ledger.table(), "")
    kv = plan.kv_bytes_per_token
    yield f"KV of a token: {kv.codes:,} bytes of codes, {kv.stored:,} stored with scales, {kv.reads:,} read by a step"
    yield f"snapshot on disk: {plan.snapshot_nbytes / _GB:.2f} GB; in memory {plan.resident_nbytes / _GB:.2f} GB"
    yield f"weights read by a step: {plan.step_weights_nbytes / _GB:.2f} GB"
    yield from ("", "Decode, at most (bandwidth over bytes read)")
    yield from _table(
        ("context", "rows", "GB a step", "tok/s", f"all {wanted['users']}"),
        [
            (f"{b.context:,}", f"{b.rows:,}", f"{b.nbytes / _GB:.2f}", f"{b.tok_s:.1f}", f"{b.total_tok_s:.1f}")
            for b in plan.bounds
        ],
    )
    yield ""
    yield f"Reading the document once: about {plan.prefill.seconds:.1f} s ({plan.prefill.tok_s:.0f} tok/s, estimated)"
    yield from _table(
        ("tier", "GB/s", "restore s", "times faster", "pays above GB/s"),
        [
            (
                r.tier, f"{r.gbps:.2f}{'' if r.measured else ' (typical)'}", f"{r.seconds:.2f}",
                f"{r.times_faster:.1f}", f"{r.break_even_gbps:.3f}",
            )
            for r in plan.restore
        ],
    )  # fmt: skip
    yield from _settings(plan)
    if plan.notes:
        yield ""
    yield from (f"Note: {note}." for note in plan.notes)


def _settings(plan: Plan) -> Iterator[str]:
    yield from ("", "Settings that fit, best first (retention: sinks + summary + window)")
    if not plan.settings:
        yield "  none: take a smaller model, a shorter document, or a card with more memory"
        return
    header = ("bits", "KV", "retention", "rows", "GiB left", "reserve", "tok/s at most")
    yield from _table(header, [_setting(setting) for setting in plan.settings])
    if plan.conversion is not None:
        first = "after `preread models import`, " if plan.model["kind"] == "gguf" else ""
        yield f"To make the first of them: {first}{plan.conversion.command}"


def _setting(s: Setting) -> tuple[str, ...]:
    free, reserve = s.free_nbytes / 2**30, s.reserve_nbytes / 2**30
    return f"{s.bits:.2f}", s.kv_type, s.retention, f"{s.rows:,}", f"{free:.2f}", f"{reserve:.2f}", f"{s.tok_s:.1f}"


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(len(line[i]) for line in (header, *rows)) for i in range(len(header))]
    for line in (header, *rows):
        yield "  " + "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))


def _dtypes(dtypes: dict[str, bool]) -> str:
    missing = [name for name, has in dtypes.items() if not has]
    return " ".join(name for name, has in dtypes.items() if has) + (f" (no {', '.join(missing)})" if missing else "")
