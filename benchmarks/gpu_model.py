"""An EXL2 model of any shape with random weights, for measuring speed and memory on a card.

    python -m benchmarks.gpu_model /dev/shm/models/big            # 27B-shaped, 4.0 bpw, 13.3 GB, ~20 s
    PREREAD_DATA_DIR=... PREREAD_ENGINE=exl2 PREREAD_MODEL=/dev/shm/models/big preread serve

Speed and memory do not depend on the values of weights. The directory is a finished model of Preread (card included)
in the format of EXL2: what it says is noise. Its tokenizer reads one byte as one token, so a text of n ASCII letters
is n tokens, and every id above that has a short word, so that answers stream.
"""

import argparse
import hashlib
import json
import math
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from service.engine.models.card import CARD_VERSION, KVGate, ModelCard, ModelDigests, save_card
from service.engine.models.chat import plain_parts
from service.engine.models.rope import stored_rope_digest
from service.engine.models.weights import config_digest
from service.engine.prompt import DEFAULT_SYSTEM_TEXT, template_digest
from service.engine.tokenizer import tokenizer_digest

SHARD_NBYTES = 2 << 30
GROUP = 128
"""Inputs that share a scale."""
SPREAD = 0.02
"""Standard deviation of the weights, near that of trained models: larger ones overflow FP16."""
DTYPES = {np.dtype(np.int32): "I32", np.dtype(np.int16): "I16", np.dtype(np.float16): "F16"}


@dataclass(frozen=True, slots=True)
class Recipe:
    """The shape of a model; the defaults are those of a 27B one."""

    layers: int = 64
    hidden: int = 5120
    intermediate: int = 21504
    heads: int = 40
    kv_heads: int = 8
    head_dim: int = 128
    vocab: int = 152064
    context: int = 139264
    bits: int = 4
    head_bits: int = 6
    seed: int = 0

    def linears(self) -> dict[str, tuple[int, int]]:
        """Name in a layer -> (inputs, outputs)."""
        query, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = {"q_proj": (self.hidden, query), "k_proj": (self.hidden, kv), "v_proj": (self.hidden, kv)}
        attention["o_proj"] = (query, self.hidden)
        mlp = {"gate_proj": (self.hidden, self.intermediate), "up_proj": (self.hidden, self.intermediate)}
        mlp["down_proj"] = (self.intermediate, self.hidden)
        return {f"self_attn.{k}": v for k, v in attention.items()} | {f"mlp.{k}": v for k, v in mlp.items()}


