"""The extraction corpus: documents whose text is known, made when they are needed."""
