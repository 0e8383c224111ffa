from hypothesis import given
from hypothesis import strategies as st

from ingest.fake import SPECIAL_TOKENS, ByteTokenizer
from ingest.model import Document, MediaType, Page
from ingest.tokenize import PAGE_SEPARATOR, tokenize

TOKENIZER = ByteTokenizer()


def document(*texts: str) -> Document:
    return Document(MediaType.TEXT, tuple(Page(i, None, text) for i, text in enumerate(texts, start=1)))


@given(st.lists(st.text(max_size=30), min_size=1, max_size=6))
def test_ranges_cover_the_pages_in_order_and_nothing_else(texts: list[str]):
    prefix, suffix = [256, 1, 2], [3, 257]
    tokenized = tokenize(document(*texts), TOKENIZER, prefix_ids=prefix, suffix_ids=suffix)
    assert tokenized.token_ids[:3] == prefix
    assert tokenized.token_ids[-2:] == suffix
    assert tokenized.pages[0].token_start == 3
    assert tokenized.pages[-1].token_end == tokenized.n_tokens - 2
    for page, text, following in zip(tokenized.pages, texts, [*tokenized.pages[1:], None], strict=True):
        ids = tokenized.token_ids[page.token_start : page.token_end]
        assert TOKENIZER.decode(ids) == (text + PAGE_SEPARATOR if text.strip() else "")
        assert following is None or following.token_start == page.token_end


def test_a_page_is_found_by_its_token():
    tokenized = tokenize(document("one", "", "three"), TOKENIZER, prefix_ids=[9], suffix_ids=[9])
    assert [tokenized.page_at(token) for token in (0, 1, 5, 6, 12, 13)] == [None, 1, 1, 3, 3, None]


def test_control_strings_in_a_document_are_plain_text():
    text = "".join(SPECIAL_TOKENS)
    tokenized = tokenize(document(text), TOKENIZER)
    assert max(tokenized.token_ids) < 256
    assert TOKENIZER.encode_template(text) == [256, 257, 258]
    assert TOKENIZER.decode([*TOKENIZER.encode_template(text), 0xE2, 0x82]) == text + "\ufffd"
