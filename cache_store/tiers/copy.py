"""A snapshot's bytes on their way between tiers: what a manifest promises, and whether a shard keeps it."""

import numpy as np
import numpy.typing as npt

from cache_store.errors import MissReason, SnapshotMiss
from cache_store.fingerprint import Fingerprint, token_digest
from cache_store.keys import EntryName
from cache_store.layout import KVLayout
from cache_store.manifest import Manifest
from cache_store.sealing import check_sealed_tokens
from cache_store.shards import Shard, plan_shards
from cache_store.stored import check_identity, decode_manifest
from cache_store.tiers.tier import generation_of


class CopyPlan:
    """What a copy must be, by its manifest alone.

    Raises SnapshotMiss when the manifest is damaged, or that of another snapshot.
    """

    def __init__(self, name: EntryName, data: bytes) -> None:
        self.name = name
        self.data = data
        self.generation = generation_of(data)
        self.manifest: Manifest = decode_manifest(data)
        check_identity(self.manifest, name, None, None, None, None)
        self.sealed = self.manifest.sealed
        self.layout: KVLayout = self.manifest.layout.layout()
        self._geometry = plan_shards(name, self.layout, self.manifest.n_tokens)
        if [shard.nbytes for shard in self.shards] != self.manifest.shard_nbytes:
            raise SnapshotMiss(MissReason.CHECKSUM, "the manifest's shards are not those of its tokens")
        self._checksums = self.manifest.checksum_table()
        self._tokens: npt.NDArray[np.int32] = np.zeros(self.manifest.n_tokens, "<i4")
        self._split: list[tuple[Shard, npt.NDArray[np.int32]]] = []

    @property
    def shards(self) -> tuple[Shard, ...]:
        return self._geometry.shards

    @property
    def nbytes(self) -> int:
        """Bytes of all shards."""
        return self._geometry.nbytes

    @property
    def largest_nbytes(self) -> int:
        return max(shard.nbytes for shard in self.shards)

    def matches(
        self, fingerprint: Fingerprint, layout: KVLayout, digest: str | None, context_digest: str | None
    ) -> None:
        """Compare with what is asked for. Raises SnapshotMiss."""
        check_identity(self.manifest, self.name, fingerprint, layout, digest, context_digest)

    def same_as(self, data: bytes) -> bool:
        """Whether another manifest is of the same tokens and rows, so that either snapshot does."""
        try:
            other = decode_manifest(data)
        except SnapshotMiss:
            return False
        return _subject(self.manifest) == _subject(other)

    def check(self, shard: Shard, memory: memoryview) -> None:
        """Check every byte of a shard. Raises SnapshotMiss. Several threads may check different shards."""
        ShardCheck(self, shard, memory).up_to(shard.nbytes)

    def check_beginning(self, shard: Shard, memory: memoryview) -> None:
        """Check a shard's header, and take its tokens, of which nothing is known before the last shard. Raises
        SnapshotMiss."""
        if bytes(memory[: len(shard.header)]) != shard.header:
            raise SnapshotMiss(MissReason.CHECKSUM, f"{shard.file_name} is not the shard it should be")
        records = shard.layer_offset(shard.first_layer)
        if self.sealed is not None:
            # What they are is not known without the key, and nothing here needs one.
            check_sealed_tokens(self.sealed, shard, memory[shard.tokens_offset : records])
            return
        tokens = np.frombuffer(memory[shard.tokens_offset : records], "<i4")
        if shard.first_layer:
            self._split.append((shard, tokens.copy()))
        else:
            self._tokens[shard.first_token : shard.first_token + shard.n_tokens] = tokens

    def check_tokens(self) -> None:
        """After all shards. Raises SnapshotMiss."""
        for shard, tokens in self._split:
            if not np.array_equal(tokens, self._tokens[shard.first_token : shard.first_token + shard.n_tokens]):
                raise SnapshotMiss(MissReason.CHECKSUM, f"{shard.file_name} holds other tokens than its neighbours")
        if self.sealed is None and token_digest(self._tokens.tobytes()) != self.manifest.token_digest:
            raise SnapshotMiss(MissReason.CHECKSUM, "the stored tokens do not match their digest")

    def record(self, shard: Shard, block: int, layer: int) -> slice:
        """Where a record lies in its shard."""
        at = self._geometry.record_offset(shard, block, layer)
        return slice(at, at + self.layout.record_nbytes(self._geometry.block_length(block)))

    def check_record(self, record: memoryview, block: int, layer: int) -> None:
        """Raises SnapshotMiss."""
        if self._geometry.checksum(record, block, layer) != int(self._checksums[block, layer]):
            raise SnapshotMiss(MissReason.CHECKSUM, f"block {block} of layer {layer} is damaged")


class ShardCheck:
    """One shard, checked from its beginning on as its bytes arrive in `memory`."""

    def __init__(self, plan: CopyPlan, shard: Shard, memory: memoryview) -> None:
        self._plan = plan
        self._shard = shard
        self._memory = memory
        self._n_records = 0
        self.nbytes = 0
        """How many bytes are known to be right (but for the tokens, which are looked at together at the end)."""

    def up_to(self, n: int) -> int:
        """Check all that is whole within the first `n` bytes; how many are known to be right. Raises SnapshotMiss."""
        plan, shard = self._plan, self._shard
        if not self.nbytes and n >= (begin := shard.layer_offset(shard.first_layer)):
            plan.check_beginning(shard, self._memory)
            self.nbytes = begin
        while self.nbytes and self._n_records < shard.n_layers * shard.n_blocks:
            layer, block = divmod(self._n_records, shard.n_blocks)
            layer, block = layer + shard.first_layer, block + shard.first_block
            place = plan.record(shard, block, layer)
            if place.stop > n:
                break
            plan.check_record(self._memory[place], block, layer)
            self.nbytes = place.stop
            self._n_records += 1
        return self.nbytes


def _subject(manifest: Manifest) -> tuple[object, ...]:
    return (
        manifest.key,
        manifest.fingerprint,
        manifest.layout,
        manifest.token_digest,
        manifest.context_digest,
        manifest.next_position,
        manifest.blocks,
        manifest.retention,
        manifest.resident_rows,
        manifest.slots,
        None if (sealed := manifest.sealed) is None else sealed.key_id,
    )
