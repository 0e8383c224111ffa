"""The KL gate on the torch engine: what an import runs unless it is told another."""

from pathlib import Path

from cache_store.layout import KVType
from service.engine.models.card import KVGate, ModelCard
from service.engine.models.gate import gate_ids, measure_kv_types
from service.engine.models.source import Progress, quiet_transformers, silent
from service.engine.torch_engine.loading import load_model
from service.engine.torch_engine.runner import CHUNK_TOKENS, TorchRunner


def torch_gate(model_dir: Path, card: ModelCard, progress: Progress = silent) -> dict[str, KVGate]:
    """The gate on a CPU, over the bundled text behind the model's own prompt, cut to its context.

    Computed in FP32 for weights stored so, else in BF16.
    """
    ids = gate_ids(model_dir, card)
    with quiet_transformers():
        loaded = load_model(model_dir, "float32" if card.dtype == "float32" else "bfloat16", "cpu")

    def make_runner(kv_type: KVType) -> TorchRunner:
        return TorchRunner(loaded, kv_type, n_slots=1, tail_tokens=len(ids), chunk_tokens=CHUNK_TOKENS)

    return measure_kv_types(make_runner, ids, progress=progress)
