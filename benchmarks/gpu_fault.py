"""A CUDA fault in the engine's process: it must be restarted, streams end with a retryable error, nothing is lost.

The fault is planted from outside: a `sitecustomize` on the child's path waits for a file to appear and then stores to
an address that is not the card's (without a card, it kills the process).
"""

import argparse
import asyncio
import os
import shutil
import time
from pathlib import Path

import msgspec

from benchmarks.gpu_engine import Text
from benchmarks.gpu_lib import ON_CARD, Result, Row
from service.engine.digests import digest_of
from service.engine.factory import EngineConfig
from service.engine.messages import (
    AnswerDone,
    AnswerRequest,
    AnswerStarted,
    AnswerText,
    BuildDone,
    BuildRequest,
    Failed,
    Sampling,
)
from service.engine.remote.supervisor import EngineSupervisor

PLANT = """\
import os, signal, sys, threading, time


def fault(trigger):
    while not os.path.exists(trigger):
        time.sleep(0.005)
    os.unlink(trigger)
    import torch
    if not torch.cuda.is_available():
        os.kill(os.getpid(), signal.SIGKILL)
    from planted_kernel import store_far_away
    x = torch.zeros(1, device="cuda")
    store_far_away[(1,)](x, 1 << 44)
    try:
        torch.cuda.synchronize()
    except Exception as error:
        print("planted:", str(error).splitlines()[0], flush=True)


if "service.engine.remote.server" in " ".join(sys.orig_argv):
    threading.Thread(target=fault, args=(os.environ["PREREAD_BENCH_FAULT"],), daemon=True).start()
"""
KERNEL = """\
import triton
import triton.language as tl


@triton.jit
def store_far_away(x, offset):
    tl.store(x + offset, 1.0)
"""


def plant(directory: Path) -> Path:
    """Write the fault, put it on the path of processes started from here; the file that sets it off."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "sitecustomize.py").write_text(PLANT)
    (directory / "planted_kernel.py").write_text(KERNEL)
    trigger = directory / "now"
    trigger.unlink(missing_ok=True)
    os.environ["PREREAD_BENCH_FAULT"] = str(trigger)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(directory), os.environ.get("PYTHONPATH", "")]))
    return trigger


def configuration(model_dir: Path, store: Path) -> EngineConfig:
    """A small engine on the card; without one the fake engine, which says the same letter all the time."""
    common = {"store_dir": str(store), "kv_type": "k8v4", "free_floor_nbytes": 0, "max_batch": 2, "idle_tails": 2}
    common |= {"tail_tokens": 1024, "drain_s": 1.0}
    if ON_CARD:
        own = {"engine": "exl2", "model_dir": str(model_dir), "max_context": 8192, "gpu_pool_nbytes": 1 << 30}
    else:
        own = {"engine": "fake", "fake_script": [97], "fake_step_s": 0.002}
    return msgspec.convert(common | own, EngineConfig)


def question(text: Text, name: str, max_tokens: int) -> AnswerRequest:
    prompt = [(17 * i + 3) % 251 for i in range(30)]
    return AnswerRequest(name, name, text.ref, digest_of(text.ids), len(text.ids), [], prompt, Sampling(max_tokens))


async def run(config: EngineConfig, trigger: Path, text: Text) -> dict:
    """What a client sees: the events of a stream that the fault hits, and of the next question."""
    engine = EngineSupervisor(config, start_timeout_s=120)
    await engine.start()
    try:
        built = [event async for event in engine.build(BuildRequest("build", text.ref, text.ids))][-1]
        before = [event async for event in engine.answer(question(text, "before", 20))][-1]
        first_pid, hit, hit_at = engine.info.pid, [], 0.0
        async for event in engine.answer(question(text, "hit", 900)):
            hit.append(event)
            if sum(isinstance(e, AnswerText) for e in hit) == 3 and not hit_at:
                hit_at = time.perf_counter()
                trigger.touch()
        ended = time.perf_counter()
        await asyncio.sleep(0.5)  # a stream ends a moment before its process does
        while engine.alive and engine.info.pid == first_pid and time.perf_counter() - ended < 20:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        alive = await engine.wait_alive(120)
        ready = time.perf_counter()
        after = [event async for event in engine.answer(question(text, "after", 20))] if alive else []
        return {
            "built": built,
            "before": before,
            "hit": hit[-1],
            "hit_s": ended - hit_at,
            "ready_s": ready - hit_at,
            "after": after,
            "restarts": engine.n_restarts,
            "other_pid": alive and engine.info.pid != first_pid,
        }
    finally:
        await engine.close()


def judged(found: dict) -> list[str]:
    """What does not hold, in words."""
    hit, after = found["hit"], found["after"]
    wrong = []
    if not isinstance(found["built"], BuildDone) or not isinstance(found["before"], AnswerDone):
        wrong.append(f"before the fault: {found['built']}, {found['before']}")
    if not (isinstance(hit, Failed) and hit.retryable):
        wrong.append(f"the stream ended with {hit}, which is no retryable error")
    if found["restarts"] != 1 or not found["other_pid"]:
        wrong.append(f"{found['restarts']} restarts")
    if not after or not isinstance(after[-1], AnswerDone):
        wrong.append(f"the next question ended with {after[-1:]}")
    elif (source := next(e.source for e in after if isinstance(e, AnswerStarted))) != "disk":
        wrong.append(f"the document came from {source}")
    return wrong


def measure(result: Result, arguments: argparse.Namespace, model_dir: Path) -> None:
    """Adds one row. Raises RuntimeError with what does not hold."""
    work = Path(arguments.work)
    store = work / "fault-store"
    shutil.rmtree(store, ignore_errors=True)
    trigger = plant(work / "plant")
    text = Text.numbered("fault", 5000 if ON_CARD else 700, 380)
    found = asyncio.run(run(configuration(model_dir, store), trigger, text))
    shutil.rmtree(store, ignore_errors=True)
    if wrong := judged(found):
        raise RuntimeError("; ".join(wrong))
    before, after = found["before"].token_ids, found["after"][-1].token_ids
    n_same = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), len(before))
    result.add(
        Row(
            "a CUDA fault (planted): stream ends retryable, process restarts, the next question is answered from disk",
            f"{found['hit'].code}, retryable",
            f"stream ended after {found['hit_s']:.2f} s, engine ready again after {found['ready_s']:.1f} s",
            beside=f"the same question before and after: the first {n_same} of {len(before)} tokens are the same",
            target="as said",
            met=True,
            must=True,
        )
    )
