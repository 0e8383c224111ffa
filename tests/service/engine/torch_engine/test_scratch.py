import torch

from service.engine.torch_engine.scratch import Scratch

CPU = torch.device("cpu")


def test_a_name_gives_the_same_memory_until_it_has_to_grow() -> None:
    scratch = Scratch()
    first = scratch.take("scores", (4, 6), torch.float32, CPU)
    assert first.shape == (4, 6)
    assert first.is_contiguous()
    smaller = scratch.take("scores", (2, 3, 2), torch.float32, CPU)
    assert smaller.data_ptr() == first.data_ptr()
    assert scratch.take("other", (4, 6), torch.float32, CPU).data_ptr() != first.data_ptr()
    grown = scratch.take("scores", (100,), torch.float32, CPU)
    assert grown.numel() == 100
    assert scratch.take("scores", (2,), torch.bfloat16, CPU).dtype is torch.bfloat16
