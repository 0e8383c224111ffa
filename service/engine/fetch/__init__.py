"""Which cold tokens of a document a question needs: scored by the keys of a few heads, chosen within a budget."""