class Noise:
    """Random numbers drawn once and repeated: tensors are views of them, each from another place, so that neither
    drawing nor copying takes time."""

    def __init__(self, seed: int, n: int = 1 << 24, repeats: int = 3) -> None:
        self._n = n
        self._place = np.random.default_rng(seed)
        self._words = np.tile(np.frombuffer(self._place.bytes(4 * n), np.int32), repeats)
        normal = self._place.standard_normal(n, dtype=np.float32) * SPREAD
        self._normal = np.tile(normal.astype(np.float16), repeats)

    def words(self, *shape: int) -> np.ndarray:
        return self._view(self._words, shape)

    def normal(self, *shape: int) -> np.ndarray:
        return self._view(self._normal, shape)

    def _view(self, source: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        n, first = math.prod(shape), int(self._place.integers(self._n))
        if first + n <= len(source):
            return source[first : first + n].reshape(shape)
        return np.resize(source[first:], shape)


def exl2_linear(noise: Noise, n_in: int, n_out: int, bits: int) -> dict[str, np.ndarray]:
    """Tensors of one quantized linear. A weight is ``(code - 2**(bits-1)) * (scale + 1)**2 * scale_max / 256``."""
    groups = n_in // GROUP
    scale = 7
    codes = (2**bits) / 12**0.5  # standard deviation of evenly spread codes
    scale_max = SPREAD * 256 / (codes * (scale + 1) ** 2)
    starts = np.arange(groups) * (GROUP * bits // 32)
    if starts[-1] >= 1 << 15:
        raise ValueError(f"{n_in} inputs of {bits} bits are more rows than EXL2 can number")
    return {
        "q_weight": noise.words(n_in * bits // 32, n_out),
        "q_scale": np.full((groups, n_out // 8), int(f"{scale:x}" * 8, 16), np.int32),
        "q_scale_max": np.full(groups, scale_max, np.float16),
        "q_groups": np.stack([np.full(groups, bits), starts], 1).reshape(-1).astype(np.int16),
        "q_invperm": np.arange(n_in, dtype=np.int32),
    }


def tensors(recipe: Recipe, noise: Noise) -> Iterator[tuple[str, np.ndarray]]:
    """Name and content of every tensor, in the order of the layers."""
    yield "model.embed_tokens.weight", noise.normal(recipe.vocab, recipe.hidden)
    for layer in range(recipe.layers):
        prefix = f"model.layers.{layer}"
        for name, (n_in, n_out) in recipe.linears().items():
            for part, tensor in exl2_linear(noise, n_in, n_out, recipe.bits).items():
                yield f"{prefix}.{name}.{part}", tensor
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}.{norm}.weight", np.ones(recipe.hidden, np.float16)
    yield "model.norm.weight", np.ones(recipe.hidden, np.float16)
    for part, tensor in exl2_linear(noise, recipe.hidden, recipe.vocab, recipe.head_bits).items():
        yield f"lm_head.{part}", tensor


def write_shard(path: Path, shard: list[tuple[str, np.ndarray]]) -> None:
    """A safetensors file: header length, JSON header padded to 8 bytes, the tensors one behind the other."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in shard:
        first, end = end, end + tensor.nbytes
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [first, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for _, tensor in shard:
            file.write(memoryview(tensor).cast("B"))


def write_weights(recipe: Recipe, directory: Path, shard_nbytes: int = SHARD_NBYTES) -> int:
    """Write the shards, several at a time, and give their bytes."""
    noise = Noise(recipe.seed)
    total, size, n = 0, 0, 0
    shard: list[tuple[str, np.ndarray]] = []
    with ThreadPoolExecutor(4) as pool:
        jobs = []
        for name, tensor in tensors(recipe, noise):
            if shard and size + tensor.nbytes > shard_nbytes:
                jobs.append(pool.submit(write_shard, directory / f"model-{n:05}.safetensors", shard))
                shard, size, n = [], 0, n + 1
            shard.append((name, tensor))
            size += tensor.nbytes
            total += tensor.nbytes
        jobs.append(pool.submit(write_shard, directory / f"model-{n:05}.safetensors", shard))
        for job in jobs:
            job.result()
    return total


def config_of(recipe: Recipe) -> dict[str, Any]:
    """`config.json`, read by transformers and by exllamav2."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": recipe.hidden,
        "intermediate_size": recipe.intermediate,
        "num_hidden_layers": recipe.layers,
        "num_attention_heads": recipe.heads,
        "num_key_value_heads": recipe.kv_heads,
        "head_dim": recipe.head_dim,
        "vocab_size": recipe.vocab,
        "max_position_embeddings": recipe.context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": recipe.vocab - 1,
        "torch_dtype": "float16",
        "quantization_config": {"quant_method": "exl2", "bits": float(recipe.bits), "head_bits": recipe.head_bits},
    }


def tokenizer_of(vocab: int) -> bytes:
    """One token per byte, then words that no text is read as."""
    pieces = {piece: i for i, piece in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    pieces |= {f"Ġw{i}": i for i in range(len(pieces), vocab)}
    tokenizer = Tokenizer(models.BPE(vocab=pieces, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer.to_str().encode()


def write_card(recipe: Recipe, directory: Path, name: str) -> None:
    """The card that an import would write, but that the weights are known by their recipe instead of their bytes and
    that every KV type is allowed: there are no predictions that one could spoil."""
    config = config_of(recipe)
    tokenizer = tokenizer_of(recipe.vocab)
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    (directory / "tokenizer.json").write_bytes(tokenizer)
    parts = plain_parts(DEFAULT_SYSTEM_TEXT)
    recipe_digest = hashlib.blake2b(json.dumps(asdict(recipe)).encode(), digest_size=16).hexdigest()
    card = ModelCard(
        format_version=CARD_VERSION,
        name=name,
        source="random weights",
        architecture="llama",
        n_layers=recipe.layers,
        n_heads=recipe.heads,
        n_kv_heads=recipe.kv_heads,
        head_dim=recipe.head_dim,
        max_context=recipe.context,
        vocab_size=recipe.vocab,
        n_parameters=2 * recipe.vocab * recipe.hidden
        + recipe.layers * sum(n_in * n_out for n_in, n_out in recipe.linears().values()),
        dtype="float16",
        eos_token_ids=[recipe.vocab - 1],
        quantization=f"exl2-{recipe.bits:.1f}bpw",
        digests=ModelDigests(
            weights=recipe_digest,
            config=config_digest(config),
            tokenizer=tokenizer_digest(tokenizer),
            template=template_digest("", parts),
            rope=stored_rope_digest(directory),
        ),
        prompt=parts,
        files={p.name: p.stat().st_size for p in sorted(directory.iterdir()) if p.is_file()},
        kv_types={
            t: KVGate(mean_kl=0.0, p99_kl=0.0, top1_agreement=1.0, allowed=True) for t in ("k8v8", "k8v4", "k4v4")
        },
    )
    save_card(card, directory)


def make(recipe: Recipe, directory: Path) -> int:
    """Write the model into a new or empty directory; its bytes of weights."""
    directory.mkdir(parents=True, exist_ok=True)
    if any(directory.iterdir()):
        raise SystemExit(f"{directory} is not empty")
    nbytes = write_weights(recipe, directory)
    write_card(recipe, directory, directory.name)
    return nbytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    for field, default in asdict(Recipe()).items():
        parser.add_argument(f"--{field.replace('_', '-')}", type=int, default=default)
    arguments = vars(parser.parse_args())
    directory = arguments.pop("directory")
    started = time.perf_counter()
    nbytes = make(Recipe(**arguments), directory)
    print(f"{directory}: {nbytes / 1e9:.2f} GB of weights in {time.perf_counter() - started:.1f} s")


if __name__ == "__main__":
    main()
