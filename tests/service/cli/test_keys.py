"""`preread keys` and `preread audit`: over the database alone, with and without a server."""

import json
import re
import socket

import pytest
from click.testing import CliRunner

from service.cli import main
from service.core import own_database
from service.core.credentials import split


@pytest.fixture
def preread(tmp_path, monkeypatch):
    """Runs a command in this process."""
    monkeypatch.setenv("PREREAD_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("PREREAD_ENGINE", "fake")

    def run(*arguments, exit_code=0):
        result = CliRunner().invoke(main, list(arguments))
        assert result.exit_code == exit_code, result.output
        assert "Traceback" not in result.output
        return result

    return run


def test_a_database_that_does_not_answer_is_named_without_its_password(preread, monkeypatch):
    monkeypatch.setattr(own_database, "_WAIT_S", 0.1)
    with socket.socket() as taken:  # bound, and nobody listens
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        monkeypatch.setenv("PREREAD_DATABASE_URL", f"postgresql://keeper:hush-hush@127.0.0.1:{port}/lights")
        for command in (["keys", "list"], ["db", "upgrade"]):
            said = preread(*command, exit_code=1).output
            assert f"does not answer: try again. It should be at 127.0.0.1:{port}/lights." in " ".join(said.split())
            assert "hush-hush" not in said
            assert "keeper" not in said


def test_a_key_is_made_listed_and_revoked(preread):
    made = preread("keys", "create", "--user", "ann", "--organization", "acme", "--scope", "ask", "--expires", "30d")
    key_id, secret = split(made.stdout.strip())
    assert secret not in made.stderr
    machine = json.loads(preread("keys", "create", "--json", "--name", "phone", "--user", "ann").stdout)
    assert (machine["user"], machine["organization"], machine["scopes"]) == ("ann", "local", ["manage"])
    listed = json.loads(preread("keys", "list", "--json").stdout)
    assert [(key["user"], key["organization"], key["state"]) for key in listed] == [
        ("ann", "acme", "active"), ("ann", "local", "active"),
    ]  # fmt: skip
    assert listed[0]["expires_at"] - listed[0]["created_at"] == 30 * 86400
    text = preread("keys", "list").stdout
    assert re.search(rf"{key_id}: ann \(acme\), ask: active, until \S+ \S+ UTC, not used", text)
    assert secret not in text
    preread("keys", "revoke", key_id)
    assert [key["state"] for key in json.loads(preread("keys", "list", "--json").stdout)] == ["revoked", "active"]
    again = preread("keys", "revoke", key_id, exit_code=1)
    assert "revoked before" in again.stderr
    audit = json.loads(preread("audit", "--json").stdout)
    assert [row["action"] for row in audit] == ["key.revoke", "key", "key"]
    assert f"operator key.revoke {key_id}" in preread("audit").stdout
    assert json.loads(preread("audit", "--json", "--about", key_id, "--limit", "1").stdout) == audit[:1]


def test_what_cannot_be(preread):
    assert "30d" in preread("keys", "create", "--expires", "soon", exit_code=2).output
    assert "user" in preread("keys", "create", "--user", " ", exit_code=1).stderr
    assert (
        json.loads(preread("keys", "create", "--user", "a\nb", "--json", exit_code=1).stdout)["error"]["code"]
        == "invalid"
    )
    preread("keys", "create", "--scope", "all", exit_code=2)


def test_a_key_for_the_settings_is_only_printed(preread):
    assert split(preread("keys", "new").stdout.strip())
    assert json.loads(preread("keys", "list", "--json").stdout) == []
