import threading

import pytest
import torch

from service.engine.torch_engine.arena import Arena, carve, carved_nbytes


@pytest.fixture
def prepared() -> Arena:
    arena = Arena()
    arena.prepare(3 << 20)
    return arena


def test_the_next_document_that_fits_takes_the_spare(prepared: Arena) -> None:
    assert prepared.spare_nbytes == 3 << 20
    buffer = prepared.take(2 << 20)
    assert buffer.numel() == 2 << 20
    assert prepared.spare_nbytes == 0
    buffer.fill_(7)  # writable, and its own
    assert prepared.take(2 << 20).data_ptr() != buffer.data_ptr()
    assert bool((buffer == 7).all())


@pytest.mark.parametrize("nbytes", [(3 << 20) + 1, (3 << 19) - 1])
def test_a_document_that_is_too_large_or_would_waste_most_of_it_gets_its_own(prepared: Arena, nbytes: int) -> None:
    assert prepared.take(nbytes).numel() == nbytes
    assert prepared.spare_nbytes == 3 << 20


def test_a_larger_spare_replaces_a_smaller_one_only(prepared: Arena) -> None:
    prepared.prepare(1 << 20)
    assert prepared.spare_nbytes == 3 << 20
    prepared.prepare(4 << 20)
    assert prepared.spare_nbytes == 4 << 20


def test_threads_never_share_a_spare(prepared: Arena) -> None:
    taken: list[torch.Tensor] = []
    threads = [threading.Thread(target=lambda: taken.append(prepared.take(3 << 20))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({t.data_ptr() for t in taken}) == 8


def test_carved_tensors_lie_apart_and_aligned() -> None:
    shape = (2, 3, 8, 5)
    buffer = torch.zeros(carved_nbytes(shape, torch.float32, torch.bfloat16), dtype=torch.uint8)
    k = carve(buffer, shape, None, torch.float32)
    v = carve(buffer, shape, k, torch.bfloat16)
    v.fill_(1)
    assert not k.any()
    k.fill_(2)
    assert bool((v == 1).all())
    assert (v.data_ptr() - k.data_ptr()) % 64 == 0
