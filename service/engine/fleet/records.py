"""What is written to Redis: the state of a worker, requests as on the wire to an engine, events in batches."""

from typing import Any

import msgspec

from service.engine.messages import (
    AnswerDone,
    AnswerStarted,
    AnswerText,
    BuildDone,
    BuildProgress,
    EngineInfo,
    EngineStats,
    Failed,
)
from service.engine.remote import wire

LOST = Failed("engine_lost", "the worker was lost, or Redis was", retryable=True)
NO_WORKER = Failed("engine_lost", "no worker is there: start `preread worker`", retryable=True)
UNSENT_BUILD = Failed("busy", "no worker takes this document now", retryable=True)
UNKNOWN = Failed("unknown_request", "nothing is kept of this request", retryable=True)
CLOSING = -1
"""The number of a batch by which a client ends a run whose worker is lost."""


class WorkerState(msgspec.Struct, frozen=True):
    """What a worker says with each heartbeat. `active` are its open requests; `stats` has the documents in its memory.

    `ready`: its engine answers. `shares`: it has a tier from which it restores what others stored. `free_nbytes` of the
    disk with its snapshots.
    """

    worker_id: str
    epoch: str
    info: EngineInfo
    ready: bool
    draining: bool
    shares: bool
    active: int
    free_nbytes: int
    heartbeat_s: float
    stats: EngineStats | None = None


class Delete(msgspec.Struct, frozen=True, tag="delete"):
    """Remove snapshots of an owner, pairs of kind and id, from a worker's disk. `noted`: the id under which it was
    noted for workers that are away; empty where it was not."""

    owner_id: str
    snapshots: list[tuple[str, str]]
    noted: str = ""


class FollowPins(msgspec.Struct, frozen=True, tag="follow_pins"):
    """Other documents are pinned than before: look which."""


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The only event of a run that a worker did not begin: another one must."""

    reason: str


Event = BuildProgress | BuildDone | AnswerStarted | AnswerText | AnswerDone | Failed | wire.Reply | Refused


class Batch(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive events of a run; `first` is the number of the first one, counted from 0, or CLOSING."""

    first: int
    events: list[Event]


class Pointer(msgspec.Struct, frozen=True, array_like=True):
    """Where a request runs: its latest run, and the life of the worker that has it."""

    run: str
    worker_id: str
    epoch: str

    @property
    def life(self) -> tuple[str, str]:
        return self.worker_id, self.epoch


encode = msgspec.msgpack.Encoder().encode
decode_state = msgspec.msgpack.Decoder(WorkerState).decode
decode_batch = msgspec.msgpack.Decoder(Batch).decode
decode_pointer = msgspec.msgpack.Decoder(Pointer).decode
decode_info = msgspec.msgpack.Decoder(EngineInfo).decode
decode_delete = msgspec.msgpack.Decoder(Delete).decode
decode_task = msgspec.msgpack.Decoder(wire.Request | Delete | FollowPins).decode


def ends(event: Event) -> bool:
    """Whether an event is the last of its run."""
    return not isinstance(event, BuildProgress | AnswerStarted | AnswerText)


def fields(entry: list[Any]) -> dict[bytes, bytes]:
    """Of an entry of a stream: its fields by name."""
    flat = entry[1]
    return dict(zip(flat[::2], flat[1::2], strict=True))
