"""The engines that the router knows: members, how busy each is, and the parts that choose among them.

`breaker` has the states of one engine. An engine that has not answered yet is eligible: the order of starts
must not matter.

    Roster        the engines by role and address; the log for operators
    FleetModels   what they serve
    FleetHealth   what answers, failures and probes show of them
    EngineChoice  which one gets a request
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from baton.core.errors import ConfigError
from baton.router.fleet.breaker import Health
from baton.router.fleet.choice import EngineChoice
from baton.router.fleet.engine import Engine
from baton.router.fleet.health import FleetHealth, give_up
from baton.router.fleet.models import FleetModels
from baton.router.fleet.notes import EngineLoad, Note
from baton.router.fleet.roster import ROLES, Roster
from baton.router.values.members import Member
from baton.router.values.settings import EngineKey, Role, RouterSettings, check_url

logger = logging.getLogger(__name__)

DRAIN_GRACE_S = 2.0  # An engine drains for this time before other engines continue its streams.


class Fleet:
    def __init__(self, settings: RouterSettings, *, unix_clock: Callable[[], float] = time.time) -> None:
        self.roster = Roster(settings, unix_clock)
        self.models = FleetModels(self.roster, settings.model_aliases)
        self.health = FleetHealth(self.roster, settings.outlier_detection, lambda note: self.tell(note))
        self.choice = EngineChoice(self.roster, self.models, settings)
        self._probe_settings = settings.probe
        self.on_added: list[Callable[[Engine], None]] = []
        self.on_removed: list[Callable[[Engine], None]] = []
        self.on_drain: Callable[[Engine], None] = lambda engine: None  # See `drain`.
        self.tell: Callable[[Note], None] = lambda note: None  # The other processes of this router.
        self.on_load: Callable[[], None] = lambda: None  # An engine's number of requests has changed.

    @property
    def engines(self) -> Sequence[Engine]:
        return self.roster.engines

    def find(self, key: EngineKey) -> Engine | None:
        return self.roster.find(key)

    def note_start(self, engine: Engine, num_tokens: int = 0, priority: int = 0) -> None:
        """A leg to this engine begins, with so many tokens of a prompt to compute.

        Its end is noted with `note_end`, that of the prompt with `note_computed`.
        """
        engine.in_flight += 1
        engine.num_requests += 1
        self._add_queued(engine, num_tokens, priority)
        self.on_load()

    def note_computed(self, engine: Engine, num_tokens: int, priority: int = 0) -> None:
        """The engine has computed so many tokens of a prompt, or its leg is given up."""
        self._add_queued(engine, -num_tokens, priority)
        self.on_load()

    def _add_queued(self, engine: Engine, num_tokens: int, priority: int) -> None:
        engine.num_queued_tokens += num_tokens
        engine.num_queued_at[priority] += num_tokens
        if not engine.num_queued_at[priority]:
            del engine.num_queued_at[priority]

    def note_end(self, engine: Engine) -> None:
        engine.in_flight -= 1
        self._note_drained(engine, engine.load + 1)
        self._end_leave(engine)
        self.on_load()

    def note_elsewhere(self, engine: Engine, load: EngineLoad) -> None:
        if load.num_heard > engine.elsewhere.num_heard:
            engine.health.on_answer()
        load_before, engine.elsewhere = engine.load, load
        self._note_drained(engine, load_before)
        self._end_leave(engine)

    def _note_drained(self, engine: Engine, load_before: int) -> None:
        if load_before and not engine.load:
            self.roster.idle[engine.role].add(engine)
            if engine.drain_until_s is not None:
                self.roster.note_event("drained", engine)

    # --- Members

    def add(self, member: Member, now_s: float) -> Engine:
        """`join`, by the administrator. Raises ConfigError for an engine that is there already."""
        check_url(member.address, "instance")
        known = self.find(member.key)
        if known is not None and known.drain_until_s is None:
            raise ConfigError(
                f"{known.url} is a {known.role} engine already; remove it first", field="instance"
            )
        return self.join(member, now_s)

    def join(self, member: Member, now_s: float) -> Engine:
        """A new engine, which gets requests after its first healthy probe; or one that drains, which returns.

        One that is there takes over what has changed.
        """
        role, url = member.key
        known = self.find(member.key)
        if known is None:
            known = Engine(member.address, role, Health(self._probe_settings, status="down"))
            self.roster.add(known)
            logger.info("%s engine %s is added", role, url)
            self.roster.note_event("added", known)
            for hear in self.on_added:
                hear(known)
        elif known.drain_until_s is not None:
            known.drain_until_s, known.is_leaving = None, False
            # Perhaps another process meanwhile.
            known.is_introduced, known.health.probe_at_s = False, now_s
            logger.info("%s engine %s is added again", role, url)
            self.roster.note_event("added", known, "again, while it drained")
        known.address, known.model, known.weight = member.address, member.model, member.weight
        self.models.set_names(known)
        self.models.judge()
        return known

    def drain(self, engine: Engine, until_s: float, *, is_leaving: bool) -> None:
        """No new requests. `on_drain` calls `hand_over` after DRAIN_GRACE_S, and `end_drain` at `until_s`."""
        engine.drain_until_s = until_s
        engine.is_leaving = engine.is_leaving or is_leaving
        logger.info("%s engine %s drains %d requests", engine.role, engine.url, engine.load)
        self.roster.note_event(
            "draining" if engine.load else "drained", engine, "then it is removed" if is_leaving else ""
        )
        self._end_leave(engine)
        if not engine.is_removed:
            self.on_drain(engine)

    def hand_over(self, engine: Engine, until_s: float) -> None:
        """Let other engines continue its streams, those that they can continue exactly."""
        if engine.drain_until_s == until_s:
            for wait in [wait for wait in engine.waits if wait.has_begun]:
                wait.hand_over()

    def end_drain(self, engine: Engine, now_s: float) -> None:
        """Give up the legs that are left. Nothing happens if the engine has returned or drains for longer."""
        if engine.is_removed or engine.drain_until_s is None or now_s < engine.drain_until_s:
            return
        give_up(engine.waits)
        if engine.is_leaving:
            self._forget(engine)

    def _end_leave(self, engine: Engine) -> None:
        if engine.is_leaving and not engine.load:
            self._forget(engine)

    def _forget(self, engine: Engine) -> None:
        if engine.is_removed:
            return
        engine.is_removed = True
        self.roster.remove(engine)
        logger.info("%s engine %s is removed", engine.role, engine.url)
        self.roster.note_event("removed", engine)
        self.models.judge()
        for hear in self.on_removed:
            hear(engine)

    # --- For operators

    @property
    def can_serve(self) -> bool:
        """A decode engine has answered; without one no request can be answered."""
        return any(engine.status == "up" and engine.is_eligible for engine in self.roster.of("decode"))

    def why_none(self, role: Role) -> str:
        """Text for an error message. Engines' addresses are the operator's affair, not the client's."""
        engines = self.roster.of(role)
        num_down = sum(not engine.is_up for engine in engines)
        num_refused = sum(engine.is_up and engine.refused is not None for engine in engines)
        num_draining = sum(engine.is_up and engine.drain_until_s is not None for engine in engines)
        refused = f", {num_refused} are refused" if num_refused else ""
        refused += f", {num_draining} are draining" if num_draining else ""
        return f"no {role} engine can take the request ({num_down} of {len(engines)} are down{refused})"

    def snapshot(self) -> Mapping[str, Any]:
        return {
            role: [
                {
                    "url": engine.url,
                    "status": engine.status,
                    "state": engine.state,
                    "kind": engine.kind,
                    "introduced": engine.introduction is not None,
                    "model": engine.identity.name if engine.identity is not None else None,
                    "weights": engine.weights,
                    "names": engine.names,
                    "refused": engine.refused,
                    "engine_id": engine.introduction.engine_id if engine.introduction else None,
                    "lost_links": engine.introduction.lost_links if engine.introduction else {},
                    "in_flight": engine.load,
                    "requests": engine.num_requests + engine.elsewhere.num_requests,
                    "failures": engine.num_failures + engine.elsewhere.num_failures,
                    "failures_in_row": engine.health.failures_in_row,
                    "last_error": engine.last_error,
                    "last_error_unix_s": engine.last_error_unix_s,
                }
                for engine in self.roster.of(role)
            ]
            for role in ROLES
        }
