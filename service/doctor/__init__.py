"""What makes an installation slower than it could be, or stops it: named checks with evidence and remedy."""
