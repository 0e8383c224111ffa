"""The commands over the fake engine and a real store: what they print, and with which exit code they end."""

import json
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result
from litestar.testing import TestClient

from service.app import create_app
from service.cli import main
from service.core import datadir
from service.engine.index_heads import IndexHead, IndexHeads, save_index_heads
from service.engine.models.card import ModelCard, ModelDigests, save_card
from service.engine.prompt import PromptParts
from service.settings import Settings

TEXT = "The safety officer is Bartholomew Kemp. The connection fee is 1,275 pounds.\n"


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(data_dir=tmp_path / "data", engine="fake", free_floor_bytes=0, answer_room_tokens=64)


@pytest.fixture
def preread(settings: Settings, monkeypatch: pytest.MonkeyPatch):
    """Runs a command in this process."""
    monkeypatch.setenv("PREREAD_DATA_DIR", str(settings.data_dir))
    monkeypatch.setenv("PREREAD_ENGINE", "fake")
    monkeypatch.setenv("PREREAD_FREE_FLOOR_BYTES", "0")
    monkeypatch.setenv("PREREAD_ANSWER_ROOM_TOKENS", "64")

    def run(*arguments: str, exit_code: int = 0) -> Result:
        result = CliRunner().invoke(main, list(arguments))
        assert result.exit_code == exit_code, result.output
        assert "Traceback" not in result.output
        return result

    return run


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "contract.txt"
    path.write_text(TEXT * 8)
    return path


def test_help_imports_nothing_heavy() -> None:
    heavy = ("torch", "transformers", "litestar", "sqlalchemy", "pydantic", "rich", "numpy")
    code = f"import sys, service.cli; print([m for m in {heavy} if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_every_command_has_help(preread) -> None:
    for arguments in ((), ("serve",), ("ingest",), ("ask",), ("models",), ("snapshots",), ("db",)):
        assert "--help" in preread(*arguments, "--help").stdout


def test_ask_reads_once_and_then_resumes(preread, file: Path) -> None:
    first = json.loads(preread("ask", str(file), "Who?", "And the fee?", "--json").stdout)
    second = json.loads(preread("ask", str(file), "Who?", "--json").stdout)
    tokens = first["document"]["token_count"]
    assert first["document"]["id"] == second["document"]["id"]
    assert [a["usage"]["reused_tokens"] >= tokens for a in first["answers"]] == [True, True]
    (again,) = second["answers"]
    assert again["cache"] == {
        "source": "disk", "restored_tokens": tokens, "restore_ms": again["cache"]["restore_ms"], "miss_reason": None,
    }  # fmt: skip
    assert again["usage"]["reused_tokens"] == tokens
    assert again["usage"]["prefilled_tokens"] < 60
    assert again["answer"] == first["answers"][0]["answer"]


def test_ask_goes_on_with_a_session(preread, file: Path) -> None:
    first = json.loads(preread("ask", str(file), "Who?", "--json").stdout)
    document_id, session_id = first["document"]["id"], first["session_id"]
    again = json.loads(preread("ask", document_id, "And?", "--session", session_id, "--json").stdout)
    assert again["session_id"] == session_id
    assert again["answers"][0]["usage"]["reused_tokens"] > first["document"]["token_count"]


def test_snapshots_have_the_titles_of_their_documents(preread, file: Path) -> None:
    session_id = json.loads(preread("ask", str(file), "Who?", "--json").stdout)["session_id"]
    assert session_id
    rows = json.loads(preread("snapshots", "list", "--json").stdout)["snapshots"]
    assert {(row["kind"], row["title"]) for row in rows} == {("document", "contract.txt"), ("turn", "contract.txt")}
    shown = preread("snapshots", "list").stdout.splitlines()
    assert len(shown) == len(rows)
    assert all(' "contract.txt": published, ' in line for line in shown)


