"""What of several documents is in memory together, and what is refused."""

import pytest
from msgspec.structs import replace

from service.core.retention import Bounds, Policy
from service.core.together import RESIDENT_TOKENS, Gathering
from service.db.models import DocumentRow
from service.engine.fake import FakeEngine
from service.engine.messages import EngineInfo
from service.errors import Invalid, TooLong

BOUNDS = Bounds(room_tokens=768, model="small-one")


def gathering(n_prompt: int = 40, **info) -> Gathering:
    engine = FakeEngine(max_context=8192)
    engine._info = replace(engine.info, **info)
    assert isinstance(engine.info, EngineInfo)
    return Gathering(engine, BOUNDS, most_documents=16, n_prompt=n_prompt)


def rows(*lengths: int, policy: Policy | None = None) -> list[DocumentRow]:
    stored = policy.stored() if policy else None
    return [
        DocumentRow(id=f"doc_{n}", owner_id="own", token_count=length, token_digest=f"t{n}", policy=stored)
        for n, length in enumerate(lengths)
    ]


def test_the_prompt_is_there_once_and_of_each_its_beginning_and_its_end() -> None:
    together = gathering().of(rows(2000, 3000, 100))
    assert [part.resident for part in together.parts] == [
        [(0, 72), (1872, 2000)],
        [(40, 72), (2872, 3000)],
        [(40, 100)],
    ]
    assert (together.next_position, together.fetch_tokens) == (3256, 256)
    assert [part.document.document_id for part in together.parts] == ["doc_0", "doc_1", "doc_2"]


def test_sinks_are_rounded_as_the_engine_wants_them() -> None:
    together = gathering(sink_multiple=256).of(rows(2000, 3000))
    assert together.parts[0].resident == [(0, 256), (1872, 2000)]
    assert together.parts[1].resident[0] == (40, 72)


def test_windowed_documents_stand_where_their_segments_do() -> None:
    policy = Policy("small", True, 16, 0, 256, 2048, 12, 256)
    together = gathering().of([*rows(1000), *rows(24_000, policy=policy)])
    assert together.next_position == 16 + 2048 + 256
    assert [part.retention and part.retention.segment_tokens for part in together.parts] == [None, 2048]


@pytest.mark.parametrize("n", [2, 9, 16])
def test_windows_become_shorter_when_there_are_many(n: int) -> None:
    together = gathering().of(rows(*[3000] * n))
    total = sum(last - first for part in together.parts for first, last in part.resident)
    assert total <= RESIDENT_TOKENS
    assert all(part.resident[-1][1] == 3000 for part in together.parts)


def test_what_does_not_fit_is_refused_with_the_numbers() -> None:
    with pytest.raises(TooLong, match=r"doc_1 takes 7,300 positions .* 8,192.* may take 7,168") as refused:
        gathering().of(rows(100, 7300))
    assert refused.value.param == "document_ids"
    with pytest.raises(TooLong, match="16 documents need 808 tokens in memory, and there is room for 700"):
        gathering(resident_tokens=700).of(rows(*[500] * 16))


def test_without_index_heads_it_is_said_what_to_do() -> None:
    with pytest.raises(Invalid, match="preread models index-heads small-one") as refused:
        gathering(n_index_heads=0).of(rows(100, 100))
    assert refused.value.code == "no_index_heads"


def test_how_many_and_which() -> None:
    for ids, said in (([], "0 documents"), (["a"] * 17, "17 documents .* 1 to 16"), (["a", "b", "a"], "named twice")):
        with pytest.raises(Invalid, match=said):
            gathering().check(ids)
    gathering().check(["a"])
