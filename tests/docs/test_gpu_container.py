"""The image and the compose file for NVIDIA cards, checked without a container engine."""

import re
from pathlib import Path

import pytest
import yaml

from service.settings import Settings

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "docker" / "gpu.Dockerfile").read_text(encoding="utf-8")
GUIDE = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
PLAIN = (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def override() -> dict:
    return yaml.safe_load((ROOT / "docker" / "compose.gpu.yml").read_text(encoding="utf-8"))


def argument(name: str) -> str:
    found = re.search(rf"^ARG {name}=(.*)$", DOCKERFILE, re.MULTILINE)
    assert found is not None
    return found[1].strip('"')


def test_versions_are_pinned_and_those_of_the_package():
    assert re.fullmatch(r"\d+\.\d+\.\d+", argument("CUDA"))
    assert re.fullmatch(r"\d+\.\d+\.\d+", argument("TORCH"))
    assert all("${CUDA}" in image for image in re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE))
    pinned = re.search(r'"(exllamav2==[\d.]+);', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert pinned is not None
    assert f"pip install {pinned[1]} " in DOCKERFILE


def test_torch_is_built_for_the_cuda_that_compiles_the_extension():
    major, minor, _ = argument("CUDA").split(".")
    assert argument("TORCH_INDEX").endswith(f"/cu{major}{minor}")


def test_it_is_compiled_for_every_generation_that_the_guide_names():
    archs = argument("CUDA_ARCHS")
    assert archs == "7.0;7.5;8.0;8.6;8.9;9.0"
    assert archs in GUIDE
    assert {f"sm_{arch.replace('.', '')}" for arch in archs.split(";")} <= set(re.findall(r"sm_\d+", GUIDE))


def test_the_image_copies_only_what_its_ignore_file_lets_through():
    ignore = (ROOT / "docker" / "gpu.Dockerfile.dockerignore").read_text(encoding="utf-8")
    allowed = re.findall(r"^!(\S+)", ignore, re.MULTILINE)
    for line in re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE, re.MULTILINE):
        assert set(line.split()[:-1]) <= set(allowed), line


def test_it_runs_as_the_same_user_with_the_same_data_as_the_plain_image():
    for line in ("USER 10001:10001", "VOLUME /var/lib/preread", "EXPOSE 8420", 'ENTRYPOINT ["preread"]'):
        assert f"{line}\n" in DOCKERFILE
        assert f"{line}\n" in PLAIN


def test_the_override_gives_a_card_and_no_other_right(override):
    service = override["services"]["preread"]
    assert service["build"]["dockerfile"] == "docker/gpu.Dockerfile"
    assert service["deploy"]["resources"]["reservations"]["devices"][0]["capabilities"] == ["gpu"]
    assert set(service) == {"build", "image", "environment", "deploy", "healthcheck"}
    assert service["environment"]["PREREAD_ENGINE"] == "exl2"


def test_settings_exist():
    known = {f"PREREAD_{name.upper()}" for name in Settings.model_fields} | {"PREREAD_TEST_MODEL"}
    for text in (DOCKERFILE, GUIDE, (ROOT / "docker" / "compose.gpu.yml").read_text(encoding="utf-8")):
        assert set(re.findall(r"PREREAD_[A-Z_]+", text)) <= known


def test_the_guide_names_the_types_that_are_served():
    from service.engine.models.support import CARD_TYPES

    row = re.search(r"^\| types \| (.+) \|$", GUIDE, re.MULTILINE)
    assert row is not None
    assert tuple(re.findall(r"`(\w+)`", row[1])) == CARD_TYPES
