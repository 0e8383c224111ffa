"""What the engine announced of a card's memory before loading, against what it then used; and what it refuses.

    python -m benchmarks.gpu_memory [--kv-type k8v4] [--size big] [--pool-gib 0]
    python -m benchmarks.gpu_memory --pool-gib 24       # what the plan says beside documents weighs more

The runner is loaded as the service loads it, with all that is left for documents. Then it does what takes most: a chunk
of prefill behind a long document, a question, steps of all rows, a turn's export. What `preread plan` says of the same,
by the card's driver and before this process has touched it, is held against it too. Needs a card.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_documents import filled
from benchmarks.gpu_lib import ON_CARD, Result, Row, parse
from benchmarks.gpu_models import model_dir
from cache_store.layout import KVType
from service.engine.ledger import Ledger
from service.engine.protocol import Rows

ERROR_LIMIT = 0.03
GIB = 1 << 30
ROWS = 8
"""Answers at once."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kv-type", default="k8v4")
    parser.add_argument("--size", default="big", choices=("big", "small"))
    parser.add_argument("--pool-gib", type=float, default=0.0, help="most for documents; 0: all that is left")


def exercise(runner: Any, n_rows: int) -> None:
    """What takes most memory beside what is allocated at load."""
    chunk, block = runner.limits.chunk_tokens, runner.layout.block_tokens
    room = min(runner.limits.max_context, runner.pool.n_free * block) - 2 * chunk
    past = min(131072, room) // chunk * chunk
    document = filled(runner, past, capacity=past + chunk)
    runner.prefill_chunk(document, [(31 * i) % 997 for i in range(chunk)])
    slots = [runner.new_tail() for _ in range(n_rows)]
    for slot in slots:
        runner.forward([Rows(slot, document, list(range(3, 259)))])
    runner.forward([Rows(slot, document, list(range(3, 35))) for slot in slots])
    for _ in range(3):
        runner.forward([Rows(slot, document, [7]) for slot in slots])
    runner.export_tail(slots[0], 0, runner.tail_length(slots[0]))
    for slot in slots:
        runner.free_tail(slot)
    runner.free_document(document)


def planned(directory: Path, kv_type: KVType, rows: int) -> tuple[Ledger, int]:
    """What `preread plan` says of the card that its driver names, and the card's memory as the driver counts it: with
    what it keeps for itself, which CUDA does not show."""
    from service.planning.detect import card_of, find_card
    from service.planning.headers import read_model
    from service.planning.nvidia import CardState
    from service.planning.plan import make_plan
    from service.planning.request import Wanted

    card = find_card("")
    if card.is_cpu:  # neither NVML nor nvidia-smi: by what CUDA calls the card, as if nobody used it
        total = torch.cuda.get_device_properties(0).total_memory
        card = card_of(CardState(0, torch.cuda.get_device_name(0), total, 0, total, ""), bandwidth_gbps=1.0)
    return make_plan(read_model(directory), card, Wanted(kv_type=kv_type, users=rows))[1], card.memory_nbytes


def announced(result: Result, arguments: argparse.Namespace, plan: Ledger, card_nbytes: int) -> None:
    from service.engine.exl2_engine.graph_sizes import DRAFT_TOKENS
    from service.engine.exl2_engine.loading import Options, load_runner
    from service.engine.exl2_engine.meter import Meter, compare, error
    from service.planning.request import Wanted

    directory, rows = model_dir(arguments, arguments.size), ROWS
    pool = int(arguments.pool_gib * GIB) or None
    n_slots = Wanted(users=rows).n_slots
    options = Options(
        kv_type=KVType(arguments.kv_type),
        n_slots=n_slots,
        max_rows=rows,
        draft_tokens=DRAFT_TOKENS,
        pool_nbytes=pool,
    )
    torch.cuda.init()
    meter = Meter(torch.device("cuda", 0))
    runner = load_runner(directory, options, phase_over=lambda phase: meter.mark(phase))
    exercise(runner, rows)
    peak = meter.peak()
    ledger = runner.ledger
    assert ledger is not None
    print(ledger.table())
    print(compare(ledger, meter.marks, peak), flush=True)
    off = error(ledger, meter.marks[0], peak)
    used = peak.used - meter.marks[0].used
    result.raw["announced_nbytes"], result.raw["used_nbytes"] = ledger.announced_nbytes, used
    result.add(
        Row(
            f"memory used at the peak, {arguments.kv_type}, {ledger.pool_tokens:,} tokens of documents",
            f"{used / GIB:.2f} GiB",
            beside=f"announced before loading {ledger.announced_nbytes / GIB:.2f} GiB ({off:+.2%})",
            target=f"within {ERROR_LIMIT:.0%}",
            met=abs(off) <= ERROR_LIMIT,
        )
    )
    expected = plan.nbytes("before", "load", "tails", "work") + ledger.nbytes("pool")
    whole = peak.used + card_nbytes - torch.cuda.mem_get_info()[1]
    off = whole / expected - 1
    result.raw["planned_nbytes"], result.raw["peak_nbytes"] = expected, whole
    result.add(
        Row(
            f"the card's memory at that peak, {ledger.nbytes('pool') / GIB:.1f} GiB of it for documents",
            f"{whole / GIB:.2f} GiB",
            beside=f"`preread plan` {expected / GIB:.2f} GiB ({off:+.2%}), {plan.pool_tokens:,} tokens of documents",
            target=f"within {ERROR_LIMIT:.0%}",
            met=abs(off) <= ERROR_LIMIT,
        )
    )


def refused(result: Result, arguments: argparse.Namespace) -> None:
    """A context that cannot fit beside a reserve that leaves too little: refused before anything is loaded."""
    from service.engine.exl2_engine.loading import Options, load_runner
    from service.engine.ledger import MemoryPlanRefused

    free, _ = torch.cuda.mem_get_info()
    kv_type = KVType(arguments.kv_type)
    options = Options(kv_type=kv_type, max_context=131072, reserve_nbytes=max(free - 20 * GIB, GIB))
    before, started = torch.cuda.memory_allocated(), time.perf_counter()
    try:
        load_runner(model_dir(arguments, "big"), options)
    except MemoryPlanRefused as error:
        seconds, allocated = time.perf_counter() - started, torch.cuda.memory_allocated() - before
        message = str(error)
    else:
        raise RuntimeError("a context that does not fit was not refused")
    result.add(
        Row(
            "a context of 131,072 tokens with 20 GiB for everything",
            "refused before loading, with the plan" if "documents" in message else "refused without the plan",
            f"after {seconds:.2f} s, {allocated} bytes allocated",
            target="refused, nothing loaded",
            met=allocated == 0 and "documents" in message,
            must=True,
        )
    )
    print(message, flush=True)


def main() -> None:
    arguments = parse(__doc__, add_arguments)
    result = Result("memory", "benchmarks/gpu_memory.py", arguments)
    if arguments.dry or not ON_CARD:
        result.note("There is no card: nothing to measure.")
        return
    # First: a context of CUDA in this process would be planned as somebody else's.
    plan, card_nbytes = planned(model_dir(arguments, arguments.size), KVType(arguments.kv_type), ROWS)
    result.attempt("a context that cannot fit", lambda: refused(result, arguments))
    result.attempt("announced against used", lambda: announced(result, arguments, plan, card_nbytes), needs_s=30)


if __name__ == "__main__":
    main()
