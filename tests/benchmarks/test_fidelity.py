"""The fidelity harness: its parts on made-up input, and a short run on the demo model."""

import random
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.fidelity_parts import facts, keep, texts
from benchmarks.fidelity_parts.documents import make_documents
from benchmarks.fidelity_parts.fetch import SPAN_TOKENS, chosen
from benchmarks.fidelity_parts.keep import Budget
from benchmarks.fidelity_parts.measure import Outcome, everything
from benchmarks.fidelity_parts.methods import Measured, Trial
from benchmarks.fidelity_parts.page import section
from benchmarks.fidelity_parts.plot import plot
from benchmarks.fidelity_parts.reader import KV, Ask, Reader
from benchmarks.fidelity_parts.replays import Wording
from benchmarks.fidelity_parts.summary import Collected, Report


@pytest.mark.parametrize("ratio", [1, 2, 4, 8, 16, 32])
def test_a_budget_is_exactly_its_share_of_the_rows(ratio: int) -> None:
    budget = Budget.of(3000, ratio)
    assert budget.rows == 3000 // ratio
    assert min(budget.sinks, budget.slots, budget.window) > 0
    assert int(budget.always(torch.device("cpu")).sum()) == budget.sinks + budget.window


def test_every_way_of_keeping_rows_keeps_as_many() -> None:
    kv = KV(torch.randn(4, 2, 200, 8), torch.randn(4, 2, 200, 8))
    scores, budget = torch.rand(4, 2, 200), Budget.of(200, 4)
    for kept in (
        keep.window(kv, budget),
        keep.uniform(kv, scores, budget),
        keep.layered(kv, scores, budget),
        keep.ragged(kv, scores, budget),
    ):
        assert kept.mean_rows == pytest.approx(50)
        for rows in kept.rows:
            assert (rows.sort(-1).values.diff(dim=-1) > 0).all()  # none twice
            assert all(bool(kept.always[list(of_head)].sum() == kept.always.sum()) for of_head in rows.tolist())


def test_spans_come_with_their_neighbours_and_within_the_budget() -> None:
    always = torch.zeros(320, dtype=torch.bool)
    always[:20] = True
    scores = torch.zeros(1, 10)
    scores[0, 5], scores[0, 0] = 2, 1
    found = chosen(scores, always, 4 * SPAN_TOKENS)[0].nonzero()[:, 0].tolist()
    assert found == [*range(20, 32), *range(4 * 32, 7 * 32)]  # the sinks are there anyway, one more span has no room


def test_a_fetched_row_is_not_counted_twice() -> None:
    """Fetching what is kept already changes nothing, and everything fetched is the whole cache."""
    generator = torch.Generator().manual_seed(1)
    kv = KV(*torch.randn(2, 1, 2, 64, 8, generator=generator))
    q, k, v = (torch.randn(1, heads, 5, 8, generator=generator) for heads in (6, 2, 2))
    kept = keep.uniform(kv, torch.rand(1, 2, 64, generator=generator), Budget.of(64, 2))
    none, rest = kept.always[None], ~kept.always[None]
    alone = Ask(kv, kept).attend(0, q, k, v, 0.3)
    torch.testing.assert_close(Ask(kv, kept, none).attend(0, q, k, v, 0.3), alone)
    whole = Ask(kv, everything(kv)).attend(0, q, k, v, 0.3)
    torch.testing.assert_close(Ask(kv, kept, rest).attend(0, q, k, v, 0.3), whole)
    assert (Ask(kv, kept, rest, twice=True).attend(0, q, k, v, 0.3) - whole).abs().max() > 1e-3


def test_facts_stand_in_the_document_and_differ() -> None:
    planted, asked = facts.plants(random.Random(1), 10)
    texts = " ".join(plant.text for plant in planted)
    assert {q.kind for q in asked} == set(facts.KINDS)
    assert len(asked) >= 8
    assert all(q.sentence in texts and q.value in q.sentence for q in asked if q.sentence)
    assert len({q.text for q in asked}) == len(asked)
    for q in asked:
        if q.kind == "aggregate":
            names = [p.text.removeprefix(q.lead).split()[0].strip(".") for p in planted if p.text.startswith(q.lead)]
            assert max(set(names), key=names.count) == q.value
            assert names.count(q.value) > len(names) / 2


