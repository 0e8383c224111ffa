"""The card of a model directory (`preread.json`): its shape, its identity and its prompt.

Read by the API process, so nothing here imports torch.
"""

import hashlib
from dataclasses import asdict
from pathlib import Path

import msgspec

from cache_store.fingerprint import Fingerprint
from cache_store.layout import LAYOUT_VERSION, KVLayout, KVType
from service.engine.models.errors import (
    CardVersionUnknown,
    EngineRefused,
    KVTypeRefused,
    ModelDamaged,
    ModelNotFound,
)
from service.engine.models.record import save_record, version_of
from service.engine.prompt import PromptParts

CARD_NAME = "preread.json"
CARD_VERSION = 1


class KVGate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Next-token KL (nats) of a KV type against FP16 KV over the bundled text, and the verdict."""

    mean_kl: float
    p99_kl: float
    top1_agreement: float
    allowed: bool


class ModelDigests(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Content hashes, 32 hex digits each.

    `weights`: names, dtypes, shapes and bytes of the tensors, however split into files. `config`: what
    decides the computation in `config.json`, RoPE left out. `rope`: inv_freq and attention scaling as
    computed.
    """

    weights: str
    config: str
    tokenizer: str
    template: str
    rope: str


class ModelCard(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is recorded about an imported model.

    `files`: name -> bytes of every file that belongs to it. `kv_types`: KV type -> what the KL gate measured.
    `source`: what it was imported from, for display. `quantization`: "none", or how the weights are stored
    ("exl2-4.0bpw", "gptq-4bit-128g-actorder", "gguf-MOSTLY_Q4_K_M").
    """

    format_version: int
    name: str
    source: str
    architecture: str
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    max_context: int
    vocab_size: int
    n_parameters: int
    dtype: str
    eos_token_ids: list[int]
    quantization: str
    digests: ModelDigests
    prompt: PromptParts
    files: dict[str, int]
    kv_types: dict[str, KVGate] = {}

    def layout(self, kv_type: KVType) -> KVLayout:
        """Shape of this model's KV cache in a KV type."""
        return KVLayout(self.n_layers, self.n_kv_heads, self.head_dim, kv_type)

    @property
    def needs_card(self) -> bool:
        """Whether only the exl2 engine, on an NVIDIA card, reads these weights."""
        return self.engine == "exl2"

    @property
    def engine(self) -> str:
        """The engine that reads these weights: "exl2", "llamacpp", or "torch" for plain ones, which exl2 reads too."""
        if self.quantization == "none":
            return "torch"
        return "llamacpp" if self.quantization.startswith("gguf-") else "exl2"


def save_card(card: ModelCard, model_dir: Path) -> None:
    """Write the card, replacing an earlier one at once; durable when this returns."""
    save_record(card, model_dir / CARD_NAME)


def load_card(model_dir: Path) -> ModelCard:
    """Read a model directory's card and check that the recorded files are there with the recorded sizes.

    Content is not hashed here (`verify_model` does). Raises ModelNotFound, CardVersionUnknown, ModelDamaged.
    """
    path = model_dir / CARD_NAME
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise ModelNotFound(_not_a_model(model_dir)) from None
    card = _decode(data, path)
    for name, nbytes in card.files.items():
        _check_size(model_dir / name, nbytes)
    return card


def _not_a_model(model_dir: Path) -> str:
    if not model_dir.exists():
        return f"there is no model directory {model_dir}"
    hint = "; import it first: preread models import" if (model_dir / "config.json").exists() else ""
    return f"{model_dir} is not an imported model (it has no {CARD_NAME}){hint}"


def _decode(data: bytes, path: Path) -> ModelCard:
    try:
        version = version_of(data)
        if version == CARD_VERSION:
            return msgspec.json.decode(data, type=ModelCard)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ModelDamaged(f"{path} is not a model card: {error}") from error
    raise CardVersionUnknown(
        f"{path} has format version {version}, this program reads {CARD_VERSION}: import the model again"
    )


def _check_size(path: Path, nbytes: int) -> None:
    try:
        found = path.stat().st_size
    except FileNotFoundError:
        raise ModelDamaged(f"{path} is missing: import the model again") from None
    if found != nbytes:
        raise ModelDamaged(f"{path} has {found} bytes, recorded were {nbytes}: import the model again")


def check_kv_type(card: ModelCard, kv_type: KVType) -> None:
    """Raises KVTypeRefused when the KL gate failed for this KV type, or never ran. FP16 always passes."""
    if kv_type == KVType.FP16:
        return
    gate = card.kv_types.get(kv_type)
    if gate is None:
        raise KVTypeRefused(
            f"the KV type {kv_type} was not measured for {card.name}: run `preread models measure {card.name}`"
        )
    if not gate.allowed:
        allowed = [t for t in KVType if t == KVType.FP16 or (t in card.kv_types and card.kv_types[t].allowed)]
        raise KVTypeRefused(
            f"the KV type {kv_type} is refused for {card.name}: its next-token predictions differ from those "
            f"of FP16 KV by a mean KL of {gate.mean_kl:.4f} nats, the limit is {MEAN_KL_LIMIT}; "
            f"use one of {', '.join(allowed)}"
        )


def check_engine(card: ModelCard, engine: str) -> None:
    """Raises EngineRefused when `engine` ("torch", "exl2", "llamacpp") cannot read the model's weights."""
    if card.engine == engine or (card.engine, engine) == ("torch", "exl2"):
        return
    if engine == "llamacpp":
        raise EngineRefused(
            f"the llamacpp engine reads GGUF files, and {card.name} was not kept as one: import it with "
            "`preread models import FILE.gguf --engine llamacpp --name NAME`"
        )
    where = "the exl2 engine on an NVIDIA card" if card.engine == "exl2" else "the llamacpp engine"
    raise EngineRefused(
        f"the weights of {card.name} are quantized ({card.quantization}): the {engine} engine does not read them, "
        f"only {where} does (PREREAD_ENGINE={card.engine})"
    )


MEAN_KL_LIMIT = 0.02
"""Above this mean KL (nats) a KV type is refused for a model."""


_FORMS = {"llamacpp": "ggml"}
"""What the bytes of records mean, where they are not those of `cache_store.layout`."""


def expected_fields(model_dir: Path, kv_type: str) -> dict[str, str]:
    """Of the fingerprint that a model is served with what follows from its directory and the KV type alone. Raises
    ModelError."""
    fields = asdict(fingerprint(load_card(model_dir), KVType(kv_type), "", "", 0))
    return {name: value for name, value in fields.items() if name not in ("engine", "compute_dtype", "chunking")}


def fingerprint(
    card: ModelCard, kv_type: KVType, compute_dtype: str, engine_version: str, chunk_tokens: int
) -> Fingerprint:
    """Identity of the KV that this model makes in this KV type on an engine. Contains no path and no name."""
    digests = card.digests
    weights = hashlib.blake2b(f"{digests.weights}/{digests.config}".encode(), digest_size=16).hexdigest()
    return Fingerprint(
        weights=weights,
        quantization=card.quantization,
        tokenizer=digests.tokenizer,
        template=digests.template,
        rope=digests.rope,
        kv=f"{kv_type}/{_FORMS.get(card.engine, 'layout')}-{LAYOUT_VERSION}",
        engine=engine_version,
        compute_dtype=compute_dtype,
        chunking=str(chunk_tokens),
    )
