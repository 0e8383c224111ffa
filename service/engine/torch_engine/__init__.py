"""The torch engine: a transformers model with Preread's own attention and KV cache, on a CPU or any torch device."""
