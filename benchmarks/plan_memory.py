"""What `preread plan` says of an engine's memory on the processor, against what its process then takes at its peak.

    python -m benchmarks.plan_memory [--model demo] [--engine llamacpp] [--tokens 3000] [--documents 2] [--write]

The engine runs in a process of its own, as a server starts it. It reads the documents, and all users ask at once. Its
peak is the kernel's own figure (VmHWM). Ends with status 1 when the plan is off by more than 5 %, or
10 % over llama.cpp.
"""

import argparse
import asyncio
import random
import tempfile
from pathlib import Path

import msgspec

from benchmarks.bench_report import machine, print_json, table, write_section
from cache_store.layout import KVType
from service.engine.digests import digest_of
from service.engine.factory import EngineConfig
from service.engine.messages import AnswerDone, AnswerRequest, BuildDone, BuildRequest, DocumentRef, Sampling
from service.engine.protocol import EngineClient
from service.engine.remote.child import EngineProcess
from service.planning.detect import this_processor
from service.planning.headers import read_model
from service.planning.plan import make_plan
from service.planning.request import Wanted, layout_of

LIMITS = {"torch": 0.05, "llamacpp": 0.1}
"""llama.cpp's plan counts for one moment what comes in two."""
QUESTION_TOKENS = 48
ANSWER_TOKENS = 16
START_S = 120.0


def asked(arguments: argparse.Namespace) -> Wanted:
    """The work, as a plan is told."""
    return Wanted(
        context=arguments.tokens,
        kv_type=KVType(arguments.kv_type),
        users=arguments.users,
        documents=arguments.documents,
        tail_tokens=QUESTION_TOKENS + ANSWER_TOKENS,
        resident_nbytes=0,
        compute=arguments.dtype,
        by_llama=arguments.engine == "llamacpp",
    )


def predicted(model_dir: Path, arguments: argparse.Namespace) -> tuple[int, str]:
    """Bytes at the peak by the plan, and its lines."""
    _, ledger = make_plan(read_model(model_dir), this_processor(1.0), asked(arguments))
    return ledger.announced_nbytes, ledger.table()


def llama_sizes(model_dir: Path, arguments: argparse.Namespace) -> dict[str, int]:
    """The llamacpp engine takes what documents and tails may have at the start: as much as the plan counts."""
    if arguments.engine != "llamacpp":
        return {}
    wanted, layout = asked(arguments), layout_of(read_model(model_dir).shape, KVType(arguments.kv_type))
    return {
        "resident_budget_nbytes": wanted.room_tokens * layout.bytes_per_token, "tail_tokens": wanted.tail_tokens
    }  # fmt: skip


def peak_nbytes(pid: int) -> int:
    """Most resident memory that a process has had."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("the kernel does not say VmHWM")


def token_ids(n: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(100, 20_000), k=n)


async def ask(engine: EngineClient, i: int, document: int, n: int, ids: list[int]) -> bool:
    request = AnswerRequest(
        f"a{i}", f"s{i}", DocumentRef("o", str(document)), digest_of(ids), n, [], token_ids(QUESTION_TOKENS, 1000 + i),
        Sampling(max_tokens=ANSWER_TOKENS),
    )  # fmt: skip
    return isinstance([event async for event in engine.answer(request)][-1], AnswerDone)


async def measured(model_dir: Path, arguments: argparse.Namespace) -> int:
    """Peak bytes of an engine that did what was planned: once with documents that it reads, once with those that it
    finds on disk."""
    with tempfile.TemporaryDirectory(dir=arguments.directory) as store:
        config = EngineConfig(
            store_dir=store, engine=arguments.engine, model_dir=str(model_dir), kv_type=arguments.kv_type,
            compute_dtype=arguments.dtype, max_batch=arguments.users, threads=arguments.threads,
        )  # fmt: skip
        config = msgspec.structs.replace(config, **llama_sizes(model_dir, arguments))
        return max([await one_run(config, arguments) for _ in range(2)])


async def one_run(config: EngineConfig, arguments: argparse.Namespace) -> int:
    process = await EngineProcess.start(config)
    try:
        engine = await process.connect(START_S)
        ids = [token_ids(arguments.tokens, seed) for seed in range(arguments.documents)]
        for i, tokens in enumerate(ids):
            events = [e async for e in engine.build(BuildRequest(f"b{i}", DocumentRef("o", str(i)), tokens))]
            if not isinstance(events[-1], BuildDone):
                raise RuntimeError(f"the document was not read: {events[-1]}")
        which = [i % arguments.documents for i in range(arguments.users)]
        done = await asyncio.gather(
            *(ask(engine, i, document, arguments.tokens, ids[document]) for i, document in enumerate(which))
        )
        if not all(done):
            raise RuntimeError("a question was not answered")
        return peak_nbytes(process.pid)
    finally:
        await process.stop(5.0)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="name or directory; the setting's if left out")
    parser.add_argument("--tokens", type=int, default=3000)
    parser.add_argument("--documents", type=int, default=2)
    parser.add_argument("--users", type=int, default=2)
    parser.add_argument("--kv-type", default="k8v4")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--engine", default="torch", choices=("torch", "llamacpp"))
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--directory", help="where snapshots are written")
    parser.add_argument("--write", action="store_true", help="put the table into docs/performance.md")
    return parser.parse_args()


def main() -> None:
    from service.settings import Settings

    arguments = parse()
    model_dir = Settings(**({"model": arguments.model} if arguments.model else {})).model_dir
    expected, lines = predicted(model_dir, arguments)
    found = asyncio.run(measured(model_dir, arguments))
    off, limit = found / expected - 1, LIMITS[arguments.engine]
    what = f"{arguments.documents} documents of {arguments.tokens:,} tokens, {arguments.users} users"
    sizes = (f"{found / 2**20:,.0f} MiB", f"{expected / 2**20:,.0f} MiB")
    how = "llama.cpp" if arguments.engine == "llamacpp" else arguments.dtype
    row = (f"{what}, {how}, {arguments.kv_type}", *sizes, f"{off:+.1%}", f"{limit:.0%}")
    text = "\n".join(
        [
            "## Memory on a CPU, planned and taken (`benchmarks/plan_memory.py`)", "",
            f"{machine()}. Model {model_dir.name}; peak of the engine's process.", "",
            table(("what", "peak", "plan", "off by", "at most"), [row]),
        ]
    )  # fmt: skip
    print(lines, text, sep="\n\n")
    print_json(benchmark="plan_memory", measured_nbytes=found, planned_nbytes=expected, off=off)
    if arguments.write:
        write_section(f"plan memory {how}", text)
    if abs(off) > limit:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
