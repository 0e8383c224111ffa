"""One module per format: bytes of a file to a title and the raw text of its pages."""
