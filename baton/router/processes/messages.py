"""Messages between the coordinator and a worker. Each side accepts the types of the other side only."""

from typing import Any, TypeAlias

import msgspec

from baton.router.fleet.event_log import Happened
from baton.router.fleet.notes import Erred, Handoff, Introduces, LegFailed, Note
from baton.router.fleet.peers import PeerNote
from baton.router.shell.frames import Answered, Asked
from baton.router.values.settings import RouterSettings


class _Message(msgspec.Struct, frozen=True, array_like=True): ...


class Welcome(_Message, frozen=True, tag="Welcome"):
    """The coordinator's first message to a worker."""

    settings: RouterSettings
    host: str
    port: int
    # Whether the coordinator has an admin port; else workers pass the administrator's requests on.
    has_admin_port: bool
    log_config: dict[str, Any]
    history: list[Note]
    index_path: str | None = None  # Path of the index process's socket.


class Listening(_Message, frozen=True, tag="Listening"):
    """A worker reports that it accepts connections."""


class Drain(_Message, frozen=True, tag="Drain"):
    """Order to refuse new requests, and to end after the running ones. A second order ends these at once."""

    timeout_s: float


class LookAtFiles(_Message, frozen=True, tag="LookAtFiles"):
    """Order to read again the files that have changed."""


class Fault(_Message, frozen=True, tag="Fault"):
    """The router is broken; /health reports this."""

    why: str


class Collect(_Message, frozen=True, tag="Collect"):
    """The coordinator asks for a worker's metrics: `Samples`."""


class Recall(_Message, frozen=True, tag="Recall"):
    """The coordinator asks for a worker's last requests with this id, or for all: list[RequestTimeline]."""

    request_id: str | None


class Administer(_Message, frozen=True, tag="Administer"):
    """A worker passes on an administrator's request, whose key has been checked: `admin.Reply`."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


class Charge(_Message, frozen=True, tag="Charge"):
    """A worker asks to count a request against its tenant's limits: `Verdict`."""

    tenant: str
    num_prompt_tokens: int


WorkerNote: TypeAlias = PeerNote | LegFailed | Erred | Handoff | Introduces
FromWorker: TypeAlias = WorkerNote | Happened | Asked[Administer | Charge]
FromCoordinator: TypeAlias = Note | Welcome | Drain | LookAtFiles | Fault | Asked[Collect | Recall]

decode_from_worker = msgspec.msgpack.Decoder(FromWorker | Listening | Answered).decode
decode_from_coordinator = msgspec.msgpack.Decoder(FromCoordinator | Answered).decode
