import pytest

from service.core.admission import Admission
from service.errors import Busy, Conflict


def test_one_answer_at_a_time_per_session() -> None:
    admission = Admission(8)
    ticket = admission.enter("a")
    with pytest.raises(Conflict) as refused:
        admission.enter("a")
    assert refused.value.code == "session_busy"
    ticket.leave()
    admission.enter("a")


def test_the_bound_holds_over_all_sessions() -> None:
    admission = Admission(2)
    tickets = [admission.enter("a"), admission.enter("b")]
    with pytest.raises(Busy) as refused:
        admission.enter("c")
    assert refused.value.retry_after_s >= 1
    tickets[0].leave()
    admission.enter("c")
    assert admission.admitted == 2


def test_leaving_twice_frees_one_place() -> None:
    admission = Admission(2)
    first, _ = admission.enter("a"), admission.enter("b")
    first.leave()
    again = admission.enter("a")
    first.leave()
    assert admission.admitted == 2
    again.leave()
    assert admission.admitted == 1


@pytest.mark.parametrize(
    ("seconds", "parallel", "expected"), [(9.0, 1, 9), (9.0, 3, 3), (0.01, 4, 1), (9000.0, 1, 120)]
)
def test_retry_after_follows_recent_answers(seconds: float, parallel: int, expected: int) -> None:
    admission = Admission(4, parallel=lambda: parallel)
    for _ in range(5):
        admission.enter("a").leave(seconds)
    assert admission.retry_after_s() == expected
