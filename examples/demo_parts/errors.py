"""What ends the demo early."""


class DemoError(Exception):
    """The demo cannot go on; the message says why, in a sentence for the user."""
