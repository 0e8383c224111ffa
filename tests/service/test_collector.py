import gc

import pytest

from service.collector import starting


def test_what_a_start_made_is_not_walked_again():
    frozen = gc.get_freeze_count()
    with starting():
        assert not gc.isenabled()
        made = [[] for _ in range(1000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() >= frozen + len(made)
    gc.unfreeze()


def test_a_failed_start_leaves_the_collector_on():
    with pytest.raises(RuntimeError), starting():
        raise RuntimeError
    assert gc.isenabled()
    gc.unfreeze()
