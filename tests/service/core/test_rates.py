"""Token buckets: in this process, in a Redis that processes share, and while that is away."""

import asyncio

import pytest

from service.core import rates
from service.core.clock import FakeClock
from service.core.rates import LocalBuckets, Rates, RedisBuckets
from service.engine.fleet.link import Link
from service.errors import LimitReached
from tests.cache_store.tiers.servers import RedisServer

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def redis(tmp_path_factory):
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.kill()


async def test_a_bucket_fills_again(monkeypatch):
    clock = FakeClock()
    monkeypatch.setattr(rates.time, "monotonic", clock.monotonic)
    buckets = LocalBuckets()
    assert [await buckets.take("ann", 50, 2) for _ in range(2)] == [0, 0]
    wait_s = await buckets.take("ann", 50, 2)
    assert wait_s == pytest.approx(0.02)
    assert await buckets.take("bob", 50, 2) == 0
    clock.advance(wait_s + 0.005)
    assert await buckets.take("ann", 50, 2) == 0


async def test_processes_share_a_bucket_in_redis(redis):
    links = [Link(redis.url), Link(redis.url)]
    one, other = (RedisBuckets(link) for link in links)
    # Nothing comes into it while this runs.
    assert [await one.take("ann", 0.001, 3), await other.take("ann", 0.001, 3), await one.take("ann", 0.001, 3)] == [
        0
    ] * 3
    assert await other.take("ann", 0.001, 3) == pytest.approx(1000, abs=60)
    assert await other.take("bob", 0.001, 3) == 0
    assert await one.take("eve", 20, 1) == 0
    await asyncio.sleep(0.2)
    assert await other.take("eve", 20, 1) == 0
    client = redis.client()
    assert client.ttl("preread:rate:eve") <= 2, "a full bucket is forgotten"
    client.close()
    for link in links:
        await link.close()


async def test_while_redis_is_away_each_process_counts_for_itself(tmp_path):
    server = RedisServer(tmp_path)
    link = Link(server.url)
    rates = Rates(per_minute=1, burst=1, buckets=RedisBuckets(link))
    await rates.require("ann")
    server.kill()
    await rates.require("ann")
    with pytest.raises(LimitReached) as refused:
        await rates.require("ann")
    assert (refused.value.code, 1 <= refused.value.retry_after_s <= 60) == ("rate_limited", True)
    await link.close()
