import json

import msgspec
import pytest

from service.engine.index_heads import (
    HEADS_NAME,
    IndexHead,
    IndexHeads,
    load_index_heads,
    read_index_heads,
    save_index_heads,
)
from service.engine.models.card import ModelCard, ModelDigests, save_card
from service.engine.models.errors import ModelDamaged
from service.engine.prompt import PromptParts

CARD = ModelCard(
    format_version=1, name="tiny", source="tiny.gguf", architecture="llama", n_layers=2, n_heads=4, n_kv_heads=2,
    head_dim=32, max_context=512, vocab_size=384, n_parameters=0, dtype="float32", eos_token_ids=[2],
    quantization="none", digests=ModelDigests("w" * 32, "c" * 32, "t" * 32, "p" * 32, "r" * 32),
    prompt=PromptParts("", "", "", "", ""), files={},
)  # fmt: skip
FOUND = IndexHeads(
    format_version=1,
    weights="w" * 32,
    heads=[IndexHead(1, 0, 0.9), IndexHead(0, 1, 0.8)],
    mean_reciprocal_rank=0.95,
    in_first_two=0.98,
    n_questions=20,
)


@pytest.fixture
def model_dir(tmp_path):
    save_card(CARD, tmp_path)
    return tmp_path


def test_a_model_whose_heads_were_not_looked_for_has_none(model_dir):
    assert load_index_heads(model_dir) == []


def test_what_is_saved_is_read(model_dir):
    save_index_heads(FOUND, model_dir)
    assert load_index_heads(model_dir) == [(1, 0), (0, 1)]
    assert read_index_heads(model_dir) == FOUND
    assert sorted(path.name for path in model_dir.iterdir()) == [HEADS_NAME, "preread.json"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"weights": "x" * 32}, "other weights"),
        ({"heads": [IndexHead(2, 0, 1.0)]}, "does not have"),
        ({"heads": [IndexHead(1, -1, 1.0)]}, "does not have"),
        ({"format_version": 2}, "format version 2"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(model_dir, changes, said):
    save_index_heads(msgspec.structs.replace(FOUND, **changes), model_dir)
    with pytest.raises(ModelDamaged, match=said):
        load_index_heads(model_dir)


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", json.dumps({"format_version": 1}).encode()])
def test_a_damaged_file_is_refused_with_what_to_do(model_dir, body):
    (model_dir / HEADS_NAME).write_bytes(body)
    with pytest.raises(ModelDamaged, match="preread models index-heads"):
        load_index_heads(model_dir)
