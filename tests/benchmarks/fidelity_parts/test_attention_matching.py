"""The fitted remainder, and the identities of attention that it stands on."""

import math

import pytest
import torch
from torch import Tensor

from benchmarks.fidelity_parts.attention_matching import attend, fit, merge


def random(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """RoPE of rows ``[..., n, d]`` at positions ``[n]``, halves as in Llama."""
    d = x.shape[-1]
    angles = positions[:, None].double() * 10000.0 ** (-torch.arange(0, d, 2).double() / d)
    cos, sin = (f(angles).repeat(1, 2).to(x.dtype) for f in (torch.cos, torch.sin))
    half = torch.cat((-x[..., d // 2 :], x[..., : d // 2]), -1)
    return x * cos + half * sin


def test_attention_over_two_parts_merges_to_that_over_both() -> None:
    q, k, v, bias = random(2, 5, 16), random(2, 40, 16, seed=2), random(2, 40, 16, seed=3), random(2, 40, seed=4)
    whole = attend(q, k, v, bias)
    for cut in (0, 1, 17, 40):
        parts = (attend(q, k[:, s], v[:, s], bias[:, s]) for s in (slice(0, cut), slice(cut, None)))
        merged = merge(*parts)
        torch.testing.assert_close(merged.out, whole.out, atol=1e-5, rtol=0)
        torch.testing.assert_close(merged.lse, whole.lse, atol=1e-5, rtol=0)


def test_a_bias_is_one_more_channel_of_the_key() -> None:
    q, k, v, bias = random(2, 5, 16), random(2, 40, 16, seed=2), random(2, 40, 16, seed=3), random(2, 40, seed=4)
    wider = attend(torch.cat((q, torch.ones(2, 5, 1)), -1), torch.cat((k, bias[..., None]), -1), v)
    torch.testing.assert_close(wider.out, attend(q, k, v, bias).out, atol=1e-5, rtol=0)


def test_a_block_may_move_as_a_whole_when_its_queries_move_with_it() -> None:
    """Keys keep their rotation, so only distances count: this is why segments can share positions, and why the rows
    of one block must not be renumbered one by one."""
    q, k, v = random(1, 3, 32), random(1, 50, 32, seed=2), random(1, 50, 32, seed=3)
    at, asked = torch.arange(50), torch.arange(50, 53)
    here = attend(rotated(q, asked), rotated(k, at), v).out
    moved = attend(rotated(q, asked + 700), rotated(k, at + 700), v).out
    torch.testing.assert_close(moved, here, atol=1e-5, rtol=0)
    squeezed = attend(rotated(q, asked), rotated(k, at // 2), v).out
    assert (squeezed - here).abs().max() > 0.1


def test_as_many_slots_as_rows_fit_exactly() -> None:
    q, k, v = random(2, 200, 8), random(2, 12, 8, seed=2), random(2, 12, 8, seed=3)
    (found,) = fit(k, v, q, torch.ones(2, 200), 12, ridges=[1e-3])
    assert torch.equal(found.places, torch.arange(12).expand(2, -1))
    torch.testing.assert_close(found.bias, torch.zeros(2, 12), atol=1e-3, rtol=0)
    torch.testing.assert_close(found.values, v, atol=1e-3, rtol=0)


def test_a_row_that_occurs_twice_is_one_with_a_bias_of_log_two() -> None:
    q, k, v = random(1, 300, 8), random(1, 10, 8, seed=2), random(1, 10, 8, seed=3)
    twice_k, twice_v = (torch.cat((x, x + 1e-4), 1) for x in (k, v))
    slots = attend(q, k, v, torch.full((1, 10), math.log(2)))
    whole = attend(q, twice_k, twice_v)
    torch.testing.assert_close(slots.lse, whole.lse, atol=1e-2, rtol=0)
    torch.testing.assert_close(slots.out, whole.out, atol=1e-2, rtol=0)


@pytest.mark.parametrize("n_slots", [4, 16, 32])
def test_a_fit_is_nearer_than_the_same_rows_alone(n_slots: int) -> None:
    q, k, v = random(2, 400, 16), random(2, 64, 16, seed=2), random(2, 64, 16, seed=3)
    unseen = random(2, 400, 16, seed=5)
    whole = attend(unseen, k, v)
    own, fitted = fit(k, v, q, torch.ones(2, 400), n_slots, ridges=[math.inf, 1e-2])
    at = own.places[..., None].expand(-1, -1, 16)
    rows = attend(unseen, k.gather(1, at), v.gather(1, at))
    biased, refitted = (attend(unseen, k.gather(1, at), f.values, f.bias) for f in (own, fitted))
    errors = [(part.out - whole.out).square().mean() for part in (rows, biased, refitted)]
    assert errors[2] < 0.8 * errors[0]
    masses = [(part.lse - whole.lse).abs().mean() for part in (rows, refitted)]
    assert masses[1] < masses[0]


def test_text_that_repeats_itself_does_not_break_the_fit() -> None:
    q = random(1, 100, 8)
    k = random(1, 1, 8, seed=2).expand(1, 50, 8) + 1e-6 * random(1, 50, 8, seed=4)
    v = random(1, 50, 8, seed=3)
    for found in fit(k, v, q, torch.ones(1, 100), 10, ridges=[1e-6, 1e-2]):
        assert torch.isfinite(found.values).all()
        assert found.values.abs().max() < 10 * v.abs().max()


def test_refuses_more_slots_than_rows() -> None:
    with pytest.raises(ValueError, match="6 slots for 5 rows"):
        fit(random(1, 5, 8), random(1, 5, 8), random(1, 9, 8), torch.ones(1, 9), 6, ridges=[1e-2])
