"""How far a long command is: bars on a terminal, lines elsewhere, so that it is never silent for minutes."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from service.cli.output import err

LINE_EVERY_S = 10.0
"""Between two lines of one stage."""
LEAST_MINUTES_LEFT = 2

_STAGES = {
    "queued": "waiting",
    "parsing": "reading pages",
    "prefilling": "prefilling",
    "compacting": "compacting",
    "persisting": "writing the snapshot",
    "ready": "ready",
}

Told = Callable[[str, int, int], None]
"""Takes (stage, done, total)."""


@contextmanager
def stages(beginning: str) -> Iterator[Told]:
    """A bar per stage on standard error, or lines where that is no terminal. `beginning` is said at once: what comes
    before the first stage, such as imports, takes seconds."""
    if not err.is_terminal:
        err.print(f"{beginning} ...", markup=False)
        yield Lines()
        return
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    left = TimeRemainingColumn(compact=True, elapsed_when_finished=False)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), left)
    with Progress(*columns, console=err, transient=True) as bars:
        tasks: dict[str, Any] = {beginning: bars.add_task(beginning, total=None)}

        def told(stage: str, done: int, total: int) -> None:
            if first := tasks.pop(beginning, None):
                bars.remove_task(first)
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total)
            bars.update(tasks[stage], completed=done, total=total)

        yield told


class HowFar(Protocol):
    """`done` of `total` `unit` of a document's `stage`; a total of 0 is not known yet."""

    @property
    def stage(self) -> str: ...
    @property
    def done(self) -> int: ...
    @property
    def total(self) -> int: ...
    @property
    def unit(self) -> str: ...


@contextmanager
def document_bar(name: str) -> Iterator[Callable[[HowFar], None]]:
    """A bar for a document that is being read; call it with how far that is."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[unit]}"),
        TimeRemainingColumn(compact=True),
    )  # fmt: skip
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bars:
        bar = bars.add_task(name, total=None, unit="")

        def show(far: HowFar) -> None:
            stage = f"{name}: {_STAGES.get(far.stage, far.stage)}"
            bars.update(bar, description=stage, completed=far.done, total=far.total or None, unit=far.unit)

        yield show


@contextmanager
def sending_bar(name: str) -> Iterator[Callable[[int, int | None], None]]:
    """A bar for a file that is being sent; call it with the bytes that were sent and all there are."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn(compact=True))
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bars:
        bar = bars.add_task(f"{name}: sending", total=None)
        yield lambda sent, total: bars.update(bar, completed=sent, total=total)


class Lines:
    """A line when a stage begins and when it ends, and one each `LINE_EVERY_S` between, with the time that is left
    where that is minutes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._stage = ""
        self._said_at = 0.0
        self._began, self._began_with = 0.0, 0

    def __call__(self, stage: str, done: int, total: int) -> None:
        now = self._clock()
        if stage == self._stage and done < total and now - self._said_at < LINE_EVERY_S:
            return
        if stage != self._stage:
            self._began, self._began_with = now, done
        self._stage, self._said_at = stage, now
        share = f": {100 * done // total} %" if total else ""
        err.print(f"  {stage}{share}{self._left(done, total, now)}", markup=False)

    def _left(self, done: int, total: int, now: float) -> str:
        """By the speed of this stage so far."""
        if done <= self._began_with or done >= total:
            return ""
        minutes = (now - self._began) / (done - self._began_with) * (total - done) / 60
        return f", about {minutes:.0f} min left" if minutes >= LEAST_MINUTES_LEFT else ""
