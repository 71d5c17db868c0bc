"""Floods one engine's real agent and control thread with frames, then looks for violations.

    t0            loans are lent, and claimed by an honest consumer; fetches are open at an honest producer
    t0 + a while  the flood: if it extended a loan, the loan would not end in time
    t0 + ttl      every claimed loan has ended, none before

The honest two are among the senders: others write in their names, which the control thread drops, and about
loans that are not theirs. Only messages that they may send (the claimer about its claim, the producer about
its loan) are left out of the flood.
"""

from __future__ import annotations

import gc
import logging
import random
import threading
import types
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

from baton.connectors.pull.control.agent import PullAgent
from baton.connectors.pull.control.thread import ControlThread
from baton.core.errors import PeerError
from baton.core.hashing import prompt_hash
from baton.core.identity import CurrentIdentity, KVIdentity
from baton.core.ids import Address, EngineId, LoanId, Pair, TransferId
from baton.core.layout import KEYS_AND_VALUES, CacheSpec, LayerLayout, RankLayout, Region
from baton.core.timers import Timers
from baton.protocol import messages
from baton.protocol.effects import FreeLoan
from baton.protocol.handshake import RankCard
from baton.protocol.messages import WIRE_VERSION, Envelope, Message, Renew, decode_envelope
from baton.protocol.signed_frame import ProcessKey
from baton.testing.fuzz.frames import Cast, FrameMaker
from baton.transport.control.channel import ControlChannel, Destination, Received, Route

NUM_LOANS = 6
NUM_CLAIMED = 4
NUM_FETCHES = 4
BATCH_FRAMES = 500  # Frames of one poll.
OBJECTS_MAX = 60_000  # Objects that a flood of any length may leave: routes, and entries that expire.
LOOK_EVERY_S = 0.1  # How often to check that the thread is alive.
PATIENCE_S = 120.0  # Time for one flood's thread; only reached when something is wrong.

_KV_IDENTITY = KVIdentity("model", "revision", "float32", 2, 2, 8, "seed")
_SPEC = CacheSpec(KEYS_AND_VALUES, "float32", 2)
_TRANSFER = TransferId("transfer")
_CARD = RankCard(
    0,
    RankLayout(
        tp_rank=0,
        tp_size=1,
        num_blocks=8,
        block_tokens=4,
        regions=(Region(4096, 2 * 4096),),
        layers=tuple(LayerLayout(f"layer.{i}", _SPEC, 0, i * 4096, 512, 256, 256) for i in range(2)),
    ),
    {"memory": b"here"},
)
_KEYS = [ProcessKey(bytes((number,)) * 32) for number in range(5)]
_ME, _BORROWER, _PRODUCER, _MALLORY, _SUCCESSOR = (
    Address(EngineId(name), key.epoch)
    for name, key in zip(("me", "d", "p", "mallory", "d"), _KEYS, strict=True)
)


@dataclass(slots=True)
class FloodResult:
    kinds: Counter[str] = field(default_factory=Counter)
    num_decoded: int = 0  # Well-formed, and signed by their sender.
    num_dropped: int = 0
    num_answers: int = 0
    num_objects_left: int = 0
    violations: list[str] = field(default_factory=list)

    @property
    def num_frames(self) -> int:
        return self.kinds.total()

    def add(self, other: FloodResult) -> None:
        self.kinds += other.kinds
        self.num_decoded += other.num_decoded
        self.num_dropped += other.num_dropped
        self.num_answers += other.num_answers
        self.num_objects_left = max(self.num_objects_left, other.num_objects_left)
        self.violations += other.violations


class ScriptedChannel:
    """A channel that delivers generated frames, each from a new connection, and counts the answers."""

    url = "tcp://127.0.0.1:1"

    def __init__(self, next_frame: Callable[[], bytes | None]) -> None:
        self.num_answers = 0
        self.is_exhausted = threading.Event()
        self._next_frame = next_frame
        self._woken = threading.Event()
        self._num_polled = 0

    def send(self, to: Destination, frame: bytes) -> bool:
        self.num_answers += 1
        return True

    def poll(self, timeout_s: float) -> list[Received]:
        received: list[Received] = []
        while len(received) < BATCH_FRAMES and (frame := self._next_frame()) is not None:
            self._num_polled += 1
            received.append(Received(Route(self._num_polled.to_bytes(8, "little")), frame))
        if not received:
            if self.is_exhausted.is_set():
                self._woken.wait(timeout_s)
            # Poll once more first, so that the last batch has been handled.
            self.is_exhausted.set()
        return received

    def wake(self) -> None:
        self._woken.set()

    def close(self) -> None:
        return


