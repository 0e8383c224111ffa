"""The service against plain transformers, and against itself alone."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from service.core.prompts import Prompts, load_prompts
from service.engine.tokenizer import Tokenizer
from tests.e2e.referenced import reference
from tests.e2e.server import ROOT, Server

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(600)]
# Two paragraphs: a processor that does not multiply BF16 natively takes many times as long for each token of them.
TEXT = "\n\n".join((ROOT / "examples" / "letter.txt").read_text(encoding="utf-8").split("\n\n")[3:5])
COMPUTE_DTYPES = ("float32", "bfloat16")
MAX_TOKENS = 16
END_ID = 2
QUESTIONS = [
    "Who is the workshop foreman?",
    "How long is the crack in the soundboard?",
    "What is the salary of the foreman?",
]


@pytest.fixture(scope="module")
def prompts(demo_model: Path) -> Prompts:
    return load_prompts(demo_model)


@pytest.fixture(scope="module")
def expected(demo_model: Path, prompts: Prompts) -> list[dict[str, Any]]:
    """For each question, as `reference.generate` gives it."""
    document = prompts.template.document(TEXT).ids
    return reference(
        "generate",
        model_dir=str(demo_model),
        prompts=[document + prompts.template.question(question) for question in QUESTIONS],
        max_new=MAX_TOKENS,
        end_id=END_ID,
        compute_dtypes=COMPUTE_DTYPES,
    )


def differs_beyond_noise(
    answer: str, ids: list[int], gaps: list[float], noise: float, tokenizer: Tokenizer
) -> str | None:
    """Where an answer leaves the expected one though that had a clear favourite; None where it does not."""
    ids = [token for token in ids if token != END_ID]
    for n in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:n])
        if not answer.startswith(text.removesuffix("\ufffd")):
            gap = gaps[n - 1]
            return None if gap < 2 * noise else f"{answer!r}, not {text!r}...: gap {gap:.2g}, noise {noise:.2g}"
    return None if answer == tokenizer.decode(ids) else f"{answer!r} goes on after {tokenizer.decode(ids)!r}"


@pytest.mark.parametrize("compute_dtype", COMPUTE_DTYPES)
def test_greedy_answers_are_those_of_plain_transformers_alone_and_in_a_batch(
    serve, demo_model: Path, prompts: Prompts, expected: list[dict[str, Any]], compute_dtype: str
):
    server: Server = serve(model=demo_model, compute_dtype=compute_dtype, kv_type="fp16")
    document_id = server.ready(TEXT.encode())["id"]

    def ask(question: str) -> str:
        return server.ask(server.session(document_id), question, max_tokens=MAX_TOKENS)["answer"]

    alone = [ask(question) for question in QUESTIONS]
    with ThreadPoolExecutor(len(QUESTIONS)) as pool:
        together = list(pool.map(ask, QUESTIONS))
    server.stop()
    assert together == alone or compute_dtype != "float32"
    found = [
        differs_beyond_noise(answer, one["ids"], one["gaps"], one["noise"][compute_dtype], prompts.tokenizer)
        for answer, one in zip(alone + together, expected * 2, strict=True)
    ]
    assert [each for each in found if each] == []
