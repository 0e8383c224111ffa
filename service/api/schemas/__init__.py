"""Bodies of requests and responses; validated at the edge, then trusted."""
