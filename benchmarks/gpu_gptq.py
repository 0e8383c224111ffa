"""A GPTQ copy of a model, and the same copy with its weights written out: one reference for two engines.

    python -m benchmarks.gpu_gptq MODEL_DIR OUT [--group-size 64] [--act-order]

MODEL_DIR is an imported model with plain weights. `OUT/gptq` and `OUT/plain` become imported models: the first for the
exl2 engine, the second for the torch engine, with weights of equal value. Weights are rounded to the nearest of 16
levels per group, which is a worse quantization than GPTQ's own but the same format. With `--act-order` groups are not
runs of neighbouring inputs. No card is needed.
"""

import argparse
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from service.engine.models.card import ModelCard, load_card, save_card
from service.engine.models.importer import import_model

LINEARS = tuple(f"self_attn.{x}_proj" for x in "qkvo") + tuple(f"mlp.{x}_proj" for x in ("gate", "up", "down"))


@dataclass(frozen=True, slots=True)
class Quantized:
    """`tensors` in the first GPTQ format (zeros are stored less one); `weight` FP32 ``[out, in]``: their value."""

    tensors: dict[str, Tensor]
    weight: Tensor


def group_size_for(n_in: int, wanted: int) -> int:
    """The largest of `wanted`, half of it, ... down to 32 that divides the inputs. Raises ValueError if none does."""
    size = wanted
    while n_in % size:
        size //= 2
        if size < 32:
            raise ValueError(f"{n_in} inputs cannot be cut into groups of 32 or more")
    return size


def quantize(weight: Tensor, group_size: int, order: Tensor | None = None) -> Quantized:
    """A weight ``[out, in]`` to 4 bits. `order`: permutation of the inputs; groups are runs of it."""
    n_out, n_in = weight.shape
    order = torch.arange(n_in) if order is None else order
    groups = weight.float()[:, order].view(n_out, n_in // group_size, group_size)
    low, high = groups.amin(-1).clamp_max(0), groups.amax(-1).clamp_min(0)
    scale = ((high - low) / 15).clamp_min(1e-7).half()
    zero = (-low / scale.float()).round().clamp(1, 15)
    codes = ((groups / scale.float()[..., None]).round() + zero[..., None]).clamp(0, 15)
    value = ((codes - zero[..., None]) * scale.float()[..., None]).view(n_out, n_in)
    place = torch.argsort(order)
    tensors = {
        "qweight": pack(codes.view(n_out, n_in)[:, place].T.to(torch.int64), 0),
        "qzeros": pack((zero - 1).T.to(torch.int64), 1),
        "scales": scale.T.contiguous(),
        "g_idx": (place // group_size).to(torch.int32),
    }
    return Quantized(tensors, value[:, place].contiguous())


def pack(values: Tensor, dim: int) -> Tensor:
    """Eight numbers of 4 bits along `dim` in one int32, the first in the lowest bits."""
    parts = values.unflatten(dim, (-1, 8))
    shifts = torch.arange(0, 32, 4).view([8 if d == dim + 1 else 1 for d in range(parts.dim())])
    packed = (parts << shifts).sum(dim + 1)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32).contiguous()


def copies(model_dir: Path, group_size: int, act_order: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """All tensors of the GPTQ copy and of the plain one."""
    stored = {k: t for path in sorted(model_dir.glob("*.safetensors")) for k, t in load_file(path).items()}
    generator = torch.Generator().manual_seed(1)
    gptq: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        module = name.removesuffix(".weight")
        if not module.endswith(LINEARS):
            gptq[name], plain[name] = tensor.half(), tensor.half().float()
            continue
        n_in = tensor.shape[1]
        order = torch.randperm(n_in, generator=generator) if act_order else None
        quantized = quantize(tensor, group_size_for(n_in, group_size), order)
        gptq |= {f"{module}.{part}": t for part, t in quantized.tensors.items()}
        plain[name] = quantized.weight
    return gptq, plain


def write(
    source: Path, directory: Path, tensors: dict[str, Tensor], quantization: dict | None, **changes: object
) -> None:
    """A Hugging Face directory with the tokenizer and the config of `source`, with `changes`."""
    directory.mkdir(parents=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_bytes()) | changes
    if quantization:
        config["quantization_config"] = quantization
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        if (source / name).is_file():
            shutil.copyfile(source / name, directory / name)


def finish(source: Path, card: ModelCard, models_dir: Path, name: str) -> Path:
    """Import a written directory with the prompt of the model it comes from, and take over that model's gates: how far
    a KV type moves predictions is not what these copies are compared for."""
    import_model(source, name=name, models_dir=models_dir, measure=lambda *_: {}, find_heads=lambda *_: None)
    made = load_card(models_dir / name)
    digests = msgspec.structs.replace(made.digests, template=card.digests.template)
    save_card(
        msgspec.structs.replace(made, kv_types=card.kv_types, prompt=card.prompt, digests=digests), models_dir / name
    )
    shutil.rmtree(source)
    return models_dir / name


def make(model_dir: Path, out: Path, group_size: int, act_order: bool) -> tuple[Path, Path]:
    """Both models: (GPTQ, plain)."""
    card = load_card(model_dir)
    gptq, plain = copies(model_dir, group_size, act_order)
    settings = {"quant_method": "gptq", "bits": 4, "group_size": group_size, "desc_act": act_order, "sym": False}
    write(model_dir, out / "source-gptq", gptq, settings)
    write(model_dir, out / "source-plain", plain, None)
    return finish(out / "source-gptq", card, out, "gptq"), finish(out / "source-plain", card, out, "plain")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--act-order", action="store_true")
    arguments = parser.parse_args()
    for made in make(arguments.model_dir, arguments.out, arguments.group_size, arguments.act_order):
        print(made)


if __name__ == "__main__":
    main()
