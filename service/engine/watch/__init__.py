"""Where the tokens of an answer look: the attention of a few heads to a document's rows, told with the answer."""
