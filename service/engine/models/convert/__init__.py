"""Plain weights to EXL2 by exllamav2's own converter, in a process of its own; checked against the source."""
