"""What counts of answers that run at once."""

from collections.abc import Sequence
from typing import Any, cast

import pytest

from service.bench.talk import TRIES, Answered, Talk
from service.engine.protocol import EngineLost


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def answer(texts: list[float], tokens: int = 0) -> Answered:
    return Answered("gpu", 0.1, 0.0, tokens or len(texts), texts)


def paced(began: float, step_s: float, tokens: int) -> list[float]:
    return [began + i * step_s for i in range(tokens)]


class Told(Talk):
    """Has these answers, one list after another."""

    def __init__(self, *answers: list[Answered]) -> None:
        super().__init__(cast("Any", None), "bench", 240)
        self.answers = list(answers)

    async def all_at_once(self, names: Sequence[str], max_tokens: int) -> list[Answered]:
        return self.answers.pop(0)


@pytest.mark.anyio
async def test_only_what_comes_while_all_answers_run_counts() -> None:
    """One begins late and ends early; the other is fast before that and slow after it."""
    one = answer(paced(0.0, 0.05, 10) + paced(0.5, 0.1, 11) + paced(1.6, 0.2, 10))
    two = answer(paced(0.5, 0.1, 11))
    assert await Told([one, two]).together(["a", "b"], 11) == pytest.approx(20)


@pytest.mark.anyio
async def test_texts_of_several_tokens_count_for_as_many() -> None:
    one = answer(paced(0.0, 0.2, 11), tokens=21)  # two in each but the first
    two = answer(paced(0.1, 0.1, 11))
    assert await Told([one, two]).together(["a", "b"], 11) == pytest.approx(20)


@pytest.mark.anyio
async def test_one_answer_counts_from_its_first_text_to_its_last() -> None:
    assert await Told([answer(paced(3.0, 0.1, 11))]).together(["a"], 11) == pytest.approx(10)


@pytest.mark.anyio
async def test_answers_that_never_run_at_once_are_asked_for_again() -> None:
    apart = [answer(paced(0.0, 0.1, 11)), answer(paced(2.0, 0.1, 11))]
    both = [answer(paced(0.0, 0.1, 11)), answer(paced(0.0, 0.1, 11))]
    assert await Told(apart, both).together(["a", "b"], 11) == pytest.approx(20)
    with pytest.raises(EngineLost, match="over before the last one had begun"):
        await Told(*[apart] * TRIES).together(["a", "b"], 11)
