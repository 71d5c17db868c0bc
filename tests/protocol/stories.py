"""Plays a transcript: a script of verbs, and everything that the machines answer.

at 12.5               the time of all clocks
drift D 1.01          ... but this one's runs faster or slower
lend                  P lends; loans are named by their number
fetch D 1 0-0 1-0     D fetches loan 1 with these pairs (none: nothing to move)
reserve D 1, start D 1 0-0, unused D 1, abort D 1
read D 1 0-0 ok       a read of claim 1 has ended (or: error)
deliver, lose         everything under way; answers are under way next
again                 the last delivery once more
wake                  all timers that are due
drain 20              P drains until then
restart P             the successor has the same name
"""

from collections.abc import Sequence
from pathlib import Path

from baton.core.ids import Address, EngineId, Epoch, LoanId, Pair
from baton.core.timers import Timers
from baton.protocol.effects import (
    CancelReads,
    Deliver,
    Effect,
    Fail,
    FreeLoan,
    FreeTarget,
    Send,
    StartReads,
)
from baton.protocol.messages import (
    Envelope,
    Gone,
    Message,
    Released,
    Renew,
    Renewed,
    Stranger,
    decode_envelope,
    encode_envelope,
    pack_sends,
)
from baton.protocol.peers import admit
from baton.protocol.pull_consumer import PullConsumer
from baton.protocol.pull_producer import PullProducer

TIMERS = Timers(ttl_s=8.0, deadline_s=30.0, loan_max_s=50.0, hold_s=20.0)  # Renews every 2 s.
FOLDER = Path(__file__).parent / "transcripts"


class Node:
    def __init__(self, name: str, epoch: int) -> None:
        self.address = Address(EngineId(name), Epoch(epoch))
        self.producer = PullProducer(self.address.epoch, TIMERS)
        self.consumer = PullConsumer(TIMERS)
        self.rate = 1.0


