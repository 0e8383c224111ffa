"""Snapshots of a document's KV cache: format, codec, checks and the disk store. Knows no model and no HTTP."""
