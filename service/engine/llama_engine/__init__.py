"""The engine over llama.cpp: GGUF files as they are, its own kernels, its KV in our snapshots."""
