"""The llamacpp engine beside llama-cpp-python on the same GGUF, in turns in one process: first token from a snapshot on
disk, and tokens a second after it.

    python benchmarks/llamacpp.py [--model DIRECTORY] [--tokens 2000] [--rounds 7] [--threads 2] [--write]

Needs the extra `llamacpp` and a model kept as a GGUF (`make llamacpp` makes both). llama-cpp-python is its class
`Llama` as its documentation has it: what `save_state` gave comes from a file and goes through `load_state`, the
question through `eval`. llama.cpp is its own functions with nothing around them: the sequence's state is read from a
file by `llama_state_seq_load_file`, the question is computed, the best of the logits taken. Ours is an answer of the
engine as the API gets it: records verified, canary compared (one row more), text made of the tokens, the turn stored.
All have the same threads, KV types, attention and batch. `--write` puts the table into docs/llamacpp.md.
"""

import argparse
import asyncio
import ctypes
import pickle
import time
from contextlib import suppress
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from bench_report import machine, print_json, table, write_section
from resume_parts import DOCUMENT, built, document_ids, question_ids

from cache_store.layout import KVType
from service.engine.digests import digest_of
from service.engine.factory import EngineConfig
from service.engine.llama_engine.context import LlamaContext
from service.engine.llama_engine.library import api, build
from service.engine.llama_engine.loading import FLASH_ATTENTION, N_OUTPUTS, N_ROWS
from service.engine.llama_engine.state import ggml_types
from service.engine.local import LocalEngine
from service.engine.messages import AnswerDone, AnswerRequest, Sampling
from service.engine.models.weights import GGUF_NAME
from service.settings import Settings

PAGE = Path(__file__).parents[1] / "docs" / "llamacpp.md"
CACHE_NBYTES = 400 << 20
N_ANSWER = 48
WHO = ("ours", "package", "bare")


class Package:
    """llama-cpp-python's own class, for `n_context` tokens."""

    def __init__(self, arguments: argparse.Namespace, n_context: int) -> None:
        from llama_cpp import Llama

        threads = {"n_threads": arguments.threads, "n_threads_batch": arguments.threads}
        key_type, value_type = ggml_types(KVType(arguments.kv_type))
        self._llama = Llama(
            str(arguments.model / GGUF_NAME), n_ctx=n_context, n_batch=N_ROWS, n_ubatch=N_ROWS, flash_attn=True,
            type_k=key_type, type_v=value_type, verbose=False, **threads,
        )  # fmt: skip

    def prefill(self, ids: list[int]) -> None:
        self._llama.eval(ids)

    def save(self, path: Path) -> None:
        with path.open("wb") as file:
            pickle.dump(self._llama.save_state(), file, pickle.HIGHEST_PROTOCOL)

    def first_token(self, path: Path, question: list[int]) -> tuple[float, int]:
        """Seconds from the file to the first token, and the token."""
        self._llama.reset()
        started = time.perf_counter()
        with path.open("rb") as file:
            self._llama.load_state(pickle.load(file))
        self._llama.eval(question)
        token = self._llama.sample(temp=0.0)
        return time.perf_counter() - started, token

    def decode(self, first_token: int, n_tokens: int) -> tuple[float, list[int]]:
        """Tokens a second, and the tokens."""
        tokens = [first_token]
        started = time.perf_counter()
        while len(tokens) < n_tokens:
            self._llama.eval(tokens[-1:])
            tokens.append(self._llama.sample(temp=0.0))
        return (n_tokens - 1) / (time.perf_counter() - started), tokens

    def close(self) -> None:
        self._llama.close()


class Bare:
    """llama.cpp with one sequence in a context of `n_context` tokens."""

    def __init__(self, arguments: argparse.Namespace, n_context: int) -> None:
        self._llama = llama = api()
        model = llama.llama_model_load_from_file(str(arguments.model / GGUF_NAME).encode(), self._model_params())
        params = llama.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = n_context, N_ROWS, N_ROWS
        params.n_threads = params.n_threads_batch = arguments.threads
        params.flash_attn_type = FLASH_ATTENTION
        params.type_k, params.type_v = ggml_types(KVType(arguments.kv_type))
        self._raw = llama.llama_init_from_model(model, params)
        self._context = LlamaContext(model, self._raw, N_ROWS, N_OUTPUTS)

    def _model_params(self) -> Any:
        params = self._llama.llama_model_default_params()
        params.n_gpu_layers = 0
        return params

    def prefill(self, ids: list[int]) -> None:
        self._rows(ids, 0, wanted=False)

    def save(self, path: Path) -> None:
        if not self._llama.llama_state_seq_save_file(self._raw, str(path).encode(), 0, None, 0):
            raise SystemExit("llama.cpp does not save its state")

    def first_token(self, path: Path, n_document: int, question: list[int]) -> tuple[float, int]:
        """Seconds from the file to the first token, and the token."""
        self._context.remove(0)
        count, tokens = ctypes.c_size_t(), (ctypes.c_int32 * 1)()
        started = time.perf_counter()
        if not self._llama.llama_state_seq_load_file(self._raw, str(path).encode(), 0, tokens, 1, ctypes.byref(count)):
            raise SystemExit("llama.cpp does not load its state")
        token = self._rows(question, n_document, wanted=True)
        return time.perf_counter() - started, token

    def decode(self, first_token: int, position: int, n_tokens: int) -> tuple[float, list[int]]:
        """Tokens a second, and the tokens."""
        tokens = [first_token]
        started = time.perf_counter()
        while len(tokens) < n_tokens:
            tokens.append(self._rows(tokens[-1:], position + len(tokens) - 1, wanted=True))
        return (n_tokens - 1) / (time.perf_counter() - started), tokens

    def close(self) -> None:
        self._context.close()

    def _rows(self, ids: list[int], first: int, *, wanted: bool) -> int:
        n = len(ids)
        positions, rows = np.arange(first, first + n, dtype=np.int32), np.zeros(n, bool)
        rows[-1] = wanted
        logits = self._context.decode(np.array(ids, np.int32), positions, np.zeros(n, np.int32), rows)
        return int(logits[-1].argmax()) if wanted else -1


