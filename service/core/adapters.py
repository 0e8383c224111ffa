"""Opens what the use cases stand on, from settings; everything can be given instead."""

from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial

from ingest.limits import ParseLimits
from ingest.sandbox import parse
from service.core import datadir
from service.core.artifacts import SnapshotTier
from service.core.clock import Clock, SystemClock
from service.core.engines import start_engine
from service.core.ingestion import Read
from service.core.outages import through_outages
from service.core.prompts import Prompts, fake_prompts, load_prompts
from service.core.snapshot_tier import StoredSnapshots, tier_config
from service.db.connect import is_sqlite
from service.db.engine import Database
from service.db.faults import opening
from service.db.migrations import check, upgrade
from service.engine.protocol import EngineClient
from service.settings import Settings

START_S = 60.0
"""How long a start waits for a database that is started at the same time."""
_OCR_MARGIN_S = 15.0


@dataclass(frozen=True, slots=True)
class Given:
    """Parts that are not to be made from settings. An engine given here is not closed."""

    engine: EngineClient | None = None
    prompts: Prompts | None = None
    store: SnapshotTier | None = None
    read: Read | None = None
    clock: Clock | None = None


@dataclass(frozen=True, slots=True)
class Adapters:
    """The same for a server, a test and a terminal."""

    settings: Settings
    clock: Clock
    db: Database
    engine: EngineClient
    prompts: Prompts
    store: SnapshotTier
    read: Read


async def open_adapters(stack: AsyncExitStack, settings: Settings, given: Given) -> Adapters:
    """Lock the data directory, bring a SQLite database up to date, start the engine; `stack` undoes it. Another
    database is waited for, and must be up to date.

    Raises Conflict when another server uses the directory, ModelError when there is no such model, TierSettings for
    a tier that cannot be opened, ServiceError for a database that cannot be used.
    """
    datadir.prepare(settings)
    stack.enter_context(datadir.lock(settings.data_dir, shared=bool(settings.fleet_url)))
    prompts = given.prompts or _prompts(settings)
    await ready_database(settings.sqlalchemy_url)
    store = given.store or StoredSnapshots(settings.store_dir, tier_config(settings))
    db = Database(settings.sqlalchemy_url)
    stack.push_async_callback(db.close)
    engine = given.engine
    if engine is None:
        engine = await start_engine(settings, prompts.digest)
        stack.push_async_callback(engine.close)
    return Adapters(
        settings=settings,
        clock=given.clock or SystemClock(),
        db=db,
        engine=engine,
        prompts=prompts,
        store=store,
        read=given.read or parser(settings),
    )


def parse_limits(settings: Settings) -> ParseLimits:
    """What the settings allow one document's parser."""
    return ParseLimits(
        max_pages=settings.max_pages,
        wall_s=settings.parse_timeout_s,
        cpu_s=int(settings.parse_timeout_s) + 1,
        memory_nbytes=settings.parse_memory_bytes,
        unpacked_nbytes=settings.max_unpacked_bytes,
        markup_nbytes=settings.max_markup_bytes,
        ocr_languages="" if settings.ocr_languages == "none" else settings.ocr_languages,
        ocr_page_s=settings.ocr_page_timeout_s,
        # A page that is recognized takes its time, and the pause before it counts too.
        page_wall_s=max(ParseLimits().page_wall_s, settings.ocr_page_timeout_s + _OCR_MARGIN_S),
    )


def parser(settings: Settings) -> Read:
    """The parser process within the limits of the settings."""
    return partial(parse, limits=parse_limits(settings))


async def ready_database(url: str, *, within_s: float = START_S) -> None:
    """Bring a SQLite database up to date; another one is waited for `within_s` seconds, and must be."""
    with opening():
        sqlite = is_sqlite(url)
    if sqlite:
        await upgrade(url)
    else:
        await through_outages(lambda: check(url), within_s=within_s)


def _prompts(settings: Settings) -> Prompts:
    return fake_prompts() if settings.engine == "fake" else load_prompts(settings.model_dir)
