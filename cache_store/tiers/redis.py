"""Redis as a tier that hosts share: hot, and never needed for anything to be right.

All of a snapshot, its data and what describes it, is one key with a time to live, so that Redis can only ever forget
it as a whole:

    preread:kv:<owner>~<kind>~<id>   a hash: `fingerprint`, `manifest`, and of each shard `<generation>/<number>`

A value has at most 64 MiB. There is one copy of a key, that of the model which stored it last. While it is written it
has another name, which runs out by itself. Two more keys, of sizes and of last uses, are for the budget alone.
"""

import threading
import time
import uuid
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import OutOfMemoryError, ReadOnlyError, RedisError, ResponseError
from redis.retry import Retry

from cache_store.area import Removed
from cache_store.keys import EntryName, SnapshotKey, flat_key, parse_flat
from cache_store.tiers.errors import TierDown, TierRefused, TierSettings
from cache_store.tiers.redis_wire import read_value
from cache_store.tiers.tier import Arrived, TierEntry, generation_of, silent

PREFIX = "preread:kv:"
UNFINISHED = "preread:kv+:"
SIZES, USES, USED = "preread:kv-sizes", "preread:kv-uses", "preread:kv-used"
UNFINISHED_S = 120
_OPTIONS = frozenset(
    {"client_name", "db", "health_check_interval", "max_connections", "password", "protocol"}
    | {"socket_connect_timeout", "socket_keepalive", "socket_timeout", "timeout", "username"}
)
"""Of a URL. Others would change what redis-py answers with, or are none of its own."""
MEMORY_SHARE = 0.9
"""Of a Redis with `maxmemory`: what lies above is left to others, whose writes would fail when it is full."""

COUNTED_S = 600
"""How long the sum of all sizes is kept up rather than made anew: it does not notice what Redis itself let go of."""

_RESERVE = """
-- KEYS: sizes, uses, used. ARGV: prefix, name, nbytes, budget (0: none), bytes to free, now, seconds a write may take,
-- seconds a count holds. Redis does nothing else meanwhile: what this takes must not grow with what is kept.
local budget, over, now = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local used, counted = tonumber(redis.call('GET', KEYS[3]) or ''), false
local function size_of(name) return tonumber(redis.call('HGET', KEYS[1], name) or 0) or 0 end
local function forget(name)
  if used then used = used - size_of(name) end
  redis.call('HDEL', KEYS[1], name)
  redis.call('ZREM', KEYS[2], name)
end
local function ran_out(name, at)
  return redis.call('EXISTS', ARGV[1] .. name) == 0 and now - tonumber(at) > tonumber(ARGV[7])
end

local oldest = redis.call('ZRANGE', KEYS[2], 0, 19, 'WITHSCORES')
for i = 1, #oldest, 2 do
  if ran_out(oldest[i], oldest[i + 1]) then forget(oldest[i]) end
end
local more = tonumber(ARGV[3]) - size_of(ARGV[2])
if budget > 0 then
  if not used or used + more > budget then
    local n = redis.call('ZCARD', KEYS[2])
    if redis.call('HLEN', KEYS[1]) ~= n then
      for _, name in ipairs(redis.call('HKEYS', KEYS[1])) do
        if not redis.call('ZSCORE', KEYS[2], name) then redis.call('HDEL', KEYS[1], name) end
      end
    end
    used, counted = 0, true
    for _, size in ipairs(redis.call('HVALS', KEYS[1])) do used = used + (tonumber(size) or 0) end
    -- Of many, some more than is needed now: the next ones then need no count.
    if used + more > budget then over = math.max(over, used + more - budget + (n > 1000 and budget / 20 or 0)) end
  end
end
local kept = 0
while over > 0 do
  local names = redis.call('ZRANGE', KEYS[2], kept, kept + 99, 'WITHSCORES')
  if #names == 0 then break end
  for i = 1, #names, 2 do
    local name, size = names[i], size_of(names[i])
    if over <= 0 then break end
    local freed = name ~= ARGV[2] and redis.call('UNLINK', ARGV[1] .. name) == 1
    if freed or (name ~= ARGV[2] and ran_out(name, names[i + 1])) then
      if freed or budget > 0 then over = over - size end
      forget(name)
    else
      kept = kept + 1
    end
  end
end
if over > 0 then return 0 end
if counted then
  redis.call('SET', KEYS[3], used + more, 'EX', ARGV[8])
elseif used then
  redis.call('SET', KEYS[3], used + more, 'KEEPTTL')
end
redis.call('HSET', KEYS[1], ARGV[2], ARGV[3])
redis.call('ZADD', KEYS[2], ARGV[6], ARGV[2])
return 1
"""


