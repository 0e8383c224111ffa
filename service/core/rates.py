"""How many requests somebody may make: a token bucket each, in this process or in a Redis that all processes share."""

import math
import time
from typing import TYPE_CHECKING, Protocol

import structlog

from service.errors import LimitReached

if TYPE_CHECKING:
    from service.engine.fleet.link import Link

_MOST_KEPT = 10_000
_PREFIX = "preread:rate:"
_SCRIPT = """
local rate, burst = tonumber(ARGV[1]), tonumber(ARGV[2])
local clock = redis.call('TIME')
local now = clock[1] + clock[2] / 1e6
local state = redis.call('HMGET', KEYS[1], 'left', 'at')
local left = math.min(burst, (tonumber(state[1]) or burst) + math.max(0, now - (tonumber(state[2]) or now)) * rate)
local wait = 0
if left >= 1 then left = left - 1 else wait = (1 - left) / rate end
redis.call('HSET', KEYS[1], 'left', tostring(left), 'at', string.format('%.6f', now))
redis.call('PEXPIRE', KEYS[1], math.ceil(burst / rate * 1000) + 1000)
return tostring(wait)
"""
_log = structlog.get_logger("preread.rates")


class Buckets(Protocol):
    """`rate` per second come into a bucket of `burst`."""

    async def take(self, who: str, rate: float, burst: int) -> float:
        """Take one; seconds until there is one, when there is none now."""
        ...


class LocalBuckets:
    """Buckets of this process; those that are full again are forgotten."""

    def __init__(self) -> None:
        self._levels: dict[str, tuple[float, float]] = {}

    async def take(self, who: str, rate: float, burst: int) -> float:
        now = time.monotonic()
        left, at = self._levels.get(who, (float(burst), now))
        left = min(burst, left + (now - at) * rate)
        wait = 0.0 if left >= 1 else (1 - left) / rate
        self._levels[who] = (left if wait else left - 1, now)
        if len(self._levels) > _MOST_KEPT:
            full = burst / rate
            self._levels = {name: level for name, level in self._levels.items() if now - level[1] < full}
        return wait


class RedisBuckets:
    """Buckets that all API processes share, by the clock of Redis. While it is away, each process counts for itself."""

    def __init__(self, link: "Link") -> None:
        self._link = link
        self._here = LocalBuckets()

    async def take(self, who: str, rate: float, burst: int) -> float:
        from service.engine.fleet.link import LinkDown, refused

        try:
            replies = await self._link.ask(("EVAL", _SCRIPT, 1, _PREFIX + who, f"{rate:.6f}", burst), timeout_s=1.0)
            if (error := refused(replies)) is None:
                return float(replies[0])
            _log.warning("rates are counted here: Redis refuses", error=str(error))
        except LinkDown as error:
            _log.warning("rates are counted here: Redis is away", error=str(error))
        return await self._here.take(who, rate, burst)


class Rates:
    """`per_minute` requests of each account, `burst` of them at once; 0 is no limit."""

    def __init__(self, per_minute: int, burst: int, buckets: Buckets) -> None:
        self._rate = per_minute / 60
        self._burst = burst or max(1, per_minute)
        self._buckets = buckets

    async def require(self, account: str) -> None:
        """Raises LimitReached."""
        if not self._rate:
            return
        wait_s = await self._buckets.take(account, self._rate, self._burst)
        if wait_s > 0:
            raise LimitReached(
                f"You may send {self._rate * 60:g} requests a minute, {self._burst} of them at once.",
                code="rate_limited",
                retry_after_s=max(1, math.ceil(wait_s)),
            )
