"""The KV that a decode engine keeps of a conversation, and its way to the next turn's prefill leg.

    D's answer, with do_remote_decode --TurnSieve--> the client's answer, without
                                             +-----> TurnTable, under the client's X-Session-Id
    next prefill leg of that session <---------------+    once

Engines that are not set up for turns send no such params. A client never gets the params, which are addresses
of engines. They go to an engine that may use the keeper's KV. That engine verifies them, by signature and
prompt, and computes the blocks that it cannot fetch. The router forgets the turns of a keeper when the
keeper's weights change.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec

from baton.core.identity import KVIdentity
from baton.core.json_text import NotJson, decode_json
from baton.core.retention import SESSION_CHARS_MAX
from baton.router.fleet.engine import Engine
from baton.router.fleet.notes import Note, TurnKept, TurnTaken
from baton.router.values.identity import is_compatible
from baton.router.values.legs import PARAMS
from baton.router.values.sse import RawObject, data_of, with_data

TURNS_MAX = 4096  # Sessions at most; the one whose turn is oldest leaves first.
KEPT_S = 480.0  # Default time for which engines keep blocks. Engines compute blocks that are gone by then.

_EMPTY = msgspec.Raw(b"{}")
_MARK = f'"{PARAMS}"'.encode()


class Turn(NamedTuple):
    keeper: Engine  # The decode engine that keeps the blocks.
    params: dict[str, Any]
    kv_identity: KVIdentity | None = None  # Identity of the blocks' KV; None: not known.

    @property
    def is_old(self) -> bool:
        """Whether the keeper has other weights now."""
        return self.kv_identity is not None and self.kv_identity != self.keeper.kv_identity

    def fits(self, kv: KVIdentity | None) -> bool:
        """Whether an engine with this identity may fetch it."""
        return not self.is_old and is_compatible(kv, self.kv_identity)


def session_of(name: str | None, tenant: str) -> str | None:
    """Key of a session in a `TurnTable`, because two tenants may choose one name.

    `tenant`: the tenant of a key or token, or "".
    """
    if not name or not tenant or len(name) > SESSION_CHARS_MAX:
        return name
    return blake2b(f"{tenant}\0{name}".encode(errors="surrogatepass"), digest_size=16).hexdigest()


class TurnTable:
    """Turns of sessions. Not thread-safe.

    It takes a turn back from its keeper if no prefill leg will fetch it.
    """

    def __init__(
        self,
        take_back: Callable[[Engine, dict[str, Any]], None],
        tell: Callable[[Note], None] = lambda note: None,
    ) -> None:
        """`tell`: sends a note to the other processes of this router, which have copies of the table."""
        self._take_back = take_back
        self._tell = tell
        self._kept: OrderedDict[str, tuple[float, Turn]] = OrderedDict()

    def put(self, session: str | None, turn: Turn, now_s: float) -> None:
        if not session or len(session) > SESSION_CHARS_MAX:
            self._take_back(turn.keeper, turn.params)
            return
        if (replaced := self._kept.pop(session, None)) is not None:
            self._take_back(replaced[1].keeper, replaced[1].params)
        self._kept[session] = (now_s + KEPT_S, turn)
        if len(self._kept) > TURNS_MAX:
            _, (_, oldest) = self._kept.popitem(last=False)
            self._take_back(oldest.keeper, oldest.params)
        self._tell(TurnKept(session, turn.keeper.key, turn.params, turn.kv_identity))

    def take(self, session: str | None, now_s: float, kv: KVIdentity | None = None) -> Turn | None:
        """Take the turn of a session out: a ticket is valid for one fetch.

        `kv`: identity of the engine that has to fetch it. A turn that does not fit it stays.
        """
        until, turn = self._kept.get(session or "", (0.0, None))
        if turn is None:
            return None
        is_over = now_s >= until or turn.is_old
        if not is_over and not turn.fits(kv):
            return None
        del self._kept[session or ""]
        if is_over:
            self._take_back(turn.keeper, turn.params)
            return None
        self._tell(TurnTaken(session or ""))
        return turn

    def forget(self, keeper: Engine) -> None:
        """Take back the turns that the engine has kept with other weights than it has now."""
        for session, turn in self.kept():
            if turn.keeper is keeper and turn.is_old:
                del self._kept[session]
                self._take_back(keeper, turn.params)
                self._tell(TurnTaken(session))

    def learn(self, session: str, turn: Turn | None, now_s: float) -> None:
        """Learn that another process has put this turn, or taken the last one.

        That process takes replaced turns back, this one does not.
        """
        self._kept.pop(session, None)
        if turn is not None:
            self._kept[session] = (now_s + KEPT_S, turn)
            if len(self._kept) > TURNS_MAX:
                self._kept.popitem(last=False)

    def kept(self) -> list[tuple[str, Turn]]:
        return [(session, turn) for session, (_, turn) in self._kept.items()]


class TurnSieve:
    """Takes the router's params out of one answer. `params`: those of a kept turn, once they have come."""

    def __init__(self) -> None:
        self.params: dict[str, Any] | None = None

    def whole(self, body: bytes) -> bytes:
        found = self._sift(body)
        return body if found is None else msgspec.json.encode(found)

    def event(self, event: bytes) -> bytes:
        """A whole event for the client."""
        found = self._sift(data_of(event)) if _MARK in event else None
        return event if found is None else with_data(event, found)

    def _sift(self, text: bytes) -> RawObject | None:
        """The answer without the router's params. None: it has none.

        It decodes only the params: an answer may have many megabytes, and all clients wait meanwhile.
        """
        if _MARK not in text:
            return None
        try:
            parts = decode_json(text, RawObject)
            # A named event may have its whole answer in a field.
            name = "response" if "response" in parts else "message"
            holder = parts if PARAMS in parts else decode_json(parts.get(name, _EMPTY), RawObject)
            if PARAMS not in holder:
                return None  # The word is in the text.
            params = decode_json(holder.pop(PARAMS))
        except NotJson:
            return None  # The client gets the answer unchanged.
        if holder is not parts:
            if params is None:
                return None
            parts[name] = msgspec.Raw(msgspec.json.encode(holder))
        if isinstance(params, Mapping) and params.get("do_remote_decode") is True:
            self.params = dict(params)
        return parts
