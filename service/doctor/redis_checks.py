"""Checks of the Redis that keeps snapshots, and of the one where a fleet meets."""

from service.doctor.context import Context
from service.doctor.facts import RedisFacts
from service.doctor.findings import Finding
from service.engine.ledger import GIB

_NONE = "no Redis is used"


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
    say, found = context.finding("redis-memory"), _asked(context)
    if not found:
        return say.skip(_NONE)
    for name, facts in found.items():
        bounded = facts.maxmemory or (name == "PREREAD_REDIS_URL" and context.settings.redis_budget_bytes)
        if not bounded:
            return say.fail(
                f"{name}: maxmemory is 0, and there is no PREREAD_REDIS_BUDGET_BYTES: it grows until the machine has "
                "no memory left",
                "set maxmemory in redis.conf, to what the machine can spare",
            )
        if facts.policy != "noeviction":
            return say.warn(
                f"{name}: maxmemory-policy is {facts.policy}: it drops what it chooses, also what a fleet needs",
                "set maxmemory-policy noeviction: Preread makes room itself, by what it costs to lose",
            )
    return say.ok("; ".join(f"{name}: {f.maxmemory / GIB:.1f} GiB, {f.policy}" for name, f in found.items()))


def redis_persistence(context: Context) -> Finding:
    """Whether it writes snapshots, which are copies, to a disk again."""
    say, found = context.finding("redis-persistence"), _asked(context)
    if not found:
        return say.skip(_NONE)
    for name, facts in found.items():
        how = ["appendonly is yes"] if facts.appendonly else []
        how += [f"save is {facts.save!r}"] if facts.save else []
        if how:
            return say.warn(
                f"{name}: {' and '.join(how)}: gigabytes of copies go to its disk, and a fork doubles its memory",
                'set save "" and appendonly no: nothing in it is the only copy',
            )
    return say.ok("it writes nothing to a disk")


def _urls(context: Context) -> dict[str, str]:
    urls = {"PREREAD_REDIS_URL": context.settings.redis_url, "PREREAD_FLEET_URL": context.settings.fleet_url}
    return {name: url for name, url in urls.items() if url}


def _asked(context: Context) -> dict[str, RedisFacts]:
    """Those that answer."""
    found = {}
    for name, url in _urls(context).items():
        try:
            found[name] = context.probes.redis(url)
        except ConnectionError:  # `redis_answers` says it
            continue
    return found
