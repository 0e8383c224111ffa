"""How many rows, documents and bytes go at a time. Nothing here imports torch: a plan counts with them too."""

N_DOCUMENTS = 32
"""Documents in memory at a time: each is one of llama.cpp's sequences."""
N_OWN = 4
"""Sequences that keep the others in order (`places`)."""
N_ROWS, N_OUTPUTS = 512, 128
"""Rows that go through llama.cpp at once, and those of them that give logits."""
FILL_NBYTES = 64 << 20
"""Cells are filled, and what is loaded of a document goes to them, by states of about this size."""
