"""Compiles every kernel of the codec, RoPE, tails, merging and norms for architectures, with no card: prints a line of
JSON for each.

    python compile_codec_kernels.py 80 90

In a process of its own, as `compile_attention.py`, whose output has the same form.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from compile_attention import measured
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from cache_store.layout import KVLayout, KVType
from service.engine.exl2_engine.kernels import append, decode_blocks, encode, norm, prefill_merge, rope

INT32 = ("positions", "slots", "tail_at", "blocks")
FP32 = ("inv_freq", "a_lse", "b_lse", "out_lse")
SCALARS = ("scaling", "eps", "weight_offset")
HALVES = ("x", "q", "k", "v", "out", "a", "b", "tail_k", "tail_v", "pool_half", "residual", "weight")


def compiled(kernel, target, warps, types=None, **constants):
    """The compiled kernel; argument types follow from names, `types` overrides some."""
    signature = {}
    for name in kernel.arg_names:
        of_name = "*i32" if name in INT32 else "*fp32" if name in FP32 else "*fp16" if name in HALVES else "i32"
        of_name = "fp32" if name in SCALARS else "*u8" if name == "pool" else of_name
        signature[name] = "constexpr" if name in constants else (types or {}).get(name, of_name)
    return compile(ASTSource(kernel, signature, constexprs=constants), target=target, options={"num_warps": warps})


def kernels(target):
    """(name, compiled) of the shapes that are used."""
    for half, groups, turn, t in ((64, 4, True, 16), (0, 3, True, 64)):
        shape = {"HALF": half, "GROUPS": groups, "TURN": turn, "T": t}
        yield f"rope {shape}", compiled(rope._rope_kernel, target, 4, **shape)
    yield "append", compiled(append._append_kernel, target, 4, GROUPS=4, T=16)
    yield "fused", compiled(append._fused_kernel, target, 4, HALF=64, GROUPS=4, TURN=True, T=16)
    for kv_type, dim in ((KVType.K8V4, 128), (KVType.FP16, 96)):
        constants, tiles = encode.record_constants(KVLayout(1, 8, dim, kv_type), 128)
        for kernel in (encode._encode_kernel, decode_blocks._decode_kernel):
            yield f"{kernel.__name__} {kv_type} {dim}", compiled(kernel, target, 4, **constants, T=128, TILES=tiles)
    for a, last in (("*fp16", False), ("*fp32", True)):
        types = {"a": a, "out": "*fp16" if last else "*fp32"}
        constants = {"BOTH": True, "LAST": last, "TURN": last, "GROUPS": 4, "T": 64}
        yield f"merge {a} {last}", compiled(prefill_merge._merge_kernel, target, 4, types, **constants)
    yield "norm", compiled(norm._norm_kernel, target, 16, ADD=True, W=8192)


if __name__ == "__main__":
    for capability in map(int, sys.argv[1:]):
        for name, kernel in kernels(GPUTarget("cuda", capability, 32)):
            print(json.dumps({"arch": capability, "name": name} | measured(kernel)))
