"""A small byte-level tokenizer with chat control tokens, like those of current models."""

import json

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

CORPUS = [
    "The keeper of the lighthouse is Marta Kovalenko, and the agreement ends on 3 March 2027.",
    "Either party may end the agreement with 90 days of notice in writing.",
    "You answer questions about the document below. What is the monthly fee?",
]


@pytest.fixture(scope="session")
def tokenizer_json() -> bytes:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return json.dumps(json.loads(tokenizer.to_str()), ensure_ascii=False).encode()
