import pytest
import torch

from cache_store.codec import decode_records, encode_records
from cache_store.layout import KVLayout, KVType
from service.engine.fetch.index import SPAN_TOKENS, KeyIndex, looks_among

HEADS = [(2, 1), (0, 0), (2, 0)]
GROUP, ROWS = 3, 5


def made(kv_type, n_tokens, seed=0):
    """Layout, records per layer, and the decoded keys ``[n_layers, n_kv_heads, n_tokens, head_dim]``."""
    torch.manual_seed(seed)
    layout = KVLayout(n_layers=3, n_kv_heads=2, head_dim=64, kv_type=kv_type)
    keys = torch.empty(3, 2, n_tokens, 64)
    layers = []
    for layer in range(3):
        k, v = torch.randn(2, 2, n_tokens, 64)
        layers.append(memoryview(bytearray().join(encode_records(k, v, layout))))
        decode_records(layers[-1], n_tokens, layout, out_k=keys[layer], out_v=v, rotated=kv_type != KVType.FP16)
    return layout, layers, keys


def filled(kv_type, n_tokens):
    layout, layers, keys = made(kv_type, n_tokens)
    index = KeyIndex(layout, n_tokens, HEADS)
    for layer in index.layers:
        index.add(layer, 0, layers[layer], n_tokens)
    return index, keys


