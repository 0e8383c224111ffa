"""Which models the engine computes rightly: plain causal attention, RoPE fixed at load, nothing else carried
along.
"""

from typing import Any

from cache_store.layout import GROUP
from service.engine.models.errors import ArchitectureRefused

SUPPORTED_TYPES = ("llama", "mistral", "qwen2", "qwen3", "phi3", "smollm3", "olmo2", "granite")
"""Each is held against transformers by a test."""

SUPPORTED_ROPE = ("default", "linear", "yarn", "llama3")


def check_architecture(config: Any) -> None:
    """Raises ArchitectureRefused, naming the feature, for a transformers config that the engine cannot serve.

    A KV cache keeps keys after RoPE at fixed positions; a window, capped scores, a state beside the cache or
    a RoPE that changes with the length would make a restored snapshot answer wrongly without any error.
    """
    if config.model_type not in SUPPORTED_TYPES:
        raise ArchitectureRefused(
            f"models of type {config.model_type} are not supported, only {', '.join(SUPPORTED_TYPES)}"
        )
    for reason in (_quantized(config), _windowed(config), _capped(config), _rope(config), _head_dim(config)):
        if reason:
            raise ArchitectureRefused(f"this {config.model_type} model is not supported: {reason}")


def head_dim(config: Any) -> int:
    """Width of one attention head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def max_context(config: Any) -> int:
    """Positions the model may use: with YaRN, the original length times the factor."""
    rope = config.rope_parameters
    if rope["rope_type"] != "yarn":
        return config.max_position_embeddings
    original = rope.get("original_max_position_embeddings") or config.max_position_embeddings
    return max(config.max_position_embeddings, int(original * rope["factor"]))


def _quantized(config: Any) -> str | None:
    settings = getattr(config, "quantization_config", None)
    if not settings:
        return None
    method = settings.get("quant_method", "unknown") if isinstance(settings, dict) else settings.quant_method
    return f"its weights are quantized ({getattr(method, 'value', method)}); import plain ones or a GGUF"


def _windowed(config: Any) -> str | None:
    kinds = sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention"})
    if kinds:
        return f"it has layers of {', '.join(kinds)}"
    window = getattr(config, "sliding_window", None)
    used = getattr(config, "use_sliding_window", True)
    if window and used and window < config.max_position_embeddings:
        return f"it attends through a sliding window of {window} tokens"
    return None


def _capped(config: Any) -> str | None:
    return "its attention scores are soft-capped" if getattr(config, "attn_logit_softcapping", None) else None


def _rope(config: Any) -> str | None:
    rope = config.rope_parameters
    kind = rope.get("rope_type") if isinstance(rope, dict) else None
    if kind not in SUPPORTED_ROPE:
        return f"its RoPE type is {kind}, supported are {', '.join(SUPPORTED_ROPE)}"
    return "its RoPE is multimodal (MRoPE)" if rope.get("mrope_section") else None


def _head_dim(config: Any) -> str | None:
    width = head_dim(config)
    return f"its head dim {width} is not a multiple of {GROUP}" if width % GROUP else None
