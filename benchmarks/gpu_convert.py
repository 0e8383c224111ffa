"""A model converted by `preread models convert`, and asked about the example contract on the exl2 engine.

    python -m benchmarks.gpu_convert [--model DIRECTORY] [--bits 4.0,6.0] [--limit-s 560]

Runs on a card, for seven to nine minutes with the demo model: on 24 rows of 1,024 tokens where 100 of 2,048 are usual,
and with one measurement for all bits. Everything goes through the command line, as an operator types it.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.bench_report import ROOT
from benchmarks.contract_answers import is_right
from benchmarks.gpu_lib import ON_CARD, Result, Row, parse
from service.settings import Settings

CONTRACT = ROOT / "examples" / "contract"
ROWS = ("--rows", "24", "--row-tokens", "1024", "--measured-rows", "6")
ASKED = 12
PREREAD = (sys.executable, "-c", "from service.cli import main; main()")
FIRST_S, LATER_S, ASK_S = 280.0, 180.0, 30.0
"""What a conversion with and without a measurement, and asking, should not take longer than."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, default=os.environ.get("PREREAD_TEST_MODEL") or Settings().model_dir)
    parser.add_argument("--bits", default="4.0,6.0")


def preread(data: Path, *words: str, limit_s: float, **settings: str) -> dict[str, Any]:
    """What a command prints as JSON. Raises RuntimeError with what it said, TimeoutExpired."""
    environment = os.environ | {f"PREREAD_{name.upper()}": value for name, value in settings.items()}
    environment |= {"PREREAD_DATA_DIR": str(data), "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    done = subprocess.run(
        [*PREREAD, *words, "--json"], env=environment, stdout=subprocess.PIPE, text=True, timeout=max(limit_s, 1.0)
    )
    if done.returncode:
        raise RuntimeError(f"preread {words[0]}: exit {done.returncode}: {done.stdout[-300:]}")
    return json.loads(done.stdout)


def convert(result: Result, arguments: argparse.Namespace, data: Path, bits: str) -> str:
    """Convert to these bits and add what is recorded; the model's name."""
    name = f"converted-{bits}"
    started = time.perf_counter()
    made = preread(
        data, "models", "convert", str(arguments.model), "--bits", bits, "--name", name, *ROWS,
        "--measurement", str(data / "measurement.json"), limit_s=result.left_s,
    )  # fmt: skip
    seconds = time.perf_counter() - started
    like = made["conversion"]["likeness"]
    result.raw[name] = {"seconds": seconds, **made["conversion"]}
    result.add(
        Row(
            f"{Path(arguments.model).name} in {bits} bits, KL from its source on held-out text",
            f"mean {like['mean_kl']:.4f} nats",
            f"99 % below {like['p99_kl']:.3f}, n={like['n_positions']}",
            beside=f"same first choice {like['top1_agreement']:.1%}; perplexity {like['perplexity']:.2f}, source "
            f"{like['source_perplexity']:.2f}",
            target="published: under 0.5",
            met=like["mean_kl"] < 0.5,
            must=True,
        )
    )
    result.add(Row(f"converting to {bits} bits, KV types measured and index heads found", f"{seconds:.0f} s"))
    return name


def ask(result: Result, data: Path, name: str) -> None:
    """The first questions about the contract, each in the light of those before."""
    questions = json.loads((CONTRACT / "questions.json").read_text("utf-8"))[:ASKED]
    answered = preread(
        data, "ask", str(CONTRACT / "contract.pdf"), *(q["question"] for q in questions), "--max-tokens", "64",
        limit_s=result.left_s, engine="exl2", model=name, kv_type="fp16",
    )  # fmt: skip
    answers = [answer["answer"] for answer in answered["answers"]]
    right = [is_right(answer, q["values"]) for answer, q in zip(answers, questions, strict=True)]
    result.raw[f"answers {name}"] = answers
    result.add(Row(f"{name}, served by the exl2 engine: questions about the contract", f"{sum(right)} of {len(right)}"))


def measure(result: Result, arguments: argparse.Namespace, data: Path) -> None:
    for i, bits in enumerate(arguments.bits.split(",")):
        needed = LATER_S if i else FIRST_S
        converted = result.attempt(
            f"converting to {bits} bits", lambda bits=bits: convert(result, arguments, data, bits), needs_s=needed
        )
        if converted:
            name = f"converted-{bits}"
            result.attempt(f"asking {name}", lambda name=name: ask(result, data, name), needs_s=ASK_S)
    result.note(
        "Calibrated on 24 rows of 1,024 tokens, a quarter of the usual ones; a small model loses more than a large one."
    )


def main() -> None:
    arguments = parse(__doc__, add_arguments)
    if not ON_CARD or arguments.dry:
        sys.exit("converting needs an NVIDIA card: nothing was run")
    result = Result("convert", "benchmarks/gpu_convert.py", arguments)
    data = Path(arguments.work) / "convert"
    shutil.rmtree(data, ignore_errors=True)
    data.mkdir(parents=True)
    try:
        measure(result, arguments, data)
    finally:
        shutil.rmtree(data, ignore_errors=True)


if __name__ == "__main__":
    main()
