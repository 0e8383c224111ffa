"""Tiers beyond the local disk: where snapshots survive the host, and where other hosts find them."""
