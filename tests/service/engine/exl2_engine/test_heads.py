"""The search for index heads by the card's engine, run on the CPU over the plain decoder."""

import torch

from service.engine.exl2_engine.heads import heads_runner
from service.engine.exl2_engine.plain import PlainModel
from service.engine.index_heads_finder import find_index_heads
from service.engine.models.card import load_card
from service.engine.models.heads import heads_again
from service.engine.prompt import PromptTemplate
from service.engine.tokenizer import Tokenizer


def test_it_finds_what_the_torch_engine_finds(tiny_dir, tmp_path):
    card = load_card(tiny_dir)
    runner = heads_runner(PlainModel.load(tiny_dir, torch.float32), card)
    template = PromptTemplate(card.prompt, Tokenizer.load(tiny_dir))
    found = find_index_heads(runner, template, card.digests.weights)
    for path in tiny_dir.iterdir():
        (tmp_path / path.name).symlink_to(path)
    wanted = heads_again(tmp_path)
    assert found.pairs == wanted.pairs
    assert found.n_questions == wanted.n_questions
    assert abs(found.mean_reciprocal_rank - wanted.mean_reciprocal_rank) < 0.05
    assert runner.pool.n_free == runner.pool.n_blocks
