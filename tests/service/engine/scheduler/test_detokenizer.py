from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from service.engine.scheduler.detokenizer import Detokenizer

TEXT = "The répond 中文字符 🙂👩‍👩‍👧 naïve e\u0301 नमस्ते"


@cache
def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    return tokenizer


class WithBytes:
    """The byte-level tokenizer, able to say what bytes a token has."""

    def __init__(self) -> None:
        self._alphabet = {c: b for b, c in zip(range(256), _byte_characters(), strict=True)}

    def decode(self, ids: list[int]) -> str:
        return byte_level().decode(ids)

    def token_bytes(self, token_id: int) -> bytes:
        return bytes(self._alphabet[c] for c in byte_level().id_to_token(token_id) or "")


def _byte_characters() -> list[str]:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(others)) for b in range(256)]


@cache
def sentencepiece_like() -> Tokenizer:
    pieces = ["▁The", "▁answer", "s", "▁is", "▁", "4", "中", "."] + [f"<0x{b:02X}>" for b in range(256)]
    tokenizer = Tokenizer(models.Unigram([("<unk>", 0.0), *((piece, -1.0) for piece in pieces)], 0, True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def stream(decoder, ids) -> list[str]:
    detokenizer = Detokenizer(decoder)
    return [*(detokenizer.push(i) for i in ids), detokenizer.finish()]


def cut(text: str) -> str:
    return text.rstrip("\ufffd")


@settings(deadline=None)
@given(st.text(max_size=40))
def test_pieces_join_to_the_text(text):
    pieces = stream(byte_level(), byte_level().encode(text).ids)
    assert "".join(pieces) == cut(text)


@settings(deadline=None)
@given(st.text(min_size=1, max_size=20), st.integers(0, 60))
def test_cut_anywhere_no_replacement_character_appears(text, n):
    text = text.replace("\ufffd", "?")
    ids = byte_level().encode(text).ids[:n]
    for piece in stream(byte_level(), ids):
        assert "\ufffd" not in piece
    joined = "".join(stream(byte_level(), ids))
    assert text.startswith(joined)
    assert joined == cut(byte_level().decode(ids))


@settings(deadline=None)
@given(st.lists(st.integers(0, 299), max_size=60))
def test_any_ids_join_to_what_decoding_at_once_gives(ids):
    joined = "".join(stream(byte_level(), ids))
    whole = byte_level().decode(ids)
    assert whole.startswith(joined)
    assert set(whole[len(joined) :]) <= {"\ufffd"}


def test_a_real_replacement_character_at_the_end_is_kept_when_bytes_tell():
    ids = byte_level().encode("odd \ufffd").ids
    assert "".join(stream(WithBytes(), ids)) == "odd \ufffd"
    assert "".join(stream(WithBytes(), byte_level().encode("odd 🙂").ids[:-1])) == "odd "
    assert "".join(stream(WithBytes(), byte_level().encode("a \ufffd b").ids)) == "a \ufffd b"


def test_characters_come_as_soon_as_they_are_whole():
    ids = byte_level().encode("z🙂").ids
    pieces = stream(byte_level(), ids)
    assert pieces[0] == "z"
    assert pieces[len(ids) - 1] == "🙂"


def test_sentencepiece_spaces_and_bytes():
    tokenizer = sentencepiece_like()
    names = ["▁The", "▁answer", "s", "▁is", "▁", "4", "<0xF0>", "<0x9F>", "<0x99>", "<0x82>", "中", "."]
    ids = [tokenizer.token_to_id(name) or 0 for name in names]
    pieces = stream(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids) == "The answers is 4🙂中."
    assert pieces[:4] == ["The", " answer", "s", " is"]
    assert "".join(stream(tokenizer, ids[:9])) == "The answers is 4"


@pytest.mark.parametrize("n", [50, 500])
def test_endless_broken_bytes_do_not_grow_the_window(n):
    broken = byte_level().token_to_id("Ģ")
    assert broken is not None
    detokenizer = Detokenizer(byte_level())
    joined = "".join(detokenizer.push(broken) for _ in range(n))
    assert n - 3 <= len(joined) <= n
    assert len(detokenizer._ids) <= 40
