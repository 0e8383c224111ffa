"""The chosen model's tokenizer and prompt, without the model."""

import json
from dataclasses import dataclass
from pathlib import Path

from service.engine.models.card import load_card
from service.engine.prompt import DEFAULT_SYSTEM_TEXT, PromptParts, PromptTemplate
from service.engine.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Prompts:
    """`digest` names tokenizer and template: documents tokenized under another one are tokenized again."""

    template: PromptTemplate
    tokenizer: Tokenizer
    digest: str


def load_prompts(model_dir: Path) -> Prompts:
    """Of an imported model. Raises the ModelError of a directory that is none."""
    card = load_card(model_dir)
    tokenizer = Tokenizer.load(model_dir)
    digest = digest_of_prompt(card.digests.tokenizer, card.digests.template)
    return Prompts(PromptTemplate(card.prompt, tokenizer), tokenizer, digest)


def digest_of_prompt(tokenizer: str, template: str, **_: str) -> str:
    """`Prompts.digest` of these fields of a fingerprint; others are passed over."""
    return f"{tokenizer[:24]}-{template[:24]}"


def fake_prompts() -> Prompts:
    """For the fake engine: one token per byte, and the usual control tokens."""
    tokenizer = Tokenizer(_byte_tokenizer_json())
    parts = PromptParts(
        document_prefix=f"<|im_start|>system\n{DEFAULT_SYSTEM_TEXT}",
        document_suffix="<|im_end|>\n",
        question_prefix="<|im_start|>user\n",
        question_suffix="<|im_end|>\n<|im_start|>assistant\n",
        turn_end="<|im_end|>\n",
    )
    return Prompts(PromptTemplate(parts, tokenizer), tokenizer, "fake")


def _byte_tokenizer_json() -> bytes:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in printable]
    symbols = {byte: chr(byte) for byte in printable} | {b: chr(256 + n) for n, b in enumerate(hidden)}
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [{"id": 256 + n, "content": text, **flags} for n, text in enumerate(control)],
            "normalizer": None,
            "pre_tokenizer": byte_level,
            "post_processor": None,
            "decoder": byte_level,
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "vocab": {symbols[byte]: byte for byte in range(256)},
                "merges": [],
            },
        }
    ).encode()
