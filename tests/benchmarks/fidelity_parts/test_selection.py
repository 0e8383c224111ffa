"""Selections that the product does not use."""

import pytest
import torch

from benchmarks.fidelity_parts.selection import max_pool, select_layered, select_uniform


def test_every_head_keeps_its_own_best_tokens_in_order() -> None:
    scores = torch.tensor([[[0.1, 0.9, 0.3, 0.8], [0.7, 0.2, 0.6, 0.1]]])
    assert select_uniform(scores, 2).tolist() == [[[1, 3], [0, 2]]]
    assert select_uniform(scores, 2).dtype == torch.int64


def test_equal_scores_go_to_the_earlier_token() -> None:
    scores = torch.zeros(2, 3, 50)
    assert (select_uniform(scores, 5) == torch.arange(5)).all()


@pytest.mark.parametrize("n_slots", [0, 1, 63, 64])
def test_any_number_of_slots_up_to_all_tokens(n_slots: int) -> None:
    scores = torch.rand(3, 2, 64, generator=torch.Generator().manual_seed(1))
    kept = select_uniform(scores, n_slots)
    assert kept.shape == (3, 2, n_slots)
    assert (kept.diff(dim=-1) > 0).all()
    dropped = torch.ones_like(scores, dtype=torch.bool).scatter(-1, kept, False)
    lowest_kept = scores.gather(-1, kept).amin(-1) if n_slots else torch.full((3, 2), torch.inf)
    assert (scores.masked_fill(~dropped, -torch.inf).amax(-1) <= lowest_kept).all()


def test_refuses_what_it_cannot_select_from() -> None:
    with pytest.raises(ValueError, match="5 slots of 4 tokens"):
        select_uniform(torch.zeros(1, 1, 4), 5)
    with pytest.raises(ValueError, match="not \\[layers, heads, tokens\\]"):
        select_uniform(torch.zeros(4, 4), 2)
    with pytest.raises(ValueError, match="not finite"):
        select_uniform(torch.tensor([[[0.0, torch.nan]]]), 1)


def test_layers_share_the_slots_by_their_scores() -> None:
    scores = torch.rand(4, 2, 40, generator=torch.Generator().manual_seed(2))
    scores[2] += 1
    kept = select_layered(scores, 10)
    assert [rows.shape for rows in kept][2] == (2, 40)
    assert sum(rows.shape[1] for rows in kept) == 4 * 10
    alone = select_uniform(scores[:1], kept[0].shape[1])[0]
    assert torch.equal(kept[0], alone)


def test_equal_layers_get_equally_many_slots() -> None:
    layer = torch.rand(1, 2, 40, generator=torch.Generator().manual_seed(3))
    kept = select_layered(layer.expand(3, -1, -1), 8)
    assert max(rows.shape[1] for rows in kept) - min(rows.shape[1] for rows in kept) <= 1


def test_one_good_head_can_speak_for_its_layer() -> None:
    scores = torch.full((2, 3, 40), 0.4)
    scores[0, 1] = 0.9
    scores[0, [0, 2]] = 0.1
    assert [rows.shape[1] for rows in select_layered(scores, 10)] == [0, 20]
    assert [rows.shape[1] for rows in select_layered(scores, 10, best_head=True)] == [20, 0]


def test_pooling_spreads_a_score_over_its_neighbours() -> None:
    scores = torch.tensor([[[0.0, 0.0, 0.0, 0.9, 0.0, 0.1, 0.2]]])
    assert max_pool(scores, 2).flatten().tolist() == pytest.approx([0.0, 0.9, 0.9, 0.9, 0.9, 0.9, 0.2])
    assert torch.equal(max_pool(scores, 0), scores)
