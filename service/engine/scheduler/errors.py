"""Errors of the scheduler that cross to other threads."""


class SchedulerClosed(Exception):
    """The engine's thread has ended; nothing more is computed."""
