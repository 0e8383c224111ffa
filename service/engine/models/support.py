"""Which models the engine computes rightly: plain causal attention, RoPE fixed at load, nothing else carried
along.
"""

from collections.abc import Callable, Iterator
from typing import Any

from cache_store.layout import GROUP
from service.engine.models.errors import ArchitectureRefused

SUPPORTED_TYPES = ("llama", "mistral", "qwen2", "qwen3", "phi3", "smollm3", "olmo2", "granite")
"""Each is held against transformers by a test."""

CARD_TYPES = ("llama", "mistral", "qwen2", "qwen3", "phi3", "smollm3", "granite")
"""Those that the exl2 engine computes too: a norm before attention and one before a MLP with a SiLU gate."""

SUPPORTED_ROPE = ("default", "linear", "yarn", "llama3")

_WHY_NOT = {
    "its scores are soft-capped and it attends through sliding windows": ("gemma2",),
    "it attends through sliding windows": ("gemma3", "gemma3_text", "cohere2", "gpt_oss", "olmo3", "exaone4"),
    "attention and MLP run in parallel": ("cohere", "falcon", "gptj", "gpt_neox", "phi", "stablelm"),
    "it is a mixture of experts": ("mixtral", "qwen2_moe", "qwen3_moe", "dbrx", "deepseek_v2", "deepseek_v3", "phimoe"),
    "it has LayerNorm in place of RMSNorm": ("starcoder2", "nemotron"),
    "its positions are learned, not rotary": ("gpt2", "gpt_bigcode", "opt"),
    "its positions are biases on the scores (ALiBi)": ("bloom", "mpt"),
    "its RoPE is multimodal (MRoPE)": ("qwen2_vl", "qwen2_5_vl", "qwen3_vl"),
    "it carries a state beside the KV cache": ("mamba", "mamba2", "rwkv", "jamba", "qwen3_next"),
}
"""Known types that are refused -> the feature that would be computed wrongly."""


def check_architecture(config: Any) -> None:
    """Raises ArchitectureRefused, naming the feature, for a transformers config that the engine cannot serve.

    A KV cache keeps keys after RoPE at fixed positions; a window, capped scores, a state beside the cache or
    a RoPE that changes with the length would make a restored snapshot answer wrongly without any error.
    """
    _refuse(architecture_problems(config))


def check_card_engine(config: Any) -> None:
    """`check_architecture` for the exl2 engine, which computes fewer types but reads EXL2 and GPTQ weights (those are
    checked by `quantized.check_weights`)."""
    _refuse(card_problems(config))


def architecture_problems(config: Any) -> list[str]:
    """All that `check_architecture` would refuse. `config` may be `decoder.read_decoder`'s too."""
    return list(_problems(config, SUPPORTED_TYPES, (_quantized, *_FEATURES)))


def card_problems(config: Any) -> list[str]:
    """All that `check_card_engine` would refuse."""
    return list(_problems(config, CARD_TYPES, (*_FEATURES, _activation, _partial_rope)))


def check_type(kind: str, types: tuple[str, ...]) -> None:
    """Raises ArchitectureRefused for a type that is not one of `types`."""
    if kind not in types:
        why = why_not(kind)
        where = " on the exl2 engine" if kind in SUPPORTED_TYPES else ""
        raise ArchitectureRefused(f"models of type {kind} are not supported{where}{why}, only {', '.join(types)}")


def _problems(config: Any, types: tuple[str, ...], features: tuple[Callable[[Any], str | None], ...]) -> Iterator[str]:
    """Of a type that is not computed nothing else is known."""
    try:
        check_type(config.model_type, types)
    except ArchitectureRefused as error:
        yield str(error)
        return
    for feature in features:
        if reason := feature(config):
            yield f"this {config.model_type} model is not supported: {reason}"


def _refuse(problems: list[str]) -> None:
    if problems:
        raise ArchitectureRefused(problems[0])


def why_not(kind: str) -> str:
    """The feature of a known type in brackets, also by its name in a GGUF (`qwen2moe`); nothing for other types."""
    plain = kind.replace("-", "").replace("_", "")
    return next(
        (f" ({why})" for why, kinds in _WHY_NOT.items() if plain in {name.replace("_", "") for name in kinds}), ""
    )


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


def _experts(config: Any) -> str | None:
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    found = max(int(getattr(config, name, None) or 0) for name in names)
    return f"it is a mixture of {found} experts" if found > 1 else None


def _alibi(config: Any) -> str | None:
    return "its positions are biases on the scores (ALiBi)" if getattr(config, "alibi", None) else None


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
    if getattr(config, "attn_logit_softcapping", None):
        return "its attention scores are soft-capped"
    return "its logits are soft-capped" if getattr(config, "final_logit_softcapping", None) else None


def _rope(config: Any) -> str | None:
    rope = config.rope_parameters
    kind = rope.get("rope_type") if isinstance(rope, dict) else None
    supported = SUPPORTED_ROPE if config.model_type != "phi3" else SUPPORTED_ROPE[:1]
    if kind not in supported:
        return f"its RoPE type is {kind}, supported are {', '.join(supported)}"
    return "its RoPE is multimodal (MRoPE)" if rope.get("mrope_section") else None


def _head_dim(config: Any) -> str | None:
    width = head_dim(config)
    return f"its head dim {width} is not a multiple of {GROUP}" if width % GROUP else None


def _activation(config: Any) -> str | None:
    """exllamav2 computes the one that a type usually has, whatever the config says."""
    name = getattr(config, "hidden_act", "silu")
    return None if name in ("silu", "swish") else f"its activation is {name}, the exl2 engine computes silu"


def _partial_rope(config: Any) -> str | None:
    share = config.rope_parameters.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", None))
    if share is None or share == 1:
        return None
    return f"RoPE turns only {share:g} of each head, the exl2 engine turns all of it"


_FEATURES = (_experts, _alibi, _windowed, _capped, _rope, _head_dim)
