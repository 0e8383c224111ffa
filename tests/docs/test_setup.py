"""The two stages of the set-up: what `make demo` installs, and what `make test` adds."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECORDER = """#!/bin/sh
echo "$@" >>"{log}"
if [ "$1 $2" = "-m venv" ]; then mkdir -p "$3/bin" && cp "$0" "$3/bin/python"; fi
case "$*" in *"{fails}"*) exit 3 ;; esac
"""


def set_up(directory: Path, *arguments: str, fails: str = "no such command") -> tuple[int, str]:
    """Exit code, and the commands that a set-up into `directory` gives to Python."""
    python, log = directory / "recorder", directory / "log"
    python.write_text(RECORDER.format(log=log, fails=fails))
    python.chmod(0o700)
    log.write_text("")
    environment = os.environ | {"PYTHON": str(python)}
    environment.pop("PREREAD_TORCH_INDEX", None)
    done = subprocess.run(
        ["scripts/setup.sh", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    return done.returncode, log.read_text()


def test_running_it_takes_no_test_tools(tmp_path: Path) -> None:
    code, said = set_up(tmp_path, "run", str(tmp_path / "venv"))
    assert code == 0
    assert "torch==" in said
    assert "--editable .[redis,object,postgres]" in said
    assert "--no-deps --group demo" in said
    assert "--group dev" not in said
    assert (tmp_path / "venv" / ".run").exists()
    assert not (tmp_path / "venv" / ".ready").exists()


def test_the_tools_come_on_top(tmp_path: Path) -> None:
    set_up(tmp_path, "run", str(tmp_path / "venv"))
    code, said = set_up(tmp_path, "tools", str(tmp_path / "venv"))
    assert code == 0
    assert "--group dev" in said
    assert "torch==" not in said
    assert (tmp_path / "venv" / ".ready").exists()


@pytest.mark.parametrize("what", ["torch==", "--group demo", "--group dev"])
def test_what_fails_is_done_again_the_next_time(tmp_path: Path, what: str) -> None:
    code, _ = set_up(tmp_path, "all", str(tmp_path / "venv"), fails=what)
    assert code != 0
    assert not (tmp_path / "venv" / ".ready").exists()
    assert (tmp_path / "venv" / ".run").exists() is (what == "--group dev")


@pytest.mark.parametrize(
    ("target", "stages"),
    [
        ("demo", ["run"]),
        ("serve", ["run"]),
        ("check", ["run", "tools"]),
        ("test", ["run", "tools"]),
        ("chaos", ["run", "tools"]),
    ],
)
def test_each_command_does_its_own_set_up(tmp_path: Path, target: str, stages: list[str]) -> None:
    venv, environment = tmp_path / "venv", os.environ | {"PREREAD_DATA_DIR": str(tmp_path / "data"), "MAKEFLAGS": ""}
    command = ["make", "-n", target, f"VENV={venv}"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    found = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("scripts/setup.sh")]
    assert list(dict.fromkeys(found)) == stages  # `make test` calls make twice, and nothing was made meanwhile
