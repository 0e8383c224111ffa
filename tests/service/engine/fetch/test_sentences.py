import numpy as np
import pytest

from service.engine.fetch.sentences import sentence_starts, starts_finder


def begun(*tokens):
    """The texts of the tokens that begin a sentence."""
    texts = sorted(set(tokens))
    ids = np.array([texts.index(token) for token in tokens], np.int64)
    return [tokens[place] for place in sentence_starts(ids, texts.__getitem__)]


@pytest.mark.parametrize(
    ("tokens", "wanted"),
    [
        (("The", " keeper", " left", ".", " She", " is", " gone", "."), ["The", " She"]),
        (("It", " is", " 3", ".", "5", " m", "."), ["It"]),
        (("Who", "?", "\n", "I", "!", " ", "You"), ["Who", "I", "You"]),
        (("He", " said", ' "', "no", '."', " Then"), ["He", " Then"]),
        (("A", " line", "\n", "goes", " on"), ["A"]),
        (("A", " title", "\n", "\n", "A", "b"), ["A", "A"]),
        (("A", " title", "\n\n", "Text"), ["A", "Text"]),
        (("end", ".\n\n", "New"), ["end", "New"]),
        (("end", ".\n", "  ", "New"), ["end", "New"]),
        (("はい", "。", "いいえ"), ["はい", "いいえ"]),
        (("one",), ["one"]),
        (("\n", "one"), ["\n", "one"]),
        (("\n", " "), ["\n"]),
        (("A", ".", "\n", "x", ".)", " Y"), ["A", "x", " Y"]),
    ],
)
def test_sentences_begin_behind_ends_and_empty_lines(tokens, wanted):
    assert begun(*tokens) == wanted


def test_no_tokens():
    assert sentence_starts(np.array([], np.int32), str).tolist() == []


class Letters:
    understood = True

    def token_bytes(self, token_id):
        return bytes([token_id])


def test_a_tokenizer_tells_the_texts():
    ids = np.frombuffer(b"a. B? C", np.uint8)
    assert starts_finder(Letters())(ids).tolist() == [0, 3, 6]


def test_a_tokenizer_that_is_not_understood_gives_no_starts():
    unknown = Letters()
    unknown.understood = False
    assert starts_finder(unknown)(np.array([1, 2])).tolist() == []
    assert starts_finder(object())(np.array([1, 2])).tolist() == []
