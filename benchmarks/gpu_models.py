"""The models that the benchmarks of a card run, and runners over them."""

import argparse
import functools
import gc
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_lib import ON_CARD
from cache_store.layout import KVType
from service.engine.models.card import KVGate, load_card
from service.engine.models.importer import import_model
from service.engine.models.weights import tensor_spans

ALLOWED = {t: KVGate(mean_kl=0.0, p99_kl=0.0, top1_agreement=1.0, allowed=True) for t in ("k8v8", "k8v4", "k4v4")}
TINY = {
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 8192,
    "initializer_range": 0.1,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SMALL = {"layers": 6, "hidden": 1024, "intermediate": 2816, "heads": 8, "kv_heads": 2, "vocab": 32000}
"""Of an EXL2 model that loads in a second, for what does not depend on speed."""
DRAFT = {"layers": 16, "hidden": 2048, "intermediate": 8192, "heads": 16, "kv_heads": 4}
"""Of an EXL2 model of 1B shape with the vocabulary of the large one, that guesses for it."""
SHAPES: dict[str, dict[str, int]] = {"big": {}, "small": SMALL, "draft": DRAFT}


def model_dir(arguments: argparse.Namespace, size: str) -> Path:
    """A directory of the synthetic model `big` (27B-shaped), `draft` or `small`, made once; in a dry run a tiny plain
    one."""
    work = Path(arguments.work)
    if arguments.dry:
        return tiny_model(work)
    from benchmarks.gpu_model import Recipe, make

    target = work / f"exl2-{size}"
    if not (target / "preread.json").exists():
        shutil.rmtree(target, ignore_errors=True)
        make(Recipe(**SHAPES[size]), target)
    return target


def tiny_model(work: Path) -> Path:
    """A random Llama of 3 layers, imported."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM

    if (work / "tiny" / "preread.json").exists():
        return work / "tiny"
    source = work / "tiny-source"
    torch.manual_seed(7)
    LlamaForCausalLM(LlamaConfig(**TINY)).save_pretrained(source)
    pieces = ["<unk>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(source / "tokenizer.json"))
    import_model(
        source, name="tiny", models_dir=work, dtype="float32", replace=True,
        measure=lambda *_: ALLOWED, find_heads=lambda *_: None,
    )  # fmt: skip
    return work / "tiny"


def weights_read_nbytes(directory: Path) -> int:
    """Bytes of weights that a decode step reads: all but the embedding's table, unless that is the head too."""
    spans = tensor_spans(directory)
    tied = not any(span.name.startswith("lm_head") for span in spans)
    return sum(span.nbytes for span in spans if tied or "embed_tokens" not in span.name)


@dataclass(frozen=True, slots=True)
class Want:
    """How a runner is made. `pool_tokens`: room for documents. `backend`: auto, triton or portable. `draft_tokens`:
    guesses of a sequence that a step may check."""

    kv_type: KVType
    n_slots: int = 10
    tail_tokens: int = 1024
    pool_tokens: int = 16384
    backend: str = "auto"
    graphs: bool = True
    chunk_tokens: int = 2048
    draft_tokens: int = 0


@dataclass(slots=True)
class Opened:
    """A runner, the model below it, and a switch for its CUDA graphs."""

    runner: Any
    model: Any
    set_graphs: Callable[[bool], None]


@contextmanager
def opened(directory: Path, want: Want) -> Iterator[Opened]:
    """A runner over the directory's model, which stays loaded; the runner's memory is given back at the end. Raises
    what loading raises."""
    release_memory()
    made = _make(directory, want)
    try:
        yield made
    finally:
        made.runner = made.model = None
        made.set_graphs = lambda _: None
        release_memory()


def release_memory() -> None:
    """Back to the card what nothing holds any more."""
    gc.collect()
    if ON_CARD:
        torch.cuda.empty_cache()


@functools.lru_cache(maxsize=1)
def _model(directory: Path) -> Any:
    from service.engine.exl2_engine.loading import dq_elements
    from service.engine.exl2_engine.plain import PlainModel
    from service.engine.exl2_engine.runner import CHUNK_TOKENS

    if not ON_CARD:
        return PlainModel.load(directory, torch.float32)
    from service.engine.exl2_engine.exllama import ExllamaModel

    elements = dq_elements(directory, load_card(directory))
    return ExllamaModel.load(directory, max_rows=CHUNK_TOKENS, max_dq_elements=elements)


def _make(directory: Path, want: Want) -> Opened:
    from service.engine.exl2_engine.loading import Options, make_runner

    card = load_card(directory)
    options = Options(
        kv_type=want.kv_type,
        n_slots=want.n_slots,
        tail_tokens=want.tail_tokens,
        max_rows=max(want.n_slots - 2, 1),
        chunk_tokens=want.chunk_tokens,
        backend=want.backend,
        graphs=want.graphs,
        draft_tokens=want.draft_tokens,
    )
    model = _model(directory)
    runner = make_runner(model, card, options, card.layout(want.kv_type).n_blocks(want.pool_tokens))
    graphs = runner.graphs
    if graphs is not None:
        print(f"{graphs.n_graphs} decode steps captured; {graphs.failure or 'none failed'}", flush=True)

    def set_graphs(on: bool) -> None:
        runner.graphs = graphs if on else None

    return Opened(runner, model, set_graphs)
