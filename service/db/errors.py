"""Database errors the use cases handle; anything else is a fault.

DatabaseError
└── AlreadyExists       a unique constraint refused the row
"""


class DatabaseError(Exception):
    """Base of the errors raised on purpose by repositories."""


class AlreadyExists(DatabaseError):
    """A row with the same unique key is there already."""
