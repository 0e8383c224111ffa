"""Import a model: read a source, merge an adapter, write a directory, measure its KV types, find its index heads,
then show it at once.

GGUF file | Hugging Face directory  [+ LoRA adapter]  ->  <models_dir>/<name>/
EXL2 or GPTQ directory, its weights kept as they are  ->  <models_dir>/<name>/
GGUF file for the llamacpp engine, kept as it is      ->  <models_dir>/<name>/
"""

from collections.abc import Callable
from pathlib import Path

import msgspec

from service.engine.index_heads import save_index_heads
from service.engine.models import gguf, huggingface
from service.engine.models.card import (
    CARD_VERSION,
    KVGate,
    ModelCard,
    ModelDigests,
    load_card,
    save_card,
)
from service.engine.models.chat import plain_parts, split_template
from service.engine.models.configs import read_config, shown
from service.engine.models.errors import ModelDamaged, SourceRefused, TokenizerRefused
from service.engine.models.gates import gate_again, gate_if_possible
from service.engine.models.heads import FindHeads, heads_if_possible
from service.engine.models.kept_gguf import METHOD, keep_gguf, read_kept
from service.engine.models.lora import check_adapter, merge_adapter
from service.engine.models.quantized import Quantization, find_quantization
from service.engine.models.registry import check_name
from service.engine.models.rope import rope_digest, stored_rope_digest
from service.engine.models.source import Progress, Source, silent
from service.engine.models.staging import staged
from service.engine.models.support import head_dim, max_context
from service.engine.models.weights import config_digest, weights_digest
from service.engine.models.writer import DTYPES, TEMPLATE_NAME, chat_template, keep_model, write_model, write_texts
from service.engine.prompt import DEFAULT_SYSTEM_TEXT, PromptParts, template_digest
from service.engine.tokenizer import Tokenizer, tokenizer_digest

Measure = Callable[[Path, ModelCard, Progress], dict[str, KVGate]]
"""Runs the KL gate on a finished directory."""


def import_model(
    source: Path,
    *,
    name: str,
    models_dir: Path,
    adapter: Path | None = None,
    dtype: str | None = None,
    system_text: str | None = None,
    engine: str | None = None,
    replace: bool = False,
    measure: Measure = gate_if_possible,
    find_heads: FindHeads = heads_if_possible,
    progress: Progress = silent,
    prompt: PromptParts | None = None,
    label: str = "",
) -> ModelCard:
    """Import a GGUF file or a Hugging Face directory as ``models_dir/name`` and give its card.

    `adapter`: a PEFT LoRA directory, merged in. `dtype`: float32, bfloat16 or float16; the source's own when
    None (a GGUF is dequantized to float32). `system_text`: what is said before the document, instead of the
    default. `engine` "llamacpp" keeps a GGUF as it is, for that engine alone; an adapter's weights become Q8_0 there.
    `replace` allows a model of that name to be replaced. `measure` is the KL gate, `find_heads` looks for the index
    heads. `progress` is told (stage, done, total). `prompt`: as another card has it, in place of the template's;
    `label`: what the card calls the source. EXL2 and GPTQ weights are linked, or copied where the disk
    cannot link them; neither `adapter` nor `dtype` applies to them, and without a card their KV types stay unmeasured
    and their index heads unknown.

    Nothing is visible before all is written; an interrupted import leaves nothing but a hidden directory,
    which the next import removes. Raises ModelImportError and its kinds, OSError when the disk refuses.
    """
    check_name(name)
    if dtype is not None and dtype not in DTYPES:
        raise SourceRefused(f"{dtype!r} is not a dtype for weights: use one of {', '.join(DTYPES)}")
    _check_wishes(adapter, dtype, engine)
    with staged(models_dir, name, replace=replace) as directory:
        model = read_kept(source.absolute(), adapter, progress) if engine == "llamacpp" else _read(source, progress)
        n_parameters = _write(model, directory, adapter, dtype, progress)
        label = label or (model.label if adapter is None else f"{model.label} + {adapter.name}")
        parts = prompt or _prompt(model, DEFAULT_SYSTEM_TEXT if system_text is None else system_text)
        card = _card(model, directory, name=name, label=label, parts=parts, progress=progress)
        card = msgspec.structs.replace(card, n_parameters=n_parameters)
        save_card(card, directory)
        card = msgspec.structs.replace(card, kv_types=measure(directory, card, progress))
        save_card(card, directory)
        if found := find_heads(directory, card, progress):
            save_index_heads(found, directory)
    return card


def _check_wishes(adapter: Path | None, dtype: str | None, engine: str | None) -> None:
    """What needs no look at the source, before it is read for minutes. Raises SourceRefused, AdapterRefused."""
    if engine == "llamacpp" and dtype is not None:
        raise SourceRefused("the weights of a GGUF are kept as they are: leave --dtype out")
    if adapter is not None:
        check_adapter(adapter)


def _write(model: Source, directory: Path, adapter: Path | None, dtype: str | None, progress: Progress) -> int:
    """The number of parameters."""
    if model.quantization is not None and model.quantization.method == METHOD:
        write_texts(model, directory)
        return keep_gguf(model, directory, adapter, progress)
    if model.quantization is not None:
        if adapter is not None or dtype is not None:
            what = "an adapter cannot be merged into them" if adapter is not None else "their dtype cannot be chosen"
            raise SourceRefused(f"the weights of {model.label} are quantized ({model.quantization.label}): {what}")
        return keep_model(model, model.quantization, directory, progress)
    if adapter is not None:
        merge_adapter(model.tensors, adapter, progress)
    stored = DTYPES[dtype] if dtype else huggingface.stored_dtype(model.tensors)
    return write_model(model, directory, stored, progress)


