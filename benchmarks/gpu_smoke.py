"""First look at the card engine on a card: is it right, are decode steps captured, what does a step take.

    PYTHONPATH=. python benchmarks/gpu_smoke.py --model DIR [--kv k8v8,k8v4,fp16] [--backends triton,portable]

DIR is an imported model. Each part prints what it finds, or its traceback; one that fails does not stop the others.
The reference is the plain decoder in FP32 with exact attention and no KV cache, on the same card, with the very weights
that exllamav2 has (read back from its matrices), so that only the engine's arithmetic differs.
"""

import argparse
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from cache_store.layout import KVType
from service.engine.exl2_engine.backends import Choice
from service.engine.exl2_engine.exllama import ExllamaModel
from service.engine.exl2_engine.graphs import what_cannot_be_captured
from service.engine.exl2_engine.loading import Options, dq_elements, make_runner
from service.engine.exl2_engine.model import DecoderModel
from service.engine.exl2_engine.plain import PlainModel
from service.engine.exl2_engine.pool import block_nbytes
from service.engine.exl2_engine.projections import rotated_qkv
from service.engine.exl2_engine.rows import StepShape, pack, plan_rows, unpack
from service.engine.exl2_engine.runner import Exl2Runner
from service.engine.models.card import ModelCard, load_card
from service.engine.models.gate import gate_text, kl_stats
from service.engine.protocol import Rows
from service.engine.tokenizer import Tokenizer

POSITIONS = 600
"""Rows whose predictions are compared: most in steps of 100 rows, the last 40 one at a time."""
SINGLE = 40
MOST_PARAMETERS = 4e9
"""Of a model with more there is no room for an FP32 copy."""


def part(name: str, work: Callable[[], Any]) -> Any:
    """The result of `work`, or None and a printed traceback."""
    print(f"\n== {name}", flush=True)
    started = time.perf_counter()
    try:
        return work()
    except Exception:
        traceback.print_exc()
        return None
    finally:
        print(f"   ({time.perf_counter() - started:.1f} s)", flush=True)


def rope(x: Tensor, positions: Tensor, frequencies: Tensor, scaling: float) -> Tensor:
    angles = positions[:, None, None].float() * frequencies
    cos, sin = angles.cos() * scaling, angles.sin() * scaling
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def exact_logits(model: DecoderModel, ids: list[int], last: int) -> Tensor:
    """Logits FP32 on the CPU of the last `last` tokens of a text, with exact causal attention."""
    tokens = torch.tensor(ids, dtype=torch.int32, device=model.device)
    positions, x = torch.arange(len(ids), device=model.device), model.embed(tokens)
    for layer in range(model.n_layers):
        q, k, v = model.qkv(layer, x)
        q, k = (rope(y, positions, *model.rope(layer)) for y in (q, k))
        q, k, v = (y.transpose(0, 1)[None] for y in (q, k, v))
        out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=model.scale, enable_gqa=True)
        x = model.mlp(layer, model.attention_out(layer, out[0].transpose(0, 1), x))
    return model.head(x[-last:]).float().cpu()


def dequantized(model: ExllamaModel) -> PlainModel:
    """The FP32 decoder with the weights that exllamav2 multiplies with."""
    linears = {linear.key: linear for linear in model.linears()}
    norms = {m.key: m for layer in (*model.attentions, *model.mlps) for m in (layer.pre_layernorm,)}
    norms["model.norm"] = model._norm
    for attention in model.attentions:
        norms |= {n.key: n for n in (attention.q_norm, attention.k_norm) if n is not None}

    def get(name: str) -> Tensor:
        key, _, kind = name.rpartition(".")
        if key == "model.embed_tokens":
            return model._embedding
        if key in norms:
            weight = norms[key].weight.data
            return weight[0] if weight.dim() == 2 else weight
        linear = linears[key]
        if kind == "bias":
            return linear.get_bias_tensor()
        weight = linear.get_weight_tensor_dq().T
        return weight[: weight.shape[0] - linear.padding]

    # exllamav2 has the projections of every type apart, and a head of its own also where the embedding is the head's.
    spec = replace(model.spec, model_type="llama", tied_head=False)
    return PlainModel(spec, get, torch.float32, model.device)


def read_document(runner: Exl2Runner, ids: list[int]) -> Any:
    document, chunk = runner.new_document(len(ids)), runner.limits.chunk_tokens
    for first in range(0, len(ids), chunk):
        runner.prefill_chunk(document, ids[first : first + chunk])
    return document


