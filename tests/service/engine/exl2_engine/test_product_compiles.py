from typing import Any

import pytest

from tests.service.engine.exl2_engine.compiling import compiled

pytestmark = [pytest.mark.slow, pytest.mark.compiles, pytest.mark.timeout(600)]
# 8.9 gets the machine code of 8.6, and has as much shared memory.
SHARED_NBYTES = {80: 163 << 10, 86: 99 << 10, 90: 227 << 10}


@pytest.fixture(scope="module")
def by_arch(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    return compiled("compile_product.py", SHARED_NBYTES, tmp_path_factory.mktemp("kernels"))


@pytest.mark.parametrize("arch", sorted(SHARED_NBYTES))
def test_the_product_compiles_without_spills_for(by_arch, arch):
    kernels = {kernel["name"]: kernel for kernel in by_arch[arch]}
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
