"""Questions by clients who leave in mid-answer: nothing grows, nothing is left. `benchmarks/soak.py`, short."""

from benchmarks.soak import Soak, small_document, table


def test_memory_descriptors_and_references_stay(tmp_path):
    with small_document(True, "", tmp_path / "data") as (server, document_id):
        report = Soak(server, document_id, max_tokens=24).run(96, 4, n_samples=6)
    print(table(report))
    assert report.answered + report.disconnected == 96
    assert report.disconnected >= 6
    assert report.faults() == []
