"""Attention from kept queries is the softmax over everything that was seen, whatever is computed at a time."""

import pytest
import torch

from service.engine.watch import masses
from service.engine.watch.masses import WATCH_SPAN, HeadKeys, looks_of
from service.engine.watch.queries import KeptQueries

GROUP, ROWS, DIM, DOCUMENT, TAIL = 3, 7, 8, 75, 20


def head(seed: int, n_slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries of a head and all keys it saw: document, slots, tail."""
    made = torch.Generator().manual_seed(seed)
    queries = torch.randn(GROUP, ROWS, DIM, generator=made)
    return queries, torch.randn(DOCUMENT + n_slots + TAIL, DIM, generator=made)


def dense(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Probabilities ``[ROWS, keys]``, the mean of the heads; a row sees the tail through its own key."""
    scores = queries @ keys.T
    for row in range(ROWS):
        scores[:, row, len(keys) - ROWS + row + 1 :] = -torch.inf
    return scores.softmax(-1).mean(0)


@pytest.mark.parametrize("piece", [1 << 21, 40])
def test_sums_over_spans_and_pieces(monkeypatch, piece):
    monkeypatch.setattr(masses, "_PIECE", piece)
    heads, sizes, pieces = [head(1, 5), head(2, 0)], [5, 0], [3, 4]
    keys = [
        HeadKeys(lambda some, k=k: k[:DOCUMENT][some], DOCUMENT, k[DOCUMENT : DOCUMENT + n], k[DOCUMENT + n :])
        for (_, k), n in zip(heads, sizes, strict=True)
    ]
    looks = looks_of([q for q, _ in heads], keys, pieces)
    expected = [torch.stack([x.sum(0) for x in dense(*each).split(pieces)]) for each in heads]
    spans = torch.stack([x[:, :DOCUMENT] for x in expected]).mean(0).split(WATCH_SPAN, 1)
    torch.testing.assert_close(looks.document, torch.stack([x.sum(1) for x in spans], 1))
    torch.testing.assert_close(looks.slots[0], expected[0][:, DOCUMENT : DOCUMENT + 5] / 2)
    assert looks.slots[1].shape == (2, 0)
    tails = torch.stack([x[:, DOCUMENT + n :] for x, n in zip(expected, sizes, strict=True)]).mean(0)
    torch.testing.assert_close(looks.tail, tails)
    total = looks.document.sum(1) + looks.tail.sum(1) + sum(x.sum(1) for x in looks.slots)
    torch.testing.assert_close(total, torch.tensor([3.0, 4.0]))


def test_queries_are_kept_for_watched_slots_only():
    kept = KeptQueries()
    kept.begin(2)
    for step in range(3):
        kept.add([1, 2], torch.full((2, 1, 1, 4), float(step)) + torch.tensor([0.0, 10.0]).view(2, 1, 1, 1))
    assert 1 not in kept
    assert kept.last(2, 2)[0, 0, :, 0].tolist() == [11, 12]
    with pytest.raises(ValueError, match="3 rows of slot 2 were kept, not 4"):
        kept.last(2, 4)
    kept.begin(2)
    with pytest.raises(ValueError, match="0 rows"):
        kept.last(2, 1)
    kept.end(2)
    kept.end(2)
    assert 2 not in kept


def test_rows_of_a_step_are_kept_in_order_and_dropped_from_the_end():
    kept = KeptQueries()
    kept.begin(2)
    kept.add([1, 2], torch.arange(5.0).view(5, 1, 1, 1), [2, 3])
    kept.drop(2, 2)
    kept.add([2], torch.full((1, 1, 1, 1), 9.0))
    assert kept.last(2, 2)[0, 0, :, 0].tolist() == [2, 9]
    kept.drop(2, 0)
    kept.drop(1, 3)
    with pytest.raises(ValueError, match="2 rows of slot 2 were kept"):
        kept.last(2, 3)
    kept.drop(2, 7)
    with pytest.raises(ValueError, match="0 rows"):
        kept.last(2, 1)
