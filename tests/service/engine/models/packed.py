"""Weights in packed forms, all zero."""

import torch


def exl2_parts(n_out: int, n_in: int) -> dict[str, torch.Tensor]:
    groups = n_in // 32
    return {
        "q_weight": torch.zeros(n_in // 8, n_out, dtype=torch.int32),
        "q_scale": torch.zeros(groups, n_out // 8, dtype=torch.int32),
        "q_scale_max": torch.ones(groups, dtype=torch.float16),
        "q_groups": torch.tensor([[4, 4 * g] for g in range(groups)], dtype=torch.int16).flatten(),
        "q_invperm": torch.arange(n_in, dtype=torch.int32),
    }
