"""The compose file as a whole: its services, how they depend on each other, and what each may."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from service.cli import main
from service.settings import Settings

ROOT = Path(__file__).parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
ONE_SHOT = {"migrate", "bucket"}
OURS = {name for name, service in SERVICES.items() if service["image"].startswith("preread")}
KEYS = {
    "build", "cap_drop", "command", "depends_on", "deploy", "entrypoint", "environment", "healthcheck", "image", "init",
    "network_mode", "networks", "ports", "profiles", "read_only", "restart", "secrets", "security_opt", "shm_size",
    "stop_grace_period", "stop_signal", "tmpfs", "user", "volumes",
}  # fmt: skip
"""Of a service in the Compose specification, as far as this file uses them: others are mistyped."""


def resolve(value: str) -> str:
    """With no variable set: `${NAME:-default}` is its default."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", value)


def seconds(duration: str) -> int:
    found = re.fullmatch(r"(\d+)s", duration)
    assert found is not None
    return int(found[1])


@pytest.fixture(params=SERVICES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def test_only_keys_that_there_are() -> None:
    assert {key for key in COMPOSE if not key.startswith("x-")} == {"services", "networks", "volumes", "secrets"}
    for service in SERVICES.values():
        assert set(service) <= KEYS
        assert {"image", "user", "profiles", "read_only", "cap_drop", "stop_grace_period"} <= set(service)


def test_profiles() -> None:
    by_profile = {
        profile: {name for name, service in SERVICES.items() if profile in service["profiles"]}
        for profile in ("all-in-one", "cpu", "gpu")
    }
    apart = {"api", "migrate", "postgres", "redis", "object", "bucket"}
    assert by_profile == {"all-in-one": {"preread"}, "cpu": apart | {"worker-cpu"}, "gpu": apart | {"worker"}}
    assert set().union(*by_profile.values()) == set(SERVICES)


def test_nothing_runs_as_root(name: str) -> None:
    uid, _, gid = SERVICES[name]["user"].partition(":")
    assert int(uid) > 0
    assert int(gid) > 0


def test_what_is_named_exists(name: str) -> None:
    service = SERVICES[name]
    assert set(service.get("secrets", ())) <= set(COMPOSE["secrets"])
    assert set(service.get("networks", ())) <= set(COMPOSE["networks"])
    for volume in service.get("volumes", ()):
        source, _, target = resolve(volume).partition(":")
        assert source.startswith("/") if not target else source in COMPOSE["volumes"]
    for value in map(str, service.get("environment", {}).values()):
        for file in re.findall(r"/run/secrets/(\w+)", value):
            assert file in service["secrets"]


def test_it_waits_for_what_it_needs(name: str) -> None:
    service = SERVICES[name]
    for other, need in service.get("depends_on", {}).items():
        assert set(service["profiles"]) <= set(SERVICES[other]["profiles"])
        done = "service_completed_successfully" if other in ONE_SHOT else "service_healthy"
        assert need["condition"] == done


def test_it_is_watched_and_started_again_or_ends(name: str) -> None:
    service = SERVICES[name]
    if name in ONE_SHOT:
        assert service["restart"] == "no"
        assert "healthcheck" not in service
        return
    assert service["restart"] == "unless-stopped"
    check = service["healthcheck"]
    assert check["test"][0] in ("CMD", "CMD-SHELL")
    assert seconds(check["timeout"]) < seconds(check["interval"])
    assert seconds(check["start_period"]) >= 20


def test_ours_are_called_with_commands_and_settings_that_exist() -> None:
    fields = {f"PREREAD_{name.upper()}" for name in Settings.model_fields} | {"PREREAD_SECRETS_DIR"}
    foreign = {"AWS_ENDPOINT_URL", "AWS_REGION"}
    for name in OURS - {"bucket"}:
        command, environment = SERVICES[name]["command"], SERVICES[name]["environment"]
        assert CliRunner().invoke(main, [*command, "--help"]).exit_code == 0, command
        assert set(environment) <= fields | foreign
        given = {key.lower().removeprefix("preread_"): resolve(value) for key, value in environment.items()}
        Settings.model_validate({key: value for key, value in given.items() if key in Settings.model_fields})


def test_a_worker_may_end_its_answers() -> None:
    grace = Settings.model_fields["worker_grace_s"].default
    for name in ("worker", "worker-cpu"):
        assert seconds(SERVICES[name]["stop_grace_period"]) >= grace + 20
    assert seconds(SERVICES["api"]["stop_grace_period"]) >= Settings.model_fields["shutdown_grace_s"].default + 20


def test_the_gpu_worker_has_a_card_and_the_other_none() -> None:
    (device,) = SERVICES["worker"]["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["count"], device["capabilities"]) == ("nvidia", 1, ["gpu"])
    assert SERVICES["worker"]["build"]["dockerfile"] == "docker/gpu.Dockerfile"
    assert SERVICES["worker"]["environment"]["PREREAD_ENGINE"] == "exl2"
    assert "deploy" not in SERVICES["worker-cpu"]


def test_workers_share_no_data_directory() -> None:
    for name in ("worker", "worker-cpu"):
        assert SERVICES[name]["volumes"][0] == SERVICES[name]["environment"]["PREREAD_DATA_DIR"]


def test_no_password_is_in_the_file() -> None:
    text = (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
    assert not re.search(r"://[^/\s]*:[^/\s]*@", text)
    assert not re.search(r"(?i)(password|secret\w*key|requirepass)\w*: [^/\s]+$", text, re.MULTILINE)
    for service in SERVICES.values():
        assert not {"POSTGRES_PASSWORD", "MINIO_ROOT_PASSWORD", "AWS_SECRET_ACCESS_KEY"} & set(
            service.get("environment", ())
        )


def test_only_the_api_reaches_out() -> None:
    assert COMPOSE["networks"]["inside"] == {"internal": True}
    for name, service in SERVICES.items():
        if name not in ("preread", "api"):
            assert service.get("networks", ["inside"]) == ["inside"]
            assert ("network_mode" in service) is (name == "bucket")


@pytest.mark.parametrize("dockerfile", ["docker/Dockerfile", "docker/gpu.Dockerfile"])
def test_the_images_have_what_the_services_need(dockerfile: str) -> None:
    text = (ROOT / dockerfile).read_text(encoding="utf-8")
    extras = re.search(r'constraints\.txt "\.\[([\w,]+)\]"', text)
    assert extras is not None
    assert {"redis", "object", "postgres"} <= set(extras[1].split(","))
    for name in OURS:
        assert f"USER {SERVICES[name]['user']}\n" in text


def test_secrets_are_made_once_and_fit_together(tmp_path: Path) -> None:
    folder = tmp_path / "secrets"

    def make() -> dict[str, str]:
        subprocess.run([ROOT / "docker" / "secrets.sh", folder], check=True, capture_output=True)
        return {path.name: path.read_text().strip() for path in folder.iterdir()}

    made = make()
    assert set(made) == set(COMPOSE["secrets"])
    assert folder.stat().st_mode & 0o777 == 0o700
    assert f":{made['postgres_password']}@postgres:5432/" in made["preread_database_url"]
    redis = made["redis_conf"].removeprefix("requirepass ")
    assert made["preread_redis_url"] == f"redis://:{redis}@redis:6379/0"
    assert made["preread_fleet_url"] == f"redis://:{redis}@redis:6379/1"
    assert len({made["postgres_password"], redis, made["aws_secret_access_key"]}) == 3
    assert all(len(made[name]) >= 40 for name in ("postgres_password", "aws_secret_access_key"))
    (folder / "redis_conf").unlink()
    assert {**make(), "redis_conf": ""} == {**made, "redis_conf": ""}
