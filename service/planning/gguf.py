"""Facts of a GGUF file, read for its header only."""

from pathlib import Path

from service.engine.exl2_engine.scratch import Shape
from service.engine.models.gguf_header import Tensor, read_header
from service.engine.models.gguf_parts import check_whole
from service.engine.models.gguf_sizes import sizes_of
from service.engine.models.gguf_support import reasons_against
from service.engine.models.weights import TensorSpan
from service.planning.model import FP16_BITS, ModelFacts, facts_of_spans
from service.planning.refusals import check_width, problems_of

_TENSORS = {"token_embd.weight": "model.embed_tokens.weight", "output.weight": "lm_head.weight"}


def read_gguf_facts(path: Path) -> ModelFacts:
    """Raises SourceRefused, and ArchitectureRefused for heads that no KV layout has."""
    header = read_header(path)
    check_whole(path, header)
    sizes = sizes_of(header)
    shape = Shape(
        sizes.hidden, sizes.intermediate, sizes.n_layers, sizes.n_heads, sizes.n_kv_heads, sizes.head_dim, sizes.vocab
    )
    problems = reasons_against(header, sizes)
    _, on_card = problems_of(sizes.arch, quantized=False)
    check_width(path, shape, problems)
    tensors, n_parameters = header.tensors.values(), header.n_parameters
    stored = sum(tensor.nbytes for tensor in tensors)
    spans = [_gguf_span(path, tensor) for tensor in tensors]
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
        max_context=sizes.max_context,
        bits=FP16_BITS,  # of the plain weights: those of the file are never on a card
        joined_params=sum(tensor.n_elements for tensor in tensors if _is_joined_gguf(tensor.name)),
        stored_itemsize=4,
        problems=problems,
        file_problems=reasons_against(header, sizes, kept=True),
        card_problems=on_card,
        notes=(
            f"an import turns its {of_file} into plain weights: this plan is for them, with "
            "--engine llamacpp it is for the file as it lies",
        ),
    )


def _gguf_span(path: Path, tensor: Tensor) -> TensorSpan:
    """As the FP16 tensor that an import makes of it on a card."""
    name = _TENSORS.get(tensor.name, tensor.name)
    return TensorSpan(name, "F16", tensor.shape, path, 0, 2 * tensor.n_elements)


def _is_joined_gguf(name: str) -> bool:
    return any(f".{part}." in name for part in ("attn_q", "attn_k", "attn_v", "ffn_gate", "ffn_up"))
