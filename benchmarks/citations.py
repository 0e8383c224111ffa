"""Whether citations name the page that has the fact, and what watching attention costs: writes docs/citations.md.

    apt-get install libtasn1-doc zlib1g-dev bzip2-doc
    python -m benchmarks.citations [--data DIR] [--save FILE] [--only NAME ...] [--only-report]

Asks the 40 questions about the example contract and those of `citation_cases` about three manuals, through the service
in this process. Reading the manuals takes some minutes; with `--data` they are read once. Ends with status 1 when of
the right answers less than 90 % cite a page with the fact, or watching costs 5 % of decoding.
"""

import argparse
import asyncio
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, cast

import msgspec

from benchmarks.bench_report import machine
from benchmarks.citation_cases import SOURCES, Case, Source
from benchmarks.citation_page import Asked, Cost, Document, Run, enough, page_of
from benchmarks.contract_answers import is_right
from service.api.principal import OWNER
from service.cli.config import read_settings
from service.cli.documents import read_document
from service.cli.local import check_start
from service.core.adapters import Given, open_adapters
from service.core.engines import open_engine
from service.core.sampling import Question
from service.core.services import Services, open_services
from service.engine.local import LocalEngine
from service.engine.messages import AnswerDone, AnswerEvent, AnswerRequest
from service.engine.protocol import EngineClient
from service.errors import ServiceError

PAGE = Path(__file__).parents[1] / "docs" / "citations.md"
MAX_TOKENS = 48
COST_QUESTIONS = 3
COST_ROUNDS = 2


class Listening:
    """An engine whose last answer is known with all that it says about itself."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.done: AnswerDone | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def answer(self, request: AnswerRequest) -> AsyncIterator[AnswerEvent]:
        async for event in self._engine.answer(request):
            if isinstance(event, AnswerDone):
                self.done = event
            yield event


class Asker:
    """Reads documents and asks about them, each question in a session of its own."""

    def __init__(self, services: Services, engine: Listening) -> None:
        self._services = services
        self._engine = engine

    async def ask(self, document_id: str, question: str) -> tuple[dict[str, Any], AnswerDone]:
        """The answer as clients get it, and what the engine said."""
        conversations = self._services.conversations
        session = await conversations.sessions.create(OWNER, [document_id])
        stream = await conversations.answers.ask(OWNER, session.id, Question(question, max_tokens=MAX_TOKENS))
        data = (await stream.wait_closed()).data
        if isinstance(data, ServiceError):
            raise data
        await conversations.sessions.delete(OWNER, session.id)
        assert self._engine.done is not None
        return data, self._engine.done

    async def document(self, source: Source) -> Document:
        """Read it, unless that was done before, and ask everything about it."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / source.path.with_suffix("").with_suffix(".pdf").name
            path.write_bytes(source.read())
            row, _ = await read_document(self._services, path)
        read = self._services.documents.text_page
        rows = [await read(OWNER, row.id, number) for number in range(1, (row.page_count or 0) + 1)]
        pages = [(each.number, each.text, each.token_start, each.token_end) for each in rows]
        asked = [await self._asked(row.id, case) for case in source.cases]
        return Document(row.id, source.name, source.package, pages, asked)

    async def _asked(self, document_id: str, case: Case) -> Asked:
        data, done = await self.ask(document_id, case.question)
        right = is_right(data["answer"], case.values)
        sys.stdout.write(f"{'right' if right else 'wrong'} {case.question} {data['answer']!r}\n")
        sys.stdout.flush()
        cited = [citation["page"] for citation in data["citations"]]
        return Asked(case.question, data["answer"], right, done.looks, cited)

    async def cost(self, document_id: str, questions: Sequence[str]) -> Cost:
        """The same questions with and without watching, in turns: processor seconds and seconds of each."""
        runner = local(self._engine).runner
        heads, spent = runner.watched_heads, {True: [], False: []}
        finding: list[float] = []
        for repeat in range(COST_ROUNDS + 1):
            for watched in (True, False):
                runner.watched_heads = heads if watched else ()
                for question in questions:
                    gc.collect()
                    started = time.process_time()
                    _, done = await self.ask(document_id, question)
                    if not repeat:
                        continue  # the first round loads and compiles
                    spent[watched].append(time.process_time() - started)
                    if watched:
                        decoding_ms = (done.completion_tokens - 1) / max(done.decode_tokens_per_s, 1e-9) * 1e3
                        finding.append(done.looks_ms / decoding_ms)
        runner.watched_heads = heads
        pairs = zip(spent[True], spent[False], strict=True)
        ratios = [on / off for on, off in pairs]
        return Cost(statistics.median(ratios) - 1, statistics.median(finding), max(finding), len(ratios))


def local(engine: Listening) -> Any:
    """What is inside an engine of this process."""
    assert isinstance(engine._engine, LocalEngine)
    return engine._engine._host._context


async def measured(data_dir: Path, sources: Sequence[Source], before: Run | None, keep: Callable[[Run], object]) -> Run:
    """`before`: what is known of other documents. `keep` gets what there is after each one. The cost is measured with
    the first of `sources`, unless it is known."""
    settings = read_settings().model_copy(update={"data_dir": data_dir, "citation_attention": True})
    check_start(settings)
    async with AsyncExitStack() as stack:
        engine = Listening(await open_engine(settings))
        stack.push_async_callback(engine.close)
        given = Given(engine=cast(EngineClient, engine))
        services = await open_services(stack, await open_adapters(stack, settings, given))
        asker = Asker(services, engine)
        known = {document.name: document for document in before.documents} if before else {}
        cost = before.cost if before else None
        for source in sources:
            known[source.name] = document = await asker.document(source)
            if cost is None:
                cost = await asker.cost(document.id, [case.question for case in source.cases[:COST_QUESTIONS]])
            documents = [known[each.name] for each in SOURCES if each.name in known]
            before = Run(machine(), engine.info.model_name, settings.kv_type, documents, cost)
            keep(before)
        assert before is not None
        return before


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="a data directory that is kept")
    parser.add_argument("--save", type=Path, default=None, help="keeps what was answered, as JSON")
    parser.add_argument(
        "--only", nargs="+", default=[""], help="parts of names: asks about these, --save has the others"
    )
    parser.add_argument("--only-report", action="store_true", help="nothing is asked: what --save kept is taken")
    parser.add_argument("--out", type=Path, default=PAGE)
    arguments = parser.parse_args()

    def keep(run: Run) -> None:
        if arguments.save:
            arguments.save.write_bytes(msgspec.json.encode(run))

    saved = arguments.save if arguments.save and arguments.save.exists() else None
    before = msgspec.json.decode(saved.read_bytes(), type=Run) if saved else None
    sources = [source for source in SOURCES if any(part in source.name for part in arguments.only)]
    if arguments.only_report:
        if before is None:
            parser.error("there is nothing to report: --save names no file")
        run = before
    else:
        with tempfile.TemporaryDirectory() as folder:
            run = asyncio.run(measured(arguments.data or Path(folder), sources, before, keep))
    arguments.out.write_text(page_of(run), encoding="utf-8")
    sys.stdout.write(f"{arguments.out}\n")
    return 0 if enough(run) else 1


if __name__ == "__main__":
    sys.exit(main())
