"""The server as a process: where it listens, how it stops, and what it finds again after it was killed."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from service.core import datadir
from service.errors import Conflict, Invalid
from service.serve import check_address, make_server
from service.settings import Settings

ROOT = Path(__file__).parents[2]
TEXT = b"The keeper is Marta Kovalenko. " * 200
PROGRAM = """
import sys
from service.core.adapters import Given
from service.engine.fake import FakeEngine
from service.serve import run
from service.settings import Settings
engine = FakeEngine(chunk_delay_s=float(sys.argv[1]))
sys.exit(run(Settings(engine="fake", port=0, free_floor_bytes=0), Given(engine=engine)))
"""


@contextmanager
def server(data_dir, chunk_delay_s=0.0):
    environment = {"PATH": os.defpath, "PREREAD_DATA_DIR": str(data_dir), "PYTHONWARNINGS": "error"}
    command = [sys.executable, "-c", PROGRAM, str(chunk_delay_s)]
    log = data_dir / f"log-{time.monotonic_ns()}"
    with log.open("w") as stderr:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=stderr)
    try:
        while (url := re.search(r"listens on (http://\S+)", log.read_text())) is None:
            assert process.poll() is None, log.read_text()
            time.sleep(0.05)
        with httpx.Client(base_url=url[1], timeout=60) as client:
            yield process, client
    finally:
        process.kill()
        process.wait(60)


def status(client, document_id):
    return client.get(f"/v1/documents/{document_id}").json()["status"]


def wait_for(client, document_id, wanted):
    deadline = time.monotonic() + 60
    while (found := status(client, document_id)) != wanted:
        assert time.monotonic() < deadline, found
        assert found != "failed", client.get(f"/v1/documents/{document_id}").text
        time.sleep(0.05)


@pytest.mark.alone
def test_sigterm_ends_open_streams_and_the_document_goes_on_after_the_restart(tmp_path):
    with server(tmp_path, chunk_delay_s=0.5) as (process, client):
        document_id = client.post("/v1/documents", files={"file": ("a.txt", TEXT)}).json()["id"]
        wait_for(client, document_id, "prefilling")
        with client.stream("GET", f"/v1/documents/{document_id}/events") as response:
            lines = response.iter_lines()
            next(lines)
            asked = time.monotonic()
            process.send_signal(signal.SIGTERM)
            last = [line for line in lines if line.startswith(("event:", "data:"))][-2:]
        assert last[0] == "event: error"
        assert '"status":503' in last[1]
        process.wait(60)
        assert time.monotonic() - asked < 10
    with server(tmp_path) as (_, client):
        wait_for(client, document_id, "ready")


def test_a_killed_server_finds_its_documents_again(tmp_path):
    with server(tmp_path, chunk_delay_s=0.5) as (process, client):
        done = client.post("/v1/documents", files={"file": ("b.txt", b"A short text.")}).json()["id"]
        wait_for(client, done, "ready")
        document_id = client.post("/v1/documents", files={"file": ("a.txt", TEXT)}).json()["id"]
        wait_for(client, document_id, "prefilling")
        process.kill()
        process.wait(60)
    with server(tmp_path) as (_, client):
        assert status(client, done) == "ready"
        wait_for(client, document_id, "ready")
        assert sorted(p.name for p in (tmp_path / "files").iterdir()) == sorted([done, document_id])


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
def test_others_must_be_let_in_on_purpose(settings, host):
    with pytest.raises(Invalid, match="API keys"):
        check_address(settings.model_copy(update={"host": host}))
    check_address(settings.model_copy(update={"host": host, "allow_remote": True}))
    check_address(settings.model_copy(update={"host": host}), protected=True)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_this_machine_is_always_let_in(settings, host):
    check_address(settings.model_copy(update={"host": host}))


def test_a_port_in_use_is_a_sentence(settings):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(Conflict, match=f"port {port}"):
            make_server(settings.model_copy(update={"port": port}))


def test_one_server_at_a_time_in_a_data_directory(settings):
    datadir.prepare(settings)
    with datadir.lock(settings.data_dir):
        with pytest.raises(Conflict, match="PREREAD_DATA_DIR"):
            datadir.lock(settings.data_dir)
    datadir.lock(settings.data_dir).close()


def test_folders_from_a_backup_become_private(settings):
    for path in (settings.files_dir, settings.store_dir):
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(0o755)
    datadir.prepare(settings)
    assert {path.stat().st_mode & 0o777 for path in (settings.files_dir, settings.store_dir)} == {0o700}


def test_the_server_process_never_loads_torch():
    code = "import service.serve, sys; print(sorted({'torch', 'transformers', 'pypdf'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_settings_come_from_a_file_and_the_environment_wins(tmp_path, monkeypatch):
    config = tmp_path / "preread.toml"
    config.write_text('port = 1234\nmodel = "other"\n')
    monkeypatch.setenv("PREREAD_CONFIG", str(config))
    monkeypatch.setenv("PREREAD_PORT", "4321")
    settings = Settings()
    assert (settings.port, settings.model) == (4321, "other")
    config.write_text("colour = 1\n")
    with pytest.raises(ValueError, match="colour"):
        Settings()


def test_every_setting_says_what_it_is():
    assert all(field.description for field in Settings.model_fields.values())
    with pytest.raises(ValueError, match="frozen"):
        Settings().port = 1  # pyright: ignore[reportAttributeAccessIssue]


def test_headers_are_bounded(tmp_path):
    with server(tmp_path) as (_, client):
        with socket.create_connection((client.base_url.host, client.base_url.port), timeout=60) as connection:
            with suppress(OSError):  # the server hangs up before it has read all
                connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 4_000_000)
            with suppress(ConnectionResetError):
                assert connection.recv(100).startswith(b"HTTP/1.1 400")
        assert client.get("/health/live").status_code == 200


def test_it_can_be_stopped_while_it_waits_for_a_worker(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens there: no Redis, no worker
        environment = {
            "PATH": os.defpath, "PREREAD_DATA_DIR": str(tmp_path), "PREREAD_ENGINE": "fake", "PREREAD_PORT": "0",
            "PREREAD_FLEET_URL": f"redis://127.0.0.1:{taken.getsockname()[1]}/0",
        }  # fmt: skip
        command = [sys.executable, "-c", "from service.cli import main; main()", "serve"]
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        try:
            said = ""
            while "Redis cannot be asked for workers" not in said:
                line = process.stderr.readline()
                assert line, said
                said += line
            process.send_signal(signal.SIGTERM)
            rest = process.communicate(timeout=300)[1]
        finally:
            process.kill()
    assert process.returncode == 0
    assert "Traceback" not in rest
    assert "Redis cannot be asked" not in rest
