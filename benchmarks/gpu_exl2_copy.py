"""An EXL2 copy of a model by exllamav2's own converter, and the same copy with its weights written out.

    python -m benchmarks.gpu_exl2_copy MODEL_DIR OUT [--bits 4.0] [--head-bits 6]

Runs on a card. MODEL_DIR is an imported model with plain weights. `OUT/exl2` and `OUT/plain` become imported models:
the first for the exl2 engine, the second for the torch engine, with weights of equal value, as exllamav2 reconstructs
them.

The converter calibrates on the texts that come with exllamav2. Its reader of other texts wants pandas and fastparquet;
it is not used, so empty modules stand in for them. Without flash-attn its default attention has no causal mask: it is
told to take the path that has one.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.gpu_gptq import finish, write
from service.engine.models.card import load_card

ARCHITECTURES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM"}
ARCHITECTURES |= {"qwen3": "Qwen3ForCausalLM"}
CONVERT = """
import importlib.machinery, importlib.util, runpy, sys
for name in ("pandas", "fastparquet"):
    if importlib.util.find_spec(name) is None:
        sys.modules[name] = importlib.util.module_from_spec(importlib.machinery.ModuleSpec(name, None))
runpy.run_module("exllamav2.conversion.convert_exl2", run_name="__main__", alter_sys=True)
"""


def exllama_config(stored: dict[str, Any]) -> dict[str, Any]:
    """A `config.json` in the words that exllamav2 knows: it would take another base of RoPE, without a message, where
    it does not find its own name for it. Raises SystemExit for what this program does not translate."""
    rope = stored.get("rope_parameters") or {"rope_type": "default", "rope_theta": stored.get("rope_theta", 10000.0)}
    if rope.get("rope_type", "default") != "default":
        raise SystemExit(f"RoPE of type {rope['rope_type']} is not translated for the converter")
    if stored["model_type"] not in ARCHITECTURES:
        raise SystemExit(f"models of type {stored['model_type']} are not translated for the converter")
    kept = {k: v for k, v in stored.items() if k != "rope_parameters"}
    return kept | {"architectures": [ARCHITECTURES[stored["model_type"]]], "rope_theta": rope["rope_theta"]}


def make_view(model_dir: Path, view: Path) -> None:
    """A directory that exllamav2 reads: links to weights and tokenizer, and its config."""
    view.mkdir(parents=True)
    for path in [*model_dir.glob("*.safetensors"), model_dir / "tokenizer.json"]:
        (view / path.name).symlink_to(path.resolve())
    stored = json.loads((model_dir / "config.json").read_bytes())
    (view / "config.json").write_text(json.dumps(exllama_config(stored), indent=1))


def convert(view: Path, work: Path, compiled: Path, bits: float, head_bits: int) -> None:
    """Run the converter in a process of its own. Raises CalledProcessError."""
    work.mkdir()
    options = {"-i": view, "-o": work, "-cf": compiled, "-b": bits, "-hb": head_bits, "-l": 1024, "-ml": 512}
    # Rows of text, where 100 and 16 are usual: minutes less, and the copy is only compared with itself.
    options |= {"-r": 24, "-mr": 6}
    words = [str(word) for pair in options.items() for word in pair]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    environment |= {f"EXLLAMA_NO_{part}": "1" for part in ("SDPA", "FLASH_ATTN", "XFORMERS")}
    subprocess.run([sys.executable, "-c", CONVERT, *words], check=True, env=environment)


def dequantized(compiled: Path) -> Iterator[tuple[str, Tensor]]:
    """Name and FP16 value ``[out, in]`` of every quantized linear, one by one. Each is loaded by itself: loaded
    together, an MLP's matrices come in another order of rows and columns."""
    from exllamav2 import ExLlamaV2, ExLlamaV2Config
    from exllamav2.linear import ExLlamaV2Linear

    config = ExLlamaV2Config(str(compiled))
    model = ExLlamaV2(config)
    model.load(lazy=True)
    for module in model.modules:
        for part in [module, *module.submodules]:
            if not isinstance(part, ExLlamaV2Linear):
                continue
            part.load()
            if part.is_quant():
                weight = part.get_weight_tensor_dq()[:, : part.out_features - part.padding]
                yield part.key, weight.T.contiguous().cpu()
            part.unload()


def plain_copy(compiled: Path) -> dict[str, Tensor]:
    """All tensors of the copy in FP32."""
    stored = {k: t for path in compiled.glob("*.safetensors") for k, t in load_file(path).items()}
    plain = {k: t.float() for k, t in stored.items() if k.endswith((".weight", ".bias"))}
    with torch.inference_mode():
        plain |= {f"{key}.weight": weight.float() for key, weight in dequantized(compiled)}
    return {k: t.clone() for k, t in plain.items()}


def make(model_dir: Path, out: Path, bits: float, head_bits: int) -> tuple[Path, Path]:
    """Both models: (EXL2, plain)."""
    card = load_card(model_dir)
    out.mkdir(parents=True)
    started = time.perf_counter()
    make_view(model_dir, out / "view")
    convert(out / "view", out / "work", out / "compiled", bits, head_bits)
    print(f"converted in {time.perf_counter() - started:.0f} s", flush=True)
    quantization = json.loads((out / "compiled" / "config.json").read_bytes())["quantization_config"]
    stored = {k: t for path in (out / "compiled").glob("*.safetensors") for k, t in load_file(path).items()}
    # the head is quantized, the embedding is not: they are one matrix no longer
    write(model_dir, out / "source-exl2", stored, quantization, tie_word_embeddings=False)
    write(model_dir, out / "source-plain", plain_copy(out / "compiled"), None, tie_word_embeddings=False)
    made = finish(out / "source-exl2", card, out, "exl2"), finish(out / "source-plain", card, out, "plain")
    for name in ("view", "work", "compiled"):
        shutil.rmtree(out / name)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--bits", type=float, default=4.0)
    parser.add_argument("--head-bits", type=int, default=6)
    arguments = parser.parse_args()
    for made in make(arguments.model_dir, arguments.out, arguments.bits, arguments.head_bits):
        print(made)


if __name__ == "__main__":
    main()
