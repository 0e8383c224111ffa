"""Model directories: what is recorded about a model, how one is imported, and how its KV types are gated."""
