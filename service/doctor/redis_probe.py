"""What a Redis says of its memory and of what it writes to disk."""

from typing import Any

from redis import Redis
from redis.exceptions import RedisError

from service.doctor.facts import RedisFacts

_TIMEOUT_S = 3.0


def ask_redis(url: str) -> RedisFacts:
    """Raises ConnectionError with a sentence when it does not answer, or not to us."""
    try:
        client: Any = Redis.from_url(url, socket_timeout=_TIMEOUT_S, socket_connect_timeout=_TIMEOUT_S)
        try:
            info = client.info()
            return RedisFacts(
                version=str(info.get("redis_version", "")),
                maxmemory=int(info.get("maxmemory", 0)),
                policy=str(info.get("maxmemory_policy", "")),
                appendonly=bool(int(info.get("aof_enabled", 0))),
                save=_save(client),
                used_nbytes=int(info.get("used_memory", 0)),
            )
        finally:
            client.close()
    except (RedisError, ValueError, OSError) as error:
        raise ConnectionError(str(error)) from None


def _save(client: Any) -> str | None:
    """Only its configuration says it, which hosted ones keep to themselves."""
    try:
        found = client.config_get("save")
    except RedisError:
        return None
    return str(found.get("save", ""))
