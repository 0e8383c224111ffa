"""Whether a model can guess for another one: a token id has to mean the same text in both.

Only files are compared, before anything is loaded; nothing here imports torch.
"""

from collections.abc import Iterable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from cache_store.layout import KVType
from service.engine.models.card import ModelCard, check_engine, load_card
from service.engine.models.errors import DraftRefused, EngineRefused, ModelDamaged, ModelError, SourceRefused
from service.engine.models.tokenizer_file import TOKENIZER_NAME, read_tokenizer

ENGINES = ("torch", "exl2")
"""Those that compute guesses."""


def check_draft(model_dir: Path, draft_dir: Path, engine: str) -> ModelCard:
    """The draft model's card. Raises DraftRefused for one of other tokens, EngineRefused where `engine` guesses nothing
    or does not read its weights, and what `load_card` raises."""
    if engine not in ENGINES:
        raise EngineRefused(
            f"the {engine} engine guesses no tokens: unset PREREAD_DRAFT_MODEL, or take the {' or the '.join(ENGINES)} "
            "engine"
        )
    try:
        card = load_card(draft_dir)
        check_engine(card, engine)
    except ModelError as error:
        raise type(error)(f"the draft model (PREREAD_DRAFT_MODEL): {error}") from None
    main = load_card(model_dir)
    if main.digests.tokenizer != card.digests.tokenizer and (found := first_difference(model_dir, draft_dir)):
        raise DraftRefused(
            f"the draft model {card.name} has other tokens than {main.name}: {found}. Its guesses would mean other "
            "text: take a model of the same family, or unset PREREAD_DRAFT_MODEL"
        )
    return card


def draft_kv_type(card: ModelCard, kv_type: KVType) -> KVType:
    """The KV type a draft model is served with: the model's, unless that was not measured for it or changes its
    guesses too much; then FP16, so that nobody has to measure what cannot change an answer."""
    gate = card.kv_types.get(kv_type)
    return kv_type if gate is not None and gate.allowed else KVType.FP16


def first_difference(model_dir: Path, draft_dir: Path) -> str:
    """What the tokenizers of two directories differ in, the first token or merge that does; "" where they are equal in
    vocabulary, merges and added tokens."""
    ours, theirs = _tokenizer(model_dir), _tokenizer(draft_dir)
    pieces = zip_longest(_pieces(ours), _pieces(theirs))
    for token_id, (mine, other) in enumerate(pieces):
        if mine != other:
            return f"token {token_id} is {_shown(mine)} in the model, and {_shown(other)} in the draft model"
    for n, (mine, other) in enumerate(zip_longest(_merges(ours), _merges(theirs))):
        if mine != other:
            return f"merge {n} is {_shown(mine)} in the model, and {_shown(other)} in the draft model"
    return ""


def _tokenizer(model_dir: Path) -> dict[str, Any]:
    try:
        return read_tokenizer(model_dir)
    except FileNotFoundError:
        raise ModelDamaged(f"{model_dir} has no {TOKENIZER_NAME}: import the model again") from None
    except SourceRefused as error:
        raise ModelDamaged(f"{error}: import the model again") from None


def _pieces(tokenizer: dict[str, Any]) -> Sequence[str | None]:
    """The text of each token id, None for an id that has none; added tokens count as what they were added as."""
    vocab = tokenizer["model"]["vocab"]
    by_id: dict[int, str] = {}
    if isinstance(vocab, dict):
        by_id = {i: piece for piece, i in vocab.items()}
    else:  # pairs of piece and score, in order
        by_id = dict(enumerate(piece for piece, _ in vocab))
    by_id |= {added["id"]: added["content"] for added in tokenizer.get("added_tokens") or []}
    return [by_id.get(i) for i in range(max(by_id, default=-1) + 1)]


def _merges(tokenizer: dict[str, Any]) -> Iterable[str]:
    """Files of different ages write a merge as one text or as two."""
    merges = tokenizer["model"].get("merges") or []
    return (merge if isinstance(merge, str) else " ".join(merge) for merge in merges)


def _shown(piece: str | None) -> str:
    return "missing" if piece is None else repr(piece)
