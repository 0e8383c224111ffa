"""The documentation names what there is, and its links lead somewhere."""

import re
from pathlib import Path

import pytest
from prometheus_client import generate_latest

from cache_store.errors import MissReason
from cache_store.layout import KVType
from service.api.metrics import Metrics
from service.engine.messages import EngineStats
from service.settings import Settings

ROOT = Path(__file__).parents[2]
DOCS = sorted((ROOT / "docs").glob("*.md"))
OPERATIONS = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")


def anchors(text: str) -> set[str]:
    """The anchors that GitHub makes of headings."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_links_to_files_and_headings_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path) if path else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked.read_text(encoding="utf-8")), target


def test_every_setting_is_in_the_operations_guide():
    documented = set(re.findall(r"^\| `PREREAD_(\w+)` \|", OPERATIONS, re.MULTILINE))
    assert documented == {name.upper() for name in Settings.model_fields}


def test_defaults_in_the_operations_guide_are_those_of_the_code():
    shown = dict(re.findall(r"^\| `PREREAD_(\w+)` \| ([^|]*?) \|", OPERATIONS, re.MULTILINE))
    units = {"MiB": 1 << 20, "GiB": 1 << 30}
    for name, field in Settings.model_fields.items():
        if name == "data_dir":
            continue
        text = shown[name.upper()].strip("`").replace("empty", "")
        number = re.fullmatch(r"(\d+)(?: (MiB|GiB))?", text)
        value = float(number[1]) * units.get(number[2], 1) if number else text
        default = field.get_default(call_default_factory=True)
        assert value == (str(default).lower() if isinstance(default, bool) else default), name


def test_every_miss_reason_is_explained():
    text = (ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)) >= {str(reason) for reason in MissReason}


def test_every_kv_type_is_explained_with_its_bits():
    text = (ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8")
    for kv_type in KVType:
        assert f"| `{kv_type}` | {kv_type.key_bits} bit | {kv_type.value_bits} bit |" in text


def test_metrics_in_the_operations_guide_exist():
    metrics = Metrics()
    metrics.engine.stats = EngineStats(*[0] * len(EngineStats.__struct_fields__))
    metrics.observe("GET", "/", 200, 0.1)
    exposed = set(re.findall(r"^# TYPE (\w+)", generate_latest(metrics.registry).decode(), re.MULTILINE))
    named = set(re.findall(r"`(preread_\w+)`", OPERATIONS))
    assert named
    assert named <= exposed


def test_settings_in_the_container_files_exist():
    known = {f"PREREAD_{name.upper()}" for name in Settings.model_fields}
    known |= {"PREREAD_CONFIG", "PREREAD_SECRETS_DIR", "PREREAD_WORKER_GRACE_S"}
    # Of the compose file itself.
    known |= {f"PREREAD_{name}" for name in ("PUBLISH", "PUBLISH_PORT", "MODELS_DIR", "SECRETS", "REDIS_MAXMEMORY")}
    for file in ("docker-compose.yml", "docker/Dockerfile"):
        used = set(re.findall(r"PREREAD_[A-Z_]+", (ROOT / file).read_text(encoding="utf-8")))
        assert used <= known, file


def test_documented_paths_of_this_repository_exist():
    ours = re.compile(r"`((?:cache_store|ingest|service|examples|docker|docs)/[\w./-]+)`")
    for page in DOCS:
        for path in ours.findall(page.read_text(encoding="utf-8")):
            assert (ROOT / path).exists(), (page.name, path)
