"""Selection of summary slots by replay scores."""

import pytest
import torch

from ingest.compaction import select_ragged


def test_one_threshold_over_all_heads_of_all_layers():
    scores = torch.tensor([[[0.1, 0.9, 0.3], [0.8, 0.7, 0.6]], [[0.0, 0.2, 0.1], [0.5, 0.0, 0.4]]])
    assert [[head.tolist() for head in layer] for layer in select_ragged(scores, 1)] == [[[1], [0, 1, 2]], [[], []]]
    assert [[head.tolist() for head in layer] for layer in select_ragged(scores, 2)] == [
        [[1, 2], [0, 1, 2]],
        [[1], [0, 2]],
    ]


@pytest.mark.parametrize("n_slots", [0, 1, 5, 16, 31, 32])
def test_ragged_slots_are_as_many_and_the_best(n_slots):
    scores = torch.randint(0, 40, (3, 2, 32), generator=torch.Generator().manual_seed(n_slots)) / 40
    places = select_ragged(scores, n_slots)
    kept = torch.zeros(scores.shape, dtype=torch.bool)
    for i, layer in enumerate(places):
        for j, own in enumerate(layer):
            assert own.tolist() == sorted(set(own.tolist()))
            kept[i, j, own] = True
    assert kept.sum() == 3 * 2 * n_slots
    if 0 < n_slots < 32:
        assert scores[kept].min() >= scores[~kept].max()
        level = scores == scores[kept].min()
        assert kept[level].tolist() == sorted(kept[level].tolist(), reverse=True), "the earlier of equal ones"


def test_scores_of_which_ragged_slots_cannot_be_chosen():
    with pytest.raises(ValueError, match="5 slots of 4 tokens"):
        select_ragged(torch.zeros(1, 1, 4), 5)
    with pytest.raises(ValueError, match="not \\[layers, heads, tokens\\]"):
        select_ragged(torch.zeros(4, 4), 2)
    with pytest.raises(ValueError, match="not finite"):
        select_ragged(torch.tensor([[[0.0, torch.nan]]]), 1)
