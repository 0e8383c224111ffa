"""Facts of a GGUF file, read for its header only."""

from pathlib import Path
from typing import Any

import numpy as np

from service.engine.exl2_engine.scratch import Shape
from service.engine.models.errors import SourceRefused
from service.engine.models.gguf_parts import check_whole
from service.engine.models.weights import TensorSpan
from service.planning.model import FP16_BITS, ModelFacts, facts_of_spans
from service.planning.refusals import check_width, problems_of

_TENSORS = {"token_embd.weight": "model.embed_tokens.weight", "output.weight": "lm_head.weight"}


def read_gguf_facts(path: Path) -> ModelFacts:
    from gguf import GGUFReader

    try:
        reader: Any = GGUFReader(path)
    except (ValueError, IndexError, KeyError, OSError) as error:
        raise SourceRefused(f"{path} cannot be read as a GGUF: {error}") from None
    check_whole(path, reader)
    name = _text(reader, "general.architecture")
    heads = _number(reader, f"{name}.attention.head_count")
    hidden = _number(reader, f"{name}.embedding_length")
    width = _number(reader, f"{name}.attention.key_length", hidden // max(1, heads))
    spans = [_gguf_span(path, tensor) for tensor in reader.tensors]
    vocab = next((s.shape[0] for s in spans if s.name.endswith("embed_tokens.weight")), 0)
    if not (heads and hidden and vocab):
        raise SourceRefused(f"{path} does not say its sizes: it is not a language model's GGUF")
    kv_heads = _number(reader, f"{name}.attention.head_count_kv", heads)
    intermediate = _number(reader, f"{name}.feed_forward_length")
    shape = Shape(hidden, intermediate, _number(reader, f"{name}.block_count"), heads, kv_heads, width, vocab)
    problems, on_card = problems_of(name, quantized=False)
    check_width(path, shape, problems)
    n_parameters = sum(int(tensor.n_elements) for tensor in reader.tensors)
    stored = sum(int(tensor.n_bytes) for tensor in reader.tensors)
    footprint, _, _, _ = facts_of_spans(spans, shape, n_parameters, tied=True)
    of_file = f"{8 * stored / max(1, n_parameters):.2f} bits"
    return ModelFacts(
        name=path.stem,
        kind="gguf",
        label=f"GGUF of {of_file}",
        shape=shape,
        footprint=footprint,
        n_parameters=n_parameters,
        stored_nbytes=stored,
        max_context=_number(reader, f"{name}.context_length"),
        bits=FP16_BITS,  # of the plain weights: those of the file are never on a card
        joined_params=sum(int(t.n_elements) for t in reader.tensors if _is_joined_gguf(t.name)),
        stored_itemsize=4,
        problems=problems,
        card_problems=on_card,
        notes=(
            f"an import turns its {of_file} into plain weights: this plan is for them, with "
            "--engine llamacpp it is for the file as it lies",
        ),
    )


def _gguf_span(path: Path, tensor: Any) -> TensorSpan:
    """As the FP16 tensor that an import makes of it on a card. GGUF names the fastest dimension first."""
    shape = tuple(int(n) for n in reversed(tensor.shape))
    name = str(tensor.name)
    return TensorSpan(_TENSORS.get(name, name), "F16", shape, path, 0, 2 * int(tensor.n_elements))


def _is_joined_gguf(name: str) -> bool:
    return any(f".{part}." in name for part in ("attn_q", "attn_k", "attn_v", "ffn_gate", "ffn_up"))


def _field(reader: Any, key: str) -> Any:
    field = reader.get_field(key)
    return None if field is None else field.contents()


def _number(reader: Any, key: str, default: int = 0) -> int:
    value = _field(reader, key)
    if value is None:
        return default
    return int(np.max(value))  # of each layer, where they differ


def _text(reader: Any, key: str) -> str:
    value = _field(reader, key)
    if not isinstance(value, str):
        raise SourceRefused(f"the GGUF does not say its {key}")
    return value