def measure_model(model_dir: Path, *, measure: Measure = gate_again, progress: Progress = silent) -> ModelCard:
    """Run the KL gate again on an imported model and record what it finds."""
    card = load_card(model_dir)
    card = msgspec.structs.replace(card, kv_types=measure(model_dir, card, progress))
    save_card(card, model_dir)
    return card


def verify_model(model_dir: Path, progress: Progress = silent) -> ModelCard:
    """Hash every file of a model again and give its card. Raises ModelDamaged naming what differs."""
    card = load_card(model_dir)
    template = model_dir / TEMPLATE_NAME
    found = ModelDigests(
        weights=weights_digest(model_dir, lambda done, total: progress("hashing", done, total)),
        config=_stored_config_digest(model_dir),
        tokenizer=tokenizer_digest((model_dir / "tokenizer.json").read_bytes()),
        template=template_digest(template.read_text("utf-8") if template.exists() else "", card.prompt),
        rope=stored_rope_digest(model_dir),
    )
    differing = [f for f in found.__struct_fields__ if getattr(found, f) != getattr(card.digests, f)]
    if differing:
        raise ModelDamaged(f"{model_dir} is not what was imported: {', '.join(differing)} differ from the card")
    return card


def _read(source: Path, progress: Progress) -> Source:
    if gguf.is_gguf(source) or (source.is_file() and source.suffix.lower() == ".gguf"):
        return gguf.read_gguf(source.absolute(), progress)
    if source.is_dir():
        quantization = find_quantization(source)
        if quantization is not None:
            return huggingface.read_quantized(source.absolute(), quantization, progress)
        return huggingface.read_directory(source.absolute(), progress)
    state = "is neither a GGUF file nor a directory" if source.exists() else "does not exist"
    raise SourceRefused(f"{source} {state}")


def _card(
    model: Source, directory: Path, *, name: str, label: str, parts: PromptParts, progress: Progress
) -> ModelCard:
    config = model.config
    tokenizer = _checked_tokenizer(directory, label)
    return ModelCard(
        format_version=CARD_VERSION,
        name=name,
        source=label,
        architecture=config.model_type,
        n_layers=config.num_hidden_layers,
        n_heads=config.num_attention_heads,
        n_kv_heads=config.num_key_value_heads,
        head_dim=head_dim(config),
        max_context=max_context(config),
        vocab_size=config.vocab_size,
        n_parameters=0,
        dtype="float16" if model.quantization else str(config.dtype).removeprefix("torch."),
        eos_token_ids=_eos_ids(model, tokenizer, parts),
        quantization=model.quantization.label if model.quantization else "none",
        digests=ModelDigests(
            weights=weights_digest(directory, lambda done, total: progress("hashing", done, total)),
            config=_stored_config_digest(directory),
            tokenizer=tokenizer.digest,
            template=template_digest(chat_template(model), parts),
            rope=rope_digest(config),
        ),
        prompt=parts,
        files={p.name: p.stat().st_size for p in sorted(directory.iterdir()) if p.is_file()},
    )


def check_readable(directory: Path, prompt: PromptParts | None) -> None:
    """Look at all of a Hugging Face directory that an import looks at, but for the weights. `prompt`: as `import_model`
    has it. Raises SourceRefused, ArchitectureRefused, TokenizerRefused, as the import would."""
    tokenizer = _checked_tokenizer(directory, str(directory))
    model = huggingface.read_quantized(directory.absolute(), Quantization("exl2", {}), silent)
    _eos_ids(model, tokenizer, prompt or _prompt(model, DEFAULT_SYSTEM_TEXT))


def _stored_config_digest(directory: Path) -> str:
    return config_digest(read_config(directory))


def _prompt(model: Source, system_text: str) -> PromptParts:
    if not chat_template(model):
        return plain_parts(system_text)

    def render(messages: list[dict[str, str]], header: bool) -> str:
        text = model.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=header, enable_thinking=False
        )
        return str(text)

    return split_template(render, system_text)


def _checked_tokenizer(directory: Path, label: str) -> Tokenizer:
    """Raises SourceRefused, naming the source by its `label`, and TokenizerRefused."""
    try:
        tokenizer = Tokenizer.load(directory)
    except ValueError as error:
        raise SourceRefused(f"the tokenizer.json of {label} cannot be read as a tokenizer: {error}") from error
    check_tokenizer(tokenizer)
    return tokenizer


def check_tokenizer(tokenizer: Tokenizer) -> None:
    """Raises TokenizerRefused when plain text can become a control token, or tokens cannot be joined to
    text.
    """
    if not tokenizer.understood:
        raise TokenizerRefused("the tokenizer's decoder is neither byte-level nor SentencePiece with byte fallback")
    for token_id in sorted(tokenizer.control_ids):
        text = tokenizer.decode([token_id], keep_control=True)
        if tokenizer.control_ids & set(tokenizer.encode_plain(f"a{text}b {text}")):
            raise TokenizerRefused(f"the tokenizer reads {text!r} in a document as a control token")


def _eos_ids(model: Source, tokenizer: Tokenizer, parts: PromptParts) -> list[int]:
    """The ids that end an answer: what the generation config says, and the control token that ends a turn."""
    named = getattr(model.generation_config, "eos_token_id", None) or model.config.eos_token_id
    listed = named if isinstance(named, list) else [] if named is None else [named]
    if odd := [one for one in listed if type(one) is not int]:
        raise SourceRefused(f"the config of {model.label} names {shown(odd[0])} as a token that ends an answer: no id")
    ids = set(listed)
    ids |= set(tokenizer.encode_template(parts.turn_end)[:1]) & tokenizer.control_ids
    if not ids:
        raise SourceRefused("neither the config nor the chat template says which token ends an answer")
    return sorted(ids)
