"""A real Redis that dies, stalls, is full, loses its memory, or has wrong bytes: always a miss, never more."""

import time
from contextlib import suppress
from pathlib import Path

import pytest

from cache_store.errors import SnapshotMiss
from cache_store.keys import EntryName, SnapshotKey
from cache_store.tiers.breaker import GuardedTier
from cache_store.tiers.errors import TierDown, TierRefused
from cache_store.tiers.redis import PREFIX, SIZES, USED, USES, RedisTier
from tests.cache_store.recipes import KEY, Recipe
from tests.cache_store.tiers.conftest import MakeStore
from tests.cache_store.tiers.servers import RedisServer
from tests.chaos.wire import Wire

NAME = EntryName(KEY, Recipe().fingerprint.digest)
REDIS_KEY = PREFIX + "alice~document~doc-1"


def put(tier: RedisTier, name: EntryName, nbytes: int) -> None:
    tier.write(name, b"{}", nbytes, iter([memoryview(bytes(nbytes))]))


def names(n: int) -> list[EntryName]:
    return [EntryName(SnapshotKey("alice", "document", f"doc-{i}"), "0" * 16) for i in range(n)]


def held(tier: RedisTier) -> list[str]:
    return [entry.name.key.id for entry in tier.entries()]


@pytest.fixture
def tier(redis_server: RedisServer) -> RedisTier:
    return RedisTier(redis_server.url, ttl_s=100, timeout_s=10, connect_timeout_s=10)


def test_all_of_a_snapshot_is_one_key_that_runs_out(
    tier: RedisTier, make_store: MakeStore, redis_server: RedisServer
) -> None:
    store, client = make_store([tier]), redis_server.client()
    Recipe().build(store)
    store.uploader.send_noted()
    assert {key.decode() for key in client.scan_iter("preread:kv*")} == {REDIS_KEY, SIZES, USES}
    assert 0 < client.ttl(REDIS_KEY) <= 100
    client.expire(REDIS_KEY, 5)
    other = make_store([tier], "other")
    assert Recipe().read(other) == Recipe().blocks
    assert client.ttl(REDIS_KEY) > 5
    client.close()


def test_a_flushed_redis_is_a_miss(tier: RedisTier, make_store: MakeStore, redis_server: RedisServer) -> None:
    store, client = make_store([tier]), redis_server.client()
    Recipe().build(store)
    store.uploader.send_noted()
    client.flushall()
    with pytest.raises(SnapshotMiss, match="there is no snapshot"):
        Recipe().read(make_store([tier], "other"))
    assert tier.used() == 0
    client.close()


@pytest.mark.parametrize("fault", ["bytes", "short", "gone", "manifest", "string"])
def test_what_redis_has_wrong_is_removed(
    tier: RedisTier, make_store: MakeStore, redis_server: RedisServer, fault: str
) -> None:
    store, client = make_store([tier]), redis_server.client()
    Recipe().build(store)
    store.uploader.send_noted()
    (field,) = [field.decode() for field in client.hkeys(REDIS_KEY) if b"/" in field]
    value = client.hget(REDIS_KEY, field)
    assert isinstance(value, bytes)
    match fault:
        case "bytes":
            client.hset(REDIS_KEY, field, value[:-1] + bytes([value[-1] ^ 1]))
        case "short":
            client.hset(REDIS_KEY, field, value[:-1])
        case "gone":
            client.hdel(REDIS_KEY, field)
        case "manifest":
            client.hset(REDIS_KEY, "manifest", b"{}")
        case _:
            client.delete(REDIS_KEY)
            client.set(REDIS_KEY, "something else")
    with pytest.raises(SnapshotMiss, match="redis"):
        Recipe().read(make_store([tier], "other"))
    assert not client.exists(REDIS_KEY)
    client.close()


@pytest.mark.parametrize("name", [REDIS_KEY, SIZES, USES])
def test_a_foreign_value_under_a_name_of_ours_is_in_the_way_once(
    tier: RedisTier, make_store: MakeStore, redis_server: RedisServer, name: str
) -> None:
    client = redis_server.client()
    client.set(name, "not ours")
    with suppress(TierDown):
        put(tier, NAME, 100)
    client.delete(REDIS_KEY)
    store = make_store([tier])
    Recipe().build(store)
    store.uploader.send_noted()
    assert Recipe().read(make_store([tier], "other")) == Recipe().blocks
    assert held(tier) == [KEY.id]
    assert client.type(name) != b"string"
    client.close()


def test_garbage_in_the_account_stops_nothing(
    tier: RedisTier, make_store: MakeStore, redis_server: RedisServer
) -> None:
    client = redis_server.client()
    client.hset(SIZES, mapping={"a": "x", b"\xff": "1", "": "-"})
    store = make_store([tier])
    Recipe().build(store)
    store.uploader.send_noted()
    assert held(tier) == [KEY.id]
    assert tier.remove(KEY).objects == 1
    client.close()


def test_the_budget_lets_go_of_what_was_used_longest_ago(redis_server: RedisServer) -> None:
    tier = RedisTier(redis_server.url, budget_nbytes=3_000)
    made = names(5)
    for name in made[:2]:
        put(tier, name, 1_000)
    tier.touch(made[0])
    for name in made[2:4]:
        put(tier, name, 900)
    assert held(tier) == ["doc-0", "doc-2", "doc-3"]
    with pytest.raises(TierRefused, match="larger than the whole budget"):
        put(tier, made[4], 4_000)
    assert held(tier) == ["doc-0", "doc-2", "doc-3"]
    assert tier.used() <= 3_000
    tier.close()


