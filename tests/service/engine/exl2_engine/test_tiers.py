"""The whole engine over the card's runner on a CPU: one document on the device, others in host memory or on disk."""

import pytest

from cache_store.layout import KVType
from cache_store.store import SnapshotStore
from service.engine.digests import digest_of
from service.engine.host.host import EngineHost
from service.engine.messages import AnswerRequest, BuildDone, BuildRequest, DocumentRef, Sampling

N_TOKENS = 700
A, B, C = (DocumentRef("own", name) for name in "abc")


class Words:
    def decode(self, ids: list[int]) -> str:
        return "".join(f"<{i}>" for i in ids)


class Engine:
    """Room for one document of three blocks on the device, `n_host` in host memory."""

    def __init__(self, runner, root, ids, n_host: int) -> None:
        self.runner = runner
        self.ids = {ref: ids(N_TOKENS, seed) for seed, ref in enumerate((A, B, C))}
        nbytes = runner.document_nbytes(N_TOKENS)
        runner.keep_in_host_memory(n_host * nbytes)
        runner.host_copies._memory.wait_allocated()
        self.host = EngineHost(runner, SnapshotStore(root), Words(), frozenset(), resident_budget_nbytes=nbytes)

    def build(self, ref) -> BuildDone:
        events: list = []
        self.host.build(BuildRequest("b", ref, self.ids[ref]), events.append).result(60)
        assert isinstance(events[-1], BuildDone), events[-1]
        return events[-1]

    def ask(self, ref) -> tuple[str, list[int]]:
        """Where the document came from, and the tokens of the answer."""
        events, tokens = [], self.ids[ref]
        request = AnswerRequest("q", f"s{ref}", ref, digest_of(tokens), len(tokens), [], [5, 6, 7], Sampling(4))
        self.host.answer(request, events.append).result(60)
        return events[0].source, events[-1].token_ids

    def free_blocks(self) -> int:
        self.host._context.scheduler.run(lambda: None)
        return self.runner.pool.n_free


@pytest.fixture
def engine(make_runner, tmp_path, ids):
    engines = []

    def make(kv_type=KVType.K8V4, n_host=2) -> Engine:
        engines.append(Engine(make_runner(kv_type, n_blocks=3), tmp_path / "store", ids, n_host))
        return engines[-1]

    yield make
    for one in engines:
        one.host.close()


@pytest.mark.parametrize("kv_type", [KVType.FP16, KVType.K8V4, KVType.K4V4])
def test_answers_are_the_same_from_every_tier(engine, kv_type):
    first = engine(kv_type, n_host=1)
    first.build(A)
    source, right = first.ask(A)
    assert source == "host", "on a CPU a resident document is in the host's memory"
    assert first.host.stats().host_documents == 0
    first.build(B)
    assert first.host.stats().host_documents == 1
    assert first.ask(A) == ("host", right)
    assert first.host.stats().host_documents == 1
    first.host.close()
    second = engine(kv_type, n_host=1)
    assert second.ask(A) == ("disk", right)
    second.ask(B)
    assert second.host.stats().host_documents == 1
    assert second.ask(A) == ("host", right)


def test_documents_cycle_through_all_tiers_without_a_leak(engine):
    one = engine(n_host=1)
    for ref in (A, B, C):
        one.build(ref)
    right = {ref: one.ask(ref)[1] for ref in (A, B, C)}
    sources = set()
    for i in range(30):
        ref = (A, B, C, B)[i % 4]
        source, tokens = one.ask(ref)
        sources.add(source)
        assert tokens == right[ref]
    assert sources == {"host", "disk"}
    assert one.host.stats().host_documents == 1
    for ref in (A, B, C):
        one.host.release(ref)
    assert one.free_blocks() == 3
    assert one.host.stats().host_nbytes == 0
    assert one.runner.load_buffers.n_free == one.runner.load_buffers.n_slots


def test_a_damaged_restore_leaves_the_engine_as_it_was(engine, tmp_path):
    one = engine(n_host=0)
    one.build(A)
    one.build(B)
    right = one.ask(B)[1]
    shard = next(p for p in (tmp_path / "store").rglob("shard-*") if "a" in p.parts)
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    events: list = []
    tokens = one.ids[A]
    request = AnswerRequest("q", "s", A, digest_of(tokens), len(tokens), [], [5, 6], Sampling(4))
    one.host.answer(request, events.append).result(60)
    assert (events[-1].code, events[-1].miss_reason) == ("snapshot_miss", "checksum")
    assert one.free_blocks() == 3
    assert one.runner.load_buffers.n_free == one.runner.load_buffers.n_slots
    assert one.ask(B) == ("disk", right)
