"""Commands as processes, with a standard output that is full, closed, or not read; and what they say in JSON."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from service.cli import main

RUN = (sys.executable, "-c", "from service.cli import main; main()")
PLAN = ("plan", "--layers", "2", "--kv-heads", "2", "--head-dim", "64", "--params", "0.1", "--card", "t4")
COMMANDS = [("--help",), PLAN, (*PLAN, "--json"), ("models", "list", "--json"), ("plan", "--nonsense", "--json")]


def shell(tmp_path: Path, arguments: tuple[str, ...], redirected: str, **more: str) -> tuple[int, str]:
    """Exit code and standard error of a command whose output goes where the shell says."""
    line = f"set -o pipefail; {shlex.join((*RUN, *arguments))} {redirected}"
    environment = os.environ | {"PREREAD_DATA_DIR": str(tmp_path), **more}
    done = subprocess.run(
        ["bash", "-c", line], env=environment, capture_output=True, text=True, timeout=60, check=False,
        errors="replace",
    )  # fmt: skip
    return done.returncode, done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_a_full_standard_output_is_said(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    code, said = shell(tmp_path, arguments, "> /dev/full")
    assert code == 1
    assert said.splitlines()[-1] == "preread: Standard output cannot be written: No space left on device."
    assert "Traceback" not in said
    assert "Exception ignored" not in said


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_a_closed_standard_output_is_said(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    code, said = shell(tmp_path, arguments, ">&-")
    assert code == 1
    assert said.splitlines()[-1].startswith("preread: Standard output cannot be written")
    assert "Traceback" not in said


@pytest.mark.parametrize("redirected", ["2>&-", "<&-", "0<&- 2>&-"])
def test_other_closed_descriptors_change_nothing(tmp_path: Path, redirected: str) -> None:
    code, said = shell(tmp_path, (*PLAN, "--json"), redirected)
    assert (code, said) == (0, "")


def test_a_reader_that_went_away_is_told_nothing(tmp_path: Path) -> None:
    code, said = shell(tmp_path, PLAN, "| true")
    assert (code, said) in ((141, ""), (0, ""))  # 0 where it was done before the reader had gone


def test_a_name_that_is_no_text_is_printed_all_the_same(tmp_path: Path) -> None:
    odd = os.fsdecode(b"m\xff")
    for arguments in (("plan", str(tmp_path / odd), "--json"), ("plan", str(tmp_path / odd))):
        code, said = shell(tmp_path, arguments, "> /dev/null")
        assert code == 1
        assert "Traceback" not in said
        assert "there is no model" in said
    result = CliRunner().invoke(main, ["plan", f"/none/{odd}", "--json"])
    assert json.loads(result.stdout)["error"]["message"].startswith("there is no model /none/m\ufffd")


@pytest.mark.parametrize(
    "arguments",
    [
        ("plan", "--nonsense", "--json"), ("--json", "plan"), ("plan", "--json", "--users", "none"),
        ("models", "import", "--json"), ("models", "nothing", "--json"), ("nothing", "--json"),
        ("keys", "revoke", "--json"), ("bench", "--json", "--contexts", "x"), ("--server", "x", "plan", "--json"),
        ("--key", "k", "doctor", "--json"), ("documents", "list", "--json"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_wrong_usage_is_json_too(arguments: tuple[str, ...]) -> None:
    result = CliRunner().invoke(main, arguments, env={"PREREAD_SERVER": None})
    assert result.exit_code == 2
    assert json.loads(result.stdout)["error"]["code"] == "usage"
    assert json.loads(result.stdout)["error"]["message"] in result.stderr


def test_a_full_standard_error_does_not_change_the_code(tmp_path: Path) -> None:
    assert shell(tmp_path, ("plan", "--nonsense", "--json"), "2> /dev/full")[0] == 2


def test_wrong_usage_without_json_is_text_alone() -> None:
    result = CliRunner().invoke(main, ["plan", "--", "--json", "x"])
    assert result.exit_code == 2
    assert result.stdout == ""


def test_a_home_directory_that_is_not_known_is_named(tmp_path: Path) -> None:
    runner = CliRunner()
    for arguments, env, name in (
        (["plan", "~nosuchuser/m"], {}, "MODEL"),
        (["models", "convert", "~nosuchuser/m"], {}, "SOURCE"),
        (["models", "list"], {"PREREAD_DATA_DIR": "~nosuchuser/x"}, "PREREAD_DATA_DIR"),
        (["models", "list"], {"PREREAD_CONFIG": "~nosuchuser/x"}, "PREREAD_CONFIG"),
        (["doctor"], {"PREREAD_MODEL": "~nosuchuser/x"}, "PREREAD_MODEL"),
    ):
        result = runner.invoke(main, arguments, env={"PREREAD_DATA_DIR": str(tmp_path)} | env)
        assert result.exit_code == 1, result.output
        assert name in result.stderr
        assert "~nosuchuser" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("plan", "m", "--weights-gb", "3"), "--weights-gb describes a model that is not here"),
        (("plan", "m", "--kv-heads", "3"), "--kv-heads describes"),
        ((*PLAN, "--window", "4096", "--retention", "full"), "--window is in place of --retention"),
        (("plan", "", "--card", "t4"), "MODEL is empty"),
        ((*PLAN, "--summary", "64"), "--window, which is missing"),
        (("models", "convert", "m", "--bits", "4", "--card", "t4"), "--card decides how many bits"),
    ],
)
def test_an_option_that_would_be_ignored_is_refused(arguments: tuple[str, ...], said: str, tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    result = CliRunner().invoke(main, [str(tmp_path / "m") if each == "m" else each for each in arguments])
    assert result.exit_code == 2, result.output
    assert said in result.stderr


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--heads", "3"), "a multiple of --kv-heads"),
        (("--weights-gb", "1000"), "80,000 bits a weight"),
        (("--weights-gb", "1", "--bits", "4"), "leave --bits out"),
    ],
)
def test_dimensions_of_no_model_are_refused(more: tuple[str, ...], said: str) -> None:
    result = CliRunner().invoke(main, [*PLAN, *more])
    assert result.exit_code == 1
    assert said in result.stderr
