"""Encrypted snapshots: what they hide, and that nothing but what was sealed at a place opens there."""

import base64
import errno
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from cache_store.errors import KeyRefused, MissReason, SnapshotMiss, StorageFailed
from cache_store.keyring import KeyRing, check_key, load_keys
from cache_store.keys import SnapshotKey
from cache_store.manifest import Manifest, encode_manifest
from cache_store.store import SnapshotStore
from cache_store.stored import decode_manifest
from cache_store.tiers.memory import MemoryTier
from cache_store.tiers.opening import TierConfig, open_store
from cache_store.tiers.store import TieredStore
from tests.cache_store.recipes import CANARY, KEY, RESIDENT, SEGMENTED, SLOTS, Recipe

KEYS, OTHERS = KeyRing(bytes(range(32))), KeyRing(bytes(range(1, 33)))


@pytest.fixture
def store(root: Path) -> SnapshotStore:
    return SnapshotStore(root, keys=KEYS)


def miss_of(store: SnapshotStore, recipe: Recipe) -> SnapshotMiss:
    with pytest.raises(SnapshotMiss) as caught:
        recipe.read(store)
    return caught.value


def changed_manifest(root: Path, recipe: Recipe, change: Callable[[Manifest], Manifest]) -> None:
    """With a checksum that is right again."""
    path = recipe.directory(root) / "manifest.json"
    path.write_bytes(encode_manifest(change(decode_manifest(path.read_bytes()))))


def with_sealed(manifest: Manifest, **fields: bytes) -> Manifest:
    assert manifest.sealed is not None
    section = msgspec.json.encode(msgspec.structs.replace(manifest.sealed, **fields))
    return msgspec.structs.replace(manifest, sections=manifest.sections | {"sealed": msgspec.Raw(section)})


@pytest.mark.parametrize("recipe", [Recipe(), SEGMENTED, RESIDENT, SLOTS, Recipe(key=KEY.of_kind("turn"), n_tokens=9)])
def test_every_kind_comes_back_as_it_was(store: SnapshotStore, recipe: Recipe) -> None:
    manifest = recipe.build(store)
    assert recipe.read(store) == recipe.blocks
    with store.open(recipe.key, recipe.fingerprint, recipe.layout, context_digest=recipe.context_digest) as reader:
        assert reader.canary == CANARY
        last = len(recipe.blocks) - 1
        assert [bytes(record) for record in reader.read_blocks([last])[0]] == recipe.blocks[last]
        assert b"".join(bytes(run[2]) for run in reader.read_layer(0)) == b"".join(b[0] for b in recipe.blocks)
    assert (manifest.canary, manifest.sealed is not None) == (None, True)
    assert store.usage() == sum(entry.nbytes for entry in store.entries())


def test_nothing_of_it_is_in_the_clear(store: SnapshotStore, root: Path) -> None:
    recipe = Recipe()
    recipe.build(store)
    stored = b"".join(path.read_bytes() for path in root.rglob("*") if path.is_file())
    tokens = b"".join(token.to_bytes(4, "little") for token in recipe.tokens)
    pieces = [record[:16] for block in recipe.blocks for record in block] + [tokens[:16], b'"logits"']
    assert [piece for piece in pieces if piece in stored] == []
    clear = SnapshotStore(root.parent / "clear")
    recipe.build(clear)
    in_the_clear = b"".join(path.read_bytes() for path in (root.parent / "clear").rglob("*") if path.is_file())
    assert all(piece in in_the_clear for piece in pieces)


def test_equal_documents_are_sealed_differently(store: SnapshotStore, root: Path) -> None:
    one, other = Recipe(), Recipe(key=SnapshotKey("bob", "document", "doc-1"))
    shards: list[bytes] = []
    for recipe in (one, one, other):
        recipe.build(store)
        shards.append((recipe.directory(root) / "shard-0000.safetensors").read_bytes()[-1000:])
    assert len(set(shards)) == 3


def test_without_the_key_or_with_another_it_is_a_miss_and_stays(store: SnapshotStore, root: Path) -> None:
    recipe = Recipe()
    recipe.build(store)
    for keys, words in ((None, "no key is given"), (OTHERS, "with another key")):
        miss = miss_of(SnapshotStore(root, keys=keys), recipe)
        assert miss.reason is MissReason.KEY
        assert words in miss.detail
    assert [entry.state for entry in store.entries()] == ["published"]
    assert recipe.read(store) == recipe.blocks


def test_what_is_not_encrypted_is_replaced(root: Path, store: SnapshotStore) -> None:
    recipe, clear = Recipe(), SnapshotStore(root)
    recipe.build(clear)
    assert miss_of(store, recipe).reason is MissReason.KEY
    recipe.build(store)
    assert recipe.read(store) == recipe.blocks
    assert miss_of(clear, recipe).reason is MissReason.KEY
    assert len(store.entries()) == 1