def engine_logits(runner: Exl2Runner, ids: list[int]) -> Tensor:
    """The same through document, question rows and single steps: the path that serves."""
    split = len(ids) - POSITIONS
    document, slot, found = read_document(runner, ids[:split]), runner.new_tail(), []
    for first in range(split, len(ids) - SINGLE, 100):
        found += runner.forward([Rows(slot, document, ids[first : min(first + 100, len(ids) - SINGLE)])])
    for token in ids[-SINGLE:]:
        found += runner.forward([Rows(slot, document, [token])])
    runner.free_tail(slot)
    runner.free_document(document)
    return torch.cat(found)


def kl_line(name: str, reference: Tensor | None, logits: Tensor) -> None:
    if reference is not None:
        stats = kl_stats(reference, logits)
        print(f"   KL against {name:<28} mean {stats.mean:.2e}  p99 {stats.p99:.2e}  top1 {stats.top1_agreement:.4f}")


def graphs_against_eager(runner: Exl2Runner, vocab: int) -> None:
    """Largest difference of a logit between replayed and eager steps of the same rows."""
    document = read_document(runner, list(range(100, 1100)))
    graphs = runner.graphs
    for n in (1, 2, 3, 8):
        slots = [runner.new_tail() for _ in range(n)]
        results = []
        for use in (graphs, None):
            runner.graphs = use
            for slot in slots:
                runner.truncate_tail(slot, 0)
            steps = [[Rows(s, document, [(7 * s + 31 * i) % vocab]) for s in slots] for i in range(3)]
            results.append(torch.cat([torch.cat(runner.forward(step)) for step in steps]))
        worst = (results[0] - results[1]).abs().max().item()
        print(f"   {n} rows: replayed and eager differ by at most {worst:.4f} (logits to {results[1].abs().max():.1f})")
        for slot in slots:
            runner.free_tail(slot)
    runner.graphs = graphs
    runner.free_document(document)


def capture_report(runner: Exl2Runner, model: DecoderModel) -> None:
    graphs = runner.graphs
    print(f"   captured {graphs.n_graphs if graphs else 0} steps; failure: {graphs.failure if graphs else 'off'}")
    if graphs is None or graphs.failure is None:
        return
    slot = runner.new_tail()
    plan = plan_rows([Rows(slot, None, [1])], runner._tails)
    shape = StepShape.of(plan)
    packed = unpack(pack(plan, shape, pinned=False).to(model.device), shape)
    step, x = packed.step, model.embed(packed.ids)
    q, k, v = rotated_qkv(model, runner.backend, 0, x, step.positions)
    kv = runner._tails.k[0], runner._tails.v[0]
    attend, pool = runner.backend.attend, runner.pool.layers[0]
    out = attend(step, q, pool, *kv, model.scale)
    parts: dict[str, Callable[[], object]] = {
        "embed": lambda: model.embed(packed.ids),
        "qkv": lambda: model.qkv(0, x)[0],
        "rope": lambda: rotated_qkv(model, runner.backend, 0, x, step.positions)[0],
        "append": lambda: runner.backend.append(step, k, v, *kv),
        "attend": lambda: attend(step, q, pool, *kv, model.scale),
        "attention_out": lambda: model.attention_out(0, out, x.clone()),
        "mlp": lambda: model.mlp(0, x.clone()),
        "head": lambda: model.head(x),
    }
    runner.free_tail(slot)
    for name, error in what_cannot_be_captured(parts, model.device).items():
        print(f"   cannot be captured: {name}: {error}")


def step_times(runner: Exl2Runner, n_tokens: int, vocab: int) -> None:
    """Milliseconds of decode steps on a document of zeros: what it holds does not matter for the time."""
    document = runner.new_document(n_tokens) if n_tokens else None
    if document is not None:
        runner.finish_load(document, n_tokens)
    graphs, cells = runner.graphs, []
    for n in (1, 2, 4, 8):
        slots = [runner.new_tail() for _ in range(n)]
        for use in (None, graphs):
            runner.graphs = use
            times = []
            for i in range(24):
                for slot in slots:
                    runner.truncate_tail(slot, 0)
                started = time.perf_counter()
                runner.forward([Rows(s, document, [(s + i) % vocab]) for s in slots])
                times.append(time.perf_counter() - started)
            cells.append(f"{sorted(times[8:])[8] * 1e3:7.2f}")
        for slot in slots:
            runner.free_tail(slot)
    runner.graphs = graphs
    if document is not None:
        runner.free_document(document)
    print(f"   {n_tokens:>7} tokens: " + "  ".join(f"{a}/{b}" for a, b in zip(cells[::2], cells[1::2], strict=True)))


def prefill_time(runner: Exl2Runner, n_tokens: int, vocab: int) -> None:
    chunk = runner.limits.chunk_tokens
    ids = [(i * 7919) % vocab for i in range(n_tokens)]
    document = runner.new_document(n_tokens)
    runner.prefill_chunk(document, ids[:chunk])
    torch.cuda.synchronize()
    started = time.perf_counter()
    for first in range(chunk, n_tokens, chunk):
        runner.prefill_chunk(document, ids[first : first + chunk])
    rate = (n_tokens - chunk) / (time.perf_counter() - started)
    runner.free_document(document)
    print(f"   {n_tokens} tokens in chunks of {chunk}, the first left out: {rate:,.0f} tokens/s")


