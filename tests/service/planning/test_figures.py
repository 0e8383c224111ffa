"""The figures that practitioners reported of one V100 with 16 GB, as this program computes them."""

import pytest

from cache_store.layout import KVType
from service.core.wishes import Kept
from service.engine.exl2_engine.scratch import Shape
from service.planning.cards import CARDS
from service.planning.estimates import bandwidth_bound
from service.planning.model import Dimensions, from_dimensions
from service.planning.plan import make_plan
from service.planning.request import Wanted, codes_nbytes

V100 = CARDS["v100-16"]
THEIRS = Dimensions(layers=40, kv_heads=4, head_dim=128, params_b=27, bits=4)
SHAPE = from_dimensions(THEIRS).shape


@pytest.mark.parametrize(("weights_gb", "tok_s"), [(13.5, 66.67), (14.3, 62.9), (12.7, 70.9), (54, 16.7)])
def test_decode_is_bounded_by_the_bytes_of_the_weights(weights_gb: float, tok_s: float) -> None:
    assert bandwidth_bound(900, weights_gb * 1e9) == pytest.approx(tok_s, abs=0.05)
    model = from_dimensions(Dimensions(40, 4, 128, weights_gb=weights_gb, params_b=27))
    plan, _ = make_plan(model, V100, Wanted(context=8192, kv_type=KVType.K4V4))
    assert plan.bounds[0].context == 0
    assert plan.bounds[0].tok_s == pytest.approx(tok_s, abs=0.05)


@pytest.mark.parametrize(("bits", "kib", "gib"), [(16, 80, 20), (8, 40, 10), (4, 20, 5)])
def test_a_token_of_kv_takes_what_its_dimensions_say(bits: int, kib: int, gib: int) -> None:
    assert codes_nbytes(SHAPE, bits) == kib * 1024
    assert codes_nbytes(SHAPE, bits) * 256 * 1024 == gib << 30


@pytest.mark.parametrize(("kv_type", "codes", "stored"), [("k8v8", 40, 42.5), ("k8v4", 30, 32.5), ("k4v4", 20, 22.5)])
def test_what_is_stored_has_scales_beside_the_codes(kv_type: str, codes: float, stored: float) -> None:
    plan, _ = make_plan(from_dimensions(THEIRS), V100, Wanted(context=262_144, kv_type=KVType(kv_type)))
    assert plan.kv_bytes_per_token.codes == codes * 1024
    assert plan.kv_bytes_per_token.stored == stored * 1024
    assert plan.snapshot_nbytes == stored * 1024 * 262_144


def test_27b_of_8_bits_does_not_fit_16_gb() -> None:
    model = from_dimensions(Dimensions(40, 4, 128, params_b=27, bits=8))
    plan, ledger = make_plan(model, V100, Wanted(context=2048, kv_type=KVType.K4V4))
    assert not plan.fits
    assert "the model does not fit the card" in plan.problems[0]
    assert ledger.overdrawn_nbytes > 10 << 30


def test_27b_with_a_window_of_128k_and_slots_is_found_a_setting_for() -> None:
    kept = Kept(16, 1024, 131_072)
    plan, _ = make_plan(from_dimensions(THEIRS), V100, Wanted(context=262_144, kv_type=KVType.K4V4, kept=kept))
    best = plan.settings[0]
    assert (best.kv_type, best.retention) == ("k4v4", "16+1024+131072")
    assert best.rows == 256 + 1024 + 131_072
    assert best.bits >= 2.5
    bound = 900e9 / (27e9 * best.bits / 8 + best.rows * 22.5 * 1024)
    assert best.tok_s == pytest.approx(bound, rel=0.001)
    found = from_dimensions(Dimensions(40, 4, 128, params_b=27, bits=best.bits))
    wanted = Wanted(262_144, KVType.K4V4, kept, reserve_nbytes=best.reserve_nbytes)
    assert make_plan(found, V100, wanted)[0].fits


def test_128k_of_4_bit_kv_leave_most_of_the_short_contexts_speed() -> None:
    """The reports call 25 to 30 tokens a second at 128K physics."""
    plan, _ = make_plan(from_dimensions(THEIRS), V100, Wanted(context=131_072, kv_type=KVType.K4V4))
    at = {bound.context: bound.tok_s for bound in plan.bounds}
    assert 0.8 < at[131_072] / at[0] < 0.84
    assert at[131_072] > 50


def test_users_of_one_document_share_one_read_of_it() -> None:
    one, many, apart = (
        make_plan(from_dimensions(THEIRS), CARDS["h200"], Wanted(131_072, users=n, documents=d))[0].bounds[3]
        for n, d in ((1, 1), (8, 1), (8, 8))
    )
    assert many.total_tok_s == pytest.approx(8 * one.tok_s)
    assert apart.nbytes - one.nbytes == 7 * 131_072 * 32.5 * 1024


def test_shapes_are_guessed_near_those_that_models_have() -> None:
    assert SHAPE.n_heads % SHAPE.n_kv_heads == 0
    assert SHAPE.hidden % 128 == 0
    layers = SHAPE.n_layers * (
        2 * SHAPE.hidden * SHAPE.head_dim * (SHAPE.n_heads + SHAPE.n_kv_heads) + 3 * SHAPE.hidden * SHAPE.intermediate
    )
    assert layers == pytest.approx(27e9, rel=0.03)
    given = from_dimensions(Dimensions(40, 4, 128, params_b=27, bits=4, heads=32, hidden=4096, intermediate=9000))
    assert given.shape == Shape(4096, 9000, 40, 32, 4, 128, given.shape.vocab)


def test_a_plan_counts_as_the_engine_does() -> None:
    """The engine's own constants are beside torch, which a plan does not import."""
    from service.engine.exl2_engine import exllama_loading, prefill_attention, replay, runner, tail_records
    from service.engine.exl2_engine.ledger import Sizes
    from service.engine.factory import EngineConfig
    from service.engine.torch_engine.ledger import CHUNK_TOKENS
    from service.engine.torch_engine.runner import CHUNK_TOKENS as TORCH_CHUNK_TOKENS
    from service.planning import ledgers, request

    sizes, config = Sizes(max_context=1, n_slots=1, tail_tokens=1), EngineConfig(store_dir="")
    assert ledgers.EXL2_ROPE_ROWS == exllama_loading.ROPE_ROWS
    assert sizes.chunk_tokens == runner.CHUNK_TOKENS
    assert sizes.logit_rows == runner.HEAD_ROWS
    assert sizes.piece_tokens == prefill_attention.PIECE_TOKENS
    assert sizes.replay_scores == replay.SCORES
    assert sizes.import_nbytes == tail_records.IMPORT_NBYTES
    assert (config.idle_tails, config.index_budget_nbytes) == (request.IDLE_TAILS, request.INDEX_NBYTES)
    assert Wanted().tail_tokens == config.tail_tokens
    assert CHUNK_TOKENS == TORCH_CHUNK_TOKENS


def test_prefill_is_estimated_near_what_the_h200_did() -> None:
    """7,284 tokens a second for 32K of the 27B-shaped model as a job (docs/performance.md), 7,100 for 8K as shipped."""
    given = Dimensions(64, 8, 128, params_b=26.5, bits=4, heads=40, hidden=5120, intermediate=21504, vocab=152_064)
    plan, _ = make_plan(from_dimensions(given), CARDS["h200"], Wanted(context=32_768))
    assert 5500 < plan.prefill.tok_s < 8000
    assert plan.restore[0].times_faster > 50
