"""What requests of chats have in common: parameters that are taken, those that change nothing, and those that would."""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from service.errors import Invalid

DOCUMENTS = "document_ids"
_MOST_NAMED = 64
_MOST_PAIRS, _KEY_CHARS, _VALUE_CHARS = 16, 64, 512


class Refusal(msgspec.Struct, frozen=True):
    """A parameter that is taken only when it asks for nothing: `instead` says with what."""

    is_fine: Callable[[Any], bool]
    instead: str


def _empty(value: Any) -> bool:
    return not value


def _no_choice(value: Any) -> bool:
    return value in ("none", "auto")


def _plain_text(value: Any) -> bool:
    return isinstance(value, dict) and value.get("type") == "text"


NOTHING = Refusal(_empty, "leave it out")
ZERO = Refusal(lambda value: value == 0, "only 0 is taken")
NO_TOOLS = Refusal(_empty, "there are no tools")
NO_CHOICE = Refusal(_no_choice, "there are no tools, so `none` or `auto`")
MEDIUM = Refusal(
    lambda value: value == "medium", "only `medium` is taken; say in the prompt how long answers should be"
)
TEXT = Refusal(_plain_text, "answers are text")


def refuse_unsupported(request: msgspec.Struct, refusals: Mapping[str, Refusal]) -> None:
    """Raises Invalid (``unsupported_parameter``) for the first parameter that asks for what there is not."""
    for name, refusal in refusals.items():
        value = getattr(request, name)
        if value is not None and not refusal.is_fine(value):
            raise Invalid(
                f"`{name}` is not supported here: {refusal.instead}.", code="unsupported_parameter", param=name
            )


def documents_of(metadata: Mapping[str, Any] | None) -> list[str]:
    """Of `metadata.document_ids`: a list, or as values of metadata are text, the ids with commas or blanks between,
    or a list in JSON. Raises Invalid for anything else, and for metadata that is too large to be kept."""
    for name, each in (metadata or {}).items():
        if name != DOCUMENTS and not (len(name) <= _KEY_CHARS and isinstance(each, str) and len(each) <= _VALUE_CHARS):
            raise Invalid(
                f"Keys of metadata have at most {_KEY_CHARS} characters, values are text of at most {_VALUE_CHARS}.",
                param="metadata",
            )
    if len(metadata or {}) > _MOST_PAIRS:
        raise Invalid(f"metadata has at most {_MOST_PAIRS} pairs.", param="metadata")
    value = (metadata or {}).get(DOCUMENTS)
    if value is None:
        return []
    if isinstance(value, str):
        value = _listed(value)
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value) or len(value) > _MOST_NAMED:
        raise Invalid("document_ids are ids of documents, with commas between.", param=f"metadata.{DOCUMENTS}")
    return [each for each in value if each]


def _listed(text: str) -> Any:
    if not text.lstrip().startswith("["):
        return text.replace(",", " ").split()
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return None
