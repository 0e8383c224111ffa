"""Compiles the kernels of the product of few rows for architectures, with no card: prints a line of JSON for each.

    python compile_product.py 80 90

In a process of its own, as `compile_attention.py`, whose output has the same form.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from compile_attention import compiled_as

from service.engine.exl2_engine.kernels.product import arrange_kernel, finish_kernel, gate_kernel, product_kernel

WIDTHS = {"n_in", "padded", "n_0", "n_1", "n_2", "n", "width", "x_stride"}
HALVES = {"x", "weight", "bias", "residual", "out"}
PLAIN = {"MATRICES": 1, "GROUP": 128, "GPTQ": False, "BLOCK_M": 16, "BLOCK_N": 64, "STAGES": 4, "EVEN": True}
PRODUCTS = {
    "exl2": {},
    "exl2 of three": {"MATRICES": 3, "BLOCK_N": 128},
    "exl2, 32 rows": {"BLOCK_M": 32, "BLOCK_N": 128},
    "exl2, small groups": {"GROUP": 32, "EVEN": False},
    "gptq": {"GPTQ": True},
    "gptq, small groups": {"GPTQ": True, "GROUP": 64, "BLOCK_M": 32},
}


def type_of(name: str, gptq: bool) -> str:
    kind = name.split("_")[0]
    if kind in ("words", "tables", "table") and name not in ("table_1", "table_2"):
        return "*i32"
    if kind in ("scales", "tops"):
        return "*fp16" if (kind == "scales") == gptq else "*i32"
    if name in HALVES:
        return "*fp16"
    return "*fp32" if name == "part" else "fp32" if name == "eps" else "i32"


def compiled(kernel, arch: int, constants: dict, warps: int = 4) -> dict:
    gptq = constants.get("GPTQ", False)
    types = {name: type_of(name, gptq) for name in kernel.arg_names if name not in constants}
    return compiled_as(kernel, arch, constants, warps, types, {n for n, t in types.items() if t[0] == "*"} | WIDTHS)


def kernels(arch: int) -> dict[str, dict]:
    found = {name: compiled(product_kernel, arch, PLAIN | {"FAST": True} | c) for name, c in PRODUCTS.items()}
    found["arrange"] = compiled(arrange_kernel, arch, {"NORM": True, "W": 8192, "BLOCK": 1024}, 8)
    found["finish"] = compiled(finish_kernel, arch, {"SHARES": 4, "BIAS": True, "ADD": True, "BLOCK": 1024})
    found["gate"] = compiled(gate_kernel, arch, {"SHARES": 2, "BIAS": True, "BLOCK": 1024})
    return found


def main() -> None:
    for arch in map(int, sys.argv[1:]):
        for name, one in kernels(arch).items():
            print(json.dumps({"arch": arch, "name": name} | one))


if __name__ == "__main__":
    main()