def test_records_that_change_places_do_not_open(store: SnapshotStore, root: Path) -> None:
    """With checksums and tags moved along, as somebody would who knows the format and has no key."""
    recipe = Recipe()

    def exchanged(manifest: Manifest) -> Manifest:
        assert manifest.sealed is not None
        tags, sums = bytearray(manifest.sealed.tags), bytearray(manifest.checksums)
        tags[:16], tags[48:64] = tags[48:64], tags[:16]
        sums[:8], sums[24:32] = sums[24:32], sums[:8]
        return with_sealed(msgspec.structs.replace(manifest, checksums=bytes(sums)), tags=bytes(tags))

    manifest = recipe.build(store)
    geometry_seeded = manifest.checksums
    changed_manifest(root, recipe, exchanged)
    assert miss_of(store, recipe).reason is MissReason.CHECKSUM
    assert geometry_seeded


@pytest.mark.parametrize("field", ["tags", "token_tags", "canary", "salt"])
def test_a_changed_seal_does_not_open(store: SnapshotStore, root: Path, field: str) -> None:
    recipe = Recipe()
    recipe.build(store)

    def flipped(manifest: Manifest) -> Manifest:
        data = bytearray(getattr(manifest.sealed, field))
        data[0] ^= 1
        return with_sealed(manifest, **{field: bytes(data)})

    changed_manifest(root, recipe, flipped)
    assert miss_of(store, recipe).reason is MissReason.CHECKSUM


def test_what_the_manifest_says_is_sealed_too(store: SnapshotStore, root: Path) -> None:
    """Resident rows whose last position is another: the checksums know nothing of it."""
    RESIDENT.build(store)
    moved = msgspec.Raw(b'{"last_position":12}')
    changed_manifest(root, RESIDENT, lambda m: msgspec.structs.replace(m, sections=m.sections | {"resident": moved}))
    assert miss_of(store, RESIDENT).reason is MissReason.CHECKSUM
    clear = SnapshotStore(root.parent / "clear")
    RESIDENT.build(clear)
    changed_manifest(
        root.parent / "clear", RESIDENT, lambda m: msgspec.structs.replace(m, sections=m.sections | {"resident": moved})
    )
    assert RESIDENT.read(clear) == RESIDENT.blocks


def test_one_version_does_not_open_with_the_manifest_of_another(store: SnapshotStore, root: Path) -> None:
    recipe = Recipe()
    recipe.build(store)
    kept = root.parent / "kept"
    shutil.copytree(recipe.directory(root), kept)
    recipe.build(store)
    shutil.copy(kept / "shard-0000.safetensors", recipe.directory(root))
    assert miss_of(store, recipe).reason is MissReason.CHECKSUM


def test_damage_shows_without_the_key(store: SnapshotStore, root: Path) -> None:
    recipe = Recipe()
    recipe.build(store)
    keyless = SnapshotStore(root)
    assert [verdict.ok for verdict in keyless.verify()] == [True]
    path = recipe.directory(root) / "shard-0000.safetensors"
    header = int.from_bytes(path.read_bytes()[:8], "little") + 8
    for at in (header + 3, path.stat().st_size - 5):  # in the tokens, in a record
        data = bytearray(path.read_bytes())
        data[at] ^= 1
        path.write_bytes(data)
        assert [verdict.reason for verdict in keyless.verify()] == [MissReason.CHECKSUM]
        data[at] ^= 1
        path.write_bytes(data)


def test_tiers_carry_it_without_a_key(root: Path, tmp_path: Path) -> None:
    far, recipe = MemoryTier("far", durable=True), Recipe()
    here = TieredStore(root, [far], uploads=False, keys=KEYS)
    clear = TieredStore(tmp_path / "clear", [far], uploads=False)
    recipe.build(clear)
    clear.uploader.send_noted()
    assert "not encrypted" in miss_of(here, recipe).detail
    recipe.build(here)
    here.uploader.send_noted()  # in place of the one in the clear
    (copy,) = far.copies.values()
    assert decode_manifest(copy.manifest).sealed is not None
    there = TieredStore(tmp_path / "there", [far], uploads=False, keys=KEYS)
    assert recipe.read(there) == recipe.blocks
    for keys in (None, OTHERS):
        other = TieredStore(tmp_path / f"other-{keys is None}", [far], uploads=False, keys=keys)
        assert miss_of(other, recipe).reason is MissReason.KEY
        assert "far: the snapshot is encrypted" in miss_of(other, recipe).detail
    assert len(far.copies) == 1
    for each in (here, clear, there):
        each.close()


