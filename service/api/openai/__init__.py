"""The calls that OpenAI's clients make, as far as docs/openai.md says: other words for the same use cases."""
