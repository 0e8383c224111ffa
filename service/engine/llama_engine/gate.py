"""The KL gate on llama.cpp: the model is loaded anew in each KV type, one at a time."""

from pathlib import Path

from cache_store.layout import KVType
from service.engine.llama_engine.loading import Options, load_runner
from service.engine.llama_engine.runner import LlamaRunner
from service.engine.models.card import KVGate, ModelCard
from service.engine.models.gate import gate_ids, measure_kv_types
from service.engine.models.source import Progress, silent


def llama_gate(model_dir: Path, card: ModelCard, progress: Progress = silent) -> dict[str, KVGate]:
    """The gate over the bundled text behind the model's own prompt, cut to its context; F16 keys and values are the
    reference. Raises EngineRefused, ModelDamaged."""
    ids = gate_ids(model_dir, card)
    last: list[LlamaRunner] = []

    def make(kv_type: KVType) -> LlamaRunner:
        while last:
            last.pop().close()
        nbytes = card.layout(kv_type).bytes_per_token * 2 * len(ids)
        last.append(load_runner(model_dir, card, Options(kv_type, 1, len(ids), nbytes)))
        return last[0]

    try:
        return measure_kv_types(make, ids, progress=progress)
    finally:
        for runner in last:
            runner.close()