@pytest.mark.parametrize("kv_type", list(KVType))
@pytest.mark.parametrize("n_tokens", [1, 31, 300, 1024])
def test_masses_are_those_of_softmax_over_all_tokens(kv_type, n_tokens):
    index, keys = filled(kv_type, n_tokens)
    queries = torch.randn(len(HEADS), GROUP, ROWS, 64)
    wanted = torch.zeros(len(HEADS), GROUP, ROWS, -(-n_tokens // SPAN_TOKENS) * SPAN_TOKENS)
    for place, (layer, head) in enumerate(HEADS):
        wanted[place, ..., :n_tokens] = (queries[place] @ keys[layer, head].T).softmax(-1)
    wanted = wanted.unflatten(-1, (-1, SPAN_TOKENS)).sum(-1)
    torch.testing.assert_close(index.masses(queries), wanted, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(index.scores(queries), wanted.pow(0.7).mean((0, 1, 2)), rtol=1e-4, atol=1e-6)


def test_the_span_that_a_question_looks_at_comes_first():
    index, keys = filled(KVType.K8V4, 700)
    queries = torch.stack([keys[layer, head, 345] for layer, head in HEADS])[:, None, None]
    scores = index.scores(queries.expand(-1, GROUP, ROWS, -1))
    assert scores.shape == (44,)
    assert scores.argmax() == 345 // SPAN_TOKENS


def test_resident_tokens_do_not_count_for_their_span_but_take_their_share(monkeypatch):
    index, keys = filled(KVType.K8V4, 300)
    monkeypatch.setattr("service.engine.fetch.index._SLICE_TOKENS", 96)
    queries = torch.randn(len(HEADS), GROUP, ROWS, 64)
    wanted = torch.stack([(queries[i] @ keys[layer, head].T).softmax(-1) for i, (layer, head) in enumerate(HEADS)])
    resident = [(0, 40), (150, 290)]
    for first, last in resident:
        wanted[..., first:last] = 0
    spans = torch.nn.functional.pad(wanted, (0, 4)).unflatten(-1, (-1, SPAN_TOKENS)).sum(-1)
    torch.testing.assert_close(index.masses(queries, resident=resident), spans, rtol=1e-4, atol=1e-7)
    found = index.scores(queries, resident)
    assert (found == 0).tolist() == [True, True, *[False] * 8, *[True] * 8, False]


@pytest.mark.parametrize("kv_type", [KVType.K8V4, KVType.FP16])
def test_rows_add_up_to_the_figures_of_the_best_spans_of_all_documents(kv_type, monkeypatch):
    monkeypatch.setattr("service.engine.fetch.index.CANDIDATES", 12)
    indexes = [filled(kv_type, n_tokens)[0] for n_tokens in (300, 90)]
    queries = torch.randn(len(HEADS), GROUP, ROWS, 64)
    looks = looks_among(indexes, queries, [[(40, 150)], []])
    every = torch.cat([look.figures for look in looks])
    best = {divmod(int(place), 19) if place < 19 else (1, int(place) - 19) for place in every.topk(12).indices}
    assert {(number, int(place)) for number, look in enumerate(looks) for place in look.places} == best
    for look in looks:
        assert look.rows.shape == (len(HEADS) * GROUP * ROWS, len(look.places))
        torch.testing.assert_close(look.rows.sum(0), look.figures[look.places], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("kv_type", [KVType.K8V4, KVType.FP16])
def test_slices_give_what_one_piece_gives(kv_type, monkeypatch):
    index, _ = filled(kv_type, 1000)
    queries = torch.randn(len(HEADS), GROUP, ROWS, 64)
    whole = index.masses(queries), index.scores(queries)
    monkeypatch.setattr("service.engine.fetch.index._SLICE_TOKENS", 96)
    torch.testing.assert_close((index.masses(queries), index.scores(queries)), whole, rtol=1e-5, atol=1e-8)


def test_runs_of_blocks_land_where_their_tokens_are():
    layout, layers, _ = made(KVType.K8V4, 700)
    whole, pieces = (KeyIndex(layout, 700, HEADS) for _ in range(2))
    size = layout.record_nbytes(256)
    for layer in whole.layers:
        whole.add(layer, 0, layers[layer], 700)
        pieces.add(layer, 512, layers[layer][2 * size :].toreadonly(), 188)
        pieces.add(layer, 0, layers[layer][: 2 * size], 512)
    queries = torch.randn(len(HEADS), GROUP, ROWS, 64)
    assert torch.equal(whole.masses(queries), pieces.masses(queries))
    assert whole.nbytes == 700 * 3 * (64 + 4)


def test_what_does_not_fit_is_refused():
    layout, layers, _ = made(KVType.K8V4, 300)
    with pytest.raises(ValueError, match="no KV head 2"):
        KeyIndex(layout, 300, [(0, 2)])
    index = KeyIndex(layout, 300, HEADS)
    with pytest.raises(ValueError, match="bytes of records"):
        index.add(0, 0, layers[0], 299)
    with pytest.raises(ValueError, match="not in a document"):
        index.add(0, 256, layers[0], 300)
    with pytest.raises(ValueError, match="do not fit 3 index heads"):
        index.scores(torch.zeros(2, GROUP, ROWS, 64))


@pytest.mark.parametrize("n_tokens", [300, 1000])
def test_long_questions_are_scored_piece_by_piece(n_tokens, monkeypatch):
    index, _ = filled(KVType.K8V4, n_tokens)
    queries = torch.randn(len(HEADS), GROUP, 50, 64)
    whole = index.scores(queries, [(0, 100)])
    largest = 0

    def softmax(scores, dim, of=torch.Tensor.softmax):
        nonlocal largest
        largest = max(largest, scores.numel())
        return of(scores, dim)

    monkeypatch.setattr(torch.Tensor, "softmax", softmax)
    monkeypatch.setattr("service.engine.fetch.index._PIECE", 3000)
    torch.testing.assert_close(index.scores(queries, [(0, 100)]), whole, rtol=1e-5, atol=1e-7)
    assert 1500 < largest < 4000


@pytest.mark.parametrize("kv_type", list(KVType))
def test_a_document_with_none_of_the_best_spans_has_no_rows(kv_type):
    (one, _), (other, _) = filled(kv_type, 2000), filled(kv_type, 16)
    first, second = looks_among([one, other], torch.randn(len(HEADS), GROUP, ROWS, 64), [[], [(0, 16)]])
    assert (len(first.places), len(second.places)) == (64, 0)
    assert second.rows.shape == (len(HEADS) * GROUP * ROWS, 0)
    assert float(first.rows.sum()) > 0


def test_rows_of_long_questions_are_those_of_pieces(monkeypatch):
    index, _ = filled(KVType.K8V4, 300)
    queries = torch.randn(len(HEADS), GROUP, 50, 64)
    (whole,) = looks_among([index], queries, [[(0, 100)]])
    monkeypatch.setattr("service.engine.fetch.index._PIECE", 3000)
    (pieces,) = looks_among([index], queries, [[(0, 100)]])
    one, other = (look.rows[:, look.places.argsort()] for look in (whole, pieces))
    torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-7)


def test_keys_can_move_to_a_device():
    index, _ = filled(KVType.K8V4, 300)
    nbytes = index.nbytes
    index.move_to(torch.device("meta"))
    assert (index.device, index.nbytes) == (torch.device("meta"), nbytes)
