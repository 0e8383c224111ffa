"""What docker-compose.yml runs, run: API, worker, migration and Redis with its secrets, over real servers."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.cache_store.tiers.servers import S3Server, free_port
from tests.e2e.compose import Place, Service
from tests.e2e.server import ROOT, until
from tests.postgres import PostgresServer, program

TEXT = b"The keeper of the lighthouse is Marta Kovalenko. " * 20
ANSWER = "This is the fake engine: it has no model."
FAKE = {"PREREAD_ENGINE": "fake", "PREREAD_FREE_FLOOR_BYTES": "0", "PREREAD_HOST": "127.0.0.1"}
"""No model, for its time; and nothing else is changed but addresses and paths."""


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    server = S3Server()
    httpx.put(f"{server.endpoint}/preread", timeout=60).raise_for_status()
    yield server
    server.close()


@pytest.fixture
def place(tmp_path: Path, s3: S3Server, postgres: PostgresServer) -> Place:
    """Secrets as the script makes them, with the addresses of servers here."""
    secrets = tmp_path / "secrets"
    subprocess.run([ROOT / "docker" / "secrets.sh", secrets], check=True, capture_output=True)
    redis_port, api_port = free_port(), free_port()
    database = postgres.new_database().rpartition("/")[2]
    hosts = {
        "@redis:6379/": f"@127.0.0.1:{redis_port}/",
        "@postgres:5432/preread": f"@127.0.0.1:{postgres.port}/{database}",
    }
    for path in secrets.glob("preread_*_url"):
        text = path.read_text()
        path.chmod(0o600)
        for there, here in hosts.items():
            text = text.replace(there, here)
        path.write_text(text)
    paths = {
        "/run/secrets": str(secrets),
        "http://object:9000": s3.endpoint,
        "127.0.0.1:8420": f"127.0.0.1:{api_port}",
        "redis-cli -h 127.0.0.1": f"redis-cli -h 127.0.0.1 -p {redis_port}",
        "8420": str(api_port),
        "pg_isready": program("pg_isready"),
        "--host=127.0.0.1": f"--host=127.0.0.1 --port={postgres.port}",
    }
    return Place(tmp_path, paths, FAKE | {"REDIS_PORT": str(redis_port), "API_PORT": str(api_port)})


@pytest.fixture
def redis(place: Place) -> Iterator[Service]:
    service = Service("redis", place)
    service.spec = service.spec | {
        "command": [
            *service.spec["command"], "--port", place.extra["REDIS_PORT"], "--bind", "127.0.0.1",
            "--dir", str(service.data_dir),
        ]
    }  # fmt: skip
    with service:
        service.until_healthy()
        yield service


def test_api_and_worker_apart(place: Place, redis: Service, s3: S3Server) -> None:
    worker, api, migrate = (Service(name, place) for name in ("worker-cpu", "api", "migrate"))
    refused = api.run()
    assert refused.returncode == 1, "it must not begin with a database of no version"
    assert "preread db upgrade" in refused.stderr
    done = migrate.run()
    assert done.returncode == 0, done.stderr
    assert "up to date" in done.stderr

    assert "No worker has run" in worker.check().stderr
    with worker, api:
        worker.until_healthy()
        api.until_healthy()
        assert " serves " in worker.check().stdout
        url = f"http://127.0.0.1:{place.extra['API_PORT']}"
        key = (place.directory / "secrets" / "preread_admin_key").read_text().strip()
        assert httpx.get(f"{url}/v1/documents").status_code == 401
        with httpx.Client(base_url=url, timeout=120, headers={"Authorization": f"Bearer {key}"}) as client:
            assert client.get("/health/ready").json()["engine"] == "fake"
            document = client.post("/v1/documents", files={"file": ("a.txt", TEXT)}).json()["id"]
            until(lambda: client.get(f"/v1/documents/{document}").json()["status"] == "ready", "it is not read")
            session = client.post("/v1/sessions", json={"document_ids": [document]}).json()["id"]
            answer = client.post(f"/v1/sessions/{session}/questions", json={"question": "Who?"}).json()
            assert answer["answer"] == ANSWER
        assert list((api.data_dir / "files").iterdir())
        listing = f"{s3.endpoint}/preread?list-type=2"
        until(lambda: "manifest.json" in httpx.get(listing, timeout=60).text, "nothing is stored")
        assert worker.stop() == 0
        assert "is not registered" in worker.check().stderr
        assert api.stop() in (0, -15)
    assert redis.stop() == 0


def test_everything_in_one_process(place: Place) -> None:
    with Service("preread", place) as service:
        service.until_healthy()
        assert service.stop() in (0, -15)
    assert (service.data_dir / "preread.sqlite3").exists()


def test_the_databases_health_check(place: Place, postgres: PostgresServer) -> None:
    service = Service("postgres", place)
    words = [part for word in service.spec["healthcheck"]["test"] for part in place.here(word).split()]
    assert subprocess.run(words[1:], capture_output=True, timeout=300, check=False).returncode == 0
    postgres.kill()
    assert subprocess.run(words[1:], capture_output=True, timeout=300, check=False).returncode != 0
