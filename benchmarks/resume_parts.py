"""The parts of `resume.py`, each run in its own process; the last line of output is JSON."""

import argparse
import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from bench_report import plain_read

from service.bench.files import drop_page_cache
from service.core.prompts import load_prompts
from service.engine.digests import digest_of
from service.engine.factory import EngineConfig
from service.engine.local import LocalEngine
from service.engine.messages import (
    AnswerDone,
    AnswerRequest,
    AnswerText,
    BuildDone,
    BuildRequest,
    DocumentRef,
    Sampling,
)

ROOT = Path(__file__).parents[1]
TEXT = ROOT / "examples" / "contract" / "contract.md"
QUESTION = "Who is the district heating manager of the supplier?"
DOCUMENT = DocumentRef("bench", "document")
OTHER = DocumentRef("bench", "other")
N_WARM, N_BLOCK, N_BLOCKS = 2, 8, 6


def document_ids(model_dir: str, n_tokens: int) -> list[int]:
    """Exactly `n_tokens` tokens of document prompt: the example contract, again from the start where it ends."""
    prompts = load_prompts(Path(model_dir))
    whole = prompts.template.document(TEXT.read_text())
    end = whole.first_text + whole.n_text
    prefix, text, suffix = whole.ids[: whole.first_text], whole.ids[whole.first_text : end], whole.ids[end:]
    room = n_tokens - len(prefix) - len(suffix)
    return [*prefix, *(text * (room // len(text) + 1))[:room], *suffix]


def question_ids(model_dir: str) -> list[int]:
    return load_prompts(Path(model_dir)).template.question(QUESTION)


def config(arguments: argparse.Namespace) -> EngineConfig:
    return EngineConfig(
        store_dir=arguments.store,
        model_dir=arguments.model,
        kv_type=arguments.kv_type,
        compute_dtype=arguments.dtype,
        speculation="off",
    )


async def built(engine: LocalEngine, document: DocumentRef, ids: list[int]) -> BuildDone:
    async for event in engine.build(BuildRequest(document.document_id, document, ids)):
        if isinstance(event, BuildDone):
            return event
    raise SystemExit(f"the build failed: {event}")


async def asked(
    engine: LocalEngine, arguments: argparse.Namespace, session: str, max_tokens: int, document: DocumentRef = DOCUMENT
) -> tuple[float, AnswerDone]:
    """Seconds to the first piece of text as the client sees it, and the end of the answer."""
    n_tokens = arguments.tokens if document == DOCUMENT else 512
    ids = document_ids(arguments.model, n_tokens)
    prompt = question_ids(arguments.model)
    request = AnswerRequest(
        session, session, document, digest_of(ids), n_tokens, [], prompt, Sampling(max_tokens=max_tokens)
    )
    started, first = time.perf_counter(), 0.0
    async for event in engine.answer(request):
        if isinstance(event, AnswerText) and not first:
            first = time.perf_counter() - started
        if isinstance(event, AnswerDone):
            return first or event.ttft_ms / 1e3, event
    raise SystemExit(f"the answer failed: {event}")


async def build(arguments: argparse.Namespace) -> dict:
    """Prefill speed as a job that writes a snapshot."""
    engine = await LocalEngine.open(config(arguments))
    await built(engine, OTHER, document_ids(arguments.model, 512))
    done = await built(engine, DOCUMENT, document_ids(arguments.model, arguments.tokens))
    name = engine.info.model_name
    await engine.close()
    return {"model": name, "build_tok_s": done.n_tokens / done.seconds, "nbytes": done.nbytes}


def load_runner(arguments: argparse.Namespace):
    from cache_store.layout import KVType
    from service.engine.torch_engine.runner import TorchRunner

    kv_type = KVType(arguments.kv_type)
    return TorchRunner.load(Path(arguments.model), kv_type=kv_type, compute_dtype=arguments.dtype, n_slots=4)


async def resume(arguments: argparse.Namespace) -> dict:
    """A restarted service's first question on the document, then the same question with its KV in memory."""
    files = [f for f in Path(arguments.store).rglob("*") if f.is_file() and "document" in f.parts]
    engine = await LocalEngine.open(config(arguments))
    await asked(engine, arguments, "warm-up", 2, OTHER)
    drop_page_cache(files)
    read = plain_read(files)
    drop_page_cache(files)
    disk, _ = await asked(engine, arguments, "disk", 2)
    resident = [(await asked(engine, arguments, f"resident-{i}", 2))[0] for i in range(3)]
    await engine.close()
    return {
        "disk_ttft_s": disk,
        "resident_ttft_s": min(resident),
        "plain_read_s": read,
        "nbytes": sum(f.stat().st_size for f in files),
    }


class Ours:
    """The torch engine's runner with nothing around it: a document's chunks computed and encoded, steps of sessions."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._runner = load_runner(arguments)
        self._ids, self._question = document_ids(arguments.model, arguments.tokens), question_ids(arguments.model)
        self._document = None
        self._slots: list[int] = []

    def prefill(self) -> None:
        if self._document is not None:
            self._runner.free_document(self._document)
        self._document, chunk = self._runner.new_document(len(self._ids)), self._runner.limits.chunk_tokens
        for first in range(0, len(self._ids), chunk):
            self._runner.prefill_chunk(self._document, self._ids[first : first + chunk])

    def ask(self, n_sessions: int) -> None:
        from service.engine.protocol import Rows

        self._slots = [self._runner.new_tail() for _ in range(n_sessions)]
        for slot in self._slots:
            self._runner.forward([Rows(slot, self._document, self._question)])

    def step(self, n_sessions: int) -> None:
        from service.engine.protocol import Rows

        self._runner.forward([Rows(slot, self._document, [5]) for slot in self._slots[:n_sessions]])

    @property
    def step_nbytes(self) -> int:
        return self._runner.weights_nbytes + self._runner.document_nbytes(len(self._ids))


class Stock:
    """Stock transformers on the same tokens, with its own attention and DynamicCache."""

    def __init__(self, arguments: argparse.Namespace, dtype: str) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=getattr(torch, dtype)).eval()
        self._ids = torch.tensor([document_ids(arguments.model, arguments.tokens)])
        self._question = torch.tensor([question_ids(arguments.model)])
        self._cache = None

    @torch.inference_mode()
    def prefill(self) -> None:
        from transformers import DynamicCache

        self._cache = DynamicCache(config=self._model.config)
        self._model(self._ids, cache=self._cache, logits_to_keep=1)

    @torch.inference_mode()
    def ask(self) -> None:
        self._model(self._question, cache=self._cache, logits_to_keep=1)

    @torch.inference_mode()
    def step(self) -> None:
        self._model(torch.tensor([[5]]), cache=self._cache)


def seconds(what: Callable[[], object]) -> float:
    started = time.perf_counter()
    what()
    return time.perf_counter() - started


def block(step: Callable[[], object]) -> list[float]:
    """Seconds of each of some steps in a row, as an answer is decoded; the first ones, which fetch again what the
    other's steps put out of the caches, are not counted."""
    return [seconds(step) for _ in range(N_WARM + N_BLOCK)][N_WARM:]


async def pair(arguments: argparse.Namespace) -> dict:
    """Ours and stock in turns in one process, so that a busy moment of the machine meets both: seconds of each prefill
    and of each step; steps in blocks, as answers have them."""
    ours, stock = Ours(arguments), Stock(arguments, arguments.dtype)
    turns: dict[str, list[float]] = {"prefill": [], "stock_prefill": [], "one": [], "four": [], "stock_one": []}
    for _ in range(arguments.rounds):
        turns["prefill"].append(seconds(ours.prefill))
        turns["stock_prefill"].append(seconds(stock.prefill))
    ours.ask(4)
    first = seconds(stock.ask)
    for _ in range(N_BLOCKS):
        turns["one"] += block(lambda: ours.step(1))
        turns["stock_one"] += block(stock.step)
        turns["four"] += block(lambda: ours.step(4))
    return {**turns, "stock_first_s": first, "step_nbytes": ours.step_nbytes}


async def stock(arguments: argparse.Namespace) -> dict:
    """Stock transformers alone in another dtype than the engine's: prefill to the first token."""
    model = Stock(arguments, arguments.dtype)
    return {"stock_prefill": [seconds(model.prefill)], "stock_first_s": seconds(model.ask)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=("build", "resume", "pair", "stock"))
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--kv-type", required=True)
    parser.add_argument("--store", required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    part = {"build": build, "resume": resume, "pair": pair, "stock": stock}[arguments.part]
    print(json.dumps(asyncio.run(part(arguments))))


if __name__ == "__main__":
    main()
