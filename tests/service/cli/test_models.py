"""Lines of `preread models`."""

import pytest

from service.cli.models import lines


@pytest.mark.parametrize(
    ("quantization", "said", "where"),
    [
        (
            "gguf-MOSTLY_Q8_0",
            "gguf-MOSTLY_Q8_0 (llamacpp engine)",
            "context 64; KV: fp16 only until `preread models measure m` has run; documents are kept whole",
        ),
        ("exl2-4.0bpw", "exl2-4.0bpw (exl2 engine)", "has run on a machine with an NVIDIA card"),
        ("none", "m.gguf, context", "has run; "),
    ],
)
def test_the_engine_that_alone_serves_the_weights_is_named(quantization: str, said: str, where: str) -> None:
    row = {
        "name": "m", "error": None, "source": "m.gguf", "quantization": quantization, "conversion": None,
        "kv_types": {}, "max_context": 64, "index_heads": [],
    }  # fmt: skip
    (line,) = lines(row)
    assert said in line
    assert where in line