class RedisTier:
    """A `BlobTier`. `budget_nbytes` bounds what Preread keeps there (None: nine tenths of `maxmemory`, where that is
    set); what was used longest ago gives way. Connects when it is first asked. Raises TierSettings for a URL that is
    none."""

    name = "redis"
    durable = False
    n_streams = 2

    def __init__(
        self,
        url: str,
        *,
        budget_nbytes: int | None = None,
        ttl_s: int = 24 * 3600,
        timeout_s: float = 2.0,
        connect_timeout_s: float = 0.5,
    ) -> None:
        self._budget_nbytes = budget_nbytes
        self._ttl_s = ttl_s
        try:
            self._client: Any = Redis.from_url(  # pyright: ignore[reportUnknownMemberType]
                url,
                socket_timeout=timeout_s,
                socket_connect_timeout=connect_timeout_s,
                # Trying again is the breaker's business, and a dead Redis must not cost three time-outs.
                retry=Retry(NoBackoff(), 0),
                health_check_interval=30,
            )
            _check_url(url)
            pool = self._client.connection_pool
            pool.connection_class(**pool.connection_kwargs)  # options are looked at here, not by `from_url`
        except (RedisError, TypeError, ValueError) as error:
            raise TierSettings(f"PREREAD_REDIS_URL: {error}") from None
        self._reserve = self._client.register_script(_RESERVE)
        self._writing = threading.Lock()

    def manifest(self, name: EntryName) -> bytes | None:
        with self._asking(name.key):
            digest, data = self._client.hmget(_key(name.key), "fingerprint", "manifest")
        return data if digest == name.fingerprint_digest.encode() else None

    def read(self, name: EntryName, generation: str, shard: int, memory: memoryview, arrived: Arrived = silent) -> int:
        with _failures():
            pool = self._client.connection_pool
            connection = pool.get_connection()
            try:
                n = read_value(connection, memory, "HGET", _key(name.key), f"{generation}/{shard}", arrived=arrived)
                if n > len(memory):
                    connection.disconnect()
                return n
            except BaseException:
                connection.disconnect()
                raise
            finally:
                pool.release(connection)

    def write(self, name: EntryName, manifest: bytes, nbytes: int, shards: Iterable[memoryview]) -> None:
        flat, unfinished = flat_key(name.key), f"{UNFINISHED}{flat_key(name.key)}~{uuid.uuid4().hex}"
        with self._writing, self._asking(name.key):
            self._make_room(flat, nbytes + len(manifest))
            try:
                self._client.hset(unfinished, mapping={"fingerprint": name.fingerprint_digest})
                for i, shard in enumerate(shards):
                    self._client.expire(unfinished, UNFINISHED_S)
                    self._client.hset(unfinished, f"{generation_of(manifest)}/{i}", shard)
                self._client.hset(unfinished, "manifest", manifest)
                self._publish(unfinished, name.key)
            except BaseException:
                self._give_up(unfinished, name.key)
                raise

    def touch(self, name: EntryName) -> None:
        with self._asking(name.key), self._client.pipeline(transaction=False) as pipe:
            pipe.expire(_key(name.key), self._ttl_s)
            pipe.zadd(USES, {flat_key(name.key): time.time()}, xx=True)
            pipe.execute()

    def discard(self, name: EntryName) -> Removed:
        with self._asking(name.key):
            held = self._client.hget(_key(name.key), "fingerprint")
        return self.remove(name.key) if held == name.fingerprint_digest.encode() else Removed()

    def remove(self, key: SnapshotKey) -> Removed:
        """Not as a transaction: a Redis that is full refuses to begin one, even one that frees memory."""
        with self._asking(key), self._client.pipeline(transaction=False) as pipe:
            pipe.hget(SIZES, flat_key(key))
            pipe.unlink(_key(key))
            pipe.hdel(SIZES, flat_key(key))
            pipe.zrem(USES, flat_key(key))
            nbytes, n_removed, *_ = pipe.execute()
        return Removed(n_removed, _number(nbytes)) if n_removed else Removed()

    def entries(self) -> Iterator[TierEntry]:
        with self._asking():
            sizes: dict[bytes, bytes] = self._client.hgetall(SIZES)
        for flat, nbytes in sorted(sizes.items()):
            text = flat.decode(errors="replace")
            with _failures():
                digest = self._client.hget(PREFIX + text, "fingerprint")
            name = None if digest is None else parse_flat(f"{text}~{digest.decode(errors='replace')}")
            if name is not None:
                yield TierEntry(name, _number(nbytes))

    def used(self) -> int:
        return sum(entry.nbytes for entry in self.entries())

    def close(self) -> None:
        self._client.close()

    @contextmanager
    def _asking(self, *keys: SnapshotKey) -> Generator[None]:
        """As `_failures`. A value of another type under a name of ours holds nothing of ours and would be in the way
        of every later request: it goes. So do the connections to a server that another one took over from."""
        with _failures():
            try:
                yield
            except ResponseError as error:
                # Before Redis 7 the reason why a script failed stands in the middle.
                if isinstance(error, ReadOnlyError) or "-READONLY " in str(error):
                    self._client.connection_pool.disconnect()
                elif "WRONGTYPE" in str(error):
                    self._remove_foreign(*map(_key, keys))
                raise

    def _remove_foreign(self, *names: str) -> None:
        ours = (SIZES, b"hash"), (USES, b"zset"), (USED, b"string")
        for name, kind in (*ours, *((name, b"hash") for name in names)):
            if self._client.type(name) not in (kind, b"none"):
                self._client.unlink(name)

    def _make_room(self, flat: str, nbytes: int) -> None:
        """Raises TierRefused."""
        budget = self._budget_nbytes or 0
        if budget and nbytes > budget:
            raise TierRefused(f"a snapshot of {nbytes} bytes is larger than the whole budget of {budget} in Redis")
        memory = self._client.info("memory")
        limit, used = int(memory.get("maxmemory") or 0), int(memory.get("used_memory") or 0)
        over = int(used + nbytes - MEMORY_SHARE * limit) if limit else 0
        arguments = [PREFIX, flat, nbytes, budget, max(over, 0), time.time(), UNFINISHED_S, COUNTED_S]
        if not self._reserve(keys=[SIZES, USES, USED], args=arguments):
            raise TierRefused(f"{nbytes} bytes do not fit Redis: its budget is {budget}, its maxmemory {limit}")

    def _publish(self, unfinished: str, key: SnapshotKey) -> None:
        with self._client.pipeline(transaction=True) as pipe:
            pipe.expire(unfinished, self._ttl_s)
            pipe.rename(unfinished, _key(key))
            pipe.execute()

    def _give_up(self, unfinished: str, key: SnapshotKey) -> None:
        """Best effort: without an answer the name runs out, and the account is put right by the next write."""
        with suppress(RedisError, OSError), self._client.pipeline(transaction=False) as pipe:
            pipe.unlink(unfinished)
            pipe.hdel(SIZES, flat_key(key))
            pipe.zrem(USES, flat_key(key))
            pipe.execute()


