"""What a config says about a decoder, as far as this engine computes it: one place for all of its models."""

import copy
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from service.engine.models.auto_config import stored_config
from service.engine.models.rope import inv_freq
from service.engine.models.source import read_by_others
from service.engine.models.support import check_card_engine, head_dim


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Sizes and factors of a decoder. `frequencies`: inv_freq FP32 on the CPU.

    `bias_qkv`, `bias_o`, `bias_mlp`: which projections have one. `qk_norm`: queries and keys are normed per head.
    `embedding_factor`, `residual_factor`, `logit_factor`: 1 but for Granite. `without_rope`: layers without positions.
    """

    model_type: str
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    tied_head: bool
    scale: float
    frequencies: Tensor
    rope_scaling: float
    bias_qkv: bool
    bias_o: bool
    bias_mlp: bool
    qk_norm: bool
    embedding_factor: float
    residual_factor: float
    logit_factor: float
    without_rope: frozenset[int]

    @property
    def fused(self) -> bool:
        """Queries, keys and values are one matrix, and so are the MLP's gate and its factor."""
        return self.model_type == "phi3"


def read_spec(model_dir: Path) -> ModelSpec:
    """The spec of a model directory. Raises ArchitectureRefused, naming the feature, and SourceRefused, naming the file
    and the key."""
    config = stored_config(model_dir)
    check_card_engine(config)
    with read_by_others(model_dir):
        return spec_of(config)


def spec_of(config: Any) -> ModelSpec:
    """The spec of a transformers config. Raises as `read_spec`."""
    check_card_engine(config)
    config = copy.deepcopy(config)
    config.quantization_config = None  # how weights are stored says nothing about what is computed
    kind, width = config.model_type, head_dim(config)
    frequencies, rope_scaling = inv_freq(config)
    all_biases = bool(getattr(config, "attention_bias", False))
    return ModelSpec(
        model_type=kind,
        n_layers=config.num_hidden_layers,
        n_heads=config.num_attention_heads,
        n_kv_heads=config.num_key_value_heads,
        head_dim=width,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        max_positions=config.max_position_embeddings,
        norm_eps=config.rms_norm_eps,
        tied_head=bool(config.tie_word_embeddings),
        scale=float(getattr(config, "attention_multiplier", None) or 1 / math.sqrt(width)),
        frequencies=frequencies,
        rope_scaling=rope_scaling,
        bias_qkv=kind == "qwen2" or (all_biases and kind != "phi3"),
        bias_o=all_biases and kind not in ("qwen2", "phi3"),
        bias_mlp=bool(getattr(config, "mlp_bias", False)),
        qk_norm=kind == "qwen3",
        embedding_factor=float(getattr(config, "embedding_multiplier", 1.0)),
        residual_factor=float(getattr(config, "residual_multiplier", 1.0)),
        logit_factor=1 / float(getattr(config, "logits_scaling", 1.0)),
        without_rope=_without_rope(config),
    )


def _without_rope(config: Any) -> frozenset[int]:
    """SmolLM3 leaves out RoPE in the layers that its list marks with 0."""
    marks = getattr(config, "no_rope_layers", None) or ()
    return frozenset(i for i, used in enumerate(marks) if not used)
