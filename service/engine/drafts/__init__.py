"""Speculation from the document: guesses of what an answer quotes are computed several in one step, and checked."""
