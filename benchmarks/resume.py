"""Time to first token from a disk snapshot against prefilling the document again, and the speeds around it.

    python benchmarks/resume.py [--model NAME_OR_PATH] [--dtype bfloat16] [--write]

Each part runs in a process of its own, so that a resume starts where a restarted service would: nothing of the
document in memory, and its files forgotten by the page cache. Stock transformers runs in the same call, on the
same token ids, with its own attention (sdpa) and DynamicCache, in turns with ours. `--write` puts the table into
docs/performance.md.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from bench_report import machine, print_json, read_bandwidth, table, write_section

PARTS = Path(__file__).with_name("resume_parts.py")
LLAMA_CPP = "llama.cpp, another run (2 cores, Q4_1 weights): prefill 165 tok/s, decode 42 tok/s, first token 0.67 s"


def run_part(part: str, arguments: argparse.Namespace, store: Path, dtype: str) -> dict:
    """Figures of one part, measured in a fresh process."""
    command = [sys.executable, str(PARTS), part, "--model", arguments.model, "--dtype", dtype, "--store", str(store)]
    command += ["--tokens", str(arguments.tokens), "--kv-type", arguments.kv_type, "--rounds", str(arguments.rounds)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(output.splitlines()[-1])


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def spread(values: list[float], unit: float = 1.0) -> str:
    return f"{min(values) * unit:.3g}-{max(values) * unit:.3g}, n={len(values)}"


def measure(arguments: argparse.Namespace) -> dict:
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        store = Path(directory)
        build = run_part("build", arguments, store, arguments.dtype)
        resumes = [run_part("resume", arguments, store, arguments.dtype) for _ in range(arguments.repeats)]
        pair = run_part("pair", arguments, store, arguments.dtype)
        stock32 = pair if arguments.dtype == "float32" else run_part("stock", arguments, store, "float32")
    return {"build": build, "resumes": resumes, "pair": pair, "stock32": stock32}


def rows(figures: dict, arguments: argparse.Namespace) -> list[tuple[str, str, str, str, str]]:
    """(what, figure, spread, beside it, target)."""
    build, resumes, pair, stock32 = (figures[name] for name in ("build", "resumes", "pair", "stock32"))
    ttft = [r["disk_ttft_s"] for r in resumes]
    resident, read = median([r["resident_ttft_s"] for r in resumes]), median([r["plain_read_s"] for r in resumes])
    again = median(stock32["stock_prefill"]) + stock32["stock_first_s"]
    bound = read_bandwidth() / pair["step_nbytes"]
    one, four, stock_one = (median(pair[name]) for name in ("one", "four", "stock_one"))
    ratios = [theirs / ours for ours, theirs in zip(pair["prefill"], pair["stock_prefill"], strict=True)]
    n, dtype = arguments.tokens, arguments.dtype
    return [
        (
            "first token from the disk snapshot",
            f"{median(ttft) * 1e3:.0f} ms",
            spread(ttft, 1e3),
            f"stock FP32 re-prefill {again:.1f} s: **{again / median(ttft):.0f}x**",
            "50x",
        ),
        (
            "the same, against resident + plain read",
            f"{median(ttft) / (resident + read):.2f}",
            f"resident {resident * 1e3:.0f} ms, read {read * 1e3:.0f} ms",
            f"{resumes[0]['nbytes'] / 1e6:.1f} MB at {resumes[0]['nbytes'] / read / 1e9:.2f} GB/s",
            "at most 1.5",
        ),
        (
            f"prefill, {dtype}, in turns with stock",
            f"{n / median(pair['prefill']):.0f} tok/s",
            f"{spread([n / s for s in pair['prefill']])}; as a job that writes the snapshot {build['build_tok_s']:.0f}",
            f"stock {dtype} {n / median(pair['stock_prefill']):.0f}: **{median(ratios):.2f}x**, {spread(ratios)}",
            "at least 1x",
        ),
        (
            f"decode, one session, {dtype}, blocks of steps in turns with stock",
            f"{1 / one:.1f} tok/s",
            f"bound by memory {bound:.0f} tok/s",
            f"stock {dtype} {1 / stock_one:.1f}: **{stock_one / one:.2f}x**, n={len(pair['one'])}",
            "at least 2x",
        ),
        ("decode, four sessions", f"{4 / four:.1f} tok/s in total", "", f"{4 * one / four:.2f}x of one", "at least 2x"),
    ]


def report(figures: dict, arguments: argparse.Namespace) -> str:
    lines = [
        "## Resume on a CPU (`benchmarks/resume.py`)",
        "",
        f"{machine()}. Model {figures['build']['model']}, {arguments.tokens} tokens, compute {arguments.dtype}, "
        f"KV {arguments.kv_type}. Medians; each resume in a fresh process with the snapshot's pages dropped, after one "
        "question on another document; memory is read at "
        f"{read_bandwidth() / 1e9:.1f} GB/s.",
        "",
        table(("what", "figure", "spread or part", "beside it", "target"), rows(figures, arguments)),
        "",
        LLAMA_CPP + ".",
    ]
    return "\n".join(lines)


def parse_arguments() -> argparse.Namespace:
    from service.settings import Settings

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(Settings().model_dir))
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--kv-type", default="k8v4")
    parser.add_argument("--tokens", type=int, default=6000)
    parser.add_argument("--repeats", type=int, default=5, help="resumes")
    parser.add_argument("--rounds", type=int, default=3, help="prefills of each kind")
    parser.add_argument("--directory", help="where the snapshot is written (a real disk, not a RAM file system)")
    parser.add_argument("--write", action="store_true", help="put the table into docs/performance.md")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    figures = measure(arguments)
    text = report(figures, arguments)
    print(text)
    print_json(benchmark="resume", **figures)
    if arguments.write:
        write_section(f"resume {arguments.dtype}", text)


if __name__ == "__main__":
    main()
