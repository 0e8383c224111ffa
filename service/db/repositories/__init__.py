"""Repositories, and the unit of work that holds one of each over one transaction."""

from sqlalchemy.ext.asyncio import AsyncSession

from service.db.repositories.chats import Chats
from service.db.repositories.deletions import Deletions
from service.db.repositories.documents import Documents
from service.db.repositories.pages import Pages
from service.db.repositories.people import People
from service.db.repositories.processes import Processes
from service.db.repositories.rebuilds import Rebuilds
from service.db.repositories.records import Records
from service.db.repositories.sessions import Sessions
from service.db.repositories.shares import Shares
from service.db.repositories.turns import Turns
from service.db.repositories.web_sessions import WebSessions


class UnitOfWork:
    """One transaction; made by `Database.reading` and `Database.writing`."""

    def __init__(self, session: AsyncSession) -> None:
        self.session = session
        self.chats = Chats(session)
        self.documents = Documents(session)
        self.pages = Pages(session)
        self.people = People(session)
        self.deletions = Deletions(session)
        self.processes = Processes(session)
        self.rebuilds = Rebuilds(session)
        self.records = Records(session)
        self.sessions = Sessions(session)
        self.shares = Shares(session)
        self.turns = Turns(session)
        self.web_sessions = WebSessions(session)


__all__ = [
    "Chats", "Deletions", "Documents", "Pages", "People", "Processes", "Rebuilds", "Records", "Sessions", "Shares",
    "Turns", "UnitOfWork", "WebSessions",
]  # fmt: skip
