"""The service against plain transformers, and against itself alone."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from service.core.prompts import load_prompts
from service.engine.factory import resolve_dtype
from service.engine.tokenizer import Tokenizer
from tests.e2e.referenced import reference
from tests.e2e.server import ROOT, Server

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(600)]
PARAGRAPHS = (ROOT / "examples" / "letter.txt").read_text(encoding="utf-8").split("\n\n")
MAX_TOKENS = 40
END_ID = 2
QUESTIONS = [
    "Who is the workshop foreman?",
    "How long is the crack in the soundboard?",
    "How much does the repair cost?",
    "What is the salary of the foreman?",
]


def differs_beyond_noise(answer: str, expected: dict[str, Any], tokenizer: Tokenizer) -> str | None:
    """Where an answer leaves the expected one though that had a clear favourite; None where it does not."""
    ids = [token for token in expected["ids"] if token != END_ID]
    for n in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:n])
        if not answer.startswith(text.removesuffix("\ufffd")):
            gap, noise = expected["gaps"][n - 1], expected["noise"]
            return None if gap < 2 * noise else f"{answer!r}, not {text!r}...: gap {gap:.2g}, noise {noise:.2g}"
    return None if answer == tokenizer.decode(ids) else f"{answer!r} goes on after {tokenizer.decode(ids)!r}"


@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
def test_greedy_answers_are_those_of_plain_transformers_alone_and_in_a_batch(
    serve, demo_model: Path, compute_dtype: str
):
    # A processor that does not multiply BF16 natively takes many times as long: there, fewer and shorter answers
    # about what has them.
    slow = compute_dtype not in ("float32", resolve_dtype("auto"))
    questions, max_tokens, last = (QUESTIONS[:2], 12, 5) if slow else (QUESTIONS, MAX_TOKENS, 6)
    text = "\n\n".join(PARAGRAPHS[3:last])
    server: Server = serve(model=demo_model, compute_dtype=compute_dtype, kv_type="fp16")
    document_id = server.ready(text.encode())["id"]

    def ask(question: str) -> str:
        return server.ask(server.session(document_id), question, max_tokens=max_tokens)["answer"]

    alone = [ask(question) for question in questions]
    with ThreadPoolExecutor(len(questions)) as pool:
        together = list(pool.map(ask, questions))
    server.stop()
    assert together == alone or compute_dtype != "float32"
    prompts = load_prompts(demo_model)
    document = prompts.template.document(text).ids
    expected = reference(
        "generate",
        model_dir=str(demo_model),
        prompts=[document + prompts.template.question(question) for question in questions],
        max_new=max_tokens,
        end_id=END_ID,
        compute_dtype=compute_dtype,
    )
    compared = zip(alone + together, expected * 2, strict=True)
    assert [found for pair in compared if (found := differs_beyond_noise(*pair, prompts.tokenizer))] == []
