"""Sizes that a GGUF says, held against the tensors that it has. Needs no torch."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from service.engine.models.errors import SourceRefused
from service.engine.models.gguf_header import Header, Texts

SERVED = ("llama", "qwen2", "qwen3", "phi3")
"""Architectures of GGUF files that transformers reads and the engines compute."""
_LAYER = re.compile(r"blk\.(\d{1,9})\.")
_BY_LAYER = ("feed_forward_length", "attention.head_count", "attention.head_count_kv")
"""Sizes that other architectures give each layer of its own."""
_MOST_HEADS, _MOST_WIDTH = 1 << 16, 1 << 24
_LISTS = {"tokenizer.ggml.merges": Texts(0), "tokenizer.ggml.scores": [0.0], "tokenizer.ggml.token_type": [1]}
_TEXTS = ("tokenizer.ggml.model", "tokenizer.ggml.pre", "tokenizer.chat_template", "general.name")
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Sizes:
    """`arch`: by llama.cpp's name. `by_layer`: keys that give every layer its own; its largest counts."""

    arch: str
    hidden: int
    intermediate: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    vocab: int
    max_context: int
    by_layer: tuple[str, ...]


def sizes_of(header: Header) -> Sizes:
    """Raises SourceRefused for sizes that are missing, are no numbers, or are not those of the tensors."""
    arch = header.text("general.architecture")
    flat, by_layer = _without_lists(header, arch)
    hidden = flat.number(f"{arch}.embedding_length", least=1, most=_MOST_WIDTH)
    heads = flat.number(f"{arch}.attention.head_count", least=1, most=_MOST_HEADS)
    sizes = Sizes(
        arch=arch,
        hidden=hidden,
        intermediate=flat.number(f"{arch}.feed_forward_length", least=1, most=_MOST_WIDTH),
        n_layers=flat.number(f"{arch}.block_count", least=1),
        n_heads=heads,
        n_kv_heads=flat.number(f"{arch}.attention.head_count_kv", heads, least=1, most=heads),
        head_dim=flat.number(f"{arch}.attention.key_length", max(1, hidden // heads), least=1, most=_MOST_WIDTH),
        vocab=_vocabulary(header, hidden),
        max_context=flat.number(f"{arch}.context_length", least=1),
        by_layer=by_layer,
    )
    _check_layers(header, sizes)
    if arch in SERVED:
        _check_served(flat, sizes)
    return sizes


def layer_shapes(sizes: Sizes) -> Shapes:
    """Tensors of a layer of a served architecture, slowest dimension first."""
    hidden, feed = sizes.hidden, sizes.intermediate
    query, key = sizes.n_heads * sizes.head_dim, sizes.n_kv_heads * sizes.head_dim
    shapes: Shapes = {
        "attn_norm.weight": (hidden,), "ffn_norm.weight": (hidden,),
        "attn_output.weight": (hidden, query), "ffn_down.weight": (hidden, feed),
    }  # fmt: skip
    if sizes.arch == "phi3":
        return shapes | {"attn_qkv.weight": (query + 2 * key, hidden), "ffn_up.weight": (2 * feed, hidden)}
    rows = {"attn_q": query, "attn_k": key, "attn_v": key, "ffn_gate": feed, "ffn_up": feed}
    shapes |= {f"{name}.weight": (n_rows, hidden) for name, n_rows in rows.items()}
    if sizes.arch == "qwen2":
        shapes |= {f"{name}.bias": (rows[name],) for name in ("attn_q", "attn_k", "attn_v")}
    if sizes.arch == "qwen3":
        shapes |= {"attn_q_norm.weight": (sizes.head_dim,), "attn_k_norm.weight": (sizes.head_dim,)}
    return shapes


def shapes_of(sizes: Sizes) -> Shapes:
    """Tensors of a model of a served architecture; `output.weight` is the embedding where it is missing."""
    shapes: Shapes = {"token_embd.weight": (sizes.vocab, sizes.hidden), "output_norm.weight": (sizes.hidden,)}
    of_layer = layer_shapes(sizes)
    for layer in range(sizes.n_layers):
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in of_layer.items()}
    return shapes


def _without_lists(header: Header, arch: str) -> tuple[Header, tuple[str, ...]]:
    """The largest in the place of a list of each layer's sizes, and the keys of such lists."""
    fields: Mapping[str, object] = {
        key: max(value)
        for key, value in header.fields.items()
        if key.removeprefix(f"{arch}.") in _BY_LAYER and isinstance(value, list) and all(type(n) is int for n in value)
        if value
    }
    return header._replace(fields={**header.fields, **fields}), tuple(fields)


def _vocabulary(header: Header, hidden: int) -> int:
    table = header.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise SourceRefused(f"{header.path} has no table of embeddings: it is not a language model's GGUF")
    if table.shape[1] != hidden:
        raise SourceRefused(f"{header.path} is damaged: its embeddings are {table.shape[1]:,} wide, it says {hidden:,}")
    return table.shape[0]


def _check_layers(header: Header, sizes: Sizes) -> None:
    """What is made for every layer is made before any tensor is missed."""
    found = {int(match[1]) for name in header.tensors if (match := _LAYER.match(name))}
    if (found or sizes.arch in SERVED) and found != set(range(min(sizes.n_layers, 1 << 16))):
        said = f"says that it has {sizes.n_layers:,} layers, and has tensors of {len(found):,}"
        raise SourceRefused(f"{header.path} is damaged: it {said}")


def _check_served(header: Header, sizes: Sizes) -> None:
    header.real(f"{sizes.arch}.attention.layer_norm_rms_epsilon")
    header.real(f"{sizes.arch}.rope.freq_base", 10_000.0)
    if sizes.n_heads % sizes.n_kv_heads:
        raise header.refused(f"{sizes.arch}.attention.head_count_kv", f"a divisor of {sizes.n_heads} heads")
    expected = shapes_of(sizes) | {"output.weight": (sizes.vocab, sizes.hidden)}
    for name, shape in expected.items():
        if (tensor := header.tensors.get(name)) is not None and tensor.shape != shape:
            what = f"its tensor {name} is of shape {tensor.shape}, by its sizes it would be {shape}"
            raise SourceRefused(f"{header.path} is damaged: {what}")
    _check_tokens(header, sizes)


def _check_tokens(header: Header, sizes: Sizes) -> None:
    tokens = header.fields.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, Texts):
        raise SourceRefused(f"{header.path} has no tokens (tokenizer.ggml.tokens), so that no text can be read with it")
    vocab = header.number(f"{sizes.arch}.vocab_size", tokens.n)
    if not tokens.n == vocab == sizes.vocab:
        said = f"{tokens.n:,} tokens and a vocabulary of {vocab:,}, its embeddings are of {sizes.vocab:,}"
        raise SourceRefused(f"{header.path} is damaged: it says {said}")
    for name in ("bos", "eos", "unknown", "padding"):
        header.number(f"tokenizer.ggml.{name}_token_id", 0, most=tokens.n - 1)
    for key, kind in _LISTS.items():
        if not isinstance(header.fields.get(key, kind), type(kind)):
            raise header.refused(key, "a list")
    for key in _TEXTS:
        header.text(key, "")
    if not {"tokenizer.ggml.merges", "tokenizer.ggml.scores"} & header.fields.keys():
        raise SourceRefused(f"{header.path} has neither merges nor scores of its tokens, so that no text can be read")