class _World:
    def __init__(self) -> None:
        self.now = 1000.0
        self.timers = Timers()
        self.agent = PullAgent(_ME, CurrentIdentity(_KV_IDENTITY), self.timers)
        self.agent.announce([_CARD])
        self.hash = prompt_hash([1, 2, 3], 3)
        lent = [self.agent.producer.lend(self.now) for _ in range(NUM_LOANS)]
        self.loans = [loan_id for loan_id in lent if loan_id is not None]
        self.claimed = dict(zip(self.loans[:NUM_CLAIMED], range(11, 11 + NUM_CLAIMED), strict=True))
        for loan_id, claim in self.claimed.items():
            self._hear(_BORROWER, Renew(loan_id, claim, 1))
        self.fetched: dict[LoanId, int] = {}
        for counter in range(1, NUM_FETCHES + 1):
            loan_id = LoanId(_PRODUCER.epoch, counter)
            held = self.agent.consumer.reserve(loan_id, _PRODUCER, self.now)
            assert held is not None
            self.agent.consumer.start(held[0], (Pair(0, 0),), self.now)
            self.fetched[loan_id] = held[0]
        wanted = self.agent.streams.want(_TRANSFER, _PRODUCER, self.hash, 3, 4, self.now)
        assert wanted is not None
        self.wanted = wanted[0]
        self.agent.streams.ready(self.wanted, (Pair(0, 0),), 0, self.now)
        assert self.agent.prefills.expect(_TRANSFER, self.hash, 3, self.now) is not None
        self.agent.greet(_PRODUCER, self.now)
        self.agent.take_envelopes()
        self.effects: list[object] = []
        self.agent.on_free = lambda effect, now: self.effects.append(effect)
        self.agent.on_effect = lambda effect, now: self.effects.append(effect)

    def cast(self) -> Cast:
        return Cast(
            target=_ME,
            senders=(_BORROWER, _PRODUCER, _MALLORY, _SUCCESSOR, _ME),
            loan_ids=(*self.loans, *self.fetched, LoanId(_ME.epoch, 999)),
            numbers=(*self.claimed.values(), *self.fetched.values(), self.wanted),
            texts=(_TRANSFER, "d", "p", "me"),
            hashes=(self.hash,),
            kv_identity=_KV_IDENTITY,
        )

    def is_allowed(self, envelope: Envelope) -> bool:
        """Return whether the sender may send one of these messages about a loan or fetch under test."""
        return any(self._is_allowed(envelope.sender, message) for message in envelope.messages)

    def _is_allowed(self, sender: Address, message: Message) -> bool:
        match message:
            case messages.Renew(loan_id, claim, _) | messages.Released(loan_id, claim):
                return sender == _BORROWER and self.claimed.get(loan_id) == claim
            case messages.Renewed(loan_id, claim) | messages.Gone(loan_id, claim):
                return sender == _PRODUCER and self.fetched.get(loan_id) == claim
            case (
                messages.Working(_, number)
                | messages.Announced(_, number)
                | messages.Finished(_, number)
                | messages.Failed(_, number)
            ):
                return sender == _PRODUCER and number == self.wanted
            case messages.Welcome() | messages.Refused():
                return sender == _PRODUCER
            case messages.Stranger(about):
                return about == _PRODUCER
            case _:
                return False

    def find_violations(self) -> list[str]:
        """Move the clock and return what ended too early, too late, or not at all."""
        found: list[str] = []
        agent, timers = self.agent, self.timers
        # A loan that had no claimer may be claimed and released by any peer that knows its id.
        found += [
            f"{effect} caused by a peer that may not cause it"
            for effect in self.effects
            if not (isinstance(effect, FreeLoan) and effect.loan_id not in self.claimed)
        ]
        if self._num_fetches != NUM_FETCHES + 1:
            found.append(f"{self._num_fetches} fetches are open, {NUM_FETCHES + 1} were begun")
        self.effects.clear()
        self.now = 1000.0 + timers.ttl_s - 0.001
        agent.wake(self.now)
        if agent.producer.num_open < NUM_CLAIMED:
            found.append("a loan ended before its time")
        self.now = 1000.0 + timers.ttl_s
        agent.wake(self.now)
        ended = {getattr(effect, "loan_id", None) for effect in self.effects}
        if still := self.claimed.keys() - ended:
            found.append(f"loans were extended by others than their claimer: {still}")
        self.now = 1000.0 + 2 * max(timers.loan_max_s, timers.deadline_s)
        for fetch in (*self.fetched.values(), self.wanted):
            for machine in (agent.streams, agent.consumer):
                agent.carry_out(machine.read_ended(fetch, Pair(0, 0), False, self.now, "over"), self.now)
        agent.wake(self.now)
        if agent.producer.num_open or self._num_fetches:
            found.append(f"still open: {agent.producer.num_open} loans, {self._num_fetches} fetches")
        return found

    @property
    def _num_fetches(self) -> int:
        return self.agent.consumer.num_open + self.agent.streams.num_open

    def _hear(self, sender: Address, message: Message) -> None:
        self.agent.receive(Envelope(WIRE_VERSION, sender, _ME, (message,)), self.now)


