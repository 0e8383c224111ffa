"""`make fuzz`, its second part: damaged files of every format through a real server.

    python -m tests.fuzz.run_uploads [--total 2400] [--minutes 30] [--seed 1] [--write] [--only PDF:1:17 ...]

A failure is named by its format, seed and number, which `--only` repeats; its file is kept below `fuzz-failures`.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path

import psutil

from tests.e2e.server import Server, files_below
from tests.fuzz.report import write_uploads
from tests.fuzz.uploads import Case, Tally, Watched, cases, leftovers, upload_all, watched

LIMIT_S = 60
GROWTH_NBYTES = 192 << 20
KEPT = Path("fuzz-failures")


def main() -> int:
    arguments = _arguments()
    todo = [_case(text) for text in arguments.only] or cases(arguments.total, arguments.seed)
    with tempfile.TemporaryDirectory(prefix="preread-fuzz-") as name:
        tally, seen = run(Path(name), todo, arguments.minutes * 60)
    for (format_name, outcome), count in sorted(tally.outcomes.items()):
        print(f"{format_name:10} {outcome:45} {count:6}")
    print(
        f"{tally.total} uploads in {tally.seconds:.0f} s, {tally.questions} questions, {len(tally.failures)} failures"
    )
    print(f"server {seen.server_before >> 20} to {seen.server >> 20} MiB, a reader {seen.reader >> 20} MiB at most")
    for failure in tally.failures:
        print(failure)
    if arguments.write:
        write_uploads(tally, seen, arguments.seed)
    return 1 if tally.failures else 0


def run(folder: Path, todo: list[Case], most_s: float) -> tuple[Tally, Watched]:
    """All cases against a server of their own; what it left behind is a failure too."""
    scratch = folder / "tmp"
    scratch.mkdir()
    server = Server(
        folder / "data",
        fake={"fake_script": [97, 98, 256]},
        parse_concurrency=2,
        parse_timeout_s=LIMIT_S,
        ocr_languages="none",
        log_level="warning",
    )
    server.more["TMPDIR"] = str(scratch)
    with server:
        engine = server.engine().pid
        server.until_ended(server.upload(b"One that is good.")["id"])
        with watched(server.pid, engine) as seen:
            until = time.monotonic() + most_s
            tally = asyncio.run(upload_all(server.url, todo, limit_s=LIMIT_S, until=until, keep=KEPT.absolute()))
        for body in server.get("/v1/documents", params={"limit": 100}).json()["data"]:
            assert server.request("DELETE", f"/v1/documents/{body['id']}").status_code == 200
        if server.engine().pid != engine:
            tally.failures.append("the engine's process is another one than at the beginning")
        others = [each.cmdline() for each in psutil.Process(server.pid).children() if each.pid != engine]
        tally.failures += [f"a process that was left: {other}" for other in others if "ingest.worker" in other]
    tally.failures += [f"left behind: {what}" for what in leftovers(server.data_dir)]
    tally.failures += [f"left in the temporary folder: {name}" for name in files_below(scratch)]
    tally.failures += _faults(server)
    if seen.server - seen.server_before > GROWTH_NBYTES:
        tally.failures.append(f"the server grew from {seen.server_before:,} to {seen.server:,} bytes")
    return tally, seen


def _faults(server: Server) -> list[str]:
    """Lines of the log about what failed in the server itself."""
    lines = server.log_path.read_text(errors="replace").splitlines()
    return [f"log: {line[:1500]}" for line in lines if '"level": "error"' in line or "Traceback" in line]


def _case(text: str) -> Case:
    format_name, seed, number = text.rsplit(":", 2)
    return Case(format_name, int(seed), int(number))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--total", type=int, default=2400)
    parser.add_argument("--minutes", type=float, default=30.0, help="no upload is begun after this time")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", action="append", default=[], metavar="FORMAT:SEED:NUMBER")
    parser.add_argument("--write", action="store_true", help="write what came out to docs/robustness.md")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