def test_the_account_is_put_right_and_costs_no_more_with_many(redis_server: RedisServer) -> None:
    """What Redis itself let go of is counted until it is noticed, at the latest when there seems to be no room."""
    client, made = redis_server.client(), names(2)
    tier = RedisTier(redis_server.url, budget_nbytes=10_000_000)
    many = [f"alice~turn~{n}" for n in range(3_000)]
    with client.pipeline(transaction=False) as pipe:
        pipe.hset(SIZES, mapping=dict.fromkeys(many, 3_333) | {"lost": 9_000_000})
        pipe.zadd(USES, dict.fromkeys(many, 1.0))
        pipe.execute()
    put(tier, made[0], 2_000)
    assert client.hlen(SIZES) == client.zcard(USES) <= 3_000 - 20 + 1
    for n in range(30):
        put(tier, EntryName(SnapshotKey("alice", "document", f"more-{n}"), "0" * 16), 50_000)
        assert sum(map(int, client.hvals(SIZES))) <= int(client.get(USED)) <= 10_000_000
    client.set(USED, "not ours", ex=100)
    put(tier, made[1], 2_000)
    assert set(held(tier)) >= {"doc-0", "doc-1", "more-29"}
    assert int(client.get(USED)) == sum(map(int, client.hvals(SIZES)))
    client.close()
    tier.close()


def test_a_full_redis_refuses_and_everything_else_goes_on(
    make_store: MakeStore, redis_server: RedisServer, tier: RedisTier
) -> None:
    client = redis_server.client()
    used = client.info("memory")["used_memory"]
    client.config_set("maxmemory", used + 3_000_000)
    try:
        put(tier, names(1)[0], 1_000_000)
        with pytest.raises(TierRefused, match="maxmemory"):
            put(tier, names(2)[1], 20_000_000)
        client.set("queue", "x" * 1000)  # there is room for others
        client.config_set("maxmemory", 1)
        store = make_store([tier])
        Recipe().build(store)
        assert store.uploader.send_noted() == 0
        assert store.places(KEY) == {"disk": "ready"}
        assert Recipe().read(store) == Recipe().blocks
    finally:
        client.config_set("maxmemory", 0)
        client.close()


def test_an_out_of_memory_error_in_the_middle_leaves_nothing(
    tier: RedisTier, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = redis_server.client()
    monkeypatch.setattr(tier, "_make_room", lambda *_: client.config_set("maxmemory", 1))
    try:
        with pytest.raises(TierRefused, match="full"):
            put(tier, names(1)[0], 1_000_000)
    finally:
        client.config_set("maxmemory", 0)
    assert list(client.scan_iter("preread:kv*")) == []
    client.close()


def test_a_redis_that_stalls_or_dies_costs_one_time_out(
    tmp_path_factory: pytest.TempPathFactory, make_store: MakeStore
) -> None:
    server = RedisServer(tmp_path_factory.mktemp("dying"))
    tier = RedisTier(server.url, timeout_s=1, connect_timeout_s=1)
    store = make_store([GuardedTier(tier)])
    Recipe().build(store)
    try:
        server.freeze()
        started = time.monotonic()
        assert store.uploader.send_noted() == 1
        for _ in range(20):
            with pytest.raises(SnapshotMiss, match="did not answer lately"):
                Recipe(key=SnapshotKey("alice", "document", "absent")).read(store)
        assert time.monotonic() - started < 12
        server.thaw()
        server.kill()
        with pytest.raises(TierDown):
            tier.manifest(NAME)
        server.start()
        with pytest.raises(TierDown, match="did not answer lately"):
            store.tiers[0].manifest(NAME)
        assert tier.manifest(NAME) is None
    finally:
        server.kill()


def test_a_redis_that_dies_while_it_is_read_from_is_a_miss(
    tmp_path_factory: pytest.TempPathFactory, make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = RedisServer(tmp_path_factory.mktemp("dying"))
    try:
        tier = RedisTier(server.url, timeout_s=10)
        store = make_store([tier])
        Recipe().build(store)
        store.uploader.send_noted()
        read = tier.read

        def dying(*arguments: object) -> int:
            server.kill()
            return read(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(tier, "read", dying)
        with pytest.raises(SnapshotMiss, match="redis: Redis: "):
            Recipe().read(make_store([tier], "other"))
    finally:
        server.kill()


def test_a_redis_that_became_a_replica_is_left_for_the_one_that_took_over(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    """It stays connected, and refuses what is written, removals too."""
    wire, second = Wire(redis_server.port), RedisServer(tmp_path)
    tier, before = RedisTier(f"redis://127.0.0.1:{wire.port}/0"), redis_server.client()
    (name,) = names(1)
    try:
        put(tier, name, 10)
        wire.turn_to(second.port)
        before.execute_command("REPLICAOF", "127.0.0.1", second.port)
        with pytest.raises(TierDown, match="read only"):
            tier.remove(name.key)
        put(tier, name, 10)
        assert tier.remove(name.key).objects == 1
    finally:
        before.execute_command("REPLICAOF", "NO", "ONE")
        before.close()
        tier.close()
        wire.close()
        second.kill()
