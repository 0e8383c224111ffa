"""What the README says can be typed as it stands."""

import os
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from service.settings import Settings

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
BLOCKS = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
CURL = '''\
    """As much of curl as the README uses."""
    import argparse, sys
    from pathlib import Path
    import httpx
    options = argparse.ArgumentParser()
    for flag in ("-s", "-N"):
        options.add_argument(flag, action="store_true")
    for option in ("-H", "-F"):
        options.add_argument(option, action="append", default=[])
    options.add_argument("-d")
    options.add_argument("url")
    said = options.parse_args()
    headers = dict(header.split(": ", 1) for header in said.H)
    files = {name: Path(path.removeprefix("@")) for name, path in (part.split("=", 1) for part in said.F)}
    sent = {name: (path.name, path.read_bytes()) for name, path in files.items()}
    method = "POST" if sent or said.d else "GET"
    with httpx.stream(method, said.url, headers=headers, files=sent or None, content=said.d, timeout=60) as response:
        for chunk in response.iter_bytes():
            sys.stdout.buffer.write(chunk)
    sys.exit(0 if response.is_success else 22)
'''


def commands(word: str) -> list[list[str]]:
    """Lines of the README's blocks that call `word`, as words."""
    lines = "".join(BLOCKS).replace("\\\n", " ").splitlines()
    split = [shlex.split(line, comments=True) for line in lines]
    return [words for words in split if word in (part.rsplit("/", 1)[-1] for part in words)]


@pytest.mark.parametrize("target", re.findall(r"\]\(([^)\s]+)\)", README))
def test_links_lead_somewhere(target):
    path, _, anchor = target.partition("#")
    assert (ROOT / path).exists()
    assert not anchor or f"\n## {anchor.capitalize()}\n" in README


def test_make_targets_exist():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {words[words.index("make") + 1] for words in commands("make") if words.index("make") + 1 < len(words)}
    named |= set(re.findall(r"`make ([a-z]+)`", README))
    assert named
    assert named <= targets


def test_settings_exist():
    named = set(re.findall(r"PREREAD_[A-Z_]+", README)) - {"PREREAD_TORCH_INDEX"}
    assert named <= {f"PREREAD_{name.upper()}" for name in Settings.model_fields}
    assert "PREREAD_TORCH_INDEX" in (ROOT / "scripts" / "setup.sh").read_text()


def test_preread_commands_exist():
    command = ".venv/bin/preread"
    called = [words[words.index(command) + 1 :] for words in commands("preread") if command in words]
    assert called
    for words in called:
        names = [word for word in words[:2] if re.fullmatch(r"[a-z]+", word)]
        call = [sys.executable, "-c", "from service.cli import main; main()", *names, "--help"]
        assert subprocess.run(call, cwd=ROOT, capture_output=True, check=False).returncode == 0, words


@pytest.fixture
def readme_server(tmp_path):
    """The address of a `preread serve` with the fake engine."""
    chosen = {"PREREAD_ENGINE": "fake", "PREREAD_DATA_DIR": str(tmp_path / "data"), "PREREAD_FREE_FLOOR_BYTES": "0"}
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PREREAD_")}
    server = subprocess.Popen(
        [sys.executable, "-c", "from service.cli import main; main()", "serve", "--port", "0"],
        cwd=ROOT, env={**kept, **chosen}, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert server.stderr is not None
    with server:
        listens = next(line for line in server.stderr if "listens on" in line)
        yield listens.split()[-1]
        server.terminate()
        server.stderr.read()


def test_the_calls_of_the_readme_work_one_after_the_other(tmp_path, readme_server):
    curl = tmp_path / "bin" / "curl"
    curl.parent.mkdir()
    curl.write_text(f"#!{sys.executable}\n{textwrap.dedent(CURL)}")
    curl.chmod(0o755)
    script = "set -euo pipefail\n" + "".join(block for block in BLOCKS if "curl" in block)
    script = script.replace("http://127.0.0.1:8420", readme_server)
    # The fake engine counts bytes as tokens: the contract is too long for it.
    script = script.replace("examples/contract/contract.pdf", "examples/letter.txt")
    run = subprocess.run(
        ["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, "PATH": f"{curl.parent}:{os.environ['PATH']}"},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert "event: ready" in run.stdout
    assert '"reused_tokens"' in run.stdout
    assert "event: done" in run.stdout
    for block in PYTHON:
        block = block.replace("http://127.0.0.1:8420", readme_server)
        exec(block.replace("examples/contract/contract.pdf", str(ROOT / "examples" / "letter.txt")), {})
