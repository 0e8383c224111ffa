import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
SHARED_NBYTES = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10}


@pytest.mark.slow
@pytest.mark.compiles
@pytest.mark.parametrize("arch", sorted(SHARED_NBYTES))
def test_decode_attention_compiles_without_spills_for(arch, tmp_path):
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    environment.pop("TRITON_INTERPRET", None)
    script = Path(__file__).with_name("compile_attention.py")
    done = subprocess.run([sys.executable, script, str(arch)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(kernels) == (4 if arch == 89 else 13)  # 8.9 differs from 8.6 in the others only
    for kernel in kernels:
        assert kernel["shared"] <= SHARED_NBYTES[arch], kernel["name"]
        # Two registers of a wide tile, that of questions, do not fit on sm_80 where it has slots too.
        assert kernel["stack"] <= (8 if kernel["name"] == "k4v4 128 64 slots" else 0), kernel["name"]
        loads = {name for name in kernel["instructions"] if name.startswith("LDGSTS")}
        if kernel["name"] not in ("merge", "k4v4 64 128"):  # a tile of the latter is 8 bytes a thread
            assert any(name.endswith(".128") for name in loads), kernel["name"]
