"""What this machine can do at most: memory, link, matrix products, disk. The bounds beside the other figures.

python -m benchmarks.gpu_ceilings [--dry]
"""

import os
from pathlib import Path

import torch

from benchmarks.bench_report import plain_read
from benchmarks.gpu_lib import DEVICE, ON_CARD, Result, Row, copy_ceiling, device_timed, parse, pinned_ceiling
from service.bench.files import drop_page_cache


def matmul_ceiling(n: int) -> float:
    """Floating-point operations a second of an FP16 matrix product of size `n`, on random values."""
    dtype = torch.float16 if ON_CARD else torch.float32
    a, b = (torch.randn(n, n, device=DEVICE).to(dtype) for _ in range(2))
    out = torch.empty(n, n, device=DEVICE, dtype=dtype)
    return 2 * n**3 / min(device_timed(lambda: torch.matmul(a, b, out=out), repeats=10, warm_up=3).samples)


def disk_ceiling(directory: Path, nbytes: int) -> float:
    """Bytes a second of reading a file front to back, not from the page cache."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "ceiling.bin"
    block = os.urandom(8 << 20)
    with path.open("wb") as file:
        for _ in range(max(nbytes // len(block), 1)):
            file.write(block)
    try:
        drop_page_cache([path])
        return path.stat().st_size / plain_read([path])
    finally:
        path.unlink()


def main() -> None:
    arguments = parse(__doc__)
    result = Result("ceilings", "benchmarks/gpu_ceilings.py", arguments)
    small = arguments.dry

    def add(what: str, value: float, unit: str) -> None:
        result.raw[what] = value
        result.add(Row(what, f"{value:.4g} {unit}"))

    result.attempt("copy", lambda: add("copy on the card, read + written", copy_ceiling() / 1e9, "GB/s"))
    result.attempt("pinned", lambda: add("pinned host memory to the card", pinned_ceiling() / 1e9, "GB/s"))
    n = 256 if small else 8192
    result.attempt("product", lambda: add(f"FP16 matrix product, {n} x {n}", matmul_ceiling(n) / 1e12, "TFLOP/s"))
    nbytes = (8 << 20) if small else (2 << 30)
    disk = Path(arguments.work)
    result.attempt("disk", lambda: add("plain read from disk", disk_ceiling(disk, nbytes) / 1e9, "GB/s"), needs_s=8)


if __name__ == "__main__":
    main()
