"""Snapshots of a document's KV cache: format, codec, checks, disk store. Knows no model and no HTTP."""
