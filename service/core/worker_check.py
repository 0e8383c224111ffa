"""Whether the worker of a data directory takes requests, as the API processes see it."""

from service.core.worker import worker_id
from service.engine.fleet import keys
from service.engine.fleet.link import Link, LinkDown, refused
from service.engine.fleet.records import decode_state
from service.errors import Invalid, Unavailable
from service.settings import Settings

CHECK_S = 5.0


async def check_worker(settings: Settings) -> str:
    """A line about the worker. Raises Unavailable when it is not there or not ready, Invalid without a fleet,
    FleetSettings."""
    if not settings.fleet_url:
        raise Invalid("A worker needs a fleet: set PREREAD_FLEET_URL to its Redis.", param="fleet_url")
    if not (settings.data_dir / "worker.id").exists():
        raise Unavailable(f"No worker has run in {settings.data_dir}.", code="no_worker")
    name = worker_id(settings.data_dir)
    link = Link(settings.fleet_url, timeout_s=CHECK_S)
    try:
        replies = await link.ask(("HGET", keys.worker(name), "state"))
    except LinkDown as error:
        raise Unavailable(f"The fleet's Redis does not answer: {error}", code="no_redis") from None
    finally:
        await link.close()
    if (error := refused(replies)) is not None or replies[0] is None:
        raise Unavailable(f"The worker {name} is not registered.{f' {error}' if error else ''}", code="no_worker")
    state = decode_state(replies[0])
    if not state.ready:
        raise Unavailable(f"The engine of the worker {name} does not answer.", code="not_ready")
    doing = "ends what is open" if state.draining else f"has {state.active} requests open"
    return f"The worker {name} serves {state.info.model_name} and {doing}."
