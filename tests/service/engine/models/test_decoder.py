"""What is told of a config without transformers is what transformers tells of it."""

import json
from pathlib import Path
from typing import Any

import pytest

from service.engine.models.auto_config import stored_config
from service.engine.models.decoder import read_decoder
from service.engine.models.support import (
    SUPPORTED_TYPES,
    architecture_problems,
    card_problems,
    head_dim,
    max_context,
)

SIZES: dict[str, Any] = {
    "hidden_size": 1024, "num_attention_heads": 32, "num_hidden_layers": 3, "intermediate_size": 32, "vocab_size": 64,
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CHANGES: list[dict[str, Any]] = [
    {},
    {"num_key_value_heads": 4, "max_position_embeddings": 1000, "head_dim": 64, "tie_word_embeddings": True},
    {"sliding_window": 64, "max_position_embeddings": 1000},
    {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 1, "no_rope_layer_interval": 2},
    {"sliding_window": None, "rope_theta": 5e5, "partial_rotary_factor": 0.5},
    {"sliding_window": None, "rope_scaling": {"type": "linear", "factor": 2.0}},
    {"sliding_window": None, "rope_scaling": {"type": "dynamic", "factor": 2.0}, "rope_parameters": LLAMA3},
    {"sliding_window": None, "rope_parameters": {"rope_type": "yarn", "factor": 4.0}, "max_position_embeddings": 1000},
    {"sliding_window": None, "rope_scaling": LLAMA3 | {"original_max_position_embeddings": 500}},
    {"sliding_window": None, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1]}},
    {"sliding_window": None, "num_local_experts": 8, "attn_logit_softcapping": 30.0, "hidden_act": "gelu"},
    {"sliding_window": None, "layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    {"sliding_window": None, "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
]


@pytest.mark.parametrize("kind", SUPPORTED_TYPES)
@pytest.mark.parametrize("changes", CHANGES, ids=range(len(CHANGES)))
def test_both_tell_the_same(kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SIZES | {"model_type": kind} | changes))
    ours = read_decoder(tmp_path)
    try:
        theirs = stored_config(tmp_path)
    except Exception:
        assert architecture_problems(ours), "transformers refuses what we do not"
        return
    assert architecture_problems(ours) == architecture_problems(theirs)
    assert card_problems(ours) == card_problems(theirs)
    if not architecture_problems(ours):
        assert ours.num_key_value_heads == theirs.num_key_value_heads
        assert ours.tie_word_embeddings == theirs.tie_word_embeddings
        assert head_dim(ours) == head_dim(theirs)
        assert max_context(ours) == max_context(theirs)
        assert {**theirs.rope_parameters, **ours.rope_parameters} == theirs.rope_parameters
