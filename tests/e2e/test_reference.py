"""The service in FP32 against plain transformers, against itself alone, and against a run that stored nothing."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from service.core.prompts import load_prompts
from service.engine.factory import resolve_dtype
from service.engine.tokenizer import Tokenizer
from tests.e2e.builds import build_killed_twice
from tests.e2e.server import ROOT, Server

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(600)]
LETTER = (ROOT / "examples" / "letter.txt").read_text(encoding="utf-8")
CONTRACT = (ROOT / "examples" / "contract" / "contract.md").read_text(encoding="utf-8")
N_PARITY_TOKENS = 4000
MAX_TOKENS = 40
END_ID = 2
QUESTIONS = [
    "How much does the repair cost?",
    "Who is the workshop foreman?",
    "How long is the crack in the soundboard?",
    "What is the salary of the foreman?",
]


def reference(what: str, **arguments: Any) -> Any:
    """The result of a part of `reference.py`, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.e2e.reference", what],
        cwd=ROOT,
        input=json.dumps(arguments),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


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
    # A processor that does not multiply BF16 natively takes many times as long: there, fewer and shorter answers.
    slow = compute_dtype not in ("float32", resolve_dtype("auto"))
    questions, max_tokens = (QUESTIONS[:2], 12) if slow else (QUESTIONS, MAX_TOKENS)
    server: Server = serve(model=demo_model, compute_dtype=compute_dtype, kv_type="fp16")
    document_id = server.ready(LETTER.encode())["id"]

    def ask(question: str) -> str:
        return server.ask(server.session(document_id), question, max_tokens=max_tokens)["answer"]

    alone = [ask(question) for question in questions]
    with ThreadPoolExecutor(len(questions)) as pool:
        together = list(pool.map(ask, questions))
    server.stop()
    assert together == alone or compute_dtype != "float32"
    prompts = load_prompts(demo_model)
    document = prompts.template.document(LETTER).ids
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


def test_a_build_killed_twice_has_the_bytes_and_logits_of_one_that_was_never_stored(serve, demo_model: Path):
    prompts = load_prompts(demo_model)
    starts = prompts.tokenizer.encode_plain_offsets(CONTRACT).starts
    text = CONTRACT[: starts[N_PARITY_TOKENS]]
    server: Server = serve(model=demo_model, compute_dtype="float32", kv_type="k8v4")
    document = build_killed_twice(server, text.encode())
    assert document["token_count"] >= N_PARITY_TOKENS
    (directory,) = (server.store / "snapshots").glob("*/documents/*/*")
    owner_id, _, document_id, fingerprint = directory.parts[-4:]
    server.stop()
    compared = reference(
        "never_stored",
        model_dir=str(demo_model),
        snapshots=str(server.store / "snapshots"),
        key=[owner_id, "document", document_id],
        fingerprint=fingerprint,
        kv_type="k8v4",
        question=prompts.template.question("Who represents the Council?"),
    )
    print(compared)
    assert compared["n_tokens"] == document["token_count"]
    assert compared["different_runs"] == 0
    assert compared["largest_difference"] <= 1e-3
