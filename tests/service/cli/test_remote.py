"""Commands that ask a server: what they print is what they print without one."""

import json
import os
import subprocess
import sys
import threading

import pytest
from click.testing import CliRunner

from service.cli import main
from service.core.key_ring import KeyRing
from service.engine.fake import FakeEngine
from service.settings import Settings
from tests.service.conftest import Reader
from tests.service.live import live_server, without_logs

TEXT = "The safety officer is Bartholomew Kemp. The connection fee is 1,275 pounds.\n"


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    settings = Settings(
        data_dir=tmp_path_factory.mktemp("live") / "data", engine="fake", free_floor_bytes=0, answer_room_tokens=64
    )
    engine = FakeEngine(["The safety officer ", "is Bartholomew Kemp."], max_context=20_000)
    with without_logs(), live_server(settings, engine, read=Reader()) as live:
        yield live


@pytest.fixture
def preread(live, monkeypatch):
    """Runs a command for the server."""
    monkeypatch.delenv("PREREAD_SERVER", raising=False)
    monkeypatch.delenv("PREREAD_KEY", raising=False)

    def run(*arguments, exit_code=0, server=live.url):
        result = CliRunner().invoke(main, [*(("--server", server) if server else ()), *arguments])
        assert result.exit_code == exit_code, result.output
        assert "Traceback" not in result.output
        return result

    return run


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "contract.txt"
    path.write_text(TEXT * 8)
    return path


def test_ask_reads_once_and_prints_for_people(preread, file):
    first = preread("ask", str(file), "Who?", "And then?", "--max-tokens", "9")
    answer = "The safety officer is Bartholomew Kemp.\n"
    citation = '  page 1: "The safety officer is Bartholomew Kemp." (1.00)\n'
    assert first.stdout == (answer + citation) * 2
    assert "> And then?" in first.stderr
    assert "tokens reused from host" in first.stderr
    assert "Go on with: --session ses_" in first.stderr


def test_what_is_not_in_the_document_is_said(preread, live, file, monkeypatch):
    monkeypatch.setattr(live.engine, "reply", ["The moon is made of green cheese."])
    asked = preread("ask", str(file), "What is the moon made of?")
    assert asked.stdout == "The moon is made of green cheese.\n"
    assert '  not found in the document: "The moon is made of green cheese."\n' in asked.stderr


def test_ask_goes_on_with_a_session_as_json(preread, file):
    first = json.loads(preread("ask", str(file), "Who?", "--json").stdout)
    document, (answer,) = first["document"], first["answers"]
    assert (document["status"], document["title"]) == ("ready", "contract.txt")
    assert (answer["question"], answer["answer"]) == ("Who?", "The safety officer is Bartholomew Kemp.")
    assert answer["citations"][0]["page"] == 1
    again = json.loads(preread("ask", document["id"], "?", "--session", first["session_id"], "--json").stdout)
    assert again["session_id"] == first["session_id"]
    assert again["answers"][0]["usage"]["reused_tokens"] > document["token_count"]
    refused = preread("ask", document["id"], "?", "--retention", "small", exit_code=1)
    assert "--retention is for a file" in refused.stderr


def test_json_has_the_fields_of_a_command_without_a_server(preread, file, tmp_path, monkeypatch):
    here = {"DATA_DIR": tmp_path / "here", "ENGINE": "fake", "FREE_FLOOR_BYTES": 0, "ANSWER_ROOM_TOKENS": 64}
    there = json.loads(preread("ask", str(file), "Who?", "--json").stdout)
    for name, value in here.items():
        monkeypatch.setenv(f"PREREAD_{name}", str(value))
    local = json.loads(preread("ask", str(file), "Who?", "--json", server=None).stdout)

    def shape(value):
        return {name: shape(each) for name, each in value.items()} if isinstance(value, dict) else None

    assert shape(local["document"]) == shape(there["document"])
    assert shape(local["answers"][0]) == shape(there["answers"][0])
    assert local.keys() == there.keys()


def test_ingest_sends_files_and_goes_on_after_one_that_cannot_be_read(preread, file, tmp_path):
    (tmp_path / "empty.txt").write_bytes(b"")
    result = preread("ingest", str(tmp_path / "empty.txt"), str(file), "--json", exit_code=1)
    bad, good = json.loads(result.stdout)["documents"]
    assert (bad["document"], bad["created"], bool(bad["error"]["message"])) == (None, False, True)
    assert (good["document"]["status"], good["error"]) == ("ready", None)
    known = preread("ingest", str(file)).stderr
    assert known.startswith(f"{file}: {good['document']['id']}, 1 page, ")
    assert known.endswith("kept whole (already read)\n")


