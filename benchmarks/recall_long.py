"""Right answers over documents far longer than the model's context, in fixed memory.

    python -m benchmarks.recall_long --model DIRECTORY [--engine exl2] [--tokens 24000 100000 400000] [--out FILE]
    python -m benchmarks.recall_long --page FILE

Documents are public text that comes with every Python, of the given lengths, with a planted sentence at every fortieth
part, in four wordings in turn, so that every tenth of a document has each of them. All questions are asked of the
document as it is kept with retention `small`, and of excerpts of it that the model's context holds whole: what the
model does not answer there, no way of keeping could. Answers are written freely at temperature 0; one is right when
the value asked for is in it. `--page` writes docs/long-documents.md from a file that `--out` wrote.
"""

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.bench_report import ROOT, machine
from benchmarks.recall_asker import ask, build, document_ref
from benchmarks.recall_long_page import page
from benchmarks.recall_long_texts import N_FACTS, LongDocument, excerpts, long_document
from service.engine.factory import EngineConfig
from service.engine.local import LocalEngine
from service.engine.messages import Retention, SpanRef
from service.engine.models.card import load_card
from service.engine.prompt import PromptTemplate
from service.engine.tokenizer import Tokenizer

EXCERPT_TOKENS = 6000
AT_ONCE = 4


@dataclass
class Answered:
    """Of one question. `found`: whether the whole sentence was fetched or resident. `text`: what was answered."""

    wording: str
    tenth: int
    right: bool
    found: bool
    text: str
    ttft_ms: float
    fetch_ms: float


class Asker:
    """An engine and a store of its own."""

    def __init__(self, engine: LocalEngine, template: PromptTemplate, per_fact: int) -> None:
        self.engine = engine
        self._template = template
        self._per_fact = per_fact
        self._free = asyncio.Semaphore(AT_ONCE)

    async def ask_all(self, name: str, document: LongDocument, retention: Retention | None) -> list[Answered]:
        """The questions of every fact of the document."""
        questions = [(n, which) for n in range(len(document.facts)) for which in range(self._per_fact)]
        return list(await asyncio.gather(*(self._ask(name, document, retention, *q) for q in questions)))

    async def _ask(
        self, name: str, document: LongDocument, retention: Retention | None, number: int, which: int
    ) -> Answered:
        fact, place = document.facts[number]
        prompt, session = self._template.question(fact.questions[which]), f"{name}-{number}-{which}"
        async with self._free:
            reply = await ask(self.engine, name, document.ids, prompt, retention, session)
        tenth = 10 * place[0] // len(document.ids)
        right, found = fact.answers[which] in reply.text, retention is None or _holds(reply.spans, place)
        return Answered(fact.wording, tenth, right, found, reply.text, reply.ttft_ms, reply.fetch_ms)


def _holds(spans: Sequence[SpanRef], place: tuple[int, int]) -> bool:
    return any(span.first <= place[0] and place[1] <= span.first + span.n_tokens for span in spans)


async def measure(asker: Asker, document: LongDocument, retention: Retention, *, whole: bool) -> dict:
    """Everything about one length."""
    name, started = f"{len(document.ids)}", time.monotonic()
    done = await build(asker.engine, name, document.ids, retention)
    build_s, begun = time.monotonic() - started, time.monotonic()
    answered = await asker.ask_all(name, document, retention)
    asked_s, stats = time.monotonic() - begun, await asker.engine.stats()
    figures = {
        "tokens": done.n_tokens, "build_s": build_s, "cold_nbytes": done.nbytes, "asked_s": asked_s,
        "resident_tokens": done.resident_tokens, "resident_nbytes": done.resident_nbytes,
        "index_nbytes": stats.index_nbytes, "rss_nbytes": stats.rss_nbytes,
        "answers": [asdict(answer) for answer in answered],
    }  # fmt: skip
    await asker.engine.release(document_ref(name))
    if whole:
        figures["whole"] = [asdict(answer) for answer in await _whole(asker, document)]
    print(json.dumps(_short(figures)), flush=True)
    return figures


async def _whole(asker: Asker, document: LongDocument) -> list[Answered]:
    """The same questions over excerpts that are kept whole."""
    answered = []
    for number, excerpt in enumerate(excerpts(document, EXCERPT_TOKENS)):
        name = f"excerpt-{number}"
        await build(asker.engine, name, excerpt.ids, None)
        answered += await asker.ask_all(name, excerpt, None)
        await asker.engine.release(document_ref(name))
    return answered


def _short(figures: dict) -> dict:
    right = {key: sum(answer["right"] for answer in figures[key]) for key in ("answers", "whole") if key in figures}
    found = sum(answer["found"] for answer in figures["answers"])
    return {k: v for k, v in figures.items() if k not in ("answers", "whole")} | {"right": right, "found": found}


async def run(arguments: argparse.Namespace) -> dict:
    card, tokenizer = load_card(arguments.model), Tokenizer.load(arguments.model)
    template = PromptTemplate(card.prompt, tokenizer)
    with tempfile.TemporaryDirectory(dir=arguments.work) as folder:
        config = EngineConfig(
            store_dir=folder, engine=arguments.engine, model_dir=str(arguments.model), max_batch=AT_ONCE,
            compute_dtype=arguments.dtype, gpu_pool_nbytes=8 << 30, tail_tokens=1024,
        )  # fmt: skip
        asker = Asker(await LocalEngine.open(config), template, arguments.per_fact)
        info = asker.engine.info
        sinks = -(-16 // info.sink_multiple) * info.sink_multiple
        retention = Retention(sinks, arguments.summary, 256, arguments.segment, arguments.fetch)
        results = []
        for n_tokens in arguments.tokens:
            document = long_document(template, n_tokens)
            results.append(await measure(asker, document, retention, whole=n_tokens in arguments.whole))
        await asker.engine.close()
    about = {"machine": machine(), "model": info.model_name, "engine": info.engine, "kv_type": info.kv_type}
    return about | {
        "retention": asdict_of(retention),
        "n_facts": N_FACTS,
        "per_fact": arguments.per_fact,
        "results": results,
    }


def asdict_of(retention: Retention) -> dict[str, int]:
    return {name: getattr(retention, name) for name in retention.__struct_fields__}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--model", type=Path)
    made.add_argument("--engine", default="torch")
    made.add_argument("--dtype", default="float32", help="of the torch engine")
    made.add_argument("--tokens", type=int, nargs="+", default=[24_000, 100_000, 400_000])
    made.add_argument("--whole", type=int, nargs="*", default=[24_000, 100_000], help="lengths asked over excerpts too")
    made.add_argument("--segment", type=int, default=2048, help="tokens")
    made.add_argument("--fetch", type=int, default=256)
    made.add_argument("--summary", type=int, default=0, help="summary tokens, where the engine has slots")
    made.add_argument("--per-fact", type=int, default=2, choices=(1, 2), help="questions for each planted sentence")
    made.add_argument("--work", help="a folder for the store")
    made.add_argument("--out", type=Path)
    made.add_argument("--page", type=Path, help="write the page from this file, measure nothing")
    return made


def main() -> None:
    arguments = parser().parse_args()
    if arguments.page:
        (ROOT / "docs" / "long-documents.md").write_text(page(json.loads(arguments.page.read_text())), "utf-8")
        return
    if not arguments.model:
        raise SystemExit("--model DIRECTORY: an imported model with index heads")
    figures = asyncio.run(run(arguments))
    if arguments.out:
        arguments.out.write_text(json.dumps(figures), "utf-8")


if __name__ == "__main__":
    main()
