"""What the engine decides from llama.cpp's log and answers, without llama.cpp."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cache_store.layout import KVLayout, KVType
from service.engine.llama_engine import loading
from service.engine.llama_engine.library import lines
from service.engine.llama_engine.loading import Options, check_kernels, n_cells, wants_gpu
from service.engine.models.errors import EngineRefused

ALL = "load_tensors: offloaded 41/41 layers to GPU"
SOME = "load_tensors: offloaded 33/41 layers to GPU"
ON_CARD = "llama_kv_cache:      CUDA0 KV buffer size =  2048.00 MiB"
BESIDE = "llama_kv_cache:        CPU KV buffer size =    64.00 MiB"


@pytest.fixture(autouse=True)
def log_as_it_was():
    before = list(lines)
    yield
    lines.clear()
    lines.extend(before)


def test_all_layers_and_the_cache_on_the_card_are_served():
    lines.clear()
    lines.extend([ALL, ON_CARD])
    loading.check_place(True)


@pytest.mark.parametrize("told", [[SOME, ON_CARD], [ALL, ON_CARD, BESIDE], [ON_CARD]])
def test_some_layers_or_a_part_of_the_cache_elsewhere_are_refused(told):
    lines.clear()
    lines.extend(told)
    with pytest.raises(EngineRefused, match="layers on the GPU"):
        loading.check_place(True)


def test_without_a_gpu_all_is_refused_and_auto_computes_on_the_processor(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(loading, "can_offload", lambda: False)
    with pytest.raises(EngineRefused, match="GGML_CUDA=on"):
        wants_gpu("all")
    assert [wants_gpu("auto"), wants_gpu("none")] == [False, False]
    monkeypatch.setattr(loading, "can_offload", lambda: True)
    assert [wants_gpu("all"), wants_gpu("auto"), wants_gpu("none")] == [True, True, False]


def test_the_cache_has_room_for_documents_tails_and_a_token_of_each_that_is_fed_again():
    layout = KVLayout(2, 2, 64, KVType.FP16)
    options = Options(KVType.FP16, n_slots=3, tail_tokens=100, documents_nbytes=10 * layout.bytes_per_token + 1)
    assert n_cells(layout, options) == (10, 3 * 101)


@pytest.mark.parametrize(("on_gpu", "hidden"), [(False, True), (True, False)])
def test_what_shall_not_be_on_a_gpu_does_not_see_it(monkeypatch: pytest.MonkeyPatch, on_gpu: bool, hidden: bool):
    asked: list[Any] = []

    def load(path: bytes, params: Any) -> int:
        asked.append(params)
        return 1

    params = SimpleNamespace(devices=None, n_gpu_layers=None)
    llama = SimpleNamespace(llama_model_default_params=lambda: params, llama_model_load_from_file=load)
    monkeypatch.setattr(loading, "api", lambda: llama)
    loading._load_model(Path("model.gguf"), on_gpu)
    assert (asked[0].devices is not None) == hidden
    assert bool(asked[0].n_gpu_layers) == on_gpu


@pytest.mark.parametrize(
    ("kv_type", "on_gpu", "features", "refused"),
    [
        (KVType.K8V4, True, "CUDA : ARCHS = 610 | USE_GRAPHS = 1 | CPU : AVX2 = 1 | ", True),
        (KVType.K8V4, True, "CUDA : ARCHS = 610 | FA_ALL_QUANTS = 1 | CPU : AVX2 = 1 | ", False),
        (KVType.K8V4, True, "CPU : AVX2 = 1 | ", False),
        (KVType.K8V4, False, "CUDA : ARCHS = 610 | CPU : AVX2 = 1 | ", False),
        (KVType.K8V8, True, "CUDA : ARCHS = 610 | CPU : AVX2 = 1 | ", False),
        (KVType.K4V4, True, "CUDA : ARCHS = 610 | CPU : AVX2 = 1 | ", False),
        (KVType.FP16, True, "CUDA : ARCHS = 610 | CPU : AVX2 = 1 | ", False),
    ],
)
def test_kv_types_without_attention_on_the_gpu_are_refused(
    monkeypatch: pytest.MonkeyPatch, kv_type: KVType, on_gpu: bool, features: str, refused: bool
):
    monkeypatch.setattr(loading, "features", lambda: features)
    if refused:
        with pytest.raises(EngineRefused, match="take k8v8 or k4v4"):
            check_kernels(kv_type, on_gpu)
    else:
        check_kernels(kv_type, on_gpu)
