from typing import Any

import pytest
from transformers import AutoConfig

from service.engine.models.errors import ArchitectureRefused
from service.engine.models.rope import rope_digest
from service.engine.models.support import (
    CARD_TYPES,
    SUPPORTED_TYPES,
    check_architecture,
    check_card_engine,
    head_dim,
    max_context,
)

SIZES = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2}
SIZES |= {"intermediate_size": 32, "vocab_size": 64, "max_position_embeddings": 1000}


def config(kind: str, **changes: Any) -> Any:
    return AutoConfig.for_model(kind, **(SIZES | {"sliding_window": None} | changes))


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {}),
        ("mistral", {}),
        ("mistral", {"sliding_window": 1000}),
        ("qwen2", {}),
        ("qwen2", {"sliding_window": 64, "use_sliding_window": False}),
        ("qwen3", {"head_dim": 128}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}),
    ],
)
def test_plain_causal_models_pass(kind: str, changes: dict[str, Any]) -> None:
    check_architecture(config(kind, **changes))


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("gemma2", {}, r"type gemma2 are not supported \(its scores are soft-capped"),
        ("mamba", {}, "type mamba"),
        ("cohere", {}, "in parallel"),
        ("mixtral", {}, "mixture of experts"),
        ("bloom", {}, "ALiBi"),
        ("starcoder2", {}, "LayerNorm"),
        ("gpt2", {}, "learned"),
        ("qwen2_vl", {}, "MRoPE"),
        ("bert", {}, "type bert are not supported, only llama"),
        ("llama", {"num_local_experts": 8}, "mixture of 8 experts"),
        ("llama", {"alibi": True}, "ALiBi"),
        ("llama", {"final_logit_softcapping": 30.0}, "logits are soft-capped"),
        ("mistral", {"sliding_window": 999}, "sliding window of 999"),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1},
            "sliding_attention",
        ),
        ("llama", {"head_dim": 48}, "head dim 48"),
        ("llama", {"attn_logit_softcapping": 50.0}, "soft-capped"),
        ("llama", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "gptq"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "dynamic"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 8]}},
            "multimodal",
        ),
    ],
)
def test_what_the_engine_would_compute_wrongly_is_refused(kind: str, changes: dict, message: str) -> None:
    changed = config(kind, **changes) if kind in SUPPORTED_TYPES else AutoConfig.for_model(kind)
    with pytest.raises(ArchitectureRefused, match=message):
        check_architecture(changed)


QUANTIZED = {"quantization_config": {"quant_method": "exl2", "bits": 4.0}}


@pytest.mark.parametrize("kind", CARD_TYPES)
def test_the_card_engine_takes_plain_and_quantized_models(kind: str) -> None:
    check_card_engine(config(kind))
    check_card_engine(config(kind, **QUANTIZED))
    with pytest.raises(ArchitectureRefused, match="exl2"):
        check_architecture(config(kind, **QUANTIZED))


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("olmo2", {}, "type olmo2 are not supported on the exl2 engine"),
        ("gemma2", {}, "soft-capped"),
        ("llama", {"hidden_act": "gelu"}, "activation is gelu"),
        ("mistral", {"sliding_window": 999}, "sliding window of 999"),
        (
            "phi3",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "only 0.5 of each head",
        ),
    ],
)
def test_what_the_card_engine_would_compute_wrongly_is_refused(kind: str, changes: dict, message: str) -> None:
    changed = config(kind, **changes) if kind in SUPPORTED_TYPES else AutoConfig.for_model(kind)
    with pytest.raises(ArchitectureRefused, match=message):
        check_card_engine(changed)


def test_yarn_extends_the_context() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1000, "rope_theta": 1e4}
    assert max_context(config("qwen2", rope_parameters=yarn)) == 4000
    assert max_context(config("qwen2")) == 1000
    assert head_dim(config("qwen2")) == 32


def test_rope_identity_follows_theta_scaling_and_nothing_else() -> None:
    def with_rope(**rope: Any) -> str:
        return rope_digest(config("llama", rope_parameters={"rope_type": "default", "rope_theta": 1e4} | rope))

    assert with_rope() == rope_digest(config("llama", vocab_size=128, rope_parameters=None, rope_theta=1e4))
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 250}
    variants = [
        {},
        {"rope_theta": 1.001e4},
        {"rope_type": "linear", "factor": 2.0},
        yarn,
        yarn | {"factor": 2.0},
    ]
    assert len({with_rope(**v) for v in variants}) == len(variants)
    assert with_rope(**yarn) != with_rope(**yarn, attention_factor=1.5)
