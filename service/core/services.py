"""The use cases, built once at start and handed to the HTTP layer."""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from service.core import datadir
from service.core.adapters import Adapters
from service.core.artifacts import Artifacts
from service.core.chats.opening import OpenChats, open_chats
from service.core.clock import Clock
from service.core.conversations import Conversations, Limits
from service.core.deletion import Deletion
from service.core.documents import DocumentService
from service.core.expiry import Sweeper
from service.core.files import Files
from service.core.health import Readiness
from service.core.ingestion import Ingestion
from service.core.jobs import Jobs
from service.core.keys import Keys, admin_token, install_admin_key
from service.core.leases import Leases
from service.core.permits import Permits
from service.core.policies import Policies
from service.core.progress import ProgressBoard
from service.core.quotas import DAY_S, Quotas
from service.core.rates import LocalBuckets, Rates, RedisBuckets
from service.core.rebuilding import Rebuilder
from service.core.recovery import recover
from service.core.retention import Bounds
from service.core.sharing import Sharing
from service.core.snapshots import Snapshots
from service.core.together import Gathering
from service.core.uploads import Uploads
from service.core.watching import RowWatch
from service.core.web_sessions import WebSessions
from service.db.engine import Database
from service.engine.protocol import EngineClient
from service.settings import Settings

FLEET_BUILDS = 8
"""Documents that one process has built at a time, where workers share the work; each of them has a queue of its own."""


@dataclass(slots=True)
class Services:
    """What a request handler may use. `stopping` is set when the server begins to shut down."""

    settings: Settings
    clock: Clock
    db: Database
    engine: EngineClient
    documents: DocumentService
    uploads: Uploads
    snapshots: Snapshots
    jobs: Jobs
    leases: Leases
    deletion: Deletion
    conversations: Conversations
    readiness: Readiness
    keys: Keys
    web_sessions: WebSessions
    sharing: Sharing
    permits: Permits
    rates: Rates
    chats: OpenChats
    stopping: asyncio.Event = field(default_factory=asyncio.Event)


async def open_services(stack: AsyncExitStack, adapters: Adapters) -> Services:
    """Build the use cases, put right what a crash left, and begin the background work; `stack` ends it."""
    settings, board = adapters.settings, ProgressBoard()
    files = Files(
        settings.files_dir,
        max_nbytes=settings.max_upload_bytes,
        check_free=lambda nbytes: datadir.check_free(settings, nbytes),
    )
    artifacts = Artifacts(adapters.engine, adapters.store, files)
    leases = Leases(adapters.db, adapters.clock, alone=not settings.is_shared, lease_s=settings.lease_s)
    services = _services(adapters, files, artifacts, board, leases, _rates(stack, settings))
    services.deletion.listeners.append(services.conversations.document_removed)
    await install_admin_key(adapters.db, admin_token(settings), adapters.clock.now())
    stack.push_async_callback(services.keys.close)
    services.keys.start()
    await leases.register()
    stack.push_async_callback(leases.close)
    await recover(adapters.db, services.deletion, artifacts, files, alone=leases.alone)
    await services.conversations.recover()
    stack.push_async_callback(services.snapshots.close)
    stack.push_async_callback(services.jobs.close)
    stack.push_async_callback(services.conversations.answers.close)
    await services.jobs.start()
    if not leases.alone:
        watch = RowWatch(adapters.db, board, services.jobs.is_here)
        stack.push_async_callback(watch.close)
        watch.start()
    leases.start()
    sweeper = Sweeper(
        services.deletion,
        artifacts,
        settings.sweep_interval_s,
        adapters.db,
        adapters.clock,
        settings.audit_days * DAY_S,
        services.chats.cleaning,
    )
    stack.push_async_callback(sweeper.close)
    sweeper.start()
    rebuilder = Rebuilder(adapters.db, adapters.engine, services.snapshots, settings.sweep_interval_s)
    stack.push_async_callback(rebuilder.close)
    rebuilder.start()
    stack.push_async_callback(adapters.db.leave)
    return services


def _services(
    adapters: Adapters, files: Files, artifacts: Artifacts, board: ProgressBoard, leases: Leases, rates: Rates
) -> Services:
    db, engine, clock, settings = adapters.db, adapters.engine, adapters.clock, adapters.settings
    policies = Policies(engine, _bounds(settings))
    ingestion = Ingestion(
        db=db,
        engine=engine,
        prompts=adapters.prompts,
        files=files,
        read=adapters.read,
        board=board,
        clock=clock,
        policies=policies,
        parsing=asyncio.Semaphore(settings.parse_concurrency),
        building=asyncio.Semaphore(FLEET_BUILDS if settings.fleet_url else 1),
    )
    snapshots = Snapshots(db, engine, adapters.prompts, board, policies, leases, artifacts.remove)
    jobs = Jobs(db, ingestion, artifacts, board, clock, leases)
    deletion = Deletion(db, jobs, snapshots, artifacts, board, clock, alone=leases.alone)
    conversations = _conversations(adapters, snapshots, leases)
    keys = Keys(db, clock)
    documents = DocumentService(db, files, jobs, deletion, artifacts, board, clock)
    uploads = Uploads(db, files, jobs, deletion, policies, clock, leases, _quotas(settings))
    return Services(
        settings=settings,
        clock=clock,
        db=db,
        engine=engine,
        documents=documents,
        uploads=uploads,
        snapshots=snapshots,
        jobs=jobs,
        leases=leases,
        deletion=deletion,
        conversations=conversations,
        readiness=Readiness(settings, db, engine, clock),
        keys=keys,
        web_sessions=WebSessions(db, keys, clock),
        sharing=Sharing(db, conversations.sessions, clock),
        permits=Permits(db, keys, clock),
        rates=rates,
        chats=open_chats(adapters, documents, uploads, conversations, _quotas(settings)),
    )


def _quotas(settings: Settings) -> Quotas:
    return Quotas(
        settings.quota_documents, settings.quota_bytes, settings.quota_tokens_per_day, settings.quota_questions
    )


def _rates(stack: AsyncExitStack, settings: Settings) -> Rates:
    """Counted in the fleet's Redis where there is one and a rate is set."""
    buckets: LocalBuckets | RedisBuckets = LocalBuckets()
    if settings.fleet_url and settings.rate_per_minute:
        from service.engine.fleet.link import Link

        link = Link(settings.fleet_url)
        stack.push_async_callback(link.close)
        buckets = RedisBuckets(link)
    return Rates(settings.rate_per_minute, settings.rate_burst, buckets)


def _bounds(settings: Settings) -> Bounds:
    return Bounds(
        room_tokens=settings.answer_room_tokens,
        segment_tokens=settings.segment_tokens,
        max_document_tokens=settings.max_document_tokens,
        model=settings.model,
    )


def _conversations(adapters: Adapters, snapshots: Snapshots, leases: Leases) -> Conversations:
    settings = adapters.settings
    return Conversations.over(
        adapters.db,
        adapters.engine,
        snapshots,
        adapters.store,
        prompt=adapters.prompts.template,
        prompt_digest=adapters.prompts.digest,
        clock=adapters.clock,
        limits=Limits(settings.queue_limit, settings.disconnect_grace_s, settings.max_answer_tokens, _quotas(settings)),
        gathering=Gathering(
            adapters.engine,
            _bounds(settings),
            most_documents=settings.max_session_documents,
            n_prompt=len(adapters.prompts.template.document_prefix_ids),
        ),
        leases=leases,
    )
