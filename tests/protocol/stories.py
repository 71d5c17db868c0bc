"""Plays a transcript: a script of verbs, and everything that the machines answer.

at 12.5               the time of all clocks
drift D 1.01          ... but this clock runs faster or slower
lend                  P lends; loans are named by their number
fetch D 1 0-0 1-0     D fetches loan 1 with these pairs (none: nothing to move)
reserve D 1, start D 1 0-0, abort D 1
read D 1 0-0 ok       a read of claim 1 has ended (or: error)
deliver, lose         all messages in flight; answers are in flight next
again                 the last delivery once more
wake                  all timers that are due
drain 20              P drains until then
restart P             the successor has the same name
update D v2           its weights change: D drops its claims, and P's tickets name others from now on

Push: a prompt of 8 tokens, a block per token, two layers; a transfer is a letter.

expect x 8            P: a prefill comes (expect x 8 other: of another prompt)
progress x 4 10-17    4 tokens are ready, in these blocks (... partial 8 1: and one layer up to 8)
preempt x, fail x     the run is over, or the prefill
finish x 10-17        P lends these blocks and signs a ticket
want D x 8            D waits for it, from the current incarnation of P
seek D Q x 8          ... from the engine named Q, at P's address
ready D 1 0 0-0       ... and may read, from token 0 on, with these pairs
accept D 1            the ticket is of our cluster; refuse D 1: it is not
check D 1             D compares the weights that the ticket names, and accepts or refuses it
outdate x             P: its weights have changed while this prefill computed
progress x 4 10-13,none from 0,5      ... of two cache groups, whose blocks begin at these indices
ready D 1 0 0-0 groups 3    ... layer 1 has full attention, layer 0 sees the last three tokens
ready D 1 0 0-0 table 3     ... the same at D; P has one table for both
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import msgspec

from baton.core.identity import CurrentIdentity, KVIdentity, differences
from baton.core.ids import (
    NO_EPOCH,
    Address,
    BlockId,
    EngineId,
    Epoch,
    LoanId,
    Pair,
    PromptHash,
    TransferId,
)
from baton.core.reasons import FailureCode, FailureReason
from baton.core.timers import Timers
from baton.protocol import messages as wire
from baton.protocol.effects import (
    CancelReads,
    Deliver,
    Effect,
    Fail,
    Found,
    FreeLoan,
    FreeTarget,
    Lent,
    OpenTicket,
    Part,
    ReadEarly,
    Send,
    StartReads,
    StreamEffect,
    Unwanted,
    pack_sends,
)
from baton.protocol.grouped_prompt import ONE_TABLE, GroupRoute, GroupRoutes
from baton.protocol.peers import admit
from baton.protocol.plan import GroupPair
from baton.protocol.pull_consumer import PullConsumer
from baton.protocol.pull_producer import PullProducer
from baton.protocol.push_consumer import PushConsumer
from baton.protocol.push_producer import PushProducer
from baton.protocol.ticket import Ticket
from tests.protocol import tokens

TIMERS = Timers(ttl_s=8.0, silence_s=10.0, deadline_s=30.0, loan_max_s=50.0, hold_s=20.0)  # Renews every 2 s.
NUM_LAYERS = 2
MODEL = KVIdentity(
    model="m", weights="r", dtype="bf16", num_layers=NUM_LAYERS, num_kv_heads=1, head_dim=1, hash_seed="s"
)
FOLDER = Path(__file__).parent / "transcripts"


class Node:
    def __init__(self, name: str, epoch: int) -> None:
        self.address = Address(EngineId(name), Epoch(epoch))
        self.producer = PullProducer(self.address.epoch, TIMERS)
        self.consumer = PullConsumer(TIMERS)
        self.prefills = PushProducer(TIMERS)
        self.streams = PushConsumer(TIMERS, self.consumer, NUM_LAYERS)
        self.identity = CurrentIdentity(MODEL)
        self.rate = 1.0


class Story:
    def __init__(self) -> None:
        self.now = 0.0
        self.nodes = {name: Node(name, 1) for name in ("P", "D", "E")}
        self.under_way: list[bytes] = []
        self.last_delivery: list[bytes] = []
        self.loans: dict[int, tuple[LoanId, Address]] = {}
        self.prompts: dict[str, PromptHash] = {}  # Prompts that P prefills, by transfer.
        self.tickets: dict[str, Ticket] = {}
        self.to_open: dict[tuple[str, int], str] = {}
        self.lines: list[str] = []

    def play(self, script: str) -> str:
        """The script with its reactions; reactions in `script` are replaced."""
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
                reserved = node.consumer.reserve(loan_id, producer, self._clock(node))
                if reserved is not None:
                    claim, effects = reserved
                    effects = [*effects, *node.consumer.start(claim, _pairs(pairs), self._clock(node))]
                    reserved = claim, effects
                self._started(name, reserved)
            case ["reserve", name, loan]:
                node = self.nodes[name]
                loan_id, producer = self.loans[int(loan)]
                self._started(name, node.consumer.reserve(loan_id, producer, self._clock(node)))
            case ["start", name, claim, *pairs]:
                node = self.nodes[name]
                self._react(name, node.consumer.start(int(claim), _pairs(pairs), self._clock(node)))
            case ["abort", name, claim]:
                node = self.nodes[name]
                self._react(name, node.streams.abort(int(claim), self._clock(node)))
                self._react(name, node.consumer.abort(int(claim), self._clock(node)))
            case ["read", name, claim, pair, "ok" | "error" as outcome]:
                node = self.nodes[name]
                ok, error = outcome == "ok", "" if outcome == "ok" else "link down"
                [edge] = _pairs([pair])
                read_end = (int(claim), edge, ok, self._clock(node), error)
                self._react(name, node.streams.read_ended(*read_end))
                self._react(name, node.consumer.read_ended(*read_end))
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
                    self._react(name, node.prefills.wake(self._clock(node)))
                    self._react(name, node.streams.wake(self._clock(node)))
            case ["drain", until]:
                self.nodes["P"].producer.drain(float(until))
            case ["update", name, version]:
                node = self.nodes[name]
                node.identity.update(None, version)
                for claim in range(1, 100):
                    for machine in (node.streams, node.consumer):
                        ended = machine.abort(claim, self._clock(node), FailureCode.OTHER_WEIGHTS)
                        self._react(name, ended)
            case ["restart", name]:
                self.nodes[name] = Node(name, self.nodes[name].address.epoch + 1)
            case _:
                self._do_push(words)
        assert self.now >= now, "time must not run backward"

    def _do_push(self, words: list[str]) -> None:
        node = self.nodes["P"]
        now, prefills = self._clock(node), node.prefills
        match words:
            case ["expect", name, num_tokens, *prompt]:
                self.prompts[name] = _hash(prompt)
                told = prefills.expect(TransferId(name), self.prompts[name], int(num_tokens), now)
                if told is None:
                    self.lines.append("P: one of that name computes already")
                self._react("P", told or [])
            case ["progress", name, num_tokens, blocks, *rest]:
                tokens, layers = (int(rest[1]), int(rest[2])) if rest[:1] == ["partial"] else (0, 0)
                first_blocks = tuple(map(int, rest[-1].split(","))) if rest[-2:-1] == ["from"] else ()
                self._react(
                    "P",
                    prefills.progress(
                        TransferId(name),
                        int(num_tokens),
                        _blocks(blocks),
                        now,
                        partial_tokens=tokens,
                        partial_layers=layers,
                        first_blocks=first_blocks,
                    ),
                )
            case ["outdate", name]:
                self._react("P", prefills.outdated(TransferId(name), now))
            case ["preempt", name]:
                self._react("P", prefills.preempted(TransferId(name), now))
            case ["fail", name]:
                self._react("P", prefills.failed(TransferId(name), "the client went away", now))
            case ["finish", name, blocks]:
                self._do(["lend"])
                loan_id, _ = self.loans[len(self.loans)]
                text = f"ticket {len(self.loans)}"
                ticket = _ticket(node.address, loan_id, name, _blocks(blocks), self.prompts[name])
                self.tickets[text] = msgspec.structs.replace(ticket, kv_identity=node.identity.value)
                self._react("P", prefills.finished(TransferId(name), text, now))
            case ["want", name, transfer, num_tokens, *prompt]:
                d, p = self.nodes[name], node.address
                wish = (TransferId(transfer), p, _hash(prompt), int(num_tokens), 1, self._clock(d))
                self._started(name, d.streams.want(*wish))
            case ["seek", name, producer, transfer, num_tokens]:
                d, named = self.nodes[name], Address(EngineId(producer), NO_EPOCH)
                wish = (TransferId(transfer), named, _hash([]), int(num_tokens), None, self._clock(d))
                self._started(name, d.streams.want(*wish))
            case ["ready", name, claim, first_token, *pairs, "groups" | "table" as theirs, window]:
                seeing = GroupRoute(GroupPair(0, 0), frozenset({1}))
                remote = 1 if theirs == "groups" else 0
                windowed = GroupRoute(GroupPair(1, remote), frozenset({0}), int(window))
                self._ready(name, claim, first_token, pairs, (seeing, windowed))
            case ["ready", name, claim, first_token, *pairs]:
                self._ready(name, claim, first_token, pairs, ONE_TABLE)
            case ["accept", name, claim]:
                d, text = self.nodes[name], self.to_open[name, int(claim)]
                self._react(name, d.streams.accept(int(claim), self.tickets[text], self._clock(d)))
            case ["check", name, claim]:
                d, text = self.nodes[name], self.to_open[name, int(claim)]
                if not differences(d.identity.value, self.tickets[text].kv_identity):
                    self._do_push(["accept", name, claim])
                else:
                    reason = FailureReason(FailureCode.OTHER_WEIGHTS)
                    self._react(name, d.streams.refuse(int(claim), reason, self._clock(d)))
            case ["refuse", name, claim]:
                d = self.nodes[name]
                reason = FailureReason(FailureCode.TICKET_REFUSED, "a wrong signature")
                self._react(name, d.streams.refuse(int(claim), reason, self._clock(d)))
            case _:
                raise ValueError(f"no such verb: {' '.join(words)}")

    def _ready(
        self, name: str, claim: str, first_token: str, pairs: list[str], group_routes: GroupRoutes
    ) -> None:
        d = self.nodes[name]
        may = (int(claim), _pairs(pairs), int(first_token), self._clock(d))
        self._react(name, d.streams.ready(*may, block_tokens=1, group_routes=group_routes))

    def _clock(self, node: Node) -> float:
        return self.now * node.rate

    def _started(self, name: str, started: tuple[int, Sequence[Effect | StreamEffect]] | None) -> None:
        if started is None:
            self.lines.append(f"{name}: refused, it is in use here")
            return
        claim, effects = started
        self.lines.append(f"{name}: claim {claim}")
        self._react(name, effects)

    def _deliver(self, frames: list[bytes]) -> None:
        for frame in frames:
            envelope = wire.decode_envelope(frame)
            name = envelope.target.engine_id
            if envelope.target.is_named_only:
                name = EngineId("P")  # Regardless of the name: only P listens at this address.
            node = self.nodes[name]
            messages, answers = admit(node.address, envelope)
            effects: list[Effect | StreamEffect] = [*answers]
            for message in messages:
                effects += node.producer.receive(envelope.sender, message, self._clock(node))
                effects += node.consumer.receive(envelope.sender, message, self._clock(node))
                effects += node.prefills.receive(envelope.sender, message, self._clock(node))
                effects += node.streams.receive(envelope.sender, message, self._clock(node))
            self._react(name, effects)

    def _react(self, name: str, effects: Sequence[Effect | StreamEffect]) -> None:
        self.lines += [f"{name}: {self._effect(effect)}" for effect in effects]
        sends = [effect for effect in effects if isinstance(effect, Send)]
        for effect in effects:
            if isinstance(effect, OpenTicket):
                self.to_open[name, effect.claim] = effect.text
        envelopes: list[wire.Envelope] = pack_sends(self.nodes[name].address, sends)
        self.under_way += [wire.encode_envelope(envelope) for envelope in envelopes]

    def _effect(self, effect: Effect | StreamEffect) -> str:
        match effect:
            case Send(to, message):
                return f"-> {to.engine_id}{'' if to.epoch == 1 else f'.{to.epoch}'} {self._message(message)}"
            case StartReads(claim, pairs):
                return f"StartReads claim {claim} {_edges(pairs)}"
            case ReadEarly(claim, pairs, part, block_ids):
                blocks = _table((tuple(block for block in block_ids if block),))
                return f"ReadEarly claim {claim} {_edges(pairs)}: {_part(part)}, of {blocks}"
            case Found(claim, producer):
                return f"Found claim {claim}: {producer.engine_id}.{producer.epoch}"
            case OpenTicket(claim, text):
                return f"OpenTicket claim {claim}: {text}"
            case Lent(claim, ticket, unread):
                left = "everything" if unread is None else ", ".join(map(_part, unread)) or "nothing"
                return f"Lent claim {claim} {self._loan(ticket.loan_id)}, unread: {left}"
            case CancelReads(claim) | Deliver(claim) | FreeTarget(claim):
                return f"{type(effect).__name__} claim {claim}"
            case Fail(claim, reason):
                return f"Fail claim {claim}: {reason}"
            case Unwanted(transfer_id):
                return f"Unwanted {transfer_id}"
            case FreeLoan(loan_id, expired):
                return f"FreeLoan {self._loan(loan_id)}{' (expired)' if expired else ''}"
            case _:
                raise AssertionError(effect)

    def _message(self, message: wire.Message) -> str:
        match message:
            case wire.Renew(loan_id, claim, sequence):
                return f"Renew {self._loan(loan_id)} claim {claim} sequence {sequence}"
            case wire.Renewed(loan_id, claim, sequence, ttl_s):
                return f"Renewed {self._loan(loan_id)} claim {claim} sequence {sequence} ttl {ttl_s:g}"
            case wire.Released(loan_id, claim) | wire.Gone(loan_id, claim):
                return f"{type(message).__name__} {self._loan(loan_id)} claim {claim}"
            case wire.Want(transfer_id, number, _, num_tokens):
                return f"Want {transfer_id} number {number}: {num_tokens} tokens"
            case wire.Working(transfer_id, number):
                return f"Working {transfer_id} number {number}"
            case wire.Withdraw(transfer_id, number, has_failed):
                return f"Withdraw {transfer_id} number {number}{' (failed)' if has_failed else ''}"
            case wire.Announced(transfer_id, number, run, num_tokens, block_ids, tokens, layers, firsts):
                partial = f", {layers} layer up to {tokens}" if layers else ""
                places = f" from {', '.join(map(str, firsts))}" if firsts else ""
                what = f"{num_tokens} tokens{partial}, in {_table(block_ids)}{places}"
                return f"Announced {transfer_id} number {number} run {run}: {what}"
            case wire.Finished(transfer_id, number, run, ticket):
                return f"Finished {transfer_id} number {number} run {run}: {ticket}"
            case wire.Failed(transfer_id, number, reason, has_new_weights):
                mark = " (new weights)" if has_new_weights else ""
                return f"Failed {transfer_id} number {number}: {reason}{mark}"
            case wire.Stranger(about):
                return f"Stranger about {about.engine_id}.{about.epoch}"
            case _:
                raise AssertionError(message)

    def _loan(self, loan_id: LoanId) -> str:
        [number] = [number for number, (known, _) in self.loans.items() if known == loan_id]
        return f"loan {number}"


def _pairs(words: list[str]) -> tuple[Pair, ...]:
    return tuple(Pair(*map(int, word.split("-"))) for word in words)


def _edges(pairs: Sequence[Pair]) -> str:
    return " ".join(f"{p}-{d}" for p, d in pairs)


def _part(part: Part) -> str:
    layers = "" if part.layers is None else f" layers {part.layers[0]}..{part.layers[1] - 1}"
    groups = "" if part.groups is None else f" of group {part.groups.local}"
    return f"tokens {part.first_token}..{part.first_token + part.num_tokens - 1}{layers}{groups}"


def _blocks(words: str) -> wire.BlockTables:
    return tuple(_run(group) if group != "none" else () for group in words.split(","))


def _run(words: str) -> tuple[BlockId, ...]:
    first, last = map(int, words.split("-"))
    return tuple(BlockId(block) for block in range(first, last + 1))


def _table(block_ids: wire.BlockTables) -> str:
    return ", ".join(f"{table[0]}-{table[-1]}" if table else "no block" for table in block_ids) or "no block"


def _hash(prompt: Sequence[str]) -> PromptHash:
    return PromptHash(hashlib.sha256(" ".join(prompt).encode()).digest())


def _ticket(
    p: Address, loan_id: LoanId, transfer: str, blocks: wire.BlockTables, prompt: PromptHash
) -> Ticket:
    named = {"producer": p, "loan_id": loan_id, "transfer_id": TransferId(transfer), "prompt_hash": prompt}
    shape = {"block_tokens": 1, "windows": (None,) * len(blocks), "num_tokens": len(blocks[0])}
    return tokens.ticket(**named, **shape, block_ids=blocks)


if __name__ == "__main__":  # Rewrites the reactions; review the diff.
    for path in sorted(FOLDER.glob("*.txt")):
        path.write_text(Story().play(path.read_text()))
