"""Continuous batching over a `Runner`: one thread; sequences join and leave at any step."""