class Story:
    def __init__(self) -> None:
        self.now = 0.0
        self.nodes = {name: Node(name, 1) for name in ("P", "D", "E")}
        self.under_way: list[bytes] = []
        self.last_delivery: list[bytes] = []
        self.loans: dict[int, tuple[LoanId, Address]] = {}
        self.lines: list[str] = []

    def play(self, script: str) -> str:
        """The script with its reactions, whatever reactions it came with."""
        steps = [step.split("----")[0].strip() for step in script.split("\n\n") if step.strip()]
        played = []
        for step in steps:
            if step.startswith("#"):
                played.append(step)
                continue
            self.lines = []
            for line in step.splitlines():
                self._do(line.split())
            played.append("\n".join([step, "----", *(self.lines or ["(nothing)"])]))
        return "\n\n".join(played) + "\n"

    def _do(self, words: list[str]) -> None:
        now = self.now
        match words:
            case ["at", time]:
                self.now = float(time)
            case ["drift", name, rate]:
                self.nodes[name].rate = float(rate)
            case ["lend"]:
                node = self.nodes["P"]
                loan_id = node.producer.lend(self._clock(node))
                if loan_id is None:
                    self.lines.append("P: lends nothing")
                    return
                self.loans[len(self.loans) + 1] = (loan_id, node.address)
                self.lines.append(f"P: loan {len(self.loans)}")
            case ["fetch", name, loan, *pairs]:
                node = self.nodes[name]
                loan_id, producer = self.loans[int(loan)]
                started = node.consumer.fetch(loan_id, producer, _pairs(pairs), self._clock(node))
                self._started(name, started)
            case ["reserve", name, loan]:
                node = self.nodes[name]
                loan_id, producer = self.loans[int(loan)]
                self._started(name, node.consumer.reserve(loan_id, producer, self._clock(node)))
            case ["start", name, claim, *pairs]:
                node = self.nodes[name]
                self._react(name, node.consumer.start(int(claim), _pairs(pairs), self._clock(node)))
            case ["unused", name, loan]:
                node = self.nodes[name]
                self._react(name, node.consumer.release_unused(*self.loans[int(loan)], self._clock(node)))
            case ["abort", name, claim]:
                node = self.nodes[name]
                self._react(name, node.consumer.abort(int(claim), self._clock(node)))
            case ["read", name, claim, pair, "ok" | "error" as outcome]:
                node = self.nodes[name]
                ok, error = outcome == "ok", "" if outcome == "ok" else "link down"
                [edge] = _pairs([pair])
                self._react(name, node.consumer.read_ended(int(claim), edge, ok, self._clock(node), error))
            case ["deliver"]:
                self.last_delivery, self.under_way = self.under_way, []
                self._deliver(self.last_delivery)
            case ["again"]:
                self._deliver(self.last_delivery)
            case ["lose"]:
                self.lines.append(f"({len(self.under_way)} lost)")
                self.under_way = []
            case ["wake"]:
                for name, node in self.nodes.items():
                    self._react(name, node.producer.wake(self._clock(node)))
                    self._react(name, node.consumer.wake(self._clock(node)))
            case ["drain", until]:
                self.nodes["P"].producer.drain(float(until))
            case ["restart", name]:
                self.nodes[name] = Node(name, self.nodes[name].address.epoch + 1)
            case _:
                raise ValueError(f"no such verb: {' '.join(words)}")
        assert self.now >= now, "time runs forward"

    def _clock(self, node: Node) -> float:
        return self.now * node.rate

    def _started(self, name: str, started: tuple[int, Sequence[Effect]] | None) -> None:
        if started is None:
            self.lines.append(f"{name}: refused, the loan is in use here")
            return
        claim, effects = started
        self.lines.append(f"{name}: claim {claim}")
        self._react(name, effects)

    def _deliver(self, frames: list[bytes]) -> None:
        for frame in frames:
            envelope = decode_envelope(frame)
            name = envelope.target.engine_id
            node = self.nodes[name]
            messages, answers = admit(node.address, envelope)
            effects: list[Effect] = [*answers]
            for message in messages:
                effects += node.producer.receive(envelope.sender, message, self._clock(node))
                effects += node.consumer.receive(envelope.sender, message, self._clock(node))
            self._react(name, effects)

    def _react(self, name: str, effects: Sequence[Effect]) -> None:
        self.lines += [f"{name}: {self._effect(effect)}" for effect in effects]
        sends = [effect for effect in effects if isinstance(effect, Send)]
        envelopes: list[Envelope] = pack_sends(self.nodes[name].address, sends)
        self.under_way += [encode_envelope(envelope) for envelope in envelopes]

    def _effect(self, effect: Effect) -> str:
        match effect:
            case Send(to, message):
                return f"-> {to.engine_id}{'' if to.epoch == 1 else f'.{to.epoch}'} {self._message(message)}"
            case StartReads(claim, pairs):
                return f"StartReads claim {claim} {' '.join(f'{p}-{d}' for p, d in pairs)}"
            case CancelReads(claim) | Deliver(claim) | FreeTarget(claim):
                return f"{type(effect).__name__} claim {claim}"
            case Fail(claim, reason):
                return f"Fail claim {claim}: {reason}"
            case FreeLoan(loan_id, expired):
                return f"FreeLoan {self._loan(loan_id)}{' (expired)' if expired else ''}"
            case _:
                raise AssertionError(effect)

    def _message(self, message: Message) -> str:
        match message:
            case Renew(loan_id, claim, sequence):
                return f"Renew {self._loan(loan_id)} claim {claim} sequence {sequence}"
            case Renewed(loan_id, claim, sequence, ttl_s):
                return f"Renewed {self._loan(loan_id)} claim {claim} sequence {sequence} ttl {ttl_s:g}"
            case Released(loan_id, claim) | Gone(loan_id, claim):
                return f"{type(message).__name__} {self._loan(loan_id)} claim {claim}"
            case Stranger(about):
                return f"Stranger about {about.engine_id}.{about.epoch}"
            case _:
                raise AssertionError(message)

    def _loan(self, loan_id: LoanId) -> str:
        [number] = [number for number, (known, _) in self.loans.items() if known == loan_id]
        return f"loan {number}"


def _pairs(words: list[str]) -> tuple[Pair, ...]:
    return tuple(Pair(*map(int, word.split("-"))) for word in words)


if __name__ == "__main__":  # Rewrites the reactions; the diff is for the reviewer.
    for path in sorted(FOLDER.glob("*.txt")):
        path.write_text(Story().play(path.read_text()))
