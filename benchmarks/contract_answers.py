"""How many of the 40 questions about the example contract are answered rightly, through a server.

    python -m benchmarks.contract_answers [--model NAME_OR_PATH] [--kv-type k8v4]

Each question has a session of its own. An answer is right when one of the expected values is in it, or, for the six
questions that the contract does not answer, the refusal. Prints what was wrong, then a line of JSON; ends with status 1
when fewer than 36 are right.
"""

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.bench_report import ROOT, machine
from service.cli.config import read_settings
from tests.e2e.server import Server

CONTRACT = ROOT / "examples" / "contract"
AT_LEAST = 36
AT_ONCE = 2


def is_right(answer: str, values: Sequence[str]) -> bool:
    """Whether one of `values` is in the answer, wherever its lines break."""
    folded = re.sub(r"\s+", " ", answer).lower()
    return any(value.lower() in folded for value in values)


def ask_all(server: Server, questions: list[dict[str, Any]]) -> list[str]:
    """An answer to each question, none of which sees another."""
    document = server.ready((CONTRACT / "contract.pdf").read_bytes(), "contract.pdf")

    def ask(question: dict[str, Any]) -> str:
        return server.ask(server.session(document["id"]), question["question"], max_tokens=64)["answer"]

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(ask, questions))


def report(questions: list[dict[str, Any]], answers: list[str]) -> int:
    """Print what is wrong; the number of right answers."""
    right = [is_right(answer, question["values"]) for question, answer in zip(questions, answers, strict=True)]
    for question, answer, ok in zip(questions, answers, right, strict=True):
        if not ok:
            print(f"{question['id']} {question['question']} expected {question['values']}: {answer!r}")
    return sum(right)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=read_settings().model_dir)
    parser.add_argument("--kv-type", default="k8v4")
    arguments = parser.parse_args()
    questions = json.loads((CONTRACT / "questions.json").read_text("utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder) / "data", model=arguments.model, kv_type=arguments.kv_type)
        server.start()
        try:
            n_right = report(questions, ask_all(server, questions))
        finally:
            server.stop()
    figures = {"right": n_right, "of": len(questions), "kv_type": arguments.kv_type, "machine": machine()}
    print(json.dumps(figures))
    sys.exit(n_right < AT_LEAST)


if __name__ == "__main__":
    main()
