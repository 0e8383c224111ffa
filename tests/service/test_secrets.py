"""Secrets from files."""

from pathlib import Path

import pytest

from service.errors import Invalid
from service.secrets import read_secrets


def test_files_are_settings_of_the_same_name(tmp_path: Path) -> None:
    (tmp_path / "preread_redis_url").write_text("redis://:geheim@host/0\n")
    (tmp_path / "AWS_SECRET_ACCESS_KEY").write_text("key")
    (tmp_path / "preread_fleet_url").write_text("from the file")
    (tmp_path / "postgres_password").write_text("of others")
    (tmp_path / "preread_folder").mkdir()
    environment = {"PREREAD_SECRETS_DIR": str(tmp_path), "PREREAD_FLEET_URL": "from the environment"}
    read_secrets(environment)
    del environment["PREREAD_SECRETS_DIR"]
    assert environment == {
        "PREREAD_REDIS_URL": "redis://:geheim@host/0",
        "AWS_SECRET_ACCESS_KEY": "key",
        "PREREAD_FLEET_URL": "from the environment",
    }


def test_without_a_folder_nothing_is_read() -> None:
    environment: dict[str, str] = {}
    read_secrets(environment)
    assert environment == {}


def test_what_cannot_be_read_is_told_without_the_secret(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match=r"PREREAD_SECRETS_DIR: .*none cannot be read: No such file"):
        read_secrets({"PREREAD_SECRETS_DIR": str(tmp_path / "none")})
    (tmp_path / "preread_redis_url").write_bytes(b"redis://\xff")
    with pytest.raises(Invalid, match="it is not text"):
        read_secrets({"PREREAD_SECRETS_DIR": str(tmp_path)})
