"""`make chaos` in small: one round in a small world, and that the visitors notice what is wrong."""

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from tests.chaos.faults import FAULTS
from tests.chaos.run import Chaos
from tests.chaos.visitor import Violation, Visitor
from tests.chaos.world import World


@pytest.mark.timeout(600)
def test_nothing_is_lost_in_a_small_world(tmp_path: Path) -> None:
    with World(tmp_path, n_apis=1, n_workers=1) as world:
        chaos = Chaos(world, Random(5), n_visitors=1)
        chaos.round(FAULTS["kill_redis"])
        chaos.ask_again()
        known = chaos.documents[0]
        assert known.answers[0] != known.answers[1]
        visitor = Visitor(world, 1)
        with pytest.raises(Violation, match="wrong"):
            visitor.ask(replace(known, answers=known.answers[::-1]))
        with pytest.raises(Violation, match="refused for good: 404"):
            visitor.ask(replace(known, document_id="doc_none"))
