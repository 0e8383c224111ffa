"""URLs that no tier can be opened with are told at start, in a sentence, not by whoever first uses the tier."""

from pathlib import Path

import pytest

from cache_store.tiers.errors import TierDown, TierSettings
from cache_store.tiers.opening import TierConfig, open_tiers
from tests.cache_store.recipes import KEY

HOST = "redis://127.0.0.1:1"


@pytest.mark.parametrize(
    "url",
    [
        "127.0.0.1:6379",
        "http://127.0.0.1/",
        "redis://127.0.0.1:99999/0",
        "redis://127.0.0.1:port/0",
        "redis://..:6379/0",
        f"redis://{'a' * 70}/0",
        f"{HOST}/production",
        f"{HOST}/0?socket_timeout=soon",
        f"{HOST}/0?no_such_option=1",
        f"{HOST}/0?decode_responses=true",
        f"{HOST}/0?retry=3",
        f"{HOST}/0?protocol=9",
        "rediss://127.0.0.1:1/0?ssl_cert_reqs=sometimes",
    ],
)
def test_a_wrong_url_of_redis(url: str) -> None:
    with pytest.raises(TierSettings, match=r"^PREREAD_REDIS_URL: ."):
        open_tiers(TierConfig(redis_url=url))


@pytest.mark.parametrize(
    "url",
    ["redis://", HOST, f"{HOST}/3?socket_timeout=1&client_name=preread", "rediss://127.0.0.1:1", "unix:///none.sock"],
)
def test_a_redis_that_is_down_is_opened(url: str) -> None:
    (tier,) = open_tiers(TierConfig(redis_url=url))
    if "127.0.0.1" in url or url.startswith("unix"):
        with pytest.raises(TierDown):
            tier.remove(KEY)


@pytest.mark.parametrize("url", ["/srv/preread", "file://", "file:///", "file://relative", "s3://", "ftp://host/x"])
def test_a_wrong_url_of_an_object_store(url: str) -> None:
    with pytest.raises(TierSettings, match=r"^PREREAD_OBJECT_URL: ."):
        open_tiers(TierConfig(object_url=url))


def test_an_object_store_where_a_file_is(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for url in (f"file://{tmp_path}/file", f"file://{tmp_path}/file/below"):
        with pytest.raises(TierSettings, match=r"^PREREAD_OBJECT_URL: ."):
            open_tiers(TierConfig(object_url=url))
