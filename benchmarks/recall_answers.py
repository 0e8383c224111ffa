"""Right answers over windowed documents, with and without fetch, and with the whole document where it fits.

    python benchmarks/recall_answers.py [--documents 1] [--together] [--engine torch]

The documents and questions are those of `recall.py`; an answer is right when the value that was asked for is in it.
Answers are written freely, at temperature 0. `--together` reads all documents as one. Prints one JSON line.
"""

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path

from recall_asker import ask, build
from recall_cases import Prompt, prompts
from recall_texts import WORDINGS

from service.cli.config import read_settings
from service.engine.factory import EngineConfig
from service.engine.local import LocalEngine
from service.engine.messages import Retention
from service.engine.models.card import load_card
from service.engine.prompt import PromptTemplate
from service.engine.tokenizer import Tokenizer

ROOM = 768
"""Of the context, for a question, what is fetched and the answer."""


class Asker:
    """An engine, and the ways in which a document is kept."""

    def __init__(self, engine: LocalEngine, template: PromptTemplate, arguments: argparse.Namespace) -> None:
        self.engine = engine
        self.template = template
        fetch = Retention(16, 0, 256, arguments.segment, arguments.fetch)
        self.ways = {"fetched": fetch, "not fetched": Retention(16, 0, 256, arguments.segment, 0), "whole": None}


def joined(texts: list[Prompt]) -> Prompt:
    """All documents as one."""
    ids, facts = [], []
    for text in texts:
        facts += [(fact, (first + len(ids), last + len(ids))) for fact, (first, last) in text.facts]
        ids += text.ids
    return Prompt(ids, facts)


async def run(arguments: argparse.Namespace) -> dict:
    card = load_card(arguments.model)
    template = PromptTemplate(card.prompt, Tokenizer.load(arguments.model))
    texts = prompts(template, arguments.documents)
    results: dict[str, dict[str, list[bool]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        config = EngineConfig(
            store_dir=folder, engine=arguments.engine, model_dir=str(arguments.model), threads=arguments.threads
        )
        engine = await LocalEngine.open(config)
        asker = Asker(engine, template, arguments)
        for number, text in enumerate([joined(texts)] if arguments.together else texts):
            suffix = template.document_suffix_ids
            ids = [*text.ids[: len(text.ids) - len(suffix)], *suffix]
            for way, retention in asker.ways.items():
                if retention is None and len(ids) + ROOM > engine.info.max_context:
                    continue
                started = time.monotonic()
                done = await build(engine, f"{number}", ids, retention)
                print(f"{way}: {done.n_tokens} tokens, {done.resident_tokens or done.n_tokens} resident, "
                      f"{time.monotonic() - started:.0f} s", flush=True)  # fmt: skip
                await _ask_all(asker, f"{number}", ids, text, way, results.setdefault(way, {}))
        await engine.close()
    return {way: _shares(by_wording) for way, by_wording in results.items()}


async def _ask_all(
    asker: Asker, name: str, ids: list[int], text: Prompt, way: str, right: dict[str, list[bool]]
) -> None:
    for fact, _ in text.facts:
        for question, value in zip(fact.questions, fact.answers, strict=True):
            prompt = asker.template.question(question)
            answer = (await ask(asker.engine, name, ids, prompt, asker.ways[way])).text
            right.setdefault(fact.wording, []).append(value in answer)
            if value not in answer:
                print(f"  {way}: {question} {value}: {answer!r}", flush=True)


def _shares(right: dict[str, list[bool]]) -> dict[str, str]:
    everything = [ok for w in WORDINGS for ok in right.get(w.name, [])]
    shares = {w.name: right[w.name] for w in WORDINGS if w.name in right} | {"all": everything}
    return {name: f"{sum(found)} of {len(found)}" for name, found in shares.items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=read_settings().model_dir)
    parser.add_argument("--documents", type=int, default=1)
    parser.add_argument("--together", action="store_true", help="all documents as one")
    parser.add_argument("--segment", type=int, default=2048)
    parser.add_argument("--fetch", type=int, default=256)
    parser.add_argument("--engine", default="torch")
    parser.add_argument("--threads", type=int, default=0)
    print(json.dumps(asyncio.run(run(parser.parse_args()))))
