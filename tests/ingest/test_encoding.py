"""Encodings of text files, from a few bytes and from many, without being told."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingest.encoding import decode, looks_binary

CHINESE = "本合同由甲方与乙方于二〇二四年三月五日签订。合同总价为人民币三百二十万元整，分四期支付。\n"
GERMAN = "Der Vertrag wurde in München geschlossen. Die Gebühr beträgt 300 €, fällig „sofort“ – größer.\n"
SAMPLES: dict[str, tuple[str, list[str]]] = {
    "Chinese": (CHINESE, ["gb18030", "utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be"]),
    "traditional Chinese": ("本合約由甲方與乙方於三月五日簽訂，合約總價為三百二十萬元。", ["big5"]),
    "Chinese with rare hanzi and emoji": (CHINESE + "\U00020000\N{GRINNING FACE}䶮", ["gb18030"]),
    "two hanzi": ("你好", ["gb18030", "utf-8"]),
    "Chinese with digits": ("合同编号：12", ["gb18030", "utf-16-le", "utf-16-be"]),
    "German": (GERMAN, ["cp1252", "utf-8", "utf-16", "utf-16-le", "utf-16-be", "utf-32"]),
    "one accent": ("Café", ["latin-1", "utf-8", "utf-16", "utf-16-le", "utf-16-be"]),
    "French": ("L'été, où l'élève naïf reçoit ses 1 200 €.", ["cp1252"]),
    "Icelandic": ("Samningurinn var gerður í Reykjavík, það er þýðing.", ["latin-1"]),
    "Polish": ("Umowa została zawarta między stronami. Łączna kwota wynosi trzysta złotych.", ["cp1250"]),
    "Russian": ("Договор заключён двенадцатого марта. Сумма договора три миллиона.", ["cp1251", "utf-16-le"]),
    "Greek": ("Η σύμβαση υπογράφηκε στην Αθήνα. Το ποσό είναι τριακόσια ευρώ.", ["cp1253"]),
    "Japanese": (
        "本契約は東京において締結され、総額は三百万円とする。契約期間は二年です。",
        ["cp932", "euc_jp"],
    ),
    "Korean": ("본 계약은 서울에서 체결되었으며 총 금액은 삼백만 원입니다.", ["euc_kr", "utf-16-be"]),
    "emoji": ("Contract \N{GRINNING FACE} ok", ["utf-8", "utf-16-le", "utf-16-be"]),
    "ASCII": ("plain", ["ascii"]),
}
CASES = [(name, encoding) for name, (_, encodings) in SAMPLES.items() for encoding in encodings]


@pytest.mark.parametrize("times", [1, 40])
@pytest.mark.parametrize(("name", "encoding"), CASES)
def test_text_is_read_in_the_encoding_it_was_written_in(name: str, encoding: str, times: int):
    text = SAMPLES[name][0] * times
    decoded = decode(text.encode(encoding))
    assert decoded is not None
    assert decoded.text == text


def test_a_guess_says_so():
    decoded = decode(SAMPLES["Russian"][0].encode("cp1251"))
    assert decoded is not None
    assert decoded.warning == "The file does not say its encoding; it was read as cp1251."


def test_a_few_broken_bytes_do_not_change_the_encoding():
    decoded = decode((GERMAN * 20).encode() + b"\xff and on")
    assert decoded is not None
    assert decoded.encoding == "utf-8"
    assert decoded.warning == "1 characters are not valid UTF-8 and were replaced by U+FFFD."


def test_a_replacement_character_in_the_file_is_not_a_loss():
    decoded = decode("a \ufffd b".encode())
    assert decoded is not None
    assert decoded.warning is None


@pytest.mark.parametrize("data", [bytes(range(256)) * 20, b"\x00\x01\x02\x03" * 200, b"\x80\x00\xff\x07" * 100])
def test_binary_data_is_not_text(data: bytes):
    decoded = decode(data)
    assert decoded is None or looks_binary(decoded.text)


@given(st.binary(max_size=400))
def test_any_bytes_decode_or_are_refused(data: bytes):
    decoded = decode(data)
    assert decoded is None or isinstance(decoded.text, str)


@given(st.text(st.characters(exclude_categories=["Cs", "Cc", "Co", "Cn"]), max_size=200))
def test_all_text_survives_as_utf_8(text: str):
    decoded = decode(b"\xef\xbb\xbf" + text.encode())
    assert decoded is not None
    assert decoded.text == text
