"""An S3 store that answers with errors, cut bodies, wrong bytes, or not at all: repeated, or a miss."""

from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from cache_store.errors import SnapshotMiss
from cache_store.keys import EntryName
from cache_store.tiers.errors import TierDown, TierRefused
from cache_store.tiers.object import ObjectTier
from tests.cache_store.recipes import KEY, Recipe
from tests.cache_store.tiers.conftest import MakeStore
from tests.cache_store.tiers.proxy import Proxy
from tests.cache_store.tiers.servers import BUCKET, S3Server

NAME = EntryName(KEY, Recipe().fingerprint.digest)
RETRY = {"max_retries": 3, "backoff": {"init_backoff": timedelta(milliseconds=10), "max_backoff": timedelta(seconds=1)}}


@pytest.fixture
def proxy(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    proxy = Proxy(s3.endpoint)
    monkeypatch.setenv("AWS_ENDPOINT", proxy.endpoint)
    yield proxy
    proxy.close()


@pytest.fixture
def bring(proxy: Proxy, s3: S3Server, make_store: MakeStore) -> Callable[[], object]:
    """Reads a snapshot that only the object store has."""
    tier = ObjectTier(s3.url, client={"timeout": timedelta(seconds=60)}, retry=RETRY)
    store, other = make_store([tier]), make_store([tier], "other")
    Recipe().build(store)
    store.uploader.send_noted()
    return lambda: Recipe().read(other)


@pytest.mark.parametrize(("fault", "n"), [("500", 2), ("503", 3), ("reset", 2), ("cut", 1), ("wrong", 1)])
def test_a_fault_that_passes_is_not_seen(proxy: Proxy, bring: Callable[[], object], fault: str, n: int) -> None:
    proxy.fault, proxy.n = fault, n
    assert bring() == Recipe().blocks
    assert proxy.n_faults == n


@pytest.mark.parametrize("fault", ["500", "503", "reset", "cut", "wrong"])
def test_a_fault_that_stays_is_a_miss(proxy: Proxy, bring: Callable[[], object], s3: S3Server, fault: str) -> None:
    proxy.fault = fault
    with pytest.raises(SnapshotMiss, match="object"):
        bring()
    # Only what was read whole, and twice, is known to be damaged.
    assert len(s3.names()) == (0 if fault == "wrong" else 2)
    proxy.fault = ""
    if fault != "wrong":
        assert bring() == Recipe().blocks


def test_a_server_that_is_gone_is_a_miss(s3: S3Server, make_store: MakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT", "http://127.0.0.1:9")
    store = make_store([ObjectTier(s3.url, retry={"max_retries": 0})])
    Recipe().build(store)
    assert store.uploader.send_noted() == 1
    with pytest.raises(TierDown):
        store.tiers[0].manifest(NAME)
    assert Recipe().read(store) == Recipe().blocks


def test_a_bucket_that_is_not_there_takes_nothing(s3: S3Server, make_store: MakeStore) -> None:
    store = make_store([ObjectTier(s3.url.replace(BUCKET, "nobody"), retry={"max_retries": 0})])
    Recipe().build(store)
    assert store.uploader.send_noted() == 1
    assert store.places(KEY) == {"disk": "ready", "object": "pending"}


def test_the_budget_of_the_object_store_is_kept(tmp_path: Path) -> None:
    tier = ObjectTier(f"file://{tmp_path}/objects", budget_nbytes=150)
    tier.write(NAME, b"m", 100, iter([memoryview(bytes(100))]))
    other = EntryName(KEY.of_kind("resident"), NAME.fingerprint_digest)
    with pytest.raises(TierRefused, match="101 of 150"):
        tier.write(other, b"m", 100, iter([memoryview(bytes(100))]))
    tier.discard(NAME)
    tier.write(other, b"m", 100, iter([memoryview(bytes(100))]))


def test_an_upload_without_its_manifest_is_not_seen(s3: S3Server, make_store: MakeStore) -> None:
    tier = ObjectTier(s3.url)

    def shards() -> Iterator[memoryview]:
        yield memoryview(b"first")
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError):
        tier.write(NAME, b"m", 10, shards())
    assert tier.manifest(NAME) is None
    (entry,) = tier.entries()
    assert (entry.complete, entry.nbytes) == (False, 5)
    assert tier.remove(KEY).objects == 1
