import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
# 8.9 gets the machine code of 8.6, and has as much shared memory.
SHARED_NBYTES = {80: 163 << 10, 86: 99 << 10, 90: 227 << 10}


@pytest.mark.slow
@pytest.mark.compiles
@pytest.mark.parametrize("arch", sorted(SHARED_NBYTES))
def test_the_product_compiles_without_spills_for(arch, tmp_path):
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    environment.pop("TRITON_INTERPRET", None)
    script = Path(__file__).with_name("compile_product.py")
    done = subprocess.run([sys.executable, script, str(arch)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    kernels = {kernel["name"]: kernel for kernel in map(json.loads, done.stdout.splitlines())}
    assert len(kernels) == 9
    for name, kernel in kernels.items():
        assert kernel["shared"] <= SHARED_NBYTES[arch], name
        assert kernel["stack"] <= (16 if "small groups" in name else 0), name
    for name in ("exl2", "exl2 of three", "exl2, 32 rows"):
        counts = kernels[name]["instructions"]
        stored = sum(n for instruction, n in counts.items() if instruction.startswith("STS"))
        assert counts["HMMA.16816.F32"] > 0
        # Words go to the tensor cores' registers as they are: only sums pass through shared memory, at the end.
        assert stored == counts["STG.E.128"], name
        assert any(i.startswith("LDGSTS") and i.endswith(".128") for i in counts), name
