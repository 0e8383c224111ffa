"""The pages that are made from the code are those of this code."""

import re
import subprocess
import sys
from pathlib import Path

from service.settings import Settings

ROOT = Path(__file__).parents[2]


def test_they_are_current():
    command = [sys.executable, "scripts/write_docs.py", "--check"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, f"{run.stdout}{run.stderr}\nRun `make docs`, and commit what it wrote."


def test_the_example_of_an_environment_is_one_with_which_the_server_starts(monkeypatch):
    lines = re.findall(r"^# (PREREAD_[A-Z_]+)=(.*)$", (ROOT / ".env.example").read_text(), re.MULTILINE)
    assert {name for name, _ in lines} == {f"PREREAD_{name.upper()}" for name in Settings.model_fields}
    monkeypatch.setenv("XDG_DATA_HOME", "")
    for name in list(Settings.model_fields):
        monkeypatch.delenv(f"PREREAD_{name.upper()}", raising=False)
    by_default = Settings()
    for name, value in lines:
        monkeypatch.setenv(name, value)
    assert Settings() == by_default