class Smoke:
    """Everything that is measured of one model."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.directory: Path = arguments.model
        self.card: ModelCard = load_card(self.directory)
        tokenizer = Tokenizer.load(self.directory)
        ids = tokenizer.encode_template(self.card.prompt.document_prefix) + tokenizer.encode_plain(gate_text())
        self.ids = ids[: min(arguments.text, self.card.max_context)]
        self.model: ExllamaModel | None = None
        self.reference: Tensor | None = None
        self.by_backend: dict[str, Tensor] = {}

    @torch.inference_mode()
    def run(self) -> None:
        self.model = part("load with exllamav2", self._load)
        if self.model is None:
            return
        self.reference = part("reference in FP32", self._reference)
        for kv in self.arguments.kv.split(","):
            self.by_backend = {}
            for backend in self.arguments.backends.split(","):
                runner = part(
                    f"{backend} {kv}: make a runner", lambda b=backend, k=kv: self._runner(k, cast(Choice, b))
                )
                if runner is not None:
                    self._measure(runner, f"{backend} {kv}", backend)
                    del runner
                    torch.cuda.empty_cache()

    def _measure(self, runner: Exl2Runner, name: str, backend: str) -> None:
        model, vocab = self.model, self.card.vocab_size
        assert model is not None
        part(f"{name}: predictions", lambda: self._predictions(runner, backend))
        part(f"{name}: capture", lambda: capture_report(runner, model))
        if runner.graphs is not None and runner.graphs.n_graphs:
            part(f"{name}: replayed against eager", lambda: graphs_against_eager(runner, vocab))
        print(f"\n== {name}: milliseconds of a step, eager/replayed, for 1, 2, 4, 8 rows")
        for n_tokens in self._contexts(runner):
            part(f"{n_tokens}", lambda n=n_tokens: step_times(runner, n, vocab))
        part(f"{name}: prefill", lambda: prefill_time(runner, min(8192, self.card.max_context), vocab))

    def _load(self) -> ExllamaModel:
        elements = dq_elements(self.directory, self.card)
        model = ExllamaModel.load(self.directory, max_rows=2048, max_dq_elements=elements)
        free, total = torch.cuda.mem_get_info()
        quantized = sum(linear.q_handle is not None for linear in model.linears())
        print(
            f"   {quantized} quantized matrices; {torch.cuda.get_device_name()}, {(total - free) / 2**30:.2f} GiB used"
        )
        return model

    def _reference(self) -> Tensor | None:
        assert self.model is not None
        if self.card.n_parameters > MOST_PARAMETERS or self.model.hidden_size >= 4096:
            print("   left out: no room for FP32 weights")
            return None
        reference = exact_logits(dequantized(self.model), self.ids, POSITIONS)
        kl_line("FP32: FP16, exact attention", reference, exact_logits(self.model, self.ids, POSITIONS))
        return reference

    def _runner(self, kv: str, backend: Choice) -> Exl2Runner:
        assert self.model is not None
        kv_type = KVType(kv)
        options = Options(
            kv_type=kv_type, n_slots=10, tail_tokens=1024, max_rows=8, backend=backend, graphs=backend == "triton"
        )
        room = self.arguments.pool_gib * 2**30 // block_nbytes(self.card.layout(kv_type))
        n_blocks = int(min(room, self.card.max_context // 256 + 16))
        return make_runner(self.model, self.card, options, n_blocks)

    def _predictions(self, runner: Exl2Runner, backend: str) -> None:
        logits = engine_logits(runner, self.ids)
        print(f"   {len(self.ids)} tokens, finite: {bool(torch.isfinite(logits).all())}")
        kl_line("FP32 without a cache", self.reference, logits)
        for other, theirs in self.by_backend.items():
            kl_line(f"the {other} backend", theirs, logits)
        self.by_backend[backend] = logits

    def _contexts(self, runner: Exl2Runner) -> list[int]:
        most = min(runner.pool.n_blocks * 256, self.card.max_context - 256)
        return [n for n in (0, 4096, 32768, 131072) if n <= most]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--kv", default="k8v8,k8v4,fp16")
    parser.add_argument("--backends", default="triton,portable")
    parser.add_argument("--text", type=int, default=3000, help="tokens of text that are compared")
    parser.add_argument("--pool-gib", type=float, default=20.0)
    print(f"torch {torch.__version__}, CUDA {torch.version.cuda}")
    Smoke(parser.parse_args()).run()


if __name__ == "__main__":
    main()
