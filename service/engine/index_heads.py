"""The index heads of a model: which KV heads find the place in a document that answers a question.

They are a property of the weights, found once by `find_index_heads` (at import, or with `preread models index-heads`)
and kept in the model's directory. They choose what is fetched and change nothing that is computed, so they are no part
of a fingerprint.
"""

from pathlib import Path

import msgspec

from service.engine.models.card import load_card
from service.engine.models.errors import ModelDamaged
from service.engine.models.record import save_record, version_of

HEADS_NAME = "index_heads.json"
HEADS_VERSION = 1


class IndexHead(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A KV head of a layer. `mean_reciprocal_rank`: of the span with the fact, by this head alone."""

    layer: int
    head: int
    mean_reciprocal_rank: float


class IndexHeads(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is recorded. `weights`: the digest of the weights they were found in (`ModelDigests.weights`).

    The figures are those of the heads together, on `n_questions` questions that were not used to choose them:
    `mean_reciprocal_rank` of the span with the fact among all spans, and `in_first_two`, the share of questions for
    which it is one of the first two.
    """

    format_version: int
    weights: str
    heads: list[IndexHead]
    mean_reciprocal_rank: float
    in_first_two: float
    n_questions: int

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """(layer, KV head) of each."""
        return [(head.layer, head.head) for head in self.heads]


def save_index_heads(found: IndexHeads, model_dir: Path) -> None:
    """Write the file, replacing an earlier one at once; durable when this returns."""
    save_record(found, model_dir / HEADS_NAME)


def load_index_heads(model_dir: Path) -> list[tuple[int, int]]:
    """(layer, KV head) of each index head; none when they were not found yet.

    Raises ModelDamaged for a file that cannot be read, names heads the model does not have, or belongs to other
    weights, and what `load_card` raises.
    """
    found = read_index_heads(model_dir)
    return found.pairs if found else []


def read_index_heads(model_dir: Path) -> IndexHeads | None:
    """The whole record, None when there is none; errors as `load_index_heads`."""
    path = model_dir / HEADS_NAME
    try:
        found = _decode(path.read_bytes(), path)
    except FileNotFoundError:
        return None
    card = load_card(model_dir)
    if found.weights != card.digests.weights:
        raise ModelDamaged(f"{path} belongs to other weights: {_again(model_dir)}")
    if not all(0 <= layer < card.n_layers and 0 <= head < card.n_kv_heads for layer, head in found.pairs):
        raise ModelDamaged(f"{path} names heads that {card.name} does not have: {_again(model_dir)}")
    return found


def _decode(data: bytes, path: Path) -> IndexHeads:
    try:
        version = version_of(data)
        if version == HEADS_VERSION:
            return msgspec.json.decode(data, type=IndexHeads)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ModelDamaged(f"{path} is damaged: {error}: {_again(path.parent)}") from error
    raise ModelDamaged(
        f"{path} has format version {version}, this program reads {HEADS_VERSION}: {_again(path.parent)}"
    )


def _again(model_dir: Path) -> str:
    return f"run `preread models index-heads {model_dir.name}`"
