from typing import Any

import pytest

from tests.service.engine.exl2_engine.compiling import compiled

pytestmark = [pytest.mark.slow, pytest.mark.compiles, pytest.mark.timeout(600)]
SHARED_NBYTES = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10}


@pytest.fixture(scope="module")
def by_arch(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    return compiled("compile_attention.py", SHARED_NBYTES, tmp_path_factory.mktemp("kernels"))


@pytest.mark.parametrize("arch", sorted(SHARED_NBYTES))
def test_decode_attention_compiles_without_spills_for(by_arch, arch):
    kernels = [*by_arch[arch]]
    assert len(kernels) == {86: 8, 89: 4}.get(arch, 13)  # the others are those of 8.0 or 8.6
    if arch == 86:
        roomy = [kernel for kernel in by_arch[80] if " 128 16" in kernel["name"]]
        assert all(kernel["registers"] < 192 for kernel in roomy), "of 255: with less to spare, compile them for 8.6"
        kernels += roomy
        assert len(kernels) == 13
    for kernel in kernels:
        assert kernel["shared"] <= SHARED_NBYTES[arch], kernel["name"]
        # Two registers of a wide tile, that of questions, do not fit on sm_80 where it has slots too.
        assert kernel["stack"] <= (8 if kernel["name"] == "k4v4 128 64 slots" else 0), kernel["name"]
        loads = {name for name in kernel["instructions"] if name.startswith("LDGSTS")}
        if kernel["name"] not in ("merge", "k4v4 64 128"):  # a tile of the latter is 8 bytes a thread
            assert any(name.endswith(".128") for name in loads), kernel["name"]
