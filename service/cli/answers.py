"""How answers are shown: text and citations on standard output, everything else on standard error."""

import sys
from typing import Any

from service.cli.output import err, for_terminal


def show_question(text: str) -> None:
    err.print(f"> {for_terminal(text, sys.stderr)}", style="bold", markup=False)


def show_text(text: str) -> None:
    """The next piece of an answer."""
    sys.stdout.write(for_terminal(text))
    sys.stdout.flush()


def show_end(answer: dict[str, Any], names: dict[str, str]) -> None:
    """What comes with an answer; `names` are those of its documents, where there are several."""

    def of(part: dict[str, Any]) -> str:
        return f"{names[part['document_id']]}, " if names else ""

    sys.stdout.write("\n")
    for citation in {(each["document_id"], each["page"], each["quote"]): each for each in answer["citations"]}.values():
        quote = for_terminal(" ".join(citation["quote"].split()))
        label = f" ({for_terminal(citation['label'])})" if citation.get("label") else ""
        sys.stdout.write(f'  {of(citation)}page {citation["page"]}{label}: "{quote}" ({citation["score"]:.2f})\n')
    sys.stdout.flush()
    for span in answer.get("unsupported", ()):
        sentence = " ".join(answer["answer"][span["start"] : span["end"]].split())
        err.print(f'  not found in the document: "{for_terminal(sentence, sys.stderr)}"', style="yellow", markup=False)
    for part in answer["provenance"]:
        if part["mode"] == "fetched":
            pages = _pages(part["first_page"], part["last_page"])
            err.print(f"  fetched from {of(part)}{pages}", style="dim", markup=False)
    if answer["notice"]:
        err.print(f"  {answer['notice']}", style="yellow", markup=False)
    _show_cost(answer["usage"], answer["cache"], answer["timings"])


def show_session(session_id: str) -> None:
    err.print(f"Go on with: --session {session_id}", style="dim", markup=False)


def _show_cost(usage: dict[str, Any], cache: dict[str, Any], timings: dict[str, Any]) -> None:
    miss = f" (snapshot missing: {cache['miss_reason']})" if cache["miss_reason"] else ""
    n_steps, n_accepted = timings.get("steps", 0), timings.get("accepted_tokens", 0)
    steps = f" in {n_steps} steps ({n_accepted} of them read off the text)" if n_accepted else ""
    first = "-" if timings["ttft_ms"] is None else f"{timings['ttft_ms']:.0f} ms"
    err.print(
        f"  {usage['reused_tokens']} tokens reused from {cache['source']}{miss}, {usage['prefilled_tokens']} "
        f"prefilled, {usage['completion_tokens']} generated{steps}; restore {cache['restore_ms']:.0f} ms, first token "
        f"{first}, {timings['decode_tokens_per_s']:.1f} tokens/s",
        style="dim",
        markup=False,
    )


def _pages(first: int, last: int) -> str:
    return f"page {first}" if first == last else f"pages {first} to {last}"
