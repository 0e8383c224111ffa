"""Windowed documents in a whole engine over the torch runner: real arithmetic, a tiny random Llama."""

import pytest
import torch

from cache_store.layout import KVType
from service.engine.messages import Retention
from service.engine.torch_engine.runner import TorchRunner
from tests.service.engine.together_host import (
    check_all_rows_of_one_document_are_that_document,
    check_several_documents,
)
from tests.service.engine.windowed_host import WindowedHost, check_a_killed_build_goes_on, check_restarts_change_nothing

RETENTION = Retention(sink_tokens=20, summary_tokens=60, window_tokens=100, segment_tokens=768, fetch_tokens=96)


@pytest.fixture
def desk(model_dir, tmp_path):
    desks = []

    def make(kv_type, dtype="float32") -> WindowedHost:
        def runner():
            return TorchRunner.load(
                model_dir, kv_type=kv_type, compute_dtype=dtype, n_slots=6, tail_tokens=256, chunk_tokens=512
            )

        tokens = torch.randint(3, 384, (1900,), generator=torch.Generator().manual_seed(7)).tolist()
        desks.append(WindowedHost(runner, tmp_path / "store", tokens, RETENTION, [(1, 0), (2, 1)]))
        return desks[-1]

    yield make
    for one in desks:
        one.host.close()


@pytest.mark.parametrize(
    ("kv_type", "dtype"), [(KVType.FP16, "float32"), (KVType.K8V4, "float32"), (KVType.K8V4, "bfloat16")]
)
def test_restarts_change_nothing(desk, kv_type, dtype):
    check_restarts_change_nothing(desk(kv_type, dtype), exact=dtype == "float32")


def test_a_killed_build_goes_on_to_the_same_bytes(desk):
    check_a_killed_build_goes_on(desk(KVType.K8V4), [512, 1000, 1536])


def test_several_documents(desk):
    check_several_documents(desk(KVType.K8V4))


def test_all_rows_of_one_document_are_that_document(desk, monkeypatch):
    check_all_rows_of_one_document_are_that_document(desk(KVType.K8V4), monkeypatch)
