"""The lean forward against transformers' modules: the same rows, weights, document and tails."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from cache_store.codec import rotate
from cache_store.layout import KVLayout, KVType
from service.engine.torch_engine.attention import causal_mask
from service.engine.torch_engine.kv import DocumentKV, KVMemory, Tail
from service.engine.torch_engine.lean import LeanDecoder
from service.engine.torch_engine.linear import use_row_linears
from service.engine.torch_engine.plan import NAME, Group, SequenceRows, StepPlan

CPU = torch.device("cpu")
HEADS, KV_HEADS, D, LAYERS, DOCUMENT, VOCAB = 6, 2, 32, 3, 43, 96
SIZES = {"hidden_size": 96, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "num_hidden_layers": LAYERS}
SIZES |= {"intermediate_size": 80, "vocab_size": VOCAB, "max_position_embeddings": 512, "head_dim": D}
SIZES |= {"sliding_window": None, "initializer_range": 0.1, "rms_norm_eps": 1e-5}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 128}
KNOWN = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True, "rope_parameters": YARN}),
    ("mistral", {}),
    ("qwen2", {"use_sliding_window": False}),
    ("qwen3", {}),
]
TOLERANCE = 5e-6
"""Of logits of a size of about one: sums in another order, over three layers."""


def make(kind: str, **changes: Any) -> Any:
    torch.manual_seed(1)
    config = AutoConfig.for_model(kind, **(SIZES | changes))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=NAME)
    for parameter in model.parameters():
        if parameter.dim() == 1:  # norms and biases, all alike when fresh
            nn.init.normal_(parameter, mean=0.5, std=0.3)
    use_row_linears(model)
    return model.eval().requires_grad_(False)


class Steps:
    """Sequences on one document and one without, each with `n_rows` rows; `plan` starts the same step every time."""

    def __init__(self, n_rows: int, kv_type: KVType) -> None:
        self._generator = torch.Generator().manual_seed(2)
        memory = KVMemory(KVLayout(LAYERS, KV_HEADS, D, kv_type), torch.float32, torch.float32, CPU)
        self.document = DocumentKV(memory, DOCUMENT)
        for x in (self.document.k, self.document.v):
            x[:, :, :DOCUMENT] = self._random(LAYERS, KV_HEADS, DOCUMENT, D)
        self.document.n_tokens = DOCUMENT
        if n_rows == 1:
            self.document.turn(LAYERS)  # as such steps do, some at a time: so that all of them compute alike
        self.tails = [Tail(memory, 64) for _ in range(3)]
        for tail, length in zip(self.tails, (0, 5, 9), strict=True):
            for x in (tail.k, tail.v):
                x[:, :, :length] = self._random(LAYERS, KV_HEADS, length, D)
            tail.length = length
        self.n_rows = n_rows
        self.rotation = None if kv_type is KVType.FP16 else rotate(torch.eye(D))
        starts = (DOCUMENT - 1, DOCUMENT + 5, 9)
        self.positions = torch.cat([torch.arange(start, start + n_rows) for start in starts])
        self.tokens = torch.randint(0, VOCAB, (3 * n_rows,), generator=self._generator)
        self.wanted = torch.tensor([0, n_rows - 1, 3 * n_rows - 1])

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator)

    def plan(self) -> StepPlan:
        members = []
        for i, tail in enumerate(self.tails):
            refeed = i == 0
            mask = causal_mask(self.n_rows, tail.length, refeed=refeed, device=CPU)
            members.append(SequenceRows(tail, i * self.n_rows, self.n_rows, refeed, mask))
        return StepPlan([Group(self.document, members[:2]), Group(None, members[2:])], self.rotation)

    @torch.inference_mode()
    def by_modules(self, model: Any) -> Tensor:
        inputs = {"input_ids": self.tokens[None], "position_ids": self.positions[None]}
        return model(**inputs, use_cache=False, logits_to_keep=self.wanted, plan=self.plan()).logits[0]

    @torch.inference_mode()
    def lean(self, decoder: LeanDecoder) -> Tensor:
        return decoder.logits(self.tokens, self.positions, self.plan(), self.wanted)


def decoder_of(model: Any) -> LeanDecoder:
    decoder = LeanDecoder.of(model)
    assert decoder is not None
    return decoder


@pytest.mark.parametrize(("kind", "changes"), KNOWN)
@pytest.mark.parametrize("n_rows", [1, 2, 20])
@pytest.mark.parametrize("kv_type", [KVType.FP16, KVType.K8V4])
def test_logits_are_those_of_the_modules(kind: str, changes: dict, n_rows: int, kv_type: KVType) -> None:
    model, steps = make(kind, **changes), Steps(n_rows, kv_type)
    before = steps.by_modules(model)
    kept = [tail.k.clone() for tail in steps.tails]
    decoder = decoder_of(model)
    torch.testing.assert_close(steps.lean(decoder), before, rtol=0, atol=TOLERANCE)
    for tail, k in zip(steps.tails, kept, strict=True):
        torch.testing.assert_close(tail.k[:, :, : tail.length + n_rows - 1], k[:, :, : tail.length + n_rows - 1])
    assert torch.equal(steps.by_modules(model), before)  # the modules' weights are views now, and the same


@pytest.mark.parametrize(
    "name",
    [
        "layers.1.input_layernorm.weight",
        "layers.2.post_attention_layernorm.weight",
        "layers.0.self_attn.k_proj.weight",
        "layers.1.self_attn.q_norm.weight",
        "layers.2.mlp.up_proj.weight",
        "norm.weight",
    ],
)
def test_a_weight_that_is_off_by_a_hundredth_would_be_seen(name: str) -> None:
    model, steps = make("qwen3"), Steps(2, KVType.FP16)
    before = steps.by_modules(model)
    model.model.get_parameter(name).data[0] *= 1.01
    difference = (steps.lean(decoder_of(model)) - before).abs().max()
    assert difference > 2 * TOLERANCE


def test_no_weight_is_held_twice() -> None:
    model = make("qwen2", use_sliding_window=False)
    decoder_of(model)
    attention, mlp = model.model.layers[1].self_attn, model.model.layers[1].mlp
    storages = {m.weight.untyped_storage().data_ptr() for m in (attention.q_proj, attention.k_proj, attention.v_proj)}
    assert len(storages) == 1
    assert mlp.gate_proj.weight.untyped_storage().data_ptr() == mlp.up_proj.weight.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        ("granite", {}, "GraniteForCausalLM is not one of"),
        ("smollm3", {"pad_token_id": 0}, "SmolLM3ForCausalLM is not one of"),
        ("phi3", {"pad_token_id": 0}, "Phi3ForCausalLM is not one of"),
        ("olmo2", {}, "Olmo2ForCausalLM is not one of"),
        ("llama", {"hidden_act": "gelu"}, "activation is gelu"),
        ("llama", {"mlp_bias": True}, "has a bias"),
        ("llama", {"attention_bias": True}, "has a bias"),
        ("llama", {"vocab_size": 97}, "a weight of"),
    ],
)
def test_other_models_stay_with_their_modules(kind: str, changes: dict, reason: str, caplog: Any) -> None:
    caplog.set_level("INFO")
    assert LeanDecoder.of(make(kind, **changes)) is None
    assert reason in caplog.text


def test_changed_modules_are_noticed(caplog: Any) -> None:
    caplog.set_level("INFO")
    changed = [make("llama") for _ in range(4)]
    changed[0].model.layers[1].mlp.extra = nn.Identity()
    changed[1].model.layers[2].input_layernorm.variance_epsilon = 1e-3
    changed[2].model.rotary_emb.inv_freq = torch.ones(8)
    changed[3].bfloat16()
    assert [LeanDecoder.of(model) for model in changed] == [None] * 4
    for reason in ("other parts", "another epsilon", "RoPE turns 16 of 32", "bfloat16"):
        assert reason in caplog.text


def test_the_log_says_that_it_is_used(caplog: Any) -> None:
    caplog.set_level("INFO")
    decoder_of(make("mistral"))
    assert "lean forward" in caplog.text
