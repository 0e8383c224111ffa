"""Questions by clients who leave in mid-answer: nothing grows, nothing is left. `benchmarks/soak.py`, short."""

from benchmarks.soak import Soak, small_document, table


def test_memory_descriptors_and_references_stay(tmp_path):
    with small_document(True, "", tmp_path / "data") as (server, document_id):
        report = Soak(server, document_id, max_tokens=40).run(144, 4, n_samples=6)
    print(table(report))
    assert report.answered + report.disconnected == 144
    assert report.disconnected >= 10
    assert report.faults() == []
