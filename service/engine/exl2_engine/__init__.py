"""Models on an NVIDIA card: exllamav2 gives the weights and their products; KV, attention and schedule are ours."""
