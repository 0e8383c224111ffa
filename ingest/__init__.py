"""From uploaded bytes to pages of text and their token ranges. Knows no HTTP, no database and no snapshot."""
