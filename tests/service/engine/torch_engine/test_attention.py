import math

import pytest
import torch

from service.engine.torch_engine import attention


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def exact(q, k, v, hidden=None):
    """Softmax attention in FP64 and its log-sum-exp."""
    scores = q.double() @ k.double().transpose(1, 2)
    if hidden is not None:
        scores.masked_fill_(hidden, -math.inf)
    return torch.softmax(scores, -1) @ v.double(), scores.logsumexp(-1)


@pytest.mark.parametrize("n", [1, 100, 384, 385, 900])
def test_a_halved_causal_chunk_is_causal_attention(n):
    q, k, v = random(6, n, 32), random(2, n, 32, seed=1), random(2, n, 32, seed=2)
    out, lse = attention.causal_flash(q, k, v, 0.2)
    hidden = torch.ones(n, n, dtype=torch.bool).triu(1)
    expected = exact(q * 0.2, k.repeat_interleave(3, 0), v.repeat_interleave(3, 0), hidden)
    torch.testing.assert_close(out.double(), expected[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse.double(), expected[1], rtol=1e-5, atol=1e-5)


def test_merging_two_key_sets_is_attention_over_both():
    q, k, v = random(2, 4, 32), random(2, 90, 32, seed=1), random(2, 90, 32, seed=2)
    parts = [attention.masked(q, k[:, s], v[:, s], None) for s in (slice(0, 31), slice(31, 90))]
    out, lse = attention.merge(*parts[0], *parts[1])
    expected = exact(q, k, v)
    torch.testing.assert_close(out.double(), expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), expected[1], rtol=1e-5, atol=1e-5)


def test_a_side_without_keys_leaves_the_other_as_it_is():
    q, k, v = random(2, 4, 32), random(2, 9, 32, seed=1), random(2, 9, 32, seed=2)
    some = attention.masked(q, k, v, None)
    none = attention.masked(q, k, v, torch.full((4, 9), -math.inf))
    out, lse = attention.merge(*some, *none)
    torch.testing.assert_close(out, some[0])
    torch.testing.assert_close(lse, some[1])


@pytest.mark.parametrize("causal", [False, True])
def test_the_portable_path_agrees_with_the_kernel(causal):
    q, k, v = random(2, 300, 32), random(2, 300, 32, seed=1), random(2, 300, 32, seed=2)
    expected = attention.flash(q, k, v, 0.3, causal=causal)
    got = attention._plain(q * 0.3, k, v, causal=causal)
    for a, b in zip(expected, got, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_refed_row_sees_nothing_of_the_tail():
    mask = attention.causal_mask(3, 2, refeed=True, device=torch.device("cpu"))
    assert torch.isinf(mask).tolist() == [[True] * 4, [False, False, False, True], [False] * 4]
    assert attention.causal_mask(1, 5, refeed=False, device=torch.device("cpu")) is None
