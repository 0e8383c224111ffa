"""Ids as OpenAI's clients expect them, and which of ours they are. Nothing is stored for it: only the kind's name
differs."""


def file_id(document_id: str) -> str:
    """`file-…` for `doc_…`."""
    return f"file-{document_id.removeprefix('doc_')}"


def document_id(name: str) -> str:
    """The document that is meant by an id of a file, or by its own."""
    return f"doc_{name.removeprefix('file-')}" if name.startswith("file-") else name


def completion_id(answer_id: str) -> str:
    return f"chatcmpl-{answer_id.removeprefix('ans_')}"


def response_id(answer_id: str) -> str:
    return f"resp_{answer_id.removeprefix('ans_')}"


def message_id(answer_id: str) -> str:
    """Of the only output of a response."""
    return f"msg_{answer_id.removeprefix('ans_')}"


def answer_id(response: str) -> str:
    """The answer that is meant by the id of a response."""
    return f"ans_{response.removeprefix('resp_')}" if response.startswith("resp_") else response
