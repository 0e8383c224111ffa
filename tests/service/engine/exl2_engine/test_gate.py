"""The card's KL gate, run on the CPU over the plain decoder: its figures are those of the torch engine's gate."""

import torch

from cache_store.layout import KVType
from service.engine.exl2_engine.gate import GATE_CHUNK_TOKENS, runner_maker
from service.engine.exl2_engine.plain import PlainModel
from service.engine.models.card import load_card
from service.engine.models.gate import gate_ids, measure_kv_types
from service.engine.torch_engine.loading import load_model
from service.engine.torch_engine.runner import TorchRunner


def test_it_measures_what_the_torch_engine_measures(tiny_dir):
    card = load_card(tiny_dir)
    ids = gate_ids(tiny_dir, card)[:1200]
    found = measure_kv_types(runner_maker(PlainModel.load(tiny_dir, torch.float32), card, len(ids)), ids)
    loaded = load_model(tiny_dir, "float32", "cpu")

    def torch_runner(kv_type: KVType) -> TorchRunner:
        return TorchRunner(loaded, kv_type, n_slots=1, tail_tokens=len(ids), chunk_tokens=GATE_CHUNK_TOKENS)

    wanted = measure_kv_types(torch_runner, ids)
    assert list(found) == list(wanted) == ["k8v8", "k8v4", "k4v4"]
    for kv_type, gate in wanted.items():
        assert gate.mean_kl > 0
        assert abs(found[kv_type].mean_kl / gate.mean_kl - 1) < 0.2
        assert found[kv_type].allowed == gate.allowed


def test_it_measures_types_that_are_not_allowed_yet(tiny_dir):
    card = load_card(tiny_dir)
    make = runner_maker(PlainModel.load(tiny_dir, torch.float32), card, 600)
    for kv_type in KVType:
        runner = make(kv_type)
        assert runner.limits.chunk_tokens == GATE_CHUNK_TOKENS
        assert runner.pool.n_blocks == 3
        assert runner.limits.tail_tokens == 600
