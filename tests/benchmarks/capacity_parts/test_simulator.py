"""The simulator where one can count along, and the model against it."""

from dataclasses import replace

import pytest

from benchmarks.capacity_parts.inputs import Fleet, Inputs
from benchmarks.capacity_parts.measures import measured
from benchmarks.capacity_parts.model import Model
from benchmarks.capacity_parts.simulator import Simulator
from benchmarks.capacity_parts.trace import Asked, poisson
from tests.benchmarks.capacity_parts.test_model import INPUTS, SIZES

ALL_SIZES = [SIZES[n % 2] for n in range(INPUTS.documents.n)]


def simulator(inputs: Inputs) -> Simulator:
    return Simulator(inputs, ALL_SIZES, [n % inputs.fleet.workers for n in range(len(ALL_SIZES))])


def test_a_question_alone_takes_its_steps() -> None:
    one, again = simulator(INPUTS).run([Asked(1.0, 23, 5), Asked(10.0, 23, 5)])
    first_s = INPUTS.fleet.api_s + 0.04 + 25 * 0.001
    assert one.source == again.source == "resident"
    assert one.first_s == pytest.approx(first_s)
    assert one.total_s == pytest.approx(first_s + 4 * 0.041)


def test_what_left_the_memory_comes_back_from_the_disk() -> None:
    one, again = simulator(INPUTS).run([Asked(1.0, 1, 5), Asked(10.0, 1, 5)])
    assert one.source == "disk"
    assert again.source == "resident"
    assert one.first_s - again.first_s == pytest.approx(INPUTS.bring_s("disk", SIZES[1]))


def test_four_at_once_and_the_fifth_waits() -> None:
    served = simulator(INPUTS).run([Asked(1.0, 23, 5)] * 5)
    assert len({round(one.first_s, 6) for one in served[:4]}) < 4
    assert served[4].first_s > max(one.total_s for one in served[:4])


def test_when_its_holder_is_full_another_worker_gets_a_copy() -> None:
    two = simulator(replace(INPUTS, fleet=fleet_of(2)))
    served = two.run([Asked(1.0, 23, 20)] * 6)
    assert {one.worker for one in served} == {0, 1}
    assert [one.source for one in served].count("redis") == 1
    assert 23 in two.workers[0].memory
    assert 23 in two.workers[1].memory


def test_what_is_too_much_is_refused() -> None:
    bounded = simulator(replace(INPUTS, fleet=replace(INPUTS.fleet, queue_limit=5)))
    served = bounded.run([Asked(1.0, 23, 5)] * 7)
    assert [bool(one.source) for one in served] == [True] * 5 + [False] * 2


@pytest.mark.parametrize(("workers", "load"), [(1, 0.5), (3, 0.6)])
def test_the_model_says_what_the_simulator_does(workers: int, load: float) -> None:
    inputs = replace(INPUTS, fleet=fleet_of(workers))
    model, seconds = Model(inputs), 500.0
    rate = load * model.capacity()
    told = model.forecast(rate)
    seen = measured(simulator(inputs).run(poisson(rate, seconds, len(ALL_SIZES), 0.8, (8, 24), 1)), seconds, 20)
    assert told.rate == pytest.approx(seen.rate, rel=0.1)
    assert told.first_mean_s == pytest.approx(seen.first_mean_s, rel=0.25)
    assert told.shares["resident"] == pytest.approx(seen.shares["resident"], rel=0.2)


def fleet_of(workers: int) -> Fleet:
    return replace(INPUTS.fleet, workers=workers)
