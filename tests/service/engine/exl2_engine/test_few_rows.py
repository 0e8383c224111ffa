"""The products of a layer, from modules that have the attributes of exllamav2's; in Triton's interpreter."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from service.engine.exl2_engine.few_rows import all_ours, all_products, layer_products
from tests.service.engine.exl2_engine.product_cases import exl2, gptq, inputs

HIDDEN, WIDE = 128, 192


def linear(case, padding=0):
    return SimpleNamespace(q_tensors=case.tensors if case else None, padding=padding)


def modules(**changed):
    """A layer's modules, and the weights by name."""
    shapes = {"q": (HIDDEN, HIDDEN), "k": (HIDDEN, 64), "v": (HIDDEN, 64), "o": (HIDDEN, HIDDEN)}
    shapes |= {"gate": (HIDDEN, WIDE), "up": (HIDDEN, WIDE), "down": (WIDE, HIDDEN)}
    cases = {name: exl2(*shape, seed=i) for i, (name, shape) in enumerate(shapes.items())}
    linears = {f"{name}_proj": linear(case) for name, case in cases.items()} | changed
    norm = SimpleNamespace(weight=torch.linspace(0.5, 1.5, HIDDEN).half(), variance_epsilon=1e-5)
    layer = SimpleNamespace(pre_layernorm=norm, **linears)
    return layer, {name: case.weight for name, case in cases.items()}


def normed(x, module):
    wide = x.double().numpy()
    scale = np.sqrt((wide**2).mean(-1, keepdims=True) + module.pre_layernorm.variance_epsilon)
    return wide / scale * module.pre_layernorm.weight.double().numpy()


def close(found, expected):
    assert np.abs(found.double().numpy() - expected).max() < 2e-3 * np.abs(expected).max()


def test_a_layer_s_products_are_those_of_its_weights():
    module, weights = modules()
    layer, x = layer_products(module, module), inputs(3, HIDDEN)
    for found, name in zip(layer.queries_keys_values(x), "qkv", strict=True):
        close(found, normed(x, module) @ weights[name])
    after = x.clone()
    assert layer.add_attention(inputs(3, HIDDEN, seed=1), after)
    close(after, x.double().numpy() + inputs(3, HIDDEN, seed=1).double().numpy() @ weights["o"])
    after = x.clone()
    assert layer.add_mlp(after)
    gate, up = (normed(x, module) @ weights[name] for name in ("gate", "up"))
    close(after, x.double().numpy() + gate / (1 + np.exp(-gate)) * up @ weights["down"])


@pytest.mark.parametrize(
    "left",
    [linear(None), linear(gptq(HIDDEN, 64)), linear(exl2(HIDDEN, 64, 32)), linear(exl2(HIDDEN, 64), padding=8)],
    ids=["plain", "of another kind", "of other groups", "padded"],
)
def test_what_ours_does_not_cover_stays_with_exllamav2(left):
    module, _ = modules(k_proj=left, up_proj=left)
    layer, x = layer_products(module, module), inputs(2, HIDDEN)
    assert layer.queries_keys_values(x) is None
    before = x.clone()
    assert not layer.add_mlp(x)
    assert torch.equal(x, before)
    assert layer.add_attention(inputs(2, HIDDEN), x)
    assert not all_ours(layer)
    assert all_ours(layer_products(modules()[0], modules()[0]))


@pytest.mark.parametrize(
    ("choice", "capability", "ours"),
    [
        ("exllamav2", (9, 0), 0),
        ("triton", (8, 0), 1),
        ("triton", (9, 0), 1),
        ("auto", (7, 5), 0),
        ("auto", (8, 9), 0),
        ("auto", (9, 0), 1),
    ],
)
def test_the_choice_decides(monkeypatch, choice, capability, ours):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    module, _ = modules()
    assert len(all_products([module], [module], choice)) == ours


def test_ours_by_name_is_refused_on_older_cards(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(ValueError, match="sm_80"):
        all_products([], [], "triton")


def test_gptq_is_ours_only_by_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    names = ("q_proj", "k_proj", "v_proj")
    module, _ = modules(**{name: linear(gptq(HIDDEN, 64)) for name in names})
    (by_itself,), (by_name,) = (all_products([module], [module], choice) for choice in ("auto", "triton"))
    assert by_itself.qkv is None
    assert by_itself.out is not None
    assert by_name.qkv is not None
