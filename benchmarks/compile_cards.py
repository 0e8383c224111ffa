"""Compiles for Volta and Turing what runs on a card, with neither a card nor CUDA: docs/cards.md has its tables.

    python -m benchmarks.compile_cards FOLDER [--archs sm_70 sm_75] [--only q_gemm] [--jobs 2] [--write]

Needs `apt-get` with clang 19 (Debian 12, after `apt-get update`), PyPI, and torch and triton as `make setup` installs
them. FOLDER comes to hold 0.5 GB, while it is filled 1 GB. Of exllamav2's extension every source with device code is
compiled by clang and assembled by CUDA 12.4's ptxas; our Triton kernels are by Triton with its own. Takes half an hour
on two cores. Ends with status 1 when a source of the extension did not compile.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks.bench_report import table, write_section
from benchmarks.compile_parts.toolchain import CUDA, SOURCES, Toolchain

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "cards.md"
SCRIPTS = {
    "codec, RoPE, tails, norms": "compile_codec_kernels.py",
    "products of few rows": "compile_product.py",
    "decode attention": "compile_attention.py",
}
SHARED_KIB = {"sm_70": 96, "sm_75": 64}
"""What a program may have at most of a multiprocessor's shared memory."""


@dataclass(frozen=True, slots=True)
class Built:
    """A source for an architecture: its kernels, the most registers of one, and bytes spilled by the worst."""

    source: str
    arch: str
    kernels: int = 0
    registers: int = 0
    spilled: int = 0
    error: str = ""


def built(tools: Toolchain, source: Path, arch: str) -> Built:
    """Compiles one source of the extension."""
    name = str(source.relative_to(tools.sources / "cuda").with_suffix(""))
    folder = tools.folder / "out" / arch
    folder.mkdir(parents=True, exist_ok=True)
    ptx = folder / f"{source.stem}.ptx"
    try:
        tools.ptx(source, arch, ptx)
        report = tools.assembled(ptx, arch, ptx.with_suffix(".cubin"))
    except subprocess.CalledProcessError as error:
        lines = [line for line in error.stderr.splitlines() if "error" in line]
        return Built(name, arch, error=(lines or [error.stderr[-200:]])[0])
    return usage(name, arch, report)


def usage(name: str, arch: str, report: str) -> Built:
    """What ptxas says with `-v`."""
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", report)]
    spilled = [int(n) for n in re.findall(r"(\d+) bytes spill stores", report)]
    return Built(name, arch, len(registers), max(registers, default=0), max(spilled, default=0))


def triton_kernels(script: str, arch: str, cache: Path) -> list[dict[str, int]]:
    """What a script of the tests says of each of its kernels; it runs in a process of its own."""
    path = ROOT / "tests" / "service" / "engine" / "exl2_engine" / script
    environment = os.environ | {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, str(path), arch.removeprefix("sm_")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def triton_row(part: str, arch: str, kernels: Iterable[dict[str, int]]) -> list[str]:
    found = list(kernels)
    shared = max(kernel["shared"] for kernel in found)
    fits = "" if shared <= SHARED_KIB[arch] << 10 else f", more than {SHARED_KIB[arch]}"
    spilling = [kernel["stack"] for kernel in found if kernel["stack"]]
    worst = f"{len(spilling)} of them, up to {max(spilling):,} bytes" if spilling else "none"
    return [
        part, arch, str(len(found)), str(max(kernel["registers"] for kernel in found)), worst,
        f"{shared / 1024:.0f} KiB{fits}",
    ]  # fmt: skip


def extension_rows(rows: list[Built], archs: list[str]) -> list[list[str]]:
    """A line a source: what is the same of all architectures once."""
    by_source: dict[str, dict[str, Built]] = {}
    for row in rows:
        by_source.setdefault(row.source, {})[row.arch] = row
    return [
        [source, str(max(row.kernels for row in found.values())), *(_cell(found[arch]) for arch in archs)]
        for source, found in sorted(by_source.items())
    ]


def _cell(row: Built) -> str:
    if row.error:
        return f"error: {row.error}"
    if not row.kernels:
        return "ok"
    return f"ok, {row.registers} registers, {f'{row.spilled} bytes spilled' if row.spilled else 'no spills'}"


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--archs", nargs="+", default=list(SHARED_KIB), choices=list(SHARED_KIB))
    parser.add_argument("--only", default="", help="sources with this in their name")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--write", action="store_true", help="into docs/cards.md")
    return parser.parse_args()


def main() -> int:
    arguments = parsed()
    tools = Toolchain(arguments.folder)
    tools.fetch()
    sources = [path for path in sorted((tools.sources / "cuda").rglob("*.cu")) if arguments.only in path.stem]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        work = [(source, arch) for source in sources for arch in arguments.archs]
        rows = list(pool.map(lambda one: built(tools, *one), work))
    extension = table(["source", "kernels", *arguments.archs], extension_rows(rows, arguments.archs))
    parts = [] if arguments.only else [
        triton_row(part, arch, triton_kernels(script, arch, tools.folder / "triton"))
        for part, script in SCRIPTS.items() for arch in arguments.archs
    ]  # fmt: skip
    ours = table(["our kernels", "for", "how many", "most registers", "spilling", "most shared memory"], parts)
    made = f"Made by `python -m benchmarks.compile_cards`: {SOURCES}, clang 19, {CUDA[0]}, torch's own headers."
    text = f"{made}\n\n{extension}\n\n{ours}" if parts else f"{made}\n\n{extension}"
    print(text)
    if arguments.write:
        write_section("compiled for Volta and Turing", text, PAGE)
    return int(any(row.error for row in rows))


if __name__ == "__main__":
    sys.exit(main())
