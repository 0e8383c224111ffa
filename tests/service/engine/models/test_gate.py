import math
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
import torch

from cache_store.layout import KVType
from service.engine.fake_runner import FakeRunner
from service.engine.models.gate import gate_text, kl_stats, logits_after, measure_kv_types
from service.engine.protocol import Rows


def test_kl_by_hand() -> None:
    p, q = torch.tensor([[0.5, 0.25, 0.25]]), torch.tensor([[0.25, 0.5, 0.25]])
    stats = kl_stats(p.log(), q.log() + 3.0)
    assert stats.mean == pytest.approx(0.5 * math.log(2) - 0.25 * math.log(2), rel=1e-6)
    assert (stats.p99, stats.top1_agreement, stats.n_positions) == (pytest.approx(stats.mean), 0.0, 1)


def test_mean_p99_and_agreement_are_over_positions() -> None:
    torch.manual_seed(0)
    reference = torch.randn(1000, 50)
    changed = reference.clone()
    changed[:20] = changed[:20].flip(-1)
    stats = kl_stats(reference, changed)
    by_position = torch.nn.functional.kl_div(
        changed.double().log_softmax(-1),
        reference.double().log_softmax(-1),
        reduction="none",
        log_target=True,
    ).sum(-1)
    assert stats.mean == pytest.approx(float(by_position.mean()), rel=1e-5)
    assert stats.p99 == pytest.approx(float(by_position.quantile(0.99)), rel=1e-5)
    assert 0.98 <= stats.top1_agreement < 1.0


def test_equal_logits_have_no_divergence() -> None:
    logits = torch.randn(300, 64) * 30
    stats = kl_stats(logits, logits.clone())
    assert (stats.mean, stats.p99, stats.top1_agreement, stats.n_positions) == (0.0, 0.0, 1.0, 300)


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        (torch.zeros(2, 3), torch.zeros(3, 3), "do not compare"),
        (torch.zeros(0, 3), torch.zeros(0, 3), "do not compare"),
        (torch.zeros(3), torch.zeros(3), "do not compare"),
        (torch.zeros(2, 3), torch.full((2, 3), math.nan), "not finite"),
    ],
)
def test_what_does_not_compare(one: torch.Tensor, other: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kl_stats(one, other)


class Moved(FakeRunner):
    """A fake model whose logits are moved by an amount that depends on the KV type."""

    amounts: ClassVar = {KVType.FP16: 0.0, KVType.K8V8: 0.0, KVType.K8V4: 0.05, KVType.K4V4: 5.0}

    def __init__(self, kv_type: KVType) -> None:
        super().__init__(vocab_size=32, chunk_tokens=256, tail_tokens=400)
        self.amount = self.amounts[kv_type]
        self.fed: list[int] = []

    def prefill_chunk(self, document: Any, tokens: Sequence[int], between_layers: Any = None) -> Any:
        self.fed += tokens
        return super().prefill_chunk(document, tokens, between_layers)

    def forward(self, batch: Sequence[Rows]) -> list[torch.Tensor]:
        (rows,) = batch
        self.fed += rows.tokens[1:] if rows.refeed else rows.tokens
        base = torch.arange(32.0).roll(len(self.fed))
        return [(base + self.amount * torch.arange(32.0).cos()).expand(len(rows.tokens), 32).clone()]


def test_the_gate_lets_pass_what_moves_little_and_names_what_does_not() -> None:
    runners: list[Moved] = []

    def make(kv_type: KVType) -> Moved:
        runners.append(Moved(kv_type))
        return runners[-1]

    told: list[tuple[str, int, int]] = []
    ids = [n % 30 for n in range(1000)]
    gates = measure_kv_types(make, ids, progress=lambda *p: told.append(p))
    assert [(k, g.allowed) for k, g in gates.items()] == [("k8v8", True), ("k8v4", True), ("k4v4", False)]
    assert gates["k8v8"].mean_kl == 0.0
    assert 0.0 < gates["k8v4"].mean_kl < 0.02 < gates["k4v4"].mean_kl
    assert all(r.fed == ids for r in runners)
    assert all((r.n_documents, r.n_tails) == (0, 0) for r in runners)
    assert told[0] == ("measuring", 0, 4)
    assert told[-1] == ("measuring", 4, 4)


def test_rows_come_in_order_and_the_first_is_fed_again() -> None:
    runner = FakeRunner(vocab_size=64)
    document = runner.new_document(256)
    runner.prefill_chunk(document, list(range(64)) * 4)
    tokens = [63, *range(40), *range(40), *range(60)]
    whole = logits_after(runner, document, tokens)
    assert whole.shape == (len(tokens), 64)
    assert torch.equal(logits_after(runner, document, tokens[:50]), whole[:50])


def test_the_bundled_text_is_plain_and_long_enough() -> None:
    text = gate_text()
    assert 900 < len(text.split()) < 1500
    assert text.isascii()
    assert any(c.isdigit() for c in text)