def test_a_database_of_another_version_takes_only_the_titles_away(preread, file: Path, settings: Settings) -> None:
    preread("ingest", str(file))
    with closing(sqlite3.connect(settings.data_dir / "preread.sqlite3")) as database:
        database.execute("ALTER TABLE documents RENAME COLUMN title TO name")
        database.commit()
    listed = preread("snapshots", "list")
    assert listed.stdout.startswith("document doc_")
    assert "titles are left out" in listed.stderr


def test_ask_about_several_files(preread, file: Path, tmp_path: Path) -> None:
    other = tmp_path / "letter.txt"
    other.write_text("The auditor is Clara Vint. She came in May.\n" * 12)
    asked = ("ask", str(file), "Who?", "--with", str(other))
    first = json.loads(preread(*asked, "--json").stdout)
    ids = [document["id"] for document in first["documents"]]
    assert {part["document_id"] for part in first["answers"][0]["provenance"]} == set(ids)
    assert f"fetched from {other}, page 1\n" in preread(*asked).stderr
    again = json.loads(
        preread("ask", ids[0], "And?", "--with", ids[1], "--session", first["session_id"], "--json").stdout
    )
    assert again["answers"][0]["usage"]["reused_tokens"] > sum(d["token_count"] for d in first["documents"])
    assert "about other documents" in preread("ask", ids[0], "?", "--session", first["session_id"], exit_code=1).stderr
    assert "no file 'x.txt'" in preread("ask", str(file), "?", "--with", "x.txt", exit_code=2).stderr


def test_ask_prints_for_people(preread, file: Path) -> None:
    result = preread("ask", str(file), "Who?", "--max-tokens", "12")
    assert result.stdout.startswith("This is the ")
    assert "tokens reused from" in result.stderr
    assert "--session ses_" in result.stderr


def test_a_part_of_a_document_is_kept_where_that_is_asked_for(preread, file: Path) -> None:
    asked = '{"sink_tokens": 8, "summary_tokens": 0, "window_tokens": 64}'
    (read,) = json.loads(preread("ingest", str(file), "--retention", asked, "--json").stdout)["documents"]
    snapshot = read["document"]["snapshot"]
    assert (snapshot["retention"]["preset"], snapshot["resident_tokens"]) == ("custom", 72)
    shown = preread("ask", str(file), "Who?", "--retention", asked)
    assert "fetched from page 1\n" in shown.stderr
    again = json.loads(preread("ask", str(file), "Who?", "--retention", asked, "--json").stdout)
    assert (again["document"]["id"], again["answers"][0]["cache"]["restored_tokens"]) == (read["document"]["id"], 72)
    assert {part["mode"] for part in again["answers"][0]["provenance"]} >= {"fetched"}
    whole = preread("ingest", str(file)).stderr
    assert "kept whole" in whole
    assert read["document"]["id"] not in whole


