"""How much each KV type moves a model's predictions, and what it costs that prefill attends to the stored
form.

    python -m benchmarks.kv_fidelity

Writes its section of docs/fidelity.md and prints one JSON line. The example contract is read as a document of 3,072
tokens; the 1,000 tokens that follow are fed behind it, and the distribution of the next token at each of them is
compared with the reference by its Kullback-Leibler divergence (nats).
"""

import argparse
import json
import os
import platform
import time
from dataclasses import asdict
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from benchmarks.bench_report import write_section
from cache_store.codec import decode_records, encode_records
from cache_store.layout import KVType
from service.cli.config import read_settings
from service.engine.models.card import MEAN_KL_LIMIT, ModelCard, load_card
from service.engine.models.gate import KLStats, kl_stats, logits_after
from service.engine.models.source import quiet_transformers
from service.engine.tokenizer import Tokenizer
from service.engine.torch_engine.loading import load_model
from service.engine.torch_engine.runner import CHUNK_TOKENS, TorchRunner

ROOT = Path(__file__).parents[1]
TEXT = ROOT / "examples" / "contract" / "contract.md"
PAGE = ROOT / "docs" / "fidelity.md"
N_DOCUMENT = 3072
N_FED = 1000
QUANTIZED = (KVType.K8V8, KVType.K8V4, KVType.K4V4)
DTYPES = {"float32": "FP32", "bfloat16": "BF16"}

Records = list[list[memoryview]]
"""Encoded blocks of a document: ``[block][layer]``."""


class Bench:
    """One model in one compute dtype over one text, in any KV type."""

    def __init__(self, model_dir: Path, dtype: str, token_ids: list[int]) -> None:
        with quiet_transformers():
            self._loaded = load_model(model_dir, dtype, "cpu")
        self._ids = token_ids

    def runner(self, kv_type: KVType) -> TorchRunner:
        return TorchRunner(self._loaded, kv_type, n_slots=1, tail_tokens=N_FED, chunk_tokens=CHUNK_TOKENS)

    def prefilled(self, kv_type: KVType) -> tuple[torch.Tensor, Records]:
        """Logits behind a document whose chunks attended to the stored form of those before, and its
        blocks.
        """
        runner = self.runner(kv_type)
        document = runner.new_document(N_DOCUMENT)
        blocks: Records = []
        for first in range(0, N_DOCUMENT, CHUNK_TOKENS):
            blocks += runner.prefill_chunk(document, self._ids[first : min(first + CHUNK_TOKENS, N_DOCUMENT)])
        return logits_after(runner, document, self._ids[N_DOCUMENT - 1 :]), blocks

    def quantized_after(self, kv_type: KVType, exact: Records) -> torch.Tensor:
        """Logits behind a document prefilled with FP16 KV throughout and encoded in `kv_type` at the end."""
        runner = self.runner(kv_type)
        document = runner.new_document(N_DOCUMENT)
        for layer, records in enumerate(zip(*exact, strict=True)):
            encoded = self._encoded(b"".join(records), kv_type)
            runner.load_blocks(document, layer, 0, memoryview(encoded), N_DOCUMENT)
        runner.finish_load(document, N_DOCUMENT)
        return logits_after(runner, document, self._ids[N_DOCUMENT - 1 :])

    def _encoded(self, exact: bytes, kv_type: KVType) -> bytearray:
        card = self._loaded.card
        k, v = torch.empty(2, card.n_kv_heads, N_DOCUMENT, card.head_dim)
        decode_records(exact, N_DOCUMENT, card.layout(KVType.FP16), out_k=k, out_v=v)
        return bytearray().join(encode_records(k, v, card.layout(kv_type)))


def stock_logits(model_dir: Path, token_ids: list[int]) -> torch.Tensor:
    """The same positions by transformers alone, FP32, without any cache."""
    with quiet_transformers(), torch.inference_mode():
        model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        n_wanted = len(token_ids) - N_DOCUMENT + 1
        return model(torch.tensor([token_ids]), use_cache=False, logits_to_keep=n_wanted).logits[0]


def measure(model_dir: Path, token_ids: list[int]) -> dict[str, KLStats]:
    """Name of a comparison -> its figures; see `page` for what each one is."""
    found: dict[str, KLStats] = {}
    stock = stock_logits(model_dir, token_ids)
    for dtype in DTYPES:
        bench = Bench(model_dir, dtype, token_ids)
        reference, exact = bench.prefilled(KVType.FP16)
        found[f"{dtype} fp16 stock"] = kl_stats(stock, reference)
        for kv_type in QUANTIZED:
            found[f"{dtype} {kv_type} stored"] = kl_stats(reference, bench.prefilled(kv_type)[0])
            found[f"{dtype} {kv_type} after"] = kl_stats(reference, bench.quantized_after(kv_type, exact))
            print(f"{dtype} {kv_type}: {found[f'{dtype} {kv_type} stored']}", flush=True)
    return found


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def figures(stats: KLStats) -> tuple[str, str, str]:
    return f"{stats.mean:.2g}", f"{stats.p99:.2g}", f"{stats.top1_agreement * 100:.1f} %"