def _number(stored: bytes | None) -> int:
    """Bytes of a snapshot; 0 for what is no number."""
    return int(stored) if stored is not None and stored.isdigit() else 0


def _check_url(url: str) -> None:
    """What redis-py accepts, or passes over, and would only fail at later. Raises ValueError."""
    parts = urlsplit(url)
    for option in parse_qs(parts.query):
        if option not in _OPTIONS and not option.startswith("ssl_"):
            raise ValueError(f"there is no option {option!r}; {', '.join(sorted(_OPTIONS))} and ssl_* are known")
    if parts.scheme == "unix":
        return
    try:
        unquote(parts.hostname or "localhost").encode("idna")
    except UnicodeError:
        raise ValueError(f"{parts.hostname!r} is no host name") from None
    database = unquote(parts.path).strip("/")
    if database and not database.isdecimal():
        raise ValueError(f"{database!r} is no number of a database")


def _key(key: SnapshotKey) -> str:
    return PREFIX + flat_key(key)


@contextmanager
def _failures() -> Generator[None]:
    """Every failure of Redis as one of the tier."""
    try:
        yield
    except OutOfMemoryError as error:
        raise TierRefused(f"Redis is full: {error}") from None
    except ResponseError as error:
        if str(error).startswith("OOM"):
            raise TierRefused(f"Redis is full: {error}") from None
        raise TierDown(f"Redis: {error}") from None
    except (RedisError, OSError, UnicodeError) as error:
        raise TierDown(f"Redis: {error}") from None
