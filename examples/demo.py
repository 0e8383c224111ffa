"""Reads a contract once, answers questions about it, restarts the server, and answers another one at once.

    python examples/demo.py [--dir .demo]

Everything is done the way a user would: a real `preread serve`, the Python client, a real model. Exit status 0 only
when every answer was right and nothing of the document was computed again after the restart.
"""

import argparse
import json
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
from demo_parts.client import Client
from demo_parts.errors import DemoError
from demo_parts.report import Answer, Run, broken_promises, wrong_answers
from demo_parts.screen import Screen
from demo_parts.server import ENDING, ROOT, Server

from service.settings import Settings

CONTRACT = ROOT / "examples" / "contract"
# Three questions, a follow-up of the third, and one after the restart; their ids in questions.json. They are among
# those that the small model answers rightly: what is shown here is how, not how well it reads.
FIRST, FOLLOW_UP, AFTER_RESTART = ("q24", "q21", "q03"), "q05", "q34"
DOCUMENT_PREFILL = "preread_engine_document_prefill_tokens_total"
MARK = "made-by-the-demo"


class Demo:
    """The story, told on a screen."""

    def __init__(self, server: Server, screen: Screen) -> None:
        self._server = server
        self._screen = screen
        questions = json.loads((CONTRACT / "questions.json").read_text(encoding="utf-8"))
        self._questions = {entry["id"]: entry["question"] for entry in questions}
        self._expected = {entry["question"]: entry["values"] for entry in questions}

    def run(self) -> int:
        """The exit status."""
        screen = self._screen
        screen.heading("1. Start the server")
        with self._serving() as client:
            screen.heading("2. Upload a contract; the model reads it once")
            document_id = client.upload(CONTRACT / "contract.pdf")
            with screen.reading() as show:
                reading = client.read(document_id, show)
            screen.line(
                f"  {reading.n_pages} pages, {reading.n_tokens:,} tokens, read in {reading.total_s:.1f} s; "
                f"its KV is a snapshot of {reading.snapshot_nbytes / 1e6:.0f} MB on disk ({reading.kv_type})"
            )
            screen.heading("3. Three questions and a follow-up, in one session")
            session_id = client.new_session(document_id)
            before = [self._ask(client, session_id, name) for name in (*FIRST, FOLLOW_UP)]
            counter_before = client.counter(DOCUMENT_PREFILL)
            screen.heading("4. Stop the server, and start it again")
        with self._serving() as client:
            screen.heading("5. One more question in the same session")
            after = self._ask(client, session_id, AFTER_RESTART)
            run = Run(reading, before, after, counter_before, client.counter(DOCUMENT_PREFILL))
            screen.heading("6. Stop the server")
        screen.table(run)
        return self._verdict(run)

    @contextmanager
    def _serving(self) -> Iterator[Client]:
        pid = self._server.start()
        self._screen.line(f"  preread serve, process {pid}, {self._server.base_url}")
        client = Client(self._server.base_url)
        try:
            with self._screen.waiting() as show:
                ready_s = self._server.wait_ready(client, show)
            self._screen.line(f"  ready after {ready_s:.1f} s")
            yield client
            stop_s = self._server.stop()
            self._screen.line(f"  stopped in {stop_s:.1f} s: process {pid} and its engine are gone")
        finally:
            client.close()

    def _ask(self, client: Client, session_id: str, name: str) -> Answer:
        self._screen.question(self._questions[name])
        answer = client.ask(session_id, self._questions[name], self._screen.piece)
        self._screen.answered(answer)
        return answer

    def _verdict(self, run: Run) -> int:
        found = [*wrong_answers([*run.before, run.after], self._expected), *broken_promises(run)]
        for sentence in found:
            self._screen.failure(sentence)
        if not found:
            self._screen.heading("All answers are right, and nothing of the document was prefilled after the restart.")
        return bool(found)


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--dir", type=Path, default=ROOT / ".demo", help="emptied at start (default: .demo)")
    folder = arguments.parse_args().dir.absolute()
    screen = Screen()
    # A closed terminal or a `kill` must not leave the server behind either.
    for number in ENDING:
        signal.signal(number, signal.default_int_handler)
    try:
        make_empty(folder)
        server = Server(folder / "data", model_dir(), folder / "server.log")
    except DemoError as error:
        screen.failure(str(error))
        return 1
    return play(server, screen)


def play(server: Server, screen: Screen) -> int:
    """Run the demo and, however it ends, leave no server behind."""
    try:
        return Demo(server, screen).run()
    except KeyboardInterrupt:
        screen.failure("\nInterrupted.")
        return 130
    except (DemoError, httpx.HTTPError) as error:
        said = str(error) if isinstance(error, DemoError) else f"The server does not answer ({type(error).__name__})."
        screen.failure(f"\n{said}\nThe end of the server's log:")
        screen.line(server.log_tail())
        return 1
    finally:
        with suppress(DemoError):
            server.stop()


def model_dir() -> Path:
    """The imported model that `preread serve` would take too. Raises DemoError when it is not there."""
    settings = Settings()
    if settings.engine == "torch" and not (settings.model_dir / "preread.json").is_file():
        raise DemoError(f"There is no imported model in {settings.model_dir}. `make model` makes the demo model.")
    return settings.model_dir


def make_empty(folder: Path) -> None:
    """Begin with an empty folder. Raises DemoError for one that the demo did not make."""
    if folder.exists() and any(folder.iterdir()):
        if not (folder / MARK).exists():
            raise DemoError(f"{folder} has files that are not the demo's: name another folder with --dir.")
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARK).touch()


if __name__ == "__main__":
    sys.exit(main())
