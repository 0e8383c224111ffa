"""A runner that cannot give or cut a tail, for want of memory say, costs no slot: the next answers have all of them."""

from unittest.mock import Mock

import pytest

from service.engine.host.draft.seats import Seats
from service.engine.host.tails import TailPool
from service.engine.messages import DocumentRef

A, B = DocumentRef("own", "a"), DocumentRef("own", "b")
N = 2


class Tails:
    """What pools ask of a runner and a scheduler."""

    def __init__(self):
        self.limits = Mock(n_slots=N + 1)
        self.taken = set()
        self.fails = False

    def run(self, function, *arguments):
        return function(*arguments)

    def new_tail(self):
        self.check()
        slot = next(i for i in range(N + 1) if i not in self.taken)
        self.taken.add(slot)
        return slot

    def truncate_tail(self, slot, n_tokens):
        self.check()

    def free_tail(self, slot):
        self.taken.remove(slot)

    def check(self):
        if self.fails:
            raise MemoryError


def pools(kind):
    """A runner, how a tail of it is taken, and from where."""
    tails = Tails()
    if kind == "draft":
        pool = Seats(tails, tails, N)
        return tails, pool.take, pool
    pool = TailPool(tails, tails)
    return tails, lambda *what: pool.take(*what, []), pool


@pytest.mark.parametrize("kind", ["main", "draft"])
def test_a_tail_that_cannot_be_made_costs_no_slot(kind):
    tails, take, _ = pools(kind)
    tails.fails = True
    for i in range(N + 1):
        with pytest.raises(MemoryError):
            take(f"s{i}", A, "digest")
    tails.fails = False
    assert len({take(f"s{i}", A, "digest").slot for i in range(N)}) == N


@pytest.mark.parametrize("kind", ["main", "draft"])
@pytest.mark.parametrize("session", ["s0", "other"])
def test_a_tail_that_cannot_be_cut_for_another_document_costs_no_slot(kind, session):
    tails, take, pool = pools(kind)
    for held in [take(f"s{i}", A, "digest") for i in range(N)]:
        pool.keep(held)
    tails.fails = True
    for _ in range(N + 1):
        with pytest.raises(MemoryError):
            take(session, B, "digest")
    tails.fails = False
    assert len({take(f"n{i}", B, "digest").slot for i in range(N)}) == N
