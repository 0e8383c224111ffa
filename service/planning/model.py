"""What is known of a model before it is loaded: from the headers of its files, or from dimensions that are given."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from service.engine.exl2_engine.footprint import Footprint, weights_footprint
from service.engine.exl2_engine.scratch import Shape
from service.engine.models.weights import TensorSpan
from service.engine.torch_engine.ledger import joined_parameters
from service.errors import Invalid

FP16_BITS = 16.0
MOST_BITS = 64.0


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A model as a plan sees it. `kind`: `exl2`, `gptq`, `plain`, `gguf` or `dimensions`.

    `bits`: of a weight, embedding and head included. `stored_nbytes`: of the files. `footprint`: on a card.
    `joined_params`: parameters of the matrices that the torch engine joins. `stored_itemsize`: bytes of a stored plain
    weight, 0 for quantized ones. `allowed_kv`: KV types that were measured and allowed, None where nothing was
    measured. `index_heads`: whether it can answer from windowed documents. `problems`: why it is not served, and
    `card_problems`: why not on a card, where the exl2 engine computes fewer types. `kept`: a GGUF that was imported for
    llama.cpp alone. `file_problems`: why llama.cpp does not serve a GGUF as it lies.
    """

    name: str
    kind: str
    label: str
    shape: Shape
    footprint: Footprint
    n_parameters: int
    stored_nbytes: int
    max_context: int
    bits: float
    joined_params: int = 0
    stored_itemsize: int = 0
    allowed_kv: tuple[str, ...] | None = None
    index_heads: bool = True
    problems: tuple[str, ...] = ()
    card_problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())
    kept: bool = False
    file_problems: tuple[str, ...] = ()

    @property
    def weights_nbytes(self) -> int:
        """On a card."""
        return sum(map(sum, (self.footprint.layers, self.footprint.embedding, self.footprint.head)))

    @property
    def step_nbytes(self) -> int:
        """Bytes of weights that one decode step reads on a card: of an embedding that is no head only some rows."""
        head = sum(self.footprint.head) or sum(self.footprint.embedding)
        return sum(self.footprint.layers) + head

    @property
    def layer_parameters(self) -> int:
        """Parameters that every token of a prefill is multiplied with: neither embedding nor head."""
        matrices = 1 if self.footprint.embedding and not self.footprint.head else 2
        return max(0, self.n_parameters - matrices * self.shape.vocab * self.shape.hidden)

    @property
    def is_quantized(self) -> bool:
        """Whether only the exl2 engine reads its weights."""
        return self.kind in ("exl2", "gptq") or (self.kind == "dimensions" and self.footprint.quantized)


def facts_of_spans(
    spans: Sequence[TensorSpan], shape: Shape, n_parameters: int, *, tied: bool
) -> tuple[Footprint, float, int, int]:
    """Footprint on a card, bits of a weight, bytes stored, parameters that the torch engine joins."""
    footprint = weights_footprint(spans, share_head=True)
    stored = sum(span.nbytes for span in spans)
    joined = joined_parameters(spans)
    if not (tied or footprint.head):
        footprint = replace(footprint, head=footprint.embedding)
    return footprint, 8 * stored / max(1, n_parameters), stored, joined


@dataclass(frozen=True, slots=True)
class Dimensions:
    """A model that exists only on paper. Weights by `weights_gb` (10^9 bytes), or by `params_b` (10^9) and `bits`;
    what is 0 is estimated from the rest."""

    layers: int
    kv_heads: int
    head_dim: int
    weights_gb: float = 0.0
    params_b: float = 0.0
    bits: float = 0.0
    heads: int = 0
    hidden: int = 0
    intermediate: int = 0
    vocab: int = 0
    max_context: int = 0


VOCAB = 128_256
"""Of a model whose vocabulary nobody gave: a common size among today's models."""


