"""What the engine is told of the settings."""

import pytest

from service.core.engines import engine_config
from service.settings import Settings


def test_rounds_of_fetch_reach_the_engine(tmp_path):
    assert engine_config(Settings(data_dir=tmp_path)).fetch_rounds == 1
    assert engine_config(Settings(data_dir=tmp_path, fetch_rounds=2)).fetch_rounds == 2


@pytest.mark.parametrize("rounds", [0, 3])
def test_rounds_of_fetch_are_one_or_two(tmp_path, rounds):
    with pytest.raises(ValueError, match="fetch_rounds"):
        Settings(data_dir=tmp_path, fetch_rounds=rounds)
