"""What the tests compare the service with, computed in a process of its own: ``reference.py WHAT < JSON > JSON``.

`generate`: greedy answers of plain transformers. `never_stored`: a document's KV and logits without any snapshot.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from cache_store.keys import EntryName, SnapshotKey
from cache_store.layout import KVType
from cache_store.reader import SnapshotReader
from service.engine.protocol import Rows
from service.engine.torch_engine.runner import TorchRunner


@torch.inference_mode()
def generate(
    model_dir: str, prompts: list[list[int]], max_new: int, end_id: int, compute_dtypes: list[str]
) -> list[dict[str, Any]]:
    """Greedy continuations in FP32 with a `DynamicCache`. `gaps`: between the two largest logits at each step;
    `noise`, for each of `compute_dtypes`: by how much a logit at these positions moves when the tokens are computed in
    one pass, in that dtype."""
    models = {name: _load(model_dir, getattr(torch, name)) for name in dict.fromkeys(["float32", *compute_dtypes])}
    return [_generated(models, prompt, max_new, end_id) for prompt in prompts]


def _load(model_dir: str, dtype: torch.dtype) -> Any:
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype, local_files_only=True).eval()


def _generated(models: dict[str, Any], prompt: list[int], max_new: int, end_id: int) -> dict[str, Any]:
    model = models["float32"]
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        past_key_values=DynamicCache(config=model.config),
        do_sample=False,
        max_new_tokens=max_new,
        eos_token_id=end_id,
        pad_token_id=end_id,
        output_logits=True,
        return_dict_in_generate=True,
    )
    ids = out.sequences[0, len(prompt) :].tolist()
    steps = torch.cat(out.logits).float()
    top = steps.topk(2).values
    return {
        "ids": ids,
        "gaps": (top[:, 0] - top[:, 1]).tolist(),
        "noise": {name: _noise(other, out.sequences, steps) for name, other in models.items()},
    }


def _noise(model: Any, sequences: Tensor, steps: Tensor) -> float:
    at_once = model(sequences, use_cache=False, logits_to_keep=len(steps) + 1).logits[0, :-1].float()
    return (steps - at_once).abs().max().item()


def never_stored(
    model_dir: str, snapshots: str, key: list[str], fingerprint: str, kv_type: str, question: list[int]
) -> dict[str, Any]:
    """Compute a stored document again, in memory alone, and compare: its blocks with the stored ones, the logits
    of every row of a question with those on the restored snapshot."""
    runner = TorchRunner.load(
        Path(model_dir), kv_type=KVType(kv_type), compute_dtype="float32", n_slots=2, tail_tokens=256
    )
    name = EntryName(SnapshotKey(*key), fingerprint)
    with SnapshotReader(Path(snapshots), name, fingerprint=runner.fingerprint, layout=runner.layout) as reader:
        tokens = reader.token_ids.tolist()
        computed, restored = runner.new_document(len(tokens)), runner.new_document(len(tokens))
        blocks = []
        for first in range(0, len(tokens), runner.limits.chunk_tokens):
            blocks += runner.prefill_chunk(computed, tokens[first : first + runner.limits.chunk_tokens])
        different = 0
        for layer, first, records, n_tokens in reader.layers():
            first_block = first // runner.layout.block_tokens
            n_blocks = runner.layout.n_blocks(n_tokens)
            own = b"".join(bytes(block[layer]) for block in blocks[first_block : first_block + n_blocks])
            different += own != bytes(records)
            runner.load_blocks(restored, layer, first, records, n_tokens)
        runner.finish_load(restored, len(tokens))
    logits = [_question_logits(runner, document, tokens[-1], question) for document in (computed, restored)]
    return {
        "n_tokens": len(tokens),
        "different_runs": different,
        "largest_difference": (logits[0] - logits[1]).abs().max().item(),
    }


def _question_logits(runner: TorchRunner, document: Any, last_token: int, question: list[int]) -> Tensor:
    slot = runner.new_tail()
    logits = runner.forward([Rows(slot, document, [last_token, *question], refeed=True)])[0]
    runner.free_tail(slot)
    return logits


if __name__ == "__main__":
    what = {"generate": generate, "never_stored": never_stored}[sys.argv[1]]
    print(json.dumps(what(**json.load(sys.stdin))))