def from_dimensions(given: Dimensions) -> ModelFacts:
    """A model of these dimensions. All of its weights are read in each step. Raises Invalid, naming an option."""
    _check(given)
    bits = given.bits or (8 * given.weights_gb / given.params_b if given.params_b and given.weights_gb else FP16_BITS)
    weights = round(1e9 * (given.weights_gb or given.params_b * bits / 8))
    n_parameters = round(1e9 * given.params_b) or round(weights * 8 / bits)
    if bits > MOST_BITS:
        raise Invalid(
            f"--weights-gb is too much for --params: it comes to {bits:,.0f} bits a weight.", param="weights-gb"
        )
    if not (weights and n_parameters):
        option = "weights-gb" if given.weights_gb else "params"
        raise Invalid(f"--{option} is too little: it comes to no weights at all.", param=option)
    shape = _shape(given, n_parameters)
    # Seven matrices a layer: how they are cut decides only how the allocator rounds.
    tensors = 7 * shape.n_layers
    layers = tuple([weights // tensors] * (tensors - 1) + [weights - weights // tensors * (tensors - 1)])
    largest = shape.hidden * shape.intermediate if bits < FP16_BITS else 0
    footprint = Footprint(layers, (), (), largest, 0)
    label = f"{n_parameters / 1e9:.1f}B parameters of {bits:.2f} bits"
    return ModelFacts(
        "dimensions", "dimensions", label, shape, footprint, n_parameters, weights, given.max_context, bits,
        stored_itemsize=0 if bits < FP16_BITS else 2,
    )  # fmt: skip


def _check(given: Dimensions) -> None:
    for name in ("layers", "kv_heads", "head_dim"):
        if getattr(given, name) < 1:
            option = name.replace("_", "-")
            raise Invalid(f"Give a model's directory or its dimensions: --{option} is missing.", param=option)
    if given.head_dim % 32:
        raise Invalid(f"--head-dim is {given.head_dim}; it has to be a multiple of 32.", param="head-dim")
    if given.heads % given.kv_heads:
        raise Invalid(
            f"--heads is {given.heads}; it has to be a multiple of --kv-heads, {given.kv_heads}.", param="heads"
        )
    if given.weights_gb and given.params_b and given.bits:
        raise Invalid("--weights-gb and --params say how many bits a weight has: leave --bits out.", param="bits")
    if not (given.weights_gb or given.params_b):
        raise Invalid("Give the weights: --weights-gb, or --params (10^9) with --bits.", param="weights-gb")


def _shape(given: Dimensions, n_parameters: int) -> Shape:
    """Sizes as given, the rest as a decoder of so many parameters usually has them: its layers are 4 hidden^2 of
    attention and 8 hidden^2 of a MLP."""
    step = given.head_dim
    hidden = given.hidden or max(step, round((n_parameters / given.layers / 12) ** 0.5 / step) * step)
    heads = given.heads or max(given.kv_heads, hidden // step // given.kv_heads * given.kv_heads)
    attention = 2 * hidden * step * (heads + given.kv_heads)
    left = n_parameters / given.layers - attention
    intermediate = given.intermediate or max(hidden, round(left / (3 * hidden) / 128) * 128)
    return Shape(hidden, intermediate, given.layers, heads, given.kv_heads, step, given.vocab or VOCAB)


def requantized(model: ModelFacts, bits: float) -> ModelFacts:
    """The same model with all of its weights in `bits`, scales included. What keeps it from being served stays."""
    shape = model.shape
    converted = from_dimensions(
        Dimensions(
            shape.n_layers, shape.n_kv_heads, shape.head_dim, params_b=model.n_parameters / 1e9, bits=bits,
            heads=shape.n_heads, hidden=shape.hidden, intermediate=shape.intermediate, vocab=shape.vocab,
            max_context=model.max_context,
        )
    )  # fmt: skip
    return replace(converted, name=model.name, problems=model.problems, card_problems=model.card_problems)
