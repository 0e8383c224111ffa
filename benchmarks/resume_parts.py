"""The parts of `resume.py`, each run in its own process; the last line of output is JSON."""

import argparse
import asyncio
import json
import time
from pathlib import Path

import torch
from bench_report import drop_page_cache, plain_read, timed

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
N_DECODE = 48


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
    """Prefill speed, alone (chunks computed and encoded) and as a job that writes a snapshot."""
    engine = await LocalEngine.open(config(arguments))
    ids = document_ids(arguments.model, arguments.tokens)
    await built(engine, OTHER, document_ids(arguments.model, 512))
    done = await built(engine, DOCUMENT, ids)
    name = engine.info.model_name
    await engine.close()
    runner = load_runner(arguments)
    chunk = runner.limits.chunk_tokens

    def prefill() -> None:
        document = runner.new_document(len(ids))
        for first in range(0, len(ids), chunk):
            runner.prefill_chunk(document, ids[first : first + chunk])

    alone = timed(prefill, repeats=1, warm_up=0)
    return {
        "model": name,
        "build_tok_s": done.n_tokens / done.seconds,
        "prefill_tok_s": done.n_tokens / alone.median,
        "nbytes": done.nbytes,
    }


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


async def decode(arguments: argparse.Namespace) -> dict:
    """Tokens a second of one session and of four together on the document, through the whole engine."""
    from service.engine.protocol import Rows

    runner = load_runner(arguments)
    ids = document_ids(arguments.model, arguments.tokens)
    document = runner.new_document(len(ids))
    for tensor in (document.k, document.v):
        tensor.normal_()
    runner.finish_load(document, len(ids))
    speeds = []
    for n_sessions in (1, 4):
        slots = [runner.new_tail() for _ in range(n_sessions)]
        for slot in slots:
            runner.forward([Rows(slot, document, question_ids(arguments.model))])
        steps = timed(
            lambda slots=slots: runner.forward([Rows(slot, document, [5]) for slot in slots]), repeats=N_DECODE
        )
        speeds.append(n_sessions / steps.median)
        for slot in slots:
            runner.free_tail(slot)
    return {"one_tok_s": speeds[0], "four_tok_s": speeds[1], "step_nbytes": runner.weights_nbytes + document.nbytes}


async def stock(arguments: argparse.Namespace) -> dict:
    """Stock transformers on the same tokens: prefill to the first token, then steps with DynamicCache."""
    from transformers import AutoModelForCausalLM, DynamicCache

    dtype = getattr(torch, arguments.dtype)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=dtype).eval()
    ids = torch.tensor([document_ids(arguments.model, arguments.tokens)])
    prompt = torch.tensor([question_ids(arguments.model)])
    with torch.inference_mode():
        model(ids[:, :256], logits_to_keep=1)
        cache = DynamicCache(config=model.config)
        prefill = timed(lambda: model(ids, cache=cache, logits_to_keep=1), repeats=1, warm_up=0)
        first = timed(lambda: model(prompt, cache=cache, logits_to_keep=1), repeats=1, warm_up=0)
        step = torch.tensor([[5]])
        steps = timed(lambda: model(step, cache=cache), repeats=N_DECODE)
    return {
        "prefill_s": prefill.median,
        "first_s": first.median,
        "prefill_tok_s": ids.shape[1] / prefill.median,
        "decode_tok_s": 1 / steps.median,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=("build", "resume", "decode", "stock"))
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--kv-type", required=True)
    parser.add_argument("--store", required=True)
    parser.add_argument("--tokens", type=int, required=True)
    arguments = parser.parse_args()
    part = {"build": build, "resume": resume, "decode": decode, "stock": stock}[arguments.part]
    print(json.dumps(asyncio.run(part(arguments))))


if __name__ == "__main__":
    main()
