import pytest

from service.engine.exl2_engine.kernels.attend import query_tile


@pytest.mark.parametrize(
    ("queries", "head_dim", "capability", "tile"),
    [
        (1, 128, 90, 16),
        (17, 128, 90, 64),
        (17, 128, 80, 32),
        (40, 128, 90, 64),
        (1000, 128, 90, 128),
        (1000, 256, 90, 64),
        (1000, 128, 80, 64),
        (1000, 96, 80, 64),
        (1000, 64, 80, 128),
        (5, 64, 90, 16),
        (1000, 64, 90, 32),
    ],
)
def test_a_tile_holds_the_queries_and_fits_the_card(queries, head_dim, capability, tile):
    assert query_tile(queries, head_dim, capability) == tile