def kv_table(card: ModelCard, found: dict[str, KLStats]) -> list[str]:
    lines = [
        row(
            "KV type",
            "bytes per token",
            "compute",
            "mean KL",
            "p99 KL",
            "same first choice",
            "mean KL if encoded after",
        ),
        row("---", "---:", "---", "---:", "---:", "---:", "---:"),
    ]
    for kv_type in QUANTIZED:
        for dtype in DTYPES:
            stored, after = found[f"{dtype} {kv_type} stored"], found[f"{dtype} {kv_type} after"]
            nbytes = f"{card.layout(kv_type).bytes_per_token:,}"
            lines.append(row(kv_type.upper(), nbytes, DTYPES[dtype], *figures(stored), f"{after.mean:.2g}"))
    return lines


PAGE_TEXT = """\
## KV types

Written by `benchmarks/kv_fidelity.py`. A KV type stores keys and values with fewer bits; this page
says how much that changes what a model predicts.

Model: {source}. Text: the example contract, {n_document:,} tokens of it
as the document and {n_fed:,} tokens fed behind it. KL is the Kullback-Leibler divergence (in nats) of the next
token's distribution from that of FP16 KV in the same compute type. *Same first choice* is the share of positions
at which greedy decoding takes the same token.

{kv_table}

FP16 KV takes {fp16_nbytes:,} bytes per token. In BF16 two runs that are rounded at different places differ by about
as much as BF16 does from FP32 (the second table), whatever the KV type: that is the floor of the BF16 rows.

*If encoded after* is the mean KL when the whole document is prefilled with FP16 KV and encoded once at the end.
Preread lets each chunk attend to the stored form of the chunks before it instead, so that a prefill which was
interrupted ends with the same bytes as one that was not. The difference between the two columns is the price.

### The engine itself

The same positions with FP16 KV against transformers alone in FP32, which keeps no cache:

{stock_table}

### The gate

When a model is imported, each KV type is measured over a bundled text in the same way, in the compute type its
weights are stored for. Above a mean KL of {limit} nats a type is refused for that model, and the message has the
figure. Small models and models with a key bias often fail with 4-bit keys. The card of this model records:

{gate_table}
"""


def stock_table(found: dict[str, KLStats]) -> list[str]:
    lines = [row("compute", "mean KL", "p99 KL", "same first choice"), row("---", "---:", "---:", "---:")]
    return lines + [row(DTYPES[dtype], *figures(found[f"{dtype} fp16 stock"])) for dtype in DTYPES]


def gate_table(card: ModelCard) -> list[str]:
    lines = [row("KV type", "mean KL", "p99 KL", "verdict"), row("---", "---:", "---:", "---")]
    for name, gate in card.kv_types.items():
        verdict = "allowed" if gate.allowed else "refused"
        lines.append(row(name.upper(), f"{gate.mean_kl:.2g}", f"{gate.p99_kl:.2g}", verdict))
    return lines


def page(card: ModelCard, found: dict[str, KLStats]) -> str:
    """The section of docs/fidelity.md."""
    return PAGE_TEXT.format(
        source=card.source,
        n_document=N_DOCUMENT,
        n_fed=N_FED,
        kv_table="\n".join(kv_table(card, found)),
        fp16_nbytes=card.layout(KVType.FP16).bytes_per_token,
        stock_table="\n".join(stock_table(found)),
        limit=MEAN_KL_LIMIT,
        gate_table="\n".join(gate_table(card)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=read_settings().model_dir)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--page", type=Path, default=PAGE, help="where the page is written")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    started = time.monotonic()
    card = load_card(options.model)
    tokenizer = Tokenizer.load(options.model)
    text = tokenizer.encode_plain(TEXT.read_text(encoding="utf-8"))
    ids = (tokenizer.encode_template(card.prompt.document_prefix) + text)[: N_DOCUMENT + N_FED]
    found = measure(options.model, ids)
    write_section("kv types", page(card, found), options.page)
    machine = {"machine": platform.processor() or platform.machine(), "threads": options.threads}
    measured = {name: asdict(stats) for name, stats in found.items()}
    print(json.dumps(machine | {"seconds": round(time.monotonic() - started, 1)} | measured))


if __name__ == "__main__":
    main()
