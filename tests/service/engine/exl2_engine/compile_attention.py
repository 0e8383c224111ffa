"""Compiles the kernels of decode attention for architectures, with no card: prints a line of JSON for each.

    python compile_attention.py 80 90

Runs in a process of its own, because Triton's interpreter, once chosen, stays for the whole process.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from cache_store.layout import KVLayout, KVType
from service.engine.exl2_engine.kernels.attend import decode_config, document_constants, query_tile
from service.engine.exl2_engine.kernels.decode import document_kernel
from service.engine.exl2_engine.kernels.merge import merge_kernel
from service.engine.exl2_engine.kernels.tails import tail_kernel

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
TYPES = {"q_ptr": "*fp16", "k_ptr": "*fp16", "v_ptr": "*fp16", "bias_ptr": "*fp16", "pool_ptr": "*u8", "scale": "fp32"}
TYPES |= {"slot_pool_ptr": "*u8"}
FLOATS = {"part_ptr", "lse_ptr"}
MULTIPLES_OF_16 = {"record_nbytes", "slot_stride", "head_stride"}
HEAD_DIMS = (64, 96, 128, 256)
OTHER_DIMS = {70: 64, 75: 96, 80: 64, 86: 96, 89: 256, 90: 256}
"""Beside 128, every architecture gets another head dim; 8.9 only this one."""
SAME_CODE = {89: 86}
"""The same constants give the same machine code."""
ROOMY = (128, 16)
"""Head dim and tile whose constants are those of 8.0 on 8.6 too, where they leave a third of the registers free: 8.6
need not be tried."""


def compiled(kernel, arch: int, constants: dict, warps: int) -> dict:
    """Registers, bytes of stack (spills) and instructions of a kernel."""
    types = {}
    for name in kernel.arg_names:
        out = "*fp16" if kernel is merge_kernel else "*fp32"
        default = "*fp32" if name in FLOATS else out if name == "out_ptr" else "*i32" if name[-4:] == "_ptr" else "i32"
        types[name] = TYPES.get(name, default)
    aligned = {name for name, kind in types.items() if kind[0] == "*"} | MULTIPLES_OF_16
    return compiled_as(kernel, arch, constants, warps, types, aligned)


def compiled_as(kernel, arch: int, constants: dict, warps: int, types: dict, aligned: set) -> dict:
    """`types`: of the arguments that are no constants; `aligned`: those that are multiples of 16."""
    signature, attributes = {}, {}
    for i, name in enumerate(kernel.arg_names):
        signature[name] = "constexpr" if name in constants else types[name]
        if name in aligned and name not in constants:
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    return measured(triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": warps}))


def measured(binary) -> dict:
    """Registers, bytes of stack (spills), of shared memory, and instructions of what Triton compiled."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        usage = tool("cuobjdump", "-res-usage", file.name)
        instructions = re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9_.]+)", sass(file.name), re.M)
    registers, stack = (int(re.search(name + r":(\d+)", usage)[1]) for name in ("REG", "STACK"))
    counts = {name: instructions.count(name) for name in sorted(set(instructions))}
    return {"registers": registers, "stack": stack, "shared": binary.metadata.shared, "instructions": counts}


def tool(name: str, *arguments: str) -> str:
    return subprocess.run([TOOLS / name, *arguments], check=True, capture_output=True, text=True).stdout


def sass(cubin: str) -> str:
    return tool("nvdisasm", "-c", cubin)


def documents(arch: int):
    """`document_kernel` of every KV type, and for all widths of tiles, with the defaults for the card."""
    cases = [(KVType.K8V4, OTHER_DIMS[arch], 16), (KVType.K4V4, OTHER_DIMS[arch], 128)]
    common = [*((kv_type, 128, 16) for kv_type in KVType), (KVType.K8V4, 128, 32), (KVType.K8V8, 128, 64)]
    with_slots = [(KVType.K8V4, 128, 16), (KVType.K4V4, 128, 64), (KVType.FP16, 128, 128)]
    every = [(*case, False) for case in cases + common] + [(*case, True) for case in with_slots]
    for kv_type, dim, queries, slots in every:
        tile = query_tile(queries, dim, arch)
        layout = KVLayout(64 if slots else 1, 8, dim, kv_type)
        config = decode_config(kv_type, tile, dim, arch)
        twin = SAME_CODE.get(arch, arch)
        same = (query_tile(queries, dim, twin), decode_config(kv_type, tile, dim, twin)) == (tile, config)
        if (dim == 128 and twin != arch and same) or (arch == 86 and (dim, tile) == ROOMY):
            continue
        constants = document_constants(layout, 5, tile, config, biased=dim != 128, slots=slots, fast=True)
        yield f"{kv_type} {dim} {tile}{' slots' * slots}", compiled(document_kernel, arch, constants, config.warps)


def others(arch: int):
    dim = OTHER_DIMS[arch]
    padded = triton.next_power_of_2(dim)
    shape = {"KV_HEADS": 8, "GROUP_HEADS": 5, "D": dim, "D_PAD": padded, "EVEN_ODD": True}
    tile = {"BLOCK_M": 64, "BLOCK_N": 32 if dim > 128 else 64, "STAGES": 2}
    yield "tails", compiled(tail_kernel, arch, shape | tile, 8 if 64 * dim > 64 * 64 else 4)
    merge = {"HEADS": 40, "D": dim, "D_PAD": padded, "EVEN_ODD": True, "ROTATED": True, "BLOCK_S": 16}
    yield "merge", compiled(merge_kernel, arch, merge, 4 if dim <= 128 else 8)


def main() -> None:
    for arch in map(int, sys.argv[1:]):
        for make in (documents, others):
            for name, found in make(arch):
                print(json.dumps({"arch": arch, "name": name} | found))


if __name__ == "__main__":
    main()
