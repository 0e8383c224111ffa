"""Which models the lean forward computes exactly; every other goes through transformers' modules."""

from typing import Any

from torch import Tensor, nn

from service.engine.torch_engine.linear import fits

MODELS = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""transformers' classes whose layers are those of `lean.LeanDecoder`; each is held against them by a test."""

_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}
_ACTIVATIONS = ("silu", "swish")


def why_not(model: Any) -> str | None:
    """Why a transformers model on its device is not one for the lean forward; None for one that is."""
    kind = type(model).__name__
    if kind not in MODELS:
        return f"{kind} is not one of {', '.join(MODELS)}"
    checks = (_device, _activation, _heads, _modules, _biases, _epsilons)
    return next((reason for check in checks if (reason := check(model))), None)


def _device(model: Any) -> str | None:
    plain = (p for p in model.parameters() if p.dim() == 2)
    bad = next((p for p in plain if not fits(p)), None)
    return None if bad is None else f"a weight of {tuple(bad.shape)} is {bad.dtype} on {bad.device.type}"


def _activation(model: Any) -> str | None:
    name = model.config.hidden_act
    return None if name in _ACTIVATIONS else f"its activation is {name}"


def _heads(model: Any) -> str | None:
    config, attention = model.config, model.model.layers[0].self_attn
    if config.num_attention_heads % config.num_key_value_heads:
        return "its query heads are not a multiple of its KV heads"
    turned = 2 * model.model.rotary_emb.inv_freq.numel()
    return None if turned == attention.head_dim else f"RoPE turns {turned} of {attention.head_dim} values of a head"


def _modules(model: Any) -> str | None:
    if _names(model) != {"model", "lm_head"} or _names(model.model) != {"embed_tokens", "layers", "norm", "rotary_emb"}:
        return "it has other parts"
    for layer in model.model.layers:
        attention = _names(layer.self_attn)
        plain = attention in (_ATTENTION, _ATTENTION | _HEAD_NORMS)
        if _names(layer) != _LAYER or not plain or _names(layer.mlp) != _MLP:
            return "a layer has other parts"
        if attention > _ATTENTION and layer.self_attn.q_norm.weight.shape != (layer.self_attn.head_dim,):
            return "its heads are not normalized one by one"
    return None


def _biases(model: Any) -> str | None:
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        if any(m.bias is not None for m in (attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)):
            return "a product other than those of queries, keys and values has a bias"
        if len({m.bias is None for m in (attention.q_proj, attention.k_proj, attention.v_proj)}) > 1:
            return "only some of queries, keys and values have a bias"
    return None if model.lm_head.bias is None else "its logits have a bias"


def _epsilons(model: Any) -> str | None:
    """Every norm is an RMS norm with the config's epsilon."""
    for module in model.modules():
        vector = isinstance(getattr(module, "weight", None), Tensor) and module.weight.dim() == 1
        if vector and getattr(module, "variance_epsilon", None) != model.config.rms_norm_eps:
            return f"a {type(module).__name__} has another epsilon than {model.config.rms_norm_eps}"
    return None


def _names(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_children()}
