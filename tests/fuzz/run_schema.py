"""`make fuzz`, its first part: schemathesis over every call of the schema, with all its checks.

    python -m tests.fuzz.run_schema [--minutes 15] [--examples 100] [--seed 1] [--only /v1/documents] [--open]

A real server with a fake engine, with keys or (`--open`) without any. Documents, sessions and answers are there, so
that addresses with ids find some. A failure is printed with a curl command.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.e2e.server import ROOT, Server
from tests.fuzz.hooks import DOCUMENTS
from tests.fuzz.report import write_schema
from tests.fuzz.visited import Visited, visit

CONFIG = Path(__file__).with_name("schemathesis.toml")
REPORT = "schemathesis.json"


def main() -> int:
    arguments = _arguments()
    with tempfile.TemporaryDirectory(prefix="preread-fuzz-") as name:
        folder = Path(name)
        server = Server(folder / "data", fake={"fake_script": [97, 98, 256]}, log_level="warning", sse_heartbeat_s=1)
        key = "" if arguments.open else _key(server)
        with server:
            server.client.headers["Authorization"] = f"Bearer {key}" if key else ""
            status = _schemathesis(server, visit(server), folder, key, arguments)
            assert server.get("/health/ready").status_code == 200
        errors = [line for line in server.log_path.read_text().splitlines() if '"level": "error"' in line]
        for line in errors:
            print(f"log: {line[:3000]}")
        if arguments.write:
            write_schema(json.loads((folder / REPORT).read_text()), arguments.seed, errors)
    return status or (1 if errors else 0)


def _key(server: Server) -> str:
    made = server.run(
        "keys", "create", "--user", "ann", "--organization", "acme", "--scope", "manage", "--scope", "metrics"
    )
    assert made.returncode == 0, made.stderr
    return made.stdout.strip()


def _schemathesis(server: Server, visited: Visited, folder: Path, key: str, arguments: argparse.Namespace) -> int:
    """Its exit status: 0 when all is well."""
    config = folder / "schemathesis.toml"
    config.write_text(CONFIG.read_text() + visited.dictionaries())
    command = [
        *(sys.executable, "-m", "schemathesis.cli", "--config-file", str(config)),
        *("run", f"{server.url}/schema/openapi.json", "--seed", str(arguments.seed)),
        *("--max-examples", str(arguments.examples), "--max-time", str(round(arguments.minutes * 60))),
        *("--report", "json", "--report-json-path", str(folder / REPORT), "--continue-on-failure"),
        *(("--header", f"Authorization: Bearer {key}") if key else ("--exclude-checks", "ignored_auth")),
    ]
    for path in arguments.only:
        command += ["--include-path", path]
    done = subprocess.run(
        command, cwd=ROOT, check=False, env={**os.environ, DOCUMENTS: " ".join(visited.ids["document_id"])}
    )
    return done.returncode


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--examples", type=int, default=100, help="of each call, in each phase")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", action="append", default=[], metavar="PATH")
    parser.add_argument("--write", action="store_true", help="write what came out to docs/robustness.md")
    parser.add_argument("--open", action="store_true", help="a server without keys")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