def outcome(nll: float) -> Outcome:
    return Outcome(nll, [0.1, 0.3], [True, False])


def report() -> Report:
    collected = Collected()
    for _ in range(2):
        collected.begin(["prose", "code", "cell", "aggregate", "prose"])
        for method, ratio, values in (
            ("full", 1, (1, 2, 1, 1, 5)),
            ("no document", 1, (11, 12, 9, 9, 5.1)),
            ("selection: replay", 1, (1, 2, 1, 1, 5)),
            ("selection: replay", 2, (2, 7, 1, 1, 90)),
        ):
            collected.add(Measured(method, ratio, 100.0, [outcome(float(v)) for v in values], notes={}))
    lines = collected.lines()
    full, none = collected.mean_nll("full"), collected.mean_nll("no document")
    return Report("a model", "a machine", 1.0, 0, [3000, 2900], ["aa", "bb"], 10, full, none, lines)


def test_recovery_is_one_with_the_cache_and_leaves_out_what_it_does_not_help() -> None:
    line = report().lines[-1]
    assert line.groups["prose"].n == 2  # the other question of this kind is no better with the document
    assert line.groups["prose"].recovery == pytest.approx(0.9)
    assert line.groups["strings"].recovery == pytest.approx(0.5)
    assert line.groups["cell"].recovery == pytest.approx(1)
    assert (line.mean_kl, line.same) == (pytest.approx(0.2), 0.5)


def test_the_page_and_the_plot_show_the_figures(tmp_path: Path) -> None:
    found = report()
    found.save(tmp_path / "fidelity.json")
    again = Report.load(tmp_path / "fidelity.json")
    assert again == found
    assert "| selection, equal counts | 0.90 ± 0.00 |" in section(again)
    assert ElementTree.fromstring(plot(again)).tag.endswith("svg")


@pytest.mark.model
@pytest.mark.long
@pytest.mark.timeout(600)
@torch.inference_mode()
def test_selection_on_the_demo_model(demo_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One short document: everything kept is the whole cache; a sixteenth of the rows keeps the facts when it is chosen
    by replay, and not when each head keeps as many rows that lie a few tokens off; a window needs fetch."""
    monkeypatch.setattr(texts, "_pages", lambda: iter(()))  # so that the document does not change with the project's
    reader = Reader(demo_model, "cpu")
    (document,) = make_documents(reader.tokenizer, reader.prompt, 1, 800, seed=0, n_each=2)
    single = [q for q in document.questions if q.kind in ("prose", "code", "uuid")]
    trial = Trial(reader, replace(document, questions=single), {"replay": Wording()})
    collected = Collected()
    collected.begin([q.kind for q in single])
    for measured in trial.references():
        collected.add(measured)
    kv, scores = trial.kv, trial.looked["replay"].scores
    all_rows, few, eighth = (Budget.of(kv.n_tokens, ratio) for ratio in (1, 16, 8))
    collected.add(trial.measured("uniform", 1, keep.uniform(kv, scores, all_rows)))
    collected.add(trial.measured("per head", 16, keep.ragged(kv, scores, few)))
    collected.add(trial.measured("a few tokens off", 16, keep.ragged(kv, scores.roll(7, -1), few)))
    window = keep.window(kv, eighth)
    collected.add(trial.measured("window", 8, window))
    collected.add(trial.with_fetch("window + fetch", 8, window, 192))
    at = {line.method: line for line in collected.lines()}
    assert at["uniform"].mean_kl < 1e-6
    for group in ("prose", "strings"):
        recovered = {method: line.groups[group].recovery for method, line in at.items()}
        # A sixteenth of the rows of one short document: the figure differs by some hundredths between adapters.
        assert recovered["per head"] > max(0.8, recovered["a few tokens off"] + 0.15), recovered
        assert recovered["window + fetch"] > max(0.9, recovered["window"] + 0.3), recovered
