"""Which faults of a database another try can help with."""

import sqlite3

import pytest
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError

from service.db.faults import faults, is_away
from service.errors import StorageFull


class State(Exception):
    def __init__(self, sqlstate=None):
        super().__init__("x")
        self.sqlstate = sqlstate


@pytest.mark.parametrize(
    ("error", "away"),
    [
        (DBAPIError("x", None, State("57P03")), True),
        (DBAPIError("x", None, State("53200")), True),
        (DBAPIError("x", None, State("58030")), True),
        (InterfaceError("x", None, State()), True),
        (InterfaceError("x", None, sqlite3.InterfaceError("misuse")), False),
        (OperationalError("x", None, sqlite3.OperationalError("database is locked")), True),
        (DBAPIError("x", None, State("23505")), False),
        (ConnectionResetError(), True),
        (ValueError(), False),
    ],
)
def test_what_is_worth_another_try(error, away):
    assert is_away(error) is away


def test_a_full_disk_is_told_as_one():
    with pytest.raises(StorageFull), faults():
        raise DBAPIError("x", None, State("53100"))
