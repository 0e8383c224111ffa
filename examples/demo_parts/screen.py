"""The terminal: bars and colours on one, plain lines into a file or a pipe."""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table

from .report import Answer, Row, Run, footnote, time_rows, token_rows

STEPS = 10


class Screen:
    """Shows the demo. `terminal` None asks the file."""

    def __init__(self, file: TextIO | None = None, *, terminal: bool | None = None) -> None:
        out = file or sys.stdout
        if terminal is None:
            terminal = out.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
        self._bars = terminal
        # Said outright, because environment variables can make rich believe that a pipe is a terminal.
        plain: dict[str, Any] = {} if terminal else {"no_color": True, "width": 100}
        self._console = Console(file=out, highlight=False, force_terminal=terminal, **plain)

    def heading(self, text: str) -> None:
        self._console.print(f"\n[bold]{escape(text)}[/bold]", soft_wrap=True)

    def line(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    @contextmanager
    def waiting(self) -> Iterator[Callable[[str], None]]:
        """Call the result with what is waited for."""
        if self._bars:
            with self._console.status("...") as status:
                yield lambda text: status.update(f"Waiting: {escape(text)}")
            return
        shown: set[str] = set()

        def show(text: str) -> None:
            if text not in shown:
                shown.add(text)
                self.line(f"  waiting: {text}")

        yield show

    @contextmanager
    def reading(self) -> Iterator[Callable[[dict[str, Any]], None]]:
        """Call the result with each progress of a document."""
        if not self._bars:
            yield PlainProgress(self.line).show
            return
        columns = (
            TextColumn("  {task.description:<18}"), BarColumn(),
            TextColumn("{task.completed:>6,.0f} of {task.total:,.0f} {task.fields[rest]}"),
        )  # fmt: skip
        with Progress(*columns, console=self._console) as progress:
            yield BarProgress(progress).show

    def question(self, text: str) -> None:
        self._console.print(f"\n[bold cyan]Q[/bold cyan] {escape(text)}", soft_wrap=True)
        self._console.print("[bold green]A[/bold green] ", end="")

    def piece(self, text: str) -> None:
        """A piece of an answer, at once."""
        self._console.print(text, end="", markup=False, soft_wrap=True)

    def answered(self, answer: Answer) -> None:
        """Close an answer with its pages and what it took."""
        pages = ", ".join(map(str, answer.pages)) or "none"
        restored = f", restored from {answer.source} in {answer.restore_ms:.0f} ms" if answer.source == "disk" else ""
        self._console.print()
        self._console.print(
            f"[dim]  page {pages} | reused {answer.reused_tokens:,} tokens, prefilled {answer.prefilled_tokens}"
            f"{restored} | first text after {answer.first_text_s:.2f} s[/dim]",
            soft_wrap=True,
        )

    def table(self, run: Run) -> None:
        self._console.print()
        self._console.print(_table("Tokens", ("before the restart", "after it"), token_rows(run)))
        self._console.print(_table("Time to the first text of an answer", ("",), time_rows(run)))
        self._console.print(footnote(run), markup=False)

    def failure(self, text: str) -> None:
        self._console.print(f"[bold red]{escape(text)}[/bold red]", soft_wrap=True)


class BarProgress:
    """One bar for each stage that has a length; the one for tokens follows the one for pages."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._tasks: dict[str, TaskID] = {}

    def show(self, state: dict[str, Any]) -> None:
        stage, total = state["stage"], state["total"]
        if stage not in self._tasks:
            self._close()
        if stage not in LABELS or not total:
            return
        if stage not in self._tasks:
            self._tasks[stage] = self._progress.add_task(LABELS[stage], total=total, rest="")
        rest = f"{state['unit']}{left(state['eta_s'])}"
        self._progress.update(self._tasks[stage], completed=state["done"], total=total, rest=rest)

    def _close(self) -> None:
        """A later stage has begun: the earlier ones are through, though their last event may not have come."""
        for task in self._progress.tasks:
            self._progress.update(task.id, completed=task.total, rest=task.fields["rest"].partition(",")[0])


class PlainProgress:
    """A line at the start of each stage and at every tenth of it."""

    def __init__(self, line: Callable[[str], None]) -> None:
        self._line = line
        self._last: tuple[str, int] = ("", -1)

    def show(self, state: dict[str, Any]) -> None:
        stage, done, total = state["stage"], state["done"], state["total"]
        if stage not in LABELS or not total:
            return
        step = (stage, done * STEPS // total)
        if step == self._last:
            return
        self._last = step
        self._line(f"  {LABELS[stage]}: {done:,} of {total:,} {state['unit']}{left(state['eta_s'])}")


LABELS = {"parsing": "reading pages", "prefilling": "prefilling tokens"}


def left(eta_s: float | None) -> str:
    """The time left, for the end of a line."""
    return f", {eta_s:.0f} s left" if eta_s and eta_s >= 1 else ""


def _table(title: str, columns: Sequence[str], rows: Sequence[Row] | Sequence[tuple[str, str]]) -> Table:
    table = Table(title=title, title_justify="left", show_header=any(columns))
    table.add_column("")
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*row)
    return table
