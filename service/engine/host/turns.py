"""The KV of a session's earlier turns: from its slot, else from disk, else computed again."""

import logging
from collections.abc import Sequence

from cache_store.errors import CacheStoreError, MissReason, SnapshotMiss
from cache_store.keys import SnapshotKey
from cache_store.reader import SnapshotReader
from service.engine.digests import chain_digest, digest_of
from service.engine.host.context import HostContext
from service.engine.host.tails import HeldTurn, Tail, turn_chain
from service.engine.messages import SpanRef, TurnRef

log = logging.getLogger(__name__)


class TurnStore:
    """Stored turns of one tail. Each is a snapshot of kind "turn" that names the exact tokens before it."""

    def __init__(self, context: HostContext, tail: Tail) -> None:
        self._context = context
        self._tail = tail

    def restore(self, turns: Sequence[TurnRef]) -> tuple[list[TurnRef], MissReason | None]:
        """Import the turns that the tail does not hold yet. Gives those that must be computed, all from the
        first miss on since each turn's KV follows from the ones before, and why."""
        for i in range(len(self._tail.turns), len(turns)):
            turn = turns[i]
            try:
                self._import(turn)
            except SnapshotMiss as miss:
                log.warning("the KV of turn %s cannot be used: %s", turn.kv_id, miss)
                return list(turns[i:]), miss.reason
        return [], None

    def save(self, kv_id: str, token_ids: list[int], spans: Sequence[SpanRef] = ()) -> int:
        """Bring the tail's last tokens to their stored form, and persist them under `kv_id` unless it is "". What was
        fetched for them, `spans`, leaves the tail.

        The bytes stored, 0 when they are not durable: the session then goes on, and computes them again after
        a restart.
        """
        scheduler, runner = self._context.scheduler, self._context.runner
        if spans:
            scheduler.run(runner.drop_fetched, self._tail.slot)
        if not token_ids:
            return 0
        first = self._tail.n_tokens
        blocks = scheduler.run(runner.export_tail, self._tail.slot, first, first + len(token_ids))
        context_digest = self._context_digest(spans)
        self._tail.turns.append(HeldTurn(token_ids, list(spans)))
        if not kv_id:
            return 0
        try:
            return self._persist(self._key(kv_id), token_ids, blocks, context_digest)
        except (CacheStoreError, OSError) as error:
            log.warning("the KV of turn %s is not stored: %s", kv_id, error)
            return 0

    def _key(self, kv_id: str) -> SnapshotKey:
        return SnapshotKey(self._tail.document.owner_id, "turn", kv_id)

    def _context_digest(self, spans: Sequence[SpanRef]) -> str:
        """All that the KV of the next turn follows from, but for its own tokens."""
        return chain_digest(self._tail.token_digest, [*self._tail.chain, *turn_chain((), spans)])

    def _import(self, turn: TurnRef) -> None:
        if not turn.kv_id:
            raise SnapshotMiss(MissReason.ABSENT, "the turn's KV was not stored")
        runner = self._context.runner
        with self._context.store.open(
            self._key(turn.kv_id),
            runner.fingerprint,
            runner.layout,
            token_digest=digest_of(turn.token_ids),
            context_digest=self._context_digest(turn.spans),
        ) as reader:
            blocks = _blocks(reader)
        self._context.scheduler.run(runner.import_tail, self._tail.slot, blocks, len(turn.token_ids))
        self._tail.turns.append(HeldTurn(turn.token_ids, turn.spans))

    def _persist(
        self, key: SnapshotKey, token_ids: list[int], blocks: list[list[memoryview]], context_digest: str
    ) -> int:
        runner = self._context.runner
        with self._context.store.begin(
            key, runner.fingerprint, runner.layout, token_ids, context_digest=context_digest
        ) as builder:
            for records in blocks[builder.n_blocks_done :]:
                builder.append(records)
            return builder.publish().nbytes


def _blocks(reader: SnapshotReader) -> list[list[memoryview]]:
    """All records of a snapshot as ``[block][layer]``, every one verified."""
    layout = reader.layout
    lengths = layout.block_lengths(reader.n_tokens)
    blocks: list[dict[int, memoryview]] = [{} for _ in lengths]
    for layer, first, records, _ in reader.layers():
        at, block = 0, first // layout.block_tokens
        while at < len(records):
            nbytes = layout.record_nbytes(lengths[block])
            blocks[block][layer] = records[at : at + nbytes]
            at, block = at + nbytes, block + 1
    return [[by_layer[layer] for layer in range(layout.n_layers)] for by_layer in blocks]