def test_keys_come_from_a_file_or_the_environment(tmp_path: Path) -> None:
    key = os.urandom(32)
    path = tmp_path / "key"
    for text in (key.hex() + "\n", base64.b64encode(key).decode()):
        path.write_text(text)
        for keys in (load_keys(str(path), {}), load_keys("", {"PREREAD_ENCRYPTION_KEY": text})):
            assert keys is not None
            assert keys.id == KeyRing(key).id
    assert load_keys("", {}) is None
    for text in ("", "secret-" * 4, key.hex()[:-2], "0x" + key.hex()):
        path.write_text(text)
        with pytest.raises(KeyRefused, match="PREREAD_ENCRYPTION_KEY_FILE is no key: it takes 64 hex digits") as error:
            load_keys(str(path), {})
        assert not text or text not in str(error.value)
    with pytest.raises(KeyRefused, match="cannot be read: No such file"):
        load_keys(str(tmp_path / "none"), {})


def test_a_store_is_opened_with_its_key_only(tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PREREAD_ENCRYPTION_KEY", raising=False)
    open_store(root, TierConfig(), uploads=False).close()
    monkeypatch.setenv("PREREAD_ENCRYPTION_KEY", bytes(range(32)).hex())
    for _ in range(2):
        assert open_store(root, TierConfig(), uploads=False).keys is not None
    monkeypatch.setenv("PREREAD_ENCRYPTION_KEY", bytes(range(1, 33)).hex())
    with pytest.raises(KeyRefused, match="the key given is another"):
        open_store(root, TierConfig(), uploads=False)
    monkeypatch.delenv("PREREAD_ENCRYPTION_KEY")
    with pytest.raises(KeyRefused, match="no key is given"):
        open_store(root, TierConfig(), uploads=False)
    (root / "key").unlink()
    check_key(root, None)
    assert "keys" not in json.dumps([path.name for path in root.iterdir()])


def test_a_new_key_before_the_old_one(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was sealed before is opened as ever, what comes is sealed with the new one, and then the old one may go."""
    old, new = bytes(range(32)), bytes(range(1, 33))
    first, second = Recipe(), Recipe(key=SnapshotKey("alice", "document", "doc-2"))
    opened = {}
    for text in (old.hex(), f"{new.hex()}\n{old.hex()}\n", new.hex()):
        monkeypatch.setenv("PREREAD_ENCRYPTION_KEY", text)
        opened[text] = open_store(root, TierConfig(), uploads=False)
        if text == old.hex():
            first.build(opened[text])
        elif "\n" in text:
            assert first.read(opened[text]) == first.blocks
            second.build(opened[text])
    assert second.read(opened[text]) == second.blocks
    assert miss_of(opened[text], first).reason is MissReason.KEY
    assert (root / "key").read_text().strip() == KeyRing(new).id
    monkeypatch.setenv("PREREAD_ENCRYPTION_KEY", old.hex())
    with pytest.raises(KeyRefused, match="behind a new one to change it"):
        open_store(root, TierConfig(), uploads=False)


def test_a_full_disk_leaves_the_note_of_the_key(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty note would take any key for the right one."""
    old, new = KeyRing(bytes(range(32))), KeyRing(bytes(range(1, 33)), [bytes(range(32))])
    root.mkdir(exist_ok=True)
    check_key(root, old)

    def full(path: Path, text: str) -> int:
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        with pytest.raises(StorageFailed, match="noting the key"):
            check_key(root, new)
    assert (root / "key").read_text().strip() == old.id
    with pytest.raises(KeyRefused, match="another"):
        check_key(root, KeyRing(bytes(range(1, 33))))
    check_key(root, new)
    assert (root / "key").read_text().strip() == new.id


def test_two_owners_have_two_keys() -> None:
    salt = bytes(16)
    sealed = [KEYS.for_snapshot(owner, salt).encrypt(bytes(12), b"text", None) for owner in ("alice", "bob", "alice")]
    assert sealed[0] == sealed[2] != sealed[1]


def test_a_document_of_another_owner_does_not_open(store: SnapshotStore, root: Path) -> None:
    """Its files copied to where somebody else's are looked for, with the names in them changed to fit."""
    mine, theirs = Recipe(), replace(Recipe(), key=SnapshotKey("bob", "document", "doc-1"))
    mine.build(store)
    theirs.build(store)
    directory = theirs.directory(root)
    shard = (mine.directory(root) / "shard-0000.safetensors").read_bytes()
    own = (directory / "shard-0000.safetensors").read_bytes()
    header = int.from_bytes(own[:8], "little") + 8
    (directory / "shard-0000.safetensors").write_bytes(own[:header] + shard[-(len(own) - header) :])
    assert miss_of(store, theirs).reason is MissReason.CHECKSUM
