"""The demo as a process: it cleans up behind it however it ends, and with the demo model it is right."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]


def start(folder: Path, **environment: str) -> subprocess.Popen[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PREREAD_")}
    return subprocess.Popen(
        [sys.executable, str(ROOT / "examples" / "demo.py"), "--dir", str(folder)],
        env={**kept, "PYTHONPATH": str(ROOT), **environment},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def processes_of(folder: Path) -> list[int]:
    """Processes that were started with a data directory below `folder`."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("PREREAD_DATA_DIR", "").startswith(str(folder)):
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def wait_until(condition, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_failure_says_why_shows_the_log_and_leaves_no_server(tmp_path):
    # The fake engine counts bytes as tokens: the contract has more than that.
    demo = start(tmp_path / "run", PREREAD_ENGINE="fake", PREREAD_MAX_DOCUMENT_TOKENS="10000")
    out, _ = demo.communicate(timeout=300)
    assert demo.returncode == 1, out
    assert "ready after" in out
    assert "The document was not read: The document has" in out
    assert "The end of the server's log:" in out
    assert processes_of(tmp_path) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_demo_takes_its_server_with_it(tmp_path, number):
    demo = start(tmp_path / "run", PREREAD_ENGINE="fake")
    wait_until(lambda: processes_of(tmp_path))
    demo.send_signal(number)
    out, _ = demo.communicate(timeout=300)
    assert demo.returncode == 130, out
    assert "Interrupted." in out
    assert processes_of(tmp_path) == []


def test_without_a_model_it_says_how_to_get_one(tmp_path):
    demo = start(tmp_path / "run", PREREAD_MODEL=str(tmp_path / "nothing"))
    out, _ = demo.communicate(timeout=300)
    assert demo.returncode == 1
    assert "make model" in out


def test_a_folder_of_somebody_else_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    demo = start(tmp_path, PREREAD_ENGINE="fake")
    out, _ = demo.communicate(timeout=300)
    assert demo.returncode == 1
    assert "--dir" in out
    assert (tmp_path / "thesis.txt").read_text() == "years of work"