def test_a_long_document_is_kept_in_part_and_that_is_said(preread, tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text(TEXT * 240)
    assert (
        "272 of its tokens stay in memory (small, chosen because it is long)"
        in preread("ingest", str(tmp_path / "long.txt")).stderr
    )
    refused = preread("ingest", str(tmp_path / "long.txt"), "--retention", "full", exit_code=1)
    assert "`balanced` or `small`" in refused.stderr


def test_ingest_goes_on_after_a_file_that_cannot_be_read(preread, file: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_bytes(b"")
    result = preread("ingest", str(tmp_path / "empty.txt"), str(file), "--json", exit_code=1)
    bad, good = json.loads(result.stdout)["documents"]
    assert (bad["document"], bad["created"]) == (None, False)
    assert bad["error"]["message"]
    assert good["error"] is None
    assert good["document"]["status"] == "ready"
    known = json.loads(preread("ingest", str(file), "--json").stdout)["documents"][0]
    assert (known["created"], known["document"]["id"]) == (False, good["document"]["id"])
    assert "already read" in preread("ingest", str(file)).stderr


def test_what_the_terminal_read_the_server_has_and_the_reverse(preread, settings, file: Path, tmp_path: Path) -> None:
    read = json.loads(preread("ingest", str(file), "--json").stdout)["documents"][0]["document"]
    with TestClient(create_app(settings), base_url="http://127.0.0.1") as client:
        uploaded = client.post("/v1/documents", files={"file": ("other-name.txt", file.read_bytes())})
        assert (uploaded.status_code, uploaded.json()["id"]) == (200, read["id"])
        session = client.post("/v1/sessions", json={"document_ids": [read["id"]]}).json()
        path = f"/v1/sessions/{session['id']}/questions"
        answer = client.post(path, json={"question": "Who?"}).json()
        assert answer["usage"]["reused_tokens"] == read["token_count"]
        busy = preread("ask", str(file), "Who?", "--json", exit_code=1)
        assert json.loads(busy.stdout)["error"]["code"] == "data_dir_in_use"
    again = json.loads(preread("ask", read["id"], "And?", "--session", session["id"], "--json").stdout)
    assert again["answers"][0]["usage"]["reused_tokens"] > read["token_count"]


@pytest.mark.parametrize(
    ("arguments", "exit_code", "words"),
    [
        (("ask", "no-such-file.pdf", "Who?"), 2, "no file"),
        (("ask", "doc_unknown", "Who?"), 1, "no such document"),
        (("ingest", "no-such-file.pdf"), 2, "does not exist"),
        (("ask", "doc_x", " "), 1, "empty"),
        (("ask", "doc_x", "Who?", "--temperature", "-1"), 1, "temperature"),
        (("ask", "doc_x"), 2, "Missing argument"),
        (("ask", "doc_x", "Who?", "--retention", "small"), 1, "--retention is for a file"),
        (("ingest", __file__, "--retention", "huge"), 1, "retention is `full`, `balanced`, `small`"),
        (("models", "verify", "nothing"), 1, "no model"),
        (("models", "index-heads", "nothing"), 1, "no model"),
        (("serve", "--host", "0.0.0.0"), 1, "no API keys"),
        (("unknown",), 2, "No such command"),
    ],
)
def test_what_goes_wrong_is_a_sentence(preread, arguments, exit_code, words) -> None:
    assert words in preread(*arguments, exit_code=exit_code).stderr


def test_a_model_that_is_not_there(preread, monkeypatch, file: Path) -> None:
    monkeypatch.setenv("PREREAD_ENGINE", "torch")
    monkeypatch.setenv("PREREAD_MODEL", "absent")
    for arguments in (("ask", str(file), "Who?"), ("serve", "--port", "0")):
        assert "absent" in preread(*arguments, exit_code=1).stderr


def test_settings_that_are_wrong_are_named(preread, monkeypatch) -> None:
    monkeypatch.setenv("PREREAD_MAX_BATCH", "many")
    assert "PREREAD_MAX_BATCH" in preread("models", "list", exit_code=1).stderr


@pytest.mark.parametrize("content", [None, b"port = [[[", b"\xff\xfe", b"prot = 1"])
def test_a_settings_file_that_is_missing_or_wrong_is_told(preread, monkeypatch, tmp_path, content) -> None:
    file = tmp_path / "preread.toml"
    if content is not None:
        file.write_bytes(content)
    monkeypatch.setenv("PREREAD_CONFIG", str(file))
    result = preread("models", "list", exit_code=1)
    assert "preread.toml" in result.stderr or "PROT" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("url", ["nonsense", "mysql+nope://u:secret@x", "sqlite:///relative.db", ""])
def test_a_database_that_cannot_be_used_is_told(preread, monkeypatch, settings: Settings, file: Path, url) -> None:
    monkeypatch.setenv("PREREAD_DATABASE_URL", url)
    monkeypatch.chdir(settings.data_dir.parent)
    settings.data_dir.mkdir(parents=True, exist_ok=True)
    (settings.data_dir / "preread.sqlite3").write_bytes(b"damaged" * 1000)
    for arguments in (("serve", "--port", "0"), ("ingest", str(file)), ("db", "upgrade")):
        told = preread(*arguments, exit_code=1).stderr
        assert "The database cannot be used" in told
        assert "secret" not in told
        assert "Traceback" not in told


def test_a_data_directory_in_use(preread, settings: Settings, file: Path) -> None:
    datadir.prepare(settings)
    with datadir.lock(settings.data_dir):
        assert "is using" in preread("serve", exit_code=1).stderr


def test_models_list(preread, settings: Settings) -> None:
    assert json.loads(preread("models", "list", "--json").stdout) == {"models": []}
    (settings.models_dir / "broken").mkdir(parents=True)
    (settings.models_dir / "broken" / "preread.json").write_text("{}")
    assert "broken: damaged" in preread("models", "list").stdout


def test_models_list_tells_index_heads(preread, settings: Settings) -> None:
    path = settings.models_dir / "tiny"
    path.mkdir(parents=True)
    digests = ModelDigests("w" * 32, "c" * 32, "t" * 32, "p" * 32, "r" * 32)
    card = ModelCard(
        format_version=1, name="tiny", source="tiny.gguf", architecture="llama", n_layers=2, n_heads=4, n_kv_heads=2,
        head_dim=32, max_context=512, vocab_size=384, n_parameters=0, dtype="float32", eos_token_ids=[2],
        quantization="none", digests=digests, prompt=PromptParts("", "", "", "", ""), files={},
    )  # fmt: skip
    save_card(card, path)
    assert "preread models index-heads tiny" in preread("models", "list").stdout
    found = IndexHeads(1, digests.weights, [IndexHead(1, 0, 0.9)], 0.9, 1.0, 20)
    save_index_heads(found, path)
    assert "index heads 1/0" in preread("models", "list").stdout
    (row,) = json.loads(preread("models", "list", "--json").stdout)["models"]
    assert row["index_heads"] == [{"layer": 1, "head": 0, "mean_reciprocal_rank": 0.9}]
    save_index_heads(msgspec.structs.replace(found, weights="other"), path)
    assert "belongs to other weights" in preread("models", "list").stdout


def test_snapshots_list_and_verify(preread, settings: Settings, file: Path) -> None:
    preread("ask", str(file), "Who?")
    rows = json.loads(preread("snapshots", "list", "--json").stdout)["snapshots"]
    assert {(row["kind"], row["state"]) for row in rows} == {("document", "published"), ("turn", "published")}
    assert "2 snapshots checked, 0 damaged" in preread("snapshots", "verify").stderr
    shard = next((settings.store_dir / "snapshots").rglob("documents/*/*/shard-*"))
    data = bytearray(shard.read_bytes())
    data[-3] ^= 1
    shard.chmod(0o600)
    shard.write_bytes(data)
    damaged = preread("snapshots", "verify", "--json", exit_code=1)
    assert json.loads(damaged.stdout)["damaged"] == 1
    (answer,) = json.loads(preread("ask", str(file), "Who?", "--json").stdout)["answers"]
    assert answer["cache"]["miss_reason"] == "checksum"
    assert "document" in preread("snapshots", "list").stdout


def test_database_upgrade(preread, settings: Settings) -> None:
    preread("db", "upgrade")
    preread("db", "upgrade")
    assert (settings.data_dir / "preread.sqlite3").is_file()


def test_kv_of_a_turn_that_nothing_refers_to_is_removed_at_the_next_start(preread, settings: Settings, file) -> None:
    preread("ask", str(file), "Who?")
    turns = settings.store_dir / "snapshots" / "local" / "turns"
    (kept,) = turns.iterdir()
    shutil.copytree(kept, turns / "ans_left_by_a_crash")
    preread("ask", str(file), "Who?")
    assert len(list(turns.iterdir())) == 2
    assert kept.is_dir()
