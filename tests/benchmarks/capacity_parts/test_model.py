"""The closed forms against those that are known, and the model against its simulator."""

import math
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.capacity_parts.holders import Popularity, held
from benchmarks.capacity_parts.inputs import Documents, Fleet, Inputs, Tiers, Traffic, Worker
from benchmarks.capacity_parts.model import Model, mixed_quantile
from benchmarks.capacity_parts.queueing import Line, erlang_b, erlang_c, line, worker

NO_LIMIT = 1 << 30
SIZES = (1000, 3000)
INPUTS = Inputs(
    Documents(24, ((0.5, SIZES[0]), (0.5, SIZES[1])), 100),
    Traffic(0, 0, question_tokens=24, answer_tokens=16, answer_cv=0.3),
    Worker(4, step_s=0.04, row_s=0.001, memory_nbytes=1.2e6, disk_bps=1e6, restore_s=0.01, prefill_s=1e-3),
    Fleet(1),
    Tiers(redis_nbytes=1e9, redis_s=0.02),
)


@pytest.mark.parametrize("load", [0.2, 0.5, 0.9])
def test_one_place_is_an_mm1_queue(load: float) -> None:
    one = line(1, load, 1.0, 1.0, NO_LIMIT)
    assert one.waits == pytest.approx(load)
    assert one.waits * one.wait_s == pytest.approx(load / (1 - load))


def test_services_of_one_length_wait_half_as_long() -> None:
    assert line(1, 0.5, 1.0, 0.0, NO_LIMIT).wait_s == pytest.approx(line(1, 0.5, 1.0, 1.0, NO_LIMIT).wait_s / 2)


def test_more_than_can_be_served_waits_for_ever_unless_a_limit_refuses_it() -> None:
    assert line(4, 5.0, 1.0, 1.0, NO_LIMIT).wait_s == math.inf
    bounded = line(1, 2.0, 1.0, 1.0, 3)  # M/M/1/3: weights 1, 2, 4, 8
    assert bounded.refused == pytest.approx(8 / 15)
    assert bounded.waits == pytest.approx((2 + 4) / 7)


def test_a_far_limit_is_none() -> None:
    assert line(4, 2.0, 1.0, 1.0, 190).wait_s == pytest.approx(line(4, 2.0, 1.0, 1.0, NO_LIMIT).wait_s, rel=1e-6)


def test_erlang() -> None:
    assert erlang_b(2, 1.0) == pytest.approx(0.2)
    assert erlang_c(2, 1.0) == pytest.approx(1 / 3)
    assert worker(2, 0, 0.8).full == pytest.approx(0.2, rel=0.01)
    patient = worker(1, 1, 2 / 3)  # M/M/1/2 at a load of 1: a third each
    assert (patient.full, patient.crowded, patient.waits) == pytest.approx((2 / 3, 1 / 3, 1 / 2), rel=0.02)
    assert patient.wait == pytest.approx(1.0)


def test_equally_popular_documents_are_found_by_the_share_of_them_that_fits() -> None:
    popularity = Popularity.zipf(1000, 0.0)
    found = held(popularity.share, popularity.count, 1, 250.0, lambda _: 0.0)
    assert (found.here * popularity.share * popularity.count).sum() == pytest.approx(0.25, rel=1e-3)


def test_a_least_recently_used_memory_follows_che() -> None:
    popularity = Popularity.zipf(100, 1.0)
    found = held(popularity.share, popularity.count, 1, 20.0, lambda _: 0.0)
    assert found.here == pytest.approx(-np.expm1(-popularity.share * found.lasting_s), rel=1e-6)
    assert found.here.sum() == pytest.approx(20.0, rel=1e-3)


def test_groups_of_ranks_stand_for_all_of_them() -> None:
    popularity, exact = Popularity.zipf(50_000, 0.8), np.arange(1, 50_001) ** -0.8
    assert popularity.count.sum() == 50_000
    assert (popularity.share * popularity.count).sum() == pytest.approx(1.0)
    assert popularity.share[:3] == pytest.approx(exact[:3] / exact.sum(), rel=1e-3)


def test_full_holders_make_copies_which_take_the_room_of_others() -> None:
    popularity = Popularity.zipf(100, 0.8)
    alone = held(popularity.share, popularity.count, 4, 40.0, lambda _: 0.0)
    spilled = held(popularity.share, popularity.count, 4, 40.0, lambda h: 0.3**h)
    of_all = popularity.share * popularity.count
    assert (popularity.count * spilled.copies).sum() == pytest.approx(40.0, rel=1e-3)
    assert (of_all * spilled.here).sum() < (of_all * alone.here).sum() - 0.1
    assert (spilled.copies <= 4).all()


def test_quantiles_of_a_mixture() -> None:
    waiting = Line(0.5, 2.0)
    assert mixed_quantile([(1.0, 1.0)], Line(0.0, 0.0), 0.95) == pytest.approx(1.0)
    assert mixed_quantile([(1.0, 1.0)], waiting, 0.95) == pytest.approx(1 + 2 * math.log(0.5 / 0.05))
    assert mixed_quantile([(0.9, 1.0), (0.1, 9.0)], Line(0.0, 0.0), 0.95) == pytest.approx(9.0)


def test_the_forecast_adds_up_and_grows_with_the_rate() -> None:
    model = Model(INPUTS)
    capacity = model.capacity()
    low, high = model.forecast(0.3 * capacity), model.forecast(0.8 * capacity)
    assert sum(low.shares.values()) == pytest.approx(1.0)
    assert low.rate == pytest.approx(0.3 * capacity)
    assert low.first_p50_s < high.first_p50_s
    assert low.first_p95_s < high.first_p95_s
    assert low.rate * low.place_s == pytest.approx(low.taken * 4, rel=1e-3)
    assert model.forecast(1.5 * capacity).first_p95_s == math.inf


def test_with_room_for_all_everything_is_resident() -> None:
    roomy = replace(INPUTS, worker=replace(INPUTS.worker, memory_nbytes=1e9))
    assert Model(roomy).forecast(1.0).shares["resident"] == pytest.approx(1.0)
