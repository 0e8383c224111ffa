"""Sessions and answers, built together and closed together."""

from dataclasses import dataclass, field

from service.core.admission import Admission
from service.core.answers import AnswerService
from service.core.clock import Clock
from service.core.context import Prompt
from service.core.leases import Leases
from service.core.preparation import DocumentSnapshots, Preparation
from service.core.quotas import Quotas
from service.core.sessions import SessionService
from service.core.together import Gathering
from service.core.turn_kv import TurnKV, TurnStore
from service.core.turn_log import TurnLog
from service.db.engine import Database
from service.engine.protocol import EngineClient


@dataclass(frozen=True, slots=True)
class Limits:
    """`queue_limit`: answers running and waiting over all sessions. `grace_s`: how long an answer goes on
    unread. `quotas`: of each owner."""

    queue_limit: int
    grace_s: float
    max_answer_tokens: int
    quotas: Quotas = field(default_factory=Quotas)


@dataclass(frozen=True, slots=True)
class Conversations:
    """What there is to do with sessions."""

    sessions: SessionService
    answers: AnswerService
    admission: Admission
    turns: TurnLog
    turn_kv: TurnKV

    @classmethod
    def over(
        cls,
        database: Database,
        engine: EngineClient,
        snapshots: DocumentSnapshots,
        store: TurnStore,
        *,
        prompt: Prompt,
        prompt_digest: str,
        clock: Clock,
        limits: Limits,
        gathering: Gathering,
        leases: Leases,
    ) -> "Conversations":
        turn_kv = TurnKV(store, database)
        turns = TurnLog(database, turn_kv, clock, leases, limits.quotas)
        admission = Admission(limits.queue_limit, parallel=lambda: engine.info.max_batch)
        answers = AnswerService(
            database=database,
            engine=engine,
            preparation=Preparation(
                database, engine, snapshots, prompt, prompt_digest, limits.max_answer_tokens, clock, gathering
            ),
            turns=turns,
            admission=admission,
            clock=clock,
            grace_s=limits.grace_s,
            leases=leases,
        )
        sessions = SessionService(
            database=database, engine=engine, answers=answers, turn_kv=turn_kv, clock=clock, gathering=gathering
        )
        return cls(sessions, answers, admission, turns, turn_kv)

    async def recover(self) -> None:
        """At a server's start: fail the turns that a crash left running, or take them up where others may carry them;
        remove KV that no turn refers to."""
        await self.turns.recover()
        await self.turn_kv.sweep()
        self.answers.start()

    async def document_removed(self, document_id: str, session_ids: list[str]) -> None:
        """End what uses a document whose rows are gone."""
        for session_id in session_ids:
            await self.answers.stop(session_id)
        self.answers.forget_document(document_id)
