"""A second round of fetch: what the best passage names is looked for, when it stands elsewhere too."""

import pytest
from msgspec.structs import replace

from service.engine.messages import Retention
from tests.service.engine.host.windowed import MARK, built

N_TOKENS = 1200
NAME = [401, 402, 403]
FIRST, SECOND = 300, 900
RETENTION = Retention(sink_tokens=8, summary_tokens=0, window_tokens=40, segment_tokens=512, fetch_tokens=192)


def linked(name_at_second: list[int]) -> list[int]:
    """A document of tokens that do not come again; the mark and a name at one place, the name far away."""
    tokens = [1000 + i for i in range(N_TOKENS)]
    tokens[FIRST : FIRST + 4] = [MARK, *NAME]
    tokens[SECOND : SECOND + len(name_at_second)] = name_at_second
    return tokens


def ask(lab, tokens, rounds, retention=RETENTION, prompt=(MARK,)):
    lab.start(rounds=rounds)
    built(lab.build(tokens=tokens, retention=retention))
    return lab.started(lab.ask(prompt, tokens=tokens, retention=retention, kv_id=""))


def holds(started, token: int) -> bool:
    return any(span.first <= token < span.first + span.n_tokens for span in started.spans)


@pytest.mark.parametrize("rounds", [1, 2])
def test_the_second_place_is_found_by_what_the_first_names(lab, rounds):
    started = ask(lab, linked(NAME), rounds)
    assert holds(started, FIRST)
    assert holds(started, SECOND) is (rounds == 2)
    assert sum(span.n_tokens for span in started.spans) <= RETENTION.fetch_tokens
    assert (started.second_pass_tokens > 0) is (rounds == 2)
    assert (started.first_pass_tokens, started.prefilled_tokens) == (1, 1)


def test_nothing_is_computed_again_when_nothing_stands_elsewhere(lab):
    tokens = linked([])
    assert ask(lab, tokens, 2).second_pass_tokens == 0
    assert ask(lab, tokens, 2).spans == ask(lab, tokens, 1).spans


def test_a_name_that_the_question_has_is_no_reason_to_look_again(lab):
    assert ask(lab, linked(NAME), 2, prompt=(MARK, *NAME, 1)).second_pass_tokens == 0


def test_the_passage_is_no_longer_than_what_may_be_fetched(lab):
    started = ask(lab, linked(NAME), 2, replace(RETENTION, fetch_tokens=48))
    assert started.second_pass_tokens <= 48
