"""What the hardware allows for the model that is measured."""

from dataclasses import dataclass, replace
from pathlib import Path

from cache_store.layout import KVType
from service.engine.factory import resolve_dtype
from service.engine.llama_engine.library import gpu_backends
from service.engine.models.errors import ModelError
from service.planning.cards import Card
from service.planning.detect import find_card
from service.planning.headers import read_model
from service.planning.ledgers import read_nbytes, step_nbytes
from service.planning.llama import file_step_nbytes
from service.planning.model import ModelFacts
from service.planning.placing import computes_on_card
from service.planning.request import Wanted, layout_of
from service.settings import Settings


@dataclass(frozen=True, slots=True)
class Physics:
    """Ceilings and sizes: GB/s and 10^12 operations a second; bytes of weights that a step reads, and of a row of KV as
    it reads it and as a snapshot stores it; operations of a token, without context and for a row of it. `host_gbps`:
    from host memory to a card."""

    bandwidth_gbps: float
    tflops: float
    step_nbytes: int
    row_nbytes: int
    stored_row_nbytes: int
    token_flops: float
    row_flops: float
    vocab_size: int
    host_gbps: float = 0.0

    def step(self, context: int, users: int, documents: int) -> tuple[float, float]:
        """Bytes and operations of a decode step of `users` on `documents` of `context` tokens."""
        nbytes = self.step_nbytes + documents * context * self.row_nbytes
        return float(nbytes), users * (self.token_flops + context * self.row_flops)

    def prefill_tok_s(self, tokens: int) -> float:
        """Tokens a second that products allow."""
        return self.tflops * 1e12 / (self.token_flops + tokens / 2 * self.row_flops)

    def prefill(self, tokens: int) -> tuple[float, float]:
        """Bytes that reading a document moves at least (the weights once, its rows written) and its operations."""
        nbytes = self.step_nbytes + tokens * self.stored_row_nbytes
        return float(nbytes), tokens * (self.token_flops + tokens / 2 * self.row_flops)

    def question_s(self, context: int, tokens: int) -> float:
        """Seconds of a question's prefill behind `context` tokens."""
        nbytes, flops = self.step(context, 1, 1)
        return max(nbytes / self.bandwidth_gbps / 1e9, tokens * flops / self.tflops / 1e12)


def physics_of(settings: Settings, model_dir: Path, bandwidth_gbps: float = 0.0, card_name: str = "") -> Physics | None:
    """Of the model that the settings name, on `card_name` or the card that is here; None for the fake engine.

    Raises ModelError, Invalid.
    """
    if settings.engine == "fake":
        return None
    model = read_model(model_dir)
    card = find_card(card_name if computes_on_card(settings, gpu_backends()) else "cpu", bandwidth_gbps)
    if settings.engine == "exl2" and card.is_cpu:
        raise ModelError("PREREAD_ENGINE=exl2, and there is no NVIDIA card")
    physics = _physics(model, card, KVType(settings.kv_type), resolve_dtype(settings.compute_dtype))
    if settings.engine == "llamacpp":
        # both as they are stored, wherever it computes
        return replace(physics, step_nbytes=file_step_nbytes(model), row_nbytes=physics.stored_row_nbytes)
    return physics


def _physics(model: ModelFacts, card: Card, kv_type: KVType, compute: str) -> Physics:
    shape, wanted = model.shape, Wanted(kv_type=kv_type, compute=compute)
    return Physics(
        bandwidth_gbps=card.bandwidth_gbps,
        tflops=card.fp16_tflops,
        step_nbytes=step_nbytes(model, card, wanted),
        row_nbytes=read_nbytes(model, card, wanted),
        stored_row_nbytes=layout_of(shape, kv_type).bytes_per_token,
        token_flops=2.0 * model.layer_parameters,
        row_flops=4.0 * shape.n_layers * shape.query_width,
        vocab_size=shape.vocab,
        host_gbps=0.0 if card.is_cpu else card.host_gbps,
    )