def test_documents_are_listed_shown_saved_and_deleted(preread, file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file.write_text(TEXT * 9)
    made = json.loads(preread("ingest", str(file), "--json").stdout)["documents"][0]["document"]
    line = f'{made["id"]} "contract.txt": ready, 1 page, {made["token_count"]} tokens'
    assert line in preread("documents", "list").stdout.splitlines()
    assert preread("documents", "show", made["id"]).stdout == f"{line}\n"
    assert made["id"] in [d["id"] for d in json.loads(preread("documents", "list", "--json").stdout)["documents"]]
    assert "pinned" in preread("documents", "pin", made["id"]).stdout
    assert "pinned" not in preread("documents", "pin", made["id"], "--off").stdout
    assert preread("documents", "page", made["id"], "1").stdout.startswith("The safety officer")
    assert "is there already" in preread("documents", "download", made["id"], exit_code=2).stderr
    preread("documents", "download", made["id"], "-o", "copy.txt")
    assert (tmp_path / "copy.txt").read_text() == TEXT * 9
    assert f"{made['id']}: removed from file " in preread("documents", "delete", made["id"]).stdout
    assert "not_found" in preread("documents", "show", made["id"], "--json", exit_code=1).stdout


def test_ask_reads_a_pipe(preread, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    writing = threading.Thread(target=(tmp_path / "pipe").write_text, args=(TEXT * 6,))
    writing.start()
    assert preread("ask", str(tmp_path / "pipe"), "Who?").stdout.startswith("The safety officer is Bartholomew")
    writing.join(60)


def test_what_was_deleted_before_an_error_is_said(preread, file):
    made = json.loads(preread("ingest", str(file), "--json").stdout)["documents"][0]["document"]
    result = preread("documents", "delete", made["id"], "doc_unknown", exit_code=1)
    assert f"{made['id']}: removed from file " in result.stdout


def test_names_that_are_not_utf8_are_read(preread, tmp_path):
    path = tmp_path / os.fsdecode(b"caf\xe9.txt")
    path.write_text(TEXT * 7)
    (read,) = json.loads(preread("ingest", str(path), "--json").stdout)["documents"]
    assert (read["path"], read["document"]["filename"]) == (str(tmp_path / "caf?.txt"), "caf?.txt")


def test_sessions_are_listed_shown_forked_and_deleted(preread, file):
    session_id = json.loads(preread("ask", str(file), "Who?", "--json").stdout)["session_id"]
    assert session_id in preread("sessions", "list").stdout
    shown = preread("sessions", "show", session_id)
    assert "The safety officer is Bartholomew Kemp.\n  page 1: " in shown.stdout
    assert "> Who?" in shown.stderr
    fork = json.loads(preread("sessions", "fork", session_id, "--title", "Again", "--json").stdout)
    assert (fork["forked_from"], len(fork["turns"])) == (session_id, 1)
    preread("sessions", "delete", session_id, fork["id"])
    assert session_id not in preread("sessions", "list").stdout


@pytest.mark.parametrize(
    ("arguments", "exit_code", "words"),
    [
        (("snapshots", "list"), 2, "`preread snapshots` works on the machine it runs on"),
        (("serve",), 2, "without --server and PREREAD_SERVER"),
        (("ask", "doc_unknown", "Who?"), 1, "no such"),
        (("ask", "no-file.txt", "Who?"), 2, "There is no file"),
        (("documents", "show", ".."), 1, "no id"),
    ],
)
def test_what_goes_wrong_is_a_sentence(preread, arguments, exit_code, words):
    assert words in preread(*arguments, exit_code=exit_code).stderr


def test_without_a_server_what_needs_one_says_so(preread):
    assert "name it with --server URL" in preread("documents", "list", exit_code=2, server=None).stderr
    assert "--key is for a server" in preread("--key", "k", "ask", "a", "b", exit_code=2, server=None).stderr
    assert "no address" in preread("sessions", "list", exit_code=2, server="nonsense").stderr
    assert "Is the server running?" in preread("sessions", "list", exit_code=1, server="http://127.0.0.1:9").stderr
    assert "--shared" in preread("documents", "list", "--help", server=None).stdout


def test_a_process_of_its_own_with_a_key_of_the_environment(live, file):
    async def key():
        _, token = await KeyRing(live.services.db, live.services.clock).create(
            user="ann", organization="acme", scopes=("manage",)
        )
        live.services.keys.look_again()
        return token

    kept = {name: value for name, value in os.environ.items() if not name.startswith("PREREAD_")}
    command = [sys.executable, "-c", "from service.cli import main; main()", "ask", str(file), "Who?"]
    chosen = {"PREREAD_SERVER": live.url, "PREREAD_KEY": live.do(key())}
    run = subprocess.run(command, env=kept | chosen, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("The safety officer is Bartholomew Kemp.\n  page 1: ")
    refused = subprocess.run(
        command, env=kept | {"PREREAD_SERVER": live.url}, capture_output=True, text=True, timeout=300, check=False
    )
    assert refused.returncode == 1
    assert "preread: " in refused.stderr
    assert "key" in refused.stderr
