import math

import pytest
import torch

from service.engine.messages import Sampling
from service.engine.protocol import Best
from service.engine.scheduler.sampling import NotFinite, Sampler

LOGITS = torch.tensor([1.0, 3.0, 2.0, -1.0, 0.0])


def shares(sampling: Sampling, n: int = 4000) -> list[float]:
    sampler, counts = Sampler(sampling), [0] * len(LOGITS)
    for _ in range(n):
        counts[sampler.pick(LOGITS)] += 1
    return [count / n for count in counts]


def test_greedy_takes_the_best():
    assert Sampler(Sampling()).pick(LOGITS) == 1


@pytest.mark.parametrize("best", [[300, 700, 999], [0, 999], [64, 65]])
def test_greedy_takes_the_first_of_equal_ones(best):
    logits = torch.arange(1000) % 7 / 10.0
    logits[best] = 2.0
    assert Sampler(Sampling()).pick(logits) == best[0] == int(logits.argmax())
    assert Sampler(Sampling()).pick(torch.stack((logits, logits))[1]) == best[0]


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
def test_shares_follow_the_softmax(temperature):
    expected = torch.softmax(LOGITS / temperature, 0).tolist()
    got = shares(Sampling(temperature=temperature, seed=1))
    assert all(math.isclose(a, b, abs_tol=0.03) for a, b in zip(got, expected, strict=True))


def test_top_k_and_top_p_cut_the_tail_and_keep_the_proportions():
    pair = torch.softmax(torch.tensor([3.0, 2.0]), 0).tolist()
    for cut in (Sampling(temperature=1, top_k=2, seed=2), Sampling(temperature=1, top_p=0.7, seed=3)):
        got = shares(cut)
        assert got[0] == got[3] == got[4] == 0
        assert math.isclose(got[1], pair[0], abs_tol=0.03)


def test_a_tiny_top_p_keeps_the_best_one():
    assert shares(Sampling(temperature=5, top_p=1e-9, seed=4), 50)[1] == 1


def test_equal_seeds_agree_and_others_do_not():
    def run(seed):
        sampler = Sampler(Sampling(temperature=2, seed=seed))
        return [sampler.pick(LOGITS) for _ in range(40)]

    assert run(5) == run(5)
    assert run(5) != run(6)
    assert run(None) != run(None)
    assert run(2**64 + 5) == run(5)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_logits_never_give_a_token(bad, temperature):
    logits = LOGITS.clone()
    logits[4] = bad
    with pytest.raises(NotFinite):
        Sampler(Sampling(temperature=temperature)).pick(logits)


def test_what_a_device_found_best_is_taken_unless_its_logits_were_broken():
    assert Sampler(Sampling()).pick(Best(7, True)) == 7
    with pytest.raises(NotFinite):
        Sampler(Sampling()).pick(Best(7, False))


@pytest.mark.parametrize("temperature", [5e-324, 1e-320, 1e-30, 1e-9])
def test_a_temperature_near_zero_takes_the_best_instead_of_overflowing(temperature):
    logits = torch.tensor([30.0, -30.0, 31.0])
    assert Sampler(Sampling(max_tokens=1, temperature=temperature)).pick(logits) == 2


@pytest.mark.parametrize(("spread", "top_p"), [(0.0, 0.9), (3.0, 0.9)])
def test_the_nucleus_of_a_large_vocabulary_holds_its_share_and_no_more(spread, top_p):
    """Flat logits need most of the vocabulary, peaked ones the few best."""
    logits = torch.linspace(spread, -spread, 5000)[torch.randperm(5000, generator=torch.Generator().manual_seed(1))]
    probabilities = torch.softmax(logits, 0)
    ranked = probabilities.sort(descending=True)
    n_kept = int((ranked.values.cumsum(0) - ranked.values < top_p).sum())
    kept = set(ranked.indices[: n_kept + 1].tolist()) if spread else set(range(5000))
    sampler = Sampler(Sampling(temperature=1, top_p=top_p, seed=7))
    drawn = [sampler.pick(logits) for _ in range(300)]
    assert set(drawn) <= kept
    assert len(set(drawn)) > 100
