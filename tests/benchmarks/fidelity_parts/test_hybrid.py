"""Exact slots and a fitted remainder, chosen head by head."""

import torch
from torch import Tensor

from benchmarks.fidelity_parts.attention_matching import attend, merge
from benchmarks.fidelity_parts.hybrid import LayerKV, LayerSlots, choose


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def layer(scores: Tensor | None = None) -> LayerKV:
    keys, values = random(2, 80, 16, seed=1), random(2, 80, 16, seed=2)
    always = torch.zeros(80, dtype=torch.bool)
    always[:4] = always[-8:] = True
    fit_on, held_out = random(2, 300, 16, seed=3), random(2, 100, 16, seed=4)
    if scores is None:
        scores = (fit_on @ keys.transpose(1, 2)).softmax(-1).amax(1)
    return LayerKV(keys, values, scores, always, fit_on, held_out)


def error(kv: LayerKV, rows: Tensor, values: Tensor, bias: Tensor | None) -> Tensor:
    whole = attend(kv.held_out, kv.keys, kv.values).out
    fixed = attend(kv.held_out, kv.keys[:, kv.always], kv.values[:, kv.always])
    slots = attend(kv.held_out, kv.keys.gather(1, rows[..., None].expand(-1, -1, 16)), values, bias)
    wrong = merge(fixed, slots).out - whole
    return (wrong.square().sum(-1) / whole.square().sum(-1)).mean(-1)


def check(kv: LayerKV, found: LayerSlots) -> None:
    assert not kv.always[found.rows].any()
    assert all(len(set(rows)) == len(rows) for rows in found.rows.tolist())
    errors = error(kv, found.rows, found.values, found.bias)
    torch.testing.assert_close(errors, torch.tensor(found.error), atol=1e-5, rtol=1e-4)
    assert all(mine <= plain for mine, plain in zip(found.error, found.selected, strict=True))


def test_no_head_gets_worse_on_held_out_queries() -> None:
    kv = layer()
    found = choose(kv, 20)
    check(kv, found)
    assert found.rows.shape == (2, 20)
    assert max(found.exact) < 1  # random keys have no few rows that matter, so a fit is better


def test_a_head_that_looks_at_few_rows_keeps_them() -> None:
    """All attention goes to the rows that selection keeps: nothing beats it, and ties are for it."""
    kv = layer()
    keys = kv.keys.clone()
    keys[:, 20:30] = 0
    loud = torch.full((2, 80), -1.0)
    loud[:, 20:30] = 1
    always = kv.always
    keys = torch.where(loud[..., None] > 0, keys, keys - 100 * kv.held_out.mean(1, keepdim=True))
    kv = LayerKV(keys * 0 + loud[..., None] * 20, kv.values, loud, always, kv.fit_on.abs(), kv.held_out.abs())
    found = choose(kv, 10)
    assert found.exact == [1.0, 1.0]
    assert found.rows.sort(-1).values.tolist() == [list(range(20, 30))] * 2
    assert torch.equal(found.bias, torch.zeros(2, 10))


def test_parts_can_be_switched_off() -> None:
    kv = layer()
    assert torch.equal(choose(kv, 20, biased=False).bias, torch.zeros(2, 20))
    own = choose(kv, 20, ridges=[float("inf")])
    at = own.rows[..., None].expand(-1, -1, 16)
    assert torch.equal(own.values, kv.values.gather(1, at))
    assert choose(kv, 20, shares=[]).exact == [1.0, 1.0]