def flood(num_frames: int, seed: int) -> FloodResult:
    """Send `num_frames` frames to one listener and return what came of it."""
    world, result, draw = _World(), FloodResult(), random.Random(seed)
    maker = FrameMaker(draw, world.cast())
    world.now += world.timers.silence_s / 2
    world.agent.wake(world.now)

    def next_frame() -> bytes | None:
        while result.num_frames < num_frames:
            kind, frame = maker.frame()
            try:
                envelope = decode_envelope(frame)
            except PeerError:
                envelope = None
            writer = draw.choice(_KEYS)
            if envelope is not None and draw.random() < 0.9:
                writer = next((key for key in _KEYS if key.epoch == envelope.sender.epoch), writer)
            is_honest = envelope is not None and writer.epoch == envelope.sender.epoch
            if envelope is not None and is_honest and world.is_allowed(envelope):
                continue
            result.kinds[kind] += 1
            result.num_decoded += is_honest
            return writer.sign_body(frame, _KEYS[0].public)
        return None

    channel = ScriptedChannel(next_frame)
    lock = threading.Lock()
    control = ControlThread(world.agent, lock, cast(ControlChannel, channel), _KEYS[0], lambda: world.now)
    num_objects = _count_objects(world.agent, control)
    control.start()
    is_through = _wait_through(channel, control)
    with lock:
        result.num_objects_left = _count_objects(world.agent, control) - num_objects
    control.close(PATIENCE_S)
    result.num_dropped, result.num_answers = control.num_bad_frames, channel.num_answers
    if not is_through:
        result.violations.append("the control thread died or hung")
    if result.num_dropped != result.num_frames - result.num_decoded:
        result.violations.append(
            f"{result.num_dropped} frames dropped, {result.num_decoded} were well-formed and honest"
        )
    if result.num_objects_left > OBJECTS_MAX:
        result.violations.append(f"{result.num_objects_left} objects were left")
    result.violations += world.find_violations()
    result.violations = [f"seed {seed}: {violation}" for violation in result.violations]
    return result


def _wait_through(channel: ScriptedChannel, control: ControlThread) -> bool:
    waited_s = 0.0
    while not channel.is_exhausted.wait(LOOK_EVERY_S):
        waited_s += LOOK_EVERY_S
        try:
            control.raise_if_dead()
        except Exception:  # The violation is that the thread died.
            logging.getLogger(__name__).exception("the flood ended the control thread")
            return False
        if waited_s > PATIENCE_S:
            return False
    return True


def _count_objects(*roots: object) -> int:
    """Count everything that the roots reference, except code."""
    seen: set[int] = set()
    queue: list[object] = list(roots)
    skipped = (type, types.ModuleType, types.FunctionType, types.CodeType, threading.Thread, ScriptedChannel)
    while queue:
        current = queue.pop()
        if id(current) in seen or isinstance(current, skipped):
            continue
        seen.add(id(current))
        queue.extend(gc.get_referents(current))
    return len(seen)
