"""Snapshots of documents that are ready: kept in step with the model, rebuilt from stored text when lost."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from service.core import statuses
from service.core.builds import build_snapshot
from service.core.leases import Leases
from service.core.outages import KEEP_S, through_outages
from service.core.policies import Policies
from service.core.progress import ProgressBoard
from service.core.prompts import Prompts
from service.core.retention import Policy, stored_policy
from service.core.tokens import SnapshotTokens, stored_document, tokenize_document, unpack
from service.db.engine import Database
from service.db.models import DocumentRow
from service.engine.messages import BuildDone, DocumentRef
from service.engine.protocol import EngineClient
from service.errors import Conflict, NotFound

_POLL_S = 0.2


class Snapshots:
    """`rebuild` runs once per document, however many ask for it, also in other processes. `remove`: all that is stored
    of a document."""

    def __init__(
        self,
        db: Database,
        engine: EngineClient,
        prompts: Prompts,
        board: ProgressBoard,
        policies: Policies,
        leases: Leases,
        remove: Callable[[DocumentRef], Awaitable[Any]],
    ) -> None:
        self._db = db
        self._engine = engine
        self._prompts = prompts
        self._board = board
        self._policies = policies
        self._leases = leases
        self._remove = remove
        self._rebuilds: dict[str, asyncio.Task[BuildDone]] = {}

    async def rebuild(self, document_id: str) -> BuildDone:
        """Bring back the snapshot of a ready document; returns when it is usable again.

        Raises NotFound, Conflict (not ready), TooLong, Invalid (for the model as it is now), StorageFull, Unavailable.
        """
        task = self._rebuilds.get(document_id)
        if task is None:
            task = asyncio.create_task(self._rebuild(document_id))
            self._rebuilds[document_id] = task
            task.add_done_callback(lambda done: self._forget(document_id, done))
        return await asyncio.shield(task)

    async def stop(self, document_id: str) -> None:
        """End a rebuild that is under way (deletion)."""
        if task := self._rebuilds.get(document_id):
            task.cancel()
            await asyncio.wait({task})

    async def close(self) -> None:
        for document_id in list(self._rebuilds):
            await self.stop(document_id)

    async def current(self, row: DocumentRow) -> DocumentRow:
        """The row with tokens of the prompt as it is now: another tokenizer or template reads the text again; and with
        a policy that the engine as it is now can keep to.

        Raises TooLong or Invalid when there is none.
        """
        if row.template_digest != self._prompts.digest:
            await self._tokenize_again(row)
        elif not await self._choose_again(row):
            return row
        async with self._db.reading() as uow:
            again = await uow.documents.get(row.id)
        if again is None:
            raise NotFound("The document was removed.")
        return again

    def _forget(self, document_id: str, task: asyncio.Task[BuildDone]) -> None:
        del self._rebuilds[document_id]
        if not task.cancelled():
            task.exception()  # told to whoever waited; nobody may have

    async def _rebuild(self, document_id: str) -> BuildDone:
        ref, token_ids, policy = await self._tokens_of(document_id)
        while not await self._claim(document_id):
            if (done := await self._made_elsewhere(document_id)) is not None:
                return done
        try:
            done = await build_snapshot(self._engine, ref, token_ids, policy.retention)
        except BaseException:
            await asyncio.shield(self._let_go(document_id, snapshot_state="absent"))
            raise
        await self._let_go(document_id, **snapshot_columns(done, self._engine))
        if not self._leases.alone:
            await self._remove_if_gone(ref)
        return done

    async def _remove_if_gone(self, ref: DocumentRef) -> None:
        """Another process removed the document while it was made anew here. Raises NotFound then."""
        async with self._db.reading() as uow:
            row = await uow.documents.get(ref.document_id)
        if row is None:
            await self._remove(ref)
            raise NotFound("The document was removed.")

    async def _claim(self, document_id: str) -> bool:
        """False: another process rebuilds it."""
        await self._leases.require()
        async with self._db.writing(alone=False) as uow:
            claimed = await uow.documents.claim(
                document_id, self._leases.owner, only_if={statuses.READY}, snapshot_state="rebuilding"
            )
        self._board.wake(document_id)
        return claimed

    async def _let_go(self, document_id: str, **values: Any) -> None:
        """Say how a rebuild ended."""
        await through_outages(lambda: self._set_state(document_id, lease_owner=None, **values), within_s=KEEP_S)

    async def _made_elsewhere(self, document_id: str) -> BuildDone | None:
        """Wait until another process has ended its rebuild; None when it made nothing."""
        while True:
            async with self._db.reading() as uow:
                row = await uow.documents.get(document_id)
                if row is None or row.status != statuses.READY:
                    raise NotFound("There is no such document.")
                if not await uow.documents.is_leased(document_id):
                    break
            await asyncio.sleep(_POLL_S)
        if row.snapshot_state != "ready":
            return None
        n_tokens = row.token_count or 0
        return BuildDone(n_tokens, 0, row.snapshot_nbytes or 0, 0, 0, 0.0, already=True)

    async def _tokens_of(self, document_id: str) -> tuple[DocumentRef, list[int], Policy]:
        async with self._db.reading() as uow:
            row = await uow.documents.get(document_id)
            packed = await uow.documents.token_ids(document_id)
        if row is None:
            raise NotFound("There is no such document.")
        if row.status != statuses.READY:
            raise Conflict("The document is not ready yet.", code="document_not_ready")
        ref = DocumentRef(row.owner_id, row.id)
        if packed is None or row.template_digest != self._prompts.digest:
            tokens, policy = await self._tokenize_again(row)
            return ref, tokens.ids, policy
        policy = await self._choose_again(row) or stored_policy(row.policy)
        return ref, unpack(packed), policy

    async def _choose_again(self, row: DocumentRow) -> Policy | None:
        """Another policy, stored, where the one there is cannot be kept to."""
        policy = self._policies.of(row)
        if policy == stored_policy(row.policy):
            return None
        await self._set_state(row.id, policy=policy.stored())
        return policy

    async def _tokenize_again(self, row: DocumentRow) -> tuple[SnapshotTokens, Policy]:
        async with self._db.reading() as uow:
            pages = await uow.pages.all(row.id)
        tokens = await tokenize_document(stored_document(row, pages), self._prompts)
        policy = self._policies.choose(row, len(tokens.ids))
        async with self._db.writing() as uow:
            await uow.documents.change(row.id, **token_columns(tokens), policy=policy.stored())
            await uow.pages.set_ranges(row.id, [(p.number, p.token_start, p.token_end) for p in tokens.pages])
        return tokens, policy

    async def _set_state(self, document_id: str, **values: Any) -> None:
        async with self._db.writing() as uow:
            await uow.documents.change(document_id, only_if={statuses.READY}, **values)
        self._board.wake(document_id)


def token_columns(tokens: SnapshotTokens) -> dict[str, Any]:
    """What a document's row says about its tokens."""
    return {
        "token_count": len(tokens.ids),
        "token_ids": tokens.packed,
        "token_digest": tokens.digest,
        "template_digest": tokens.template_digest,
    }


def snapshot_columns(done: BuildDone, engine: EngineClient) -> dict[str, Any]:
    """What a document's row says about a snapshot that was just built."""
    columns: dict[str, Any] = {
        "snapshot_state": "ready",
        "snapshot_fingerprint": engine.info.fingerprint_digest,
        "snapshot_kv_type": engine.info.kv_type,
        "snapshot_nbytes": done.nbytes,
        "snapshot_resident_tokens": done.resident_tokens or done.n_tokens,
        "snapshot_resident_nbytes": done.resident_nbytes or None,
        "snapshot_index_nbytes": done.index_nbytes,
    }
    if not done.already:
        columns |= {"snapshot_prefilled_tokens": done.prefilled_tokens, "snapshot_build_s": done.seconds}
    return columns
