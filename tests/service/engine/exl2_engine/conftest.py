import os

import torch

# Without a card, Triton's interpreter runs the kernels on CPU tensors. It must be chosen before triton is imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
