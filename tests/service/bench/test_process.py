"""The command as a process: a full standard output, and signals while the model is being loaded."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from service.bench.results import load_run

SMALL = ("--contexts", "300", "--users", "1", "--repeats", "1", "--answer-tokens", "8")
RUN = "from service.cli import main; main()"
SLOW = f"""
import signal, threading
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
from service.engine import local

def loads(config):
    print("loads", flush=True)
    threading.Event().wait()

local.open_host = loads
{RUN}
"""


def environment(tmp_path: Path) -> dict[str, str]:
    more = {"PREREAD_ENGINE": "fake", "PREREAD_DATA_DIR": str(tmp_path / "data"), "PREREAD_FREE_FLOOR_BYTES": "0"}
    return os.environ | more


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_full_standard_output_loses_no_file(tmp_path: Path, form: list[str]) -> None:
    out, svg = tmp_path / "run.json", tmp_path / "run.svg"
    command = [sys.executable, "-c", RUN, "bench", *SMALL, "--out", str(out), "--svg", str(svg), *form]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command, env=environment(tmp_path), stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    assert done.returncode == 1, done.stderr
    assert "prefill, 300 tokens" in {row.name for row in load_run(out).rows}
    assert svg.exists()
    assert f"Written: {out}" in done.stderr
    assert "Standard output cannot be written: No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_the_loading_of_a_model(tmp_path: Path, number: signal.Signals) -> None:
    out = tmp_path / "new" / "run.json"
    with subprocess.Popen(
        [sys.executable, "-c", SLOW, "bench", *SMALL, "--out", str(out), "--json"], env=environment(tmp_path),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            assert process.stdout.readline() == "loads\n"
            assert any((tmp_path / "data").glob(".bench-*"))
            process.send_signal(number)
            assert any("once more ends at once" in line for line in iter(process.stderr.readline, ""))
            process.send_signal(number)
            told, _ = process.communicate(timeout=20)
        finally:
            process.kill()
    assert process.returncode == 130
    assert json.loads(told)["error"]["code"] == "interrupted"
    assert not any((tmp_path / "data").glob(".bench-*"))
    assert not out.parent.exists()
