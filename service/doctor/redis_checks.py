"""Checks of the Redis that keeps snapshots, and of the one where a fleet meets."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

from service.doctor.context import Context, Say
from service.doctor.facts import RedisFacts
from service.doctor.findings import Finding, together
from service.engine.ledger import GIB

_NONE = "no Redis is used"
_PORT = 6379


@dataclass(frozen=True, slots=True)
class _Server:
    """A Redis. `name`: the settings that name it. `keeps_snapshots`: whether `budget_nbytes` (0: none) is for it."""

    name: str
    facts: RedisFacts
    keeps_snapshots: bool
    budget_nbytes: int

    @property
    def bound_nbytes(self) -> int:
        """What it comes to, or the snapshots in it, at most; 0 for no bound."""
        return self.facts.maxmemory or (self.budget_nbytes if self.keeps_snapshots else 0)


def redis_answers(context: Context) -> Finding:
    """Whether they answer."""
    say, wrong, seen = context.finding("redis"), [], []
    for name, url in _urls(context).items():
        try:
            facts = context.probes.redis(url)
            seen.append(f"{name}: Redis {facts.version}, {facts.used_nbytes / GIB:.2f} GiB")
        except ConnectionError as error:
            wrong.append(f"{name}: {error}")
    if wrong:
        return say.fail("; ".join(wrong), "start it, or correct the URL and its password; the server works without it")
    return say.ok("; ".join(seen)) if seen else say.skip(_NONE)


def redis_memory(context: Context) -> Finding:
    """Whether it is bounded, and drops nothing on its own account."""
    say, servers = context.finding("redis-memory"), _asked(context)
    if not servers:
        return say.skip(_NONE)
    if wrong := [problem for server in servers for problem in _memory_problems(say, server)]:
        return together(wrong)
    return say.ok("; ".join(f"{s.name}: {s.bound_nbytes / GIB:.1f} GiB, {s.facts.policy}" for s in servers))


def _memory_problems(say: Say, server: _Server) -> Iterator[Finding]:
    if not server.bound_nbytes:
        nor = ", and there is no PREREAD_REDIS_BUDGET_BYTES" if server.keeps_snapshots else ""
        yield say.fail(
            f"{server.name}: maxmemory is 0{nor}: it grows until the machine has no memory left",
            "set maxmemory in redis.conf, to what the machine can spare",
        )
    if server.facts.policy != "noeviction":
        yield say.warn(
            f"{server.name}: maxmemory-policy is {server.facts.policy}: it drops what it chooses, also what a fleet "
            "needs",
            "set maxmemory-policy noeviction: Preread makes room itself, by what it costs to lose",
        )


def redis_persistence(context: Context) -> Finding:
    """Whether it writes snapshots, which are copies, to a disk again."""
    say, servers, written = context.finding("redis-persistence"), _asked(context), []
    if not servers:
        return say.skip(_NONE)
    for server in servers:
        how = ["appendonly is yes"] if server.facts.appendonly else []
        how += [f"save is {server.facts.save!r}"] if server.facts.save else []
        if how:
            written.append(f"{server.name}: {' and '.join(how)}")
    if written:
        return say.warn(
            f"{'; '.join(written)}: gigabytes of copies go to its disk, and a fork doubles its memory",
            'set save "" and appendonly no: nothing in it is the only copy',
        )
    return say.ok("it writes nothing to a disk")


def _urls(context: Context) -> dict[str, str]:
    urls = {"PREREAD_REDIS_URL": context.settings.redis_url, "PREREAD_FLEET_URL": context.settings.fleet_url}
    return {name: url for name, url in urls.items() if url}


def _asked(context: Context) -> list[_Server]:
    """Those that answer, each once, by all settings that name it."""
    names: dict[str, list[str]] = {}
    facts: dict[str, RedisFacts] = {}
    for name, url in _urls(context).items():
        with suppress(ConnectionError):  # `redis_answers` says it
            facts.setdefault(_address(url), context.probes.redis(url))
            names.setdefault(_address(url), []).append(name)
    settings = context.settings
    snapshots = _address(settings.redis_url) if settings.redis_url else None
    return [
        _Server(" and ".join(names[place]), found, place == snapshots, settings.redis_budget_bytes)
        for place, found in facts.items()
    ]


def _address(url: str) -> str:
    """The server that a URL names, whichever of its databases, and as whom."""
    try:
        parts = urlsplit(url)
        return parts.path if parts.scheme == "unix" else f"{parts.hostname or 'localhost'}:{parts.port or _PORT}"
    except ValueError:  # nothing answers there
        return url
