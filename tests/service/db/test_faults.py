"""Which faults of a database another try can help with."""

import sqlite3

import asyncpg
import pytest
from sqlalchemy.dialects.postgresql.asyncpg import AsyncAdapt_asyncpg_dbapi
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError

from service.db.faults import connecting, faults, is_away
from service.errors import DatabaseUnavailable, StorageFull


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


def test_a_server_that_fails_while_a_connection_is_made_is_away():
    """What asyncpg and SQLAlchemy make of it, as a full disk under PostgreSQL showed it."""
    fault = AsyncAdapt_asyncpg_dbapi(asyncpg)._asyncpg_error_translate[asyncpg.exceptions.InternalServerError]
    error = fault("could not write init file", asyncpg.exceptions.InternalServerError("could not write init file"))
    with pytest.raises(DatabaseUnavailable), connecting():
        raise DBAPIError("x", None, error)
    with pytest.raises(DBAPIError), faults():
        raise DBAPIError("x", None, error)
    with pytest.raises(DBAPIError), connecting():
        raise DBAPIError("x", None, State("28P01"))
