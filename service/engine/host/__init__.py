"""Builds and answers: snapshots on disk, documents and tails in memory, the scheduler between them."""
