"""What scoring takes, for memory plans: without torch."""

SCORING_NBYTES = 64 << 20
"""Memory that scoring takes for a while at most, beside the keys: what `index._PIECE` allows, several times over."""