async def asked(engine: LocalEngine, arguments: argparse.Namespace, ids: list[int], session: str) -> AnswerDone:
    """An answer for which the document comes from disk."""
    await engine.release(DOCUMENT)
    prompt, sampling = question_ids(str(arguments.model)), Sampling(max_tokens=N_ANSWER)
    request = AnswerRequest(session, session, DOCUMENT, digest_of(ids), len(ids), [], prompt, sampling)
    async for event in engine.answer(request):
        if isinstance(event, AnswerDone):
            return event
    raise SystemExit(f"the answer failed: {event}")


async def measure(arguments: argparse.Namespace, directory: Path) -> dict[str, list[float]]:
    ids, question = document_ids(str(arguments.model), arguments.tokens), question_ids(str(arguments.model))
    config = EngineConfig(
        store_dir=str(directory / "store"),
        engine="llamacpp",
        model_dir=str(arguments.model),
        kv_type=arguments.kv_type,
        resident_budget_nbytes=CACHE_NBYTES,
        threads=arguments.threads,
        offload="none",
        free_floor_nbytes=0,
    )
    engine = await LocalEngine.open(config)
    bare, package = Bare(arguments, len(ids) + 512), Package(arguments, len(ids) + 512)
    await built(engine, DOCUMENT, ids)
    for other in (bare, package):
        other.prefill(ids)
        other.save(directory / type(other).__name__)
    figures = {f"{who}_{what}": [] for who in WHO for what in ("ttft", "decode")}
    for n in range(arguments.rounds + 1):
        done = await asked(engine, arguments, ids, f"session-{n}")
        seconds, token = bare.first_token(directory / "Bare", len(ids), question)
        speed, tokens = bare.decode(token, len(ids) + len(question), done.completion_tokens)
        seconds_2, token_2 = package.first_token(directory / "Package", question)
        speed_2, tokens_2 = package.decode(token_2, done.completion_tokens)
        if n == 0:
            ours = [*done.token_ids[len(question) :], *done.pending_ids]
            print(f"the same tokens: {ours == tokens == tokens_2}")
            continue
        for who, ttft, decode in (
            ("ours", done.ttft_ms / 1e3, done.decode_tokens_per_s),
            ("package", seconds_2, speed_2),
            ("bare", seconds, speed),
        ):
            figures[f"{who}_ttft"].append(ttft)
            figures[f"{who}_decode"].append(decode)
    await engine.close()
    bare.close()
    package.close()
    return figures


def rows(figures: dict[str, list[float]]) -> list[list[str]]:
    lines = []
    for name, what, unit in (("ttft", "first token from disk, ms", 1e3), ("decode", "decode, tokens a second", 1)):
        values = {who: [value * unit for value in figures[f"{who}_{name}"]] for who in WHO}
        told = [f"{median(v):.1f} ({min(v):.1f}-{max(v):.1f})" for v in values.values()]
        ratios = [median(a / b for a, b in zip(values["ours"], values[who], strict=True)) for who in WHO[1:]]
        lines.append([what, *told, *(f"{ratio:.2f}" for ratio in ratios)])
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Settings().models_dir / "demo-gguf")
    parser.add_argument("--kv-type", default="k8v8")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    with TemporaryDirectory() as directory, suppress(KeyboardInterrupt):
        figures = asyncio.run(measure(arguments, Path(directory)))
        head = ["", "llamacpp engine", "llama-cpp-python", "llama.cpp's functions", "ratio", "ratio to the functions"]
        text = table(head, rows(figures))
        about = (
            f"{machine()}, llama-cpp-python {build()}. A document of {arguments.tokens:,} tokens, {arguments.kv_type}, "
            f"{arguments.threads} threads, {arguments.rounds} rounds in turns, files in the page cache; medians "
            "(lowest-highest), and the median of the rounds' ratios."
        )
        print(f"{about}\n\n{text}")
        print_json(**figures)
        if arguments.write:
            write_section("llamacpp", f"{about}\n\n{text}", PAGE)


if __name__ == "__main__":
    main()
