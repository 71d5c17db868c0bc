"""Properties of push that the transcripts do not show: any order of messages, bounds, deadlines."""

import hashlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.ids import Address, BlockId, EngineId, Epoch, Pair, PromptHash, TransferId
from baton.core.reasons import FailureCode, FailureReason
from baton.core.timers import Timers
from baton.protocol.effects import (
    CancelReads,
    Fail,
    FreeTarget,
    Lent,
    OpenTicket,
    Part,
    ReadEarly,
    Send,
    StreamEffect,
)
from baton.protocol.grouped_prompt import ONE_TABLE, GroupRoute, GroupRoutes
from baton.protocol.messages import Announced, BlockTables, Failed, Finished, Message, Want, Withdraw, Working
from baton.protocol.plan import GroupPair
from baton.protocol.pull_consumer import PullConsumer
from baton.protocol.push_consumer import PushConsumer
from baton.protocol.push_producer import PushProducer
from baton.protocol.ticket import Ticket
from tests.protocol import tokens

T = Timers()
P, D = Address(EngineId("p"), Epoch(1)), Address(EngineId("d"), Epoch(2))
X = TransferId("x")
HASH = PromptHash(hashlib.sha256(b"prompt").digest())
PAIRS = (Pair(0, 0), Pair(1, 0))
NUM_TOKENS, NUM_LAYERS = 8, 2


WINDOW = 3  # The window holds the last three of eight tokens.
GROUPS = (GroupRoute(GroupPair(1, 0), frozenset({1})), GroupRoute(GroupPair(0, 1), frozenset({0}), WINDOW))
LAYERS_OF = {route.groups: route.layers for route in GROUPS}


def table(num_blocks: int) -> BlockTables:
    return (tuple(BlockId(10 + block) for block in range(num_blocks)),)


def tables(group_routes: GroupRoutes) -> BlockTables:
    """The blocks that P announces and lends for the whole prompt."""
    if group_routes == ONE_TABLE:
        return table(NUM_TOKENS)
    return (
        *table(NUM_TOKENS),
        tuple(BlockId(20 + block) for block in range(NUM_TOKENS - WINDOW, NUM_TOKENS)),
    )


def cells_of(parts: tuple[Part, ...]) -> set[tuple[int, int]]:
    """Tokens and layers of the parts. Asserts that no two parts overlap."""
    cells = [
        (token, layer)
        for part in parts
        for token in range(part.first_token, part.first_token + part.num_tokens)
        for layer in range(*(part.layers or (0, NUM_LAYERS)))
        if layer in LAYERS_OF.get(part.groups, frozenset(range(NUM_LAYERS)))
    ]
    assert len(set(cells)) == len(cells)
    return set(cells)


def ticket(**changes: Any) -> Ticket:
    named = {"producer": P, "transfer_id": X, "prompt_hash": HASH}
    sizes = {"block_tokens": 1, "num_tokens": NUM_TOKENS, "block_ids": table(NUM_TOKENS)}
    return tokens.ticket(**{**named, **sizes, **changes})


class Waiting:
    """One stream that waits and may read."""

    def __init__(self, first_token: int = 0, group_routes: GroupRoutes = ONE_TABLE) -> None:
        self.pull = PullConsumer(T)
        self.push = PushConsumer(T, self.pull, NUM_LAYERS)
        self.tables = tables(group_routes)
        self.first_blocks = (0, NUM_TOKENS - WINDOW) if group_routes == GROUPS else ()
        wanted = self.push.want(X, P, HASH, NUM_TOKENS, 1, 0.0)
        assert wanted is not None
        self.claim, _ = wanted
        self.push.ready(self.claim, PAIRS, first_token, 0.0, group_routes=group_routes)

    def hear(self, message: Message, now: float = 1.0) -> list[StreamEffect]:
        return self.push.receive(P, message, now)

    def announce(self, run: int, num_tokens: int, *partial: int) -> list[StreamEffect]:
        return self.say(run, num_tokens, self.tables, *partial)

    def say(
        self, run: int, num_tokens: int, block_ids: BlockTables, tokens: int = 0, layers: int = 0
    ) -> list[StreamEffect]:
        return self.hear(
            Announced(X, self.claim, run, num_tokens, block_ids, tokens, layers, self.first_blocks)
        )


announcements = st.tuples(
    st.integers(1, 3), st.integers(0, NUM_TOKENS), st.integers(0, NUM_TOKENS), st.integers(0, NUM_LAYERS)
)
inputs = st.lists(
    st.one_of(announcements, st.sampled_from(["finished 1", "finished 3", "end a read"])), max_size=12
)


@settings(max_examples=300)
@given(inputs, st.integers(0, NUM_TOKENS), st.sampled_from([ONE_TABLE, GROUPS]))
def test_no_cell_is_read_twice_in_a_run_or_in_two_runs_at_once(
    inputs: list[Any], first_token: int, group_routes: GroupRoutes
) -> None:
    stream = Waiting(first_token, group_routes)
    lent_paper = ticket(block_ids=stream.tables, windows=(None,) * len(stream.tables))
    run_of_reads = 0
    owed: set[Pair] = set()
    cells: set[tuple[int, int]] = set()
    is_lent = False

    def absorb(effects: list[StreamEffect], run: int) -> None:
        nonlocal run_of_reads, owed, cells, is_lent
        for effect in effects:
            match effect:
                case ReadEarly(_, pairs, part, block_ids):
                    assert not is_lent
                    if run != run_of_reads:
                        assert not owed, "the old run's reads must have ended"
                        run_of_reads, cells = run, set()
                    owed |= set(pairs)
                    fresh = cells_of((part,))
                    assert not fresh & cells
                    named = {10, 20}.intersection(block_ids[t] - t for t, _ in fresh)
                    assert len(named) == 1, "blocks must be of the part's group, each at its index"
                    cells |= fresh
                case OpenTicket():
                    is_lent = True
                    lent = [
                        e for e in stream.push.accept(stream.claim, lent_paper, 1.0) if isinstance(e, Lent)
                    ]
                    assert len(lent) == 1
                    unread = lent[0].unread
                    if unread is None:
                        return
                    left = cells_of(unread)
                    # The first token that each layer sees.
                    first_seen = (NUM_TOKENS - WINDOW if group_routes == GROUPS else 0, 0)
                    whole = {
                        (token, layer)
                        for layer in range(NUM_LAYERS)
                        for token in range(max(first_token, first_seen[layer]), NUM_TOKENS)
                    }
                    assert not left & cells
                    assert left | cells == whole
                    assert run == run_of_reads

    newest = 0
    for what in inputs:
        if what == "end a read":
            if owed and not is_lent:
                pair = owed.pop()
                absorb(stream.push.read_ended(stream.claim, pair, False, 1.0), newest)
                if stream.push.num_open == 0 or stream.push._streams[stream.claim].draining:
                    return  # The read was not cancelled, so the stream fails.
        elif isinstance(what, str):
            run = int(what.split()[1])
            absorb(stream.hear(Finished(X, stream.claim, run, "t")), run)
        else:
            run, num_tokens, partial_tokens, partial_layers = what
            newest = max(newest, run)
            absorb(stream.announce(run, num_tokens, partial_tokens, partial_layers), newest)


def test_tokens_in_a_window_without_a_block_are_not_read() -> None:
    stream = Waiting(group_routes=GROUPS)
    assert stream.say(1, 6, (*table(6), ())) == []
    assert stream.say(1, 5, (*table(5), ())) != []
    [read, of_window] = stream.say(1, 6, (*table(6), (BlockId(25),)))
    assert isinstance(read, ReadEarly)
    assert isinstance(of_window, ReadEarly)
    assert of_window.part == Part(5, 1, None, GroupPair(0, 1))
    assert of_window.block_ids == (0, 0, 0, 0, 0, 25)


@pytest.mark.parametrize("lent", [tables(ONE_TABLE), (tables(GROUPS)[0], tables(GROUPS)[1][::-1])])
def test_a_ticket_for_other_blocks_of_a_window_is_not_accepted(lent: BlockTables) -> None:
    stream = Waiting(group_routes=GROUPS)
    stream.announce(1, 8)
    stream.hear(Finished(X, stream.claim, 1, "t"))
    other = ticket(block_ids=lent, windows=(None,) * len(lent))
    failed = [e for e in stream.push.accept(stream.claim, other, 1.0) if isinstance(e, Fail)]
    assert [f.reason.code for f in failed] == [FailureCode.OTHER_BLOCKS]


def test_an_announcement_is_checked_when_the_block_size_becomes_known() -> None:
    push = PushConsumer(T, PullConsumer(T), NUM_LAYERS)
    wanted = push.want(X, P, HASH, NUM_TOKENS, 1, 0.0)
    assert wanted is not None
    claim, _ = wanted
    assert push.receive(P, Announced(X, claim, 1, 6, table(6)), 1.0) == []
    assert push.ready(claim, PAIRS, 0, 1.0, group_routes=GROUPS) == []
    [read, _] = push.receive(P, Announced(X, claim, 1, 6, (*table(6), table(6)[0])), 1.0)
    assert isinstance(read, ReadEarly)


def test_other_blocks_in_the_same_run_end_the_stream() -> None:
    stream = Waiting()
    stream.announce(1, 2)
    _, failed, cancelled = stream.hear(Announced(X, stream.claim, 1, 4, ((BlockId(1),) * 8,)))
    assert failed == Fail(stream.claim, FailureReason(FailureCode.BLOCKS_CHANGED))
    assert cancelled == CancelReads(stream.claim)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"producer": D}, FailureCode.OTHER_TRANSFER),
        ({"transfer_id": TransferId("y")}, FailureCode.OTHER_TRANSFER),
        ({"prompt_hash": PromptHash(b"h" * 32)}, FailureCode.OTHER_PROMPT),
        ({"num_tokens": 7, "block_ids": table(7)}, FailureCode.OTHER_PROMPT),
        ({"block_tokens": 2, "block_ids": table(4)}, FailureCode.OTHER_BLOCKS),
        ({"block_ids": (table(NUM_TOKENS)[0][::-1],)}, FailureCode.OTHER_BLOCKS),
    ],
)
def test_a_valid_ticket_for_another_stream_is_not_accepted(change: dict[str, Any], code: FailureCode) -> None:
    stream = Waiting()
    stream.announce(1, 2)
    stream.hear(Finished(X, stream.claim, 1, "t"))
    failed = [e for e in stream.push.accept(stream.claim, ticket(**change), 1.0) if isinstance(e, Fail)]
    assert [f.reason.code for f in failed] == [code]
    assert stream.pull.num_open == 0


def test_only_the_producer_of_a_stream_can_report_on_it() -> None:
    stream = Waiting()
    for message in (Working(X, stream.claim), Announced(X, stream.claim, 1, 4, table(4))):
        [answer] = stream.push.receive(D, message, 1.0)
        assert isinstance(answer, Send)
        assert answer.to == D
    assert stream.push.receive(D, Failed(X, stream.claim, "no"), 1.0) == []
    assert stream.push.num_open == 1


def test_a_loan_that_another_request_uses_ends_the_stream() -> None:
    stream = Waiting()
    stream.announce(1, 2)
    stream.hear(Finished(X, stream.claim, 1, "t"))
    lent = ticket()
    assert stream.pull.reserve(lent.loan_id, P, 1.0) is not None
    failed = [e for e in stream.push.accept(stream.claim, lent, 1.0) if isinstance(e, Fail)]
    assert failed == [Fail(stream.claim, FailureReason(FailureCode.LOAN_IN_USE))]


def test_a_stream_is_made_ready_once() -> None:
    stream = Waiting()
    assert stream.push.ready(stream.claim, (Pair(3, 3),), 4, 0.5) == []
    [read] = stream.announce(1, 4)
    assert isinstance(read, ReadEarly)
    assert (read.pairs, read.part) == (PAIRS, Part(0, 4))


def test_a_stream_that_has_failed_is_not_made_ready() -> None:
    push = PushConsumer(T, PullConsumer(T), NUM_LAYERS)
    wanted = push.want(X, P, HASH, NUM_TOKENS, 1, 0.0)
    assert wanted is not None
    claim, _ = wanted
    push.receive(P, Announced(X, claim, 1, 6, table(6)), 1.0)
    push.abort(claim, 1.0)
    assert push.ready(claim, PAIRS, 0, 1.0) == []


def test_a_state_is_read_when_it_is_lent_and_never_before() -> None:
    of_tokens, of_state = GroupPair(0, 0), GroupPair(1, 1)
    routes = (
        GroupRoute(of_tokens, frozenset({0})),
        GroupRoute(of_state, frozenset(), 1, is_state=True),
    )
    stream = Waiting(group_routes=routes)
    [read] = stream.say(1, 4, (*table(4), ()))
    assert isinstance(read, ReadEarly)
    assert read.part == Part(0, 4, None, of_tokens)
    stream.hear(Finished(X, stream.claim, 1, "t"))
    lent = ticket(block_ids=(*table(NUM_TOKENS), (BlockId(3),)), windows=(None, 1), state_groups=(1,))
    [*_, last] = stream.push.accept(stream.claim, lent, 1.0)
    assert isinstance(last, Lent)
    assert last.unread == (Part(4, 4, None, of_tokens), Part(NUM_TOKENS - 1, 1, None, of_state))


def test_a_read_that_ends_by_itself_fails_the_stream_at_once() -> None:
    stream = Waiting()
    stream.announce(1, 4)
    _, failed, _ = stream.push.read_ended(stream.claim, PAIRS[0], False, 2.0, "link down")
    assert failed == Fail(
        stream.claim, FailureReason(FailureCode.READ_FAILED, "read failed, rank 0 to rank 0: link down")
    )
    assert stream.push.read_ended(stream.claim, PAIRS[1], True, 2.0) == [FreeTarget(stream.claim)]
    assert stream.push.num_open == 0


def test_the_deadline_of_a_stream_goes_on_as_that_of_its_claim() -> None:
    stream = Waiting()
    stream.hear(Finished(X, stream.claim, 1, "t"), 100.0)
    stream.push.accept(stream.claim, ticket(), 100.0)
    [_, failed, _] = stream.pull.wake(T.deadline_s)
    assert isinstance(failed, Fail)
    assert failed.reason.code is FailureCode.DEADLINE


def test_a_stream_whose_ticket_is_never_opened_ends() -> None:
    stream = Waiting()
    stream.hear(Finished(X, stream.claim, 1, "t"))
    assert stream.push.wake(T.silence_s + 2) == []
    assert [e for e in stream.push.wake(T.deadline_s) if isinstance(e, Fail)]
    assert stream.push.accept(stream.claim, ticket(), T.deadline_s) == []
    assert stream.push.num_open == 0


def test_messages_nearly_due_to_one_producer_are_sent_together() -> None:
    push = PushConsumer(T, PullConsumer(T), NUM_LAYERS)
    for index in range(3):
        push.want(TransferId(f"x{index}"), P, HASH, 8, 1, index * 0.3)
    assert push.next_deadline == T.grant_every_s
    assert len(push.wake(T.grant_every_s)) == 3
    assert push.next_deadline == 2 * T.grant_every_s


# --- P --------------------------------------------------------------------------------------------


def answers(producer: PushProducer, message: Message, now: float, sender: Address = D) -> list[Message]:
    return [send.message for send in producer.receive(sender, message, now)]


def test_unmatched_prefills_and_wants_leave_no_records() -> None:
    producer = PushProducer(T)
    producer.expect(X, HASH, 8, 0.0)
    producer.finished(X, "t", 1.0)
    producer.receive(D, Want(TransferId("y"), 1, HASH, 8), 2.0)
    now = 0.0
    for _ in range(20):
        now = producer.next_deadline
        if now == float("inf"):
            break
        producer.wake(now)
    assert producer.num_open == 0
    assert producer.next_deadline == float("inf")


def test_a_want_gets_the_ticket_of_its_own_transfer() -> None:
    """Another prefill of the same prompt has ended before."""
    producer = PushProducer(T)
    for transfer_id in (X, TransferId("y")):
        producer.expect(transfer_id, HASH, 8, 0.0)
    producer.finished(TransferId("y"), "of y", 1.0)
    assert answers(producer, Want(X, 1, HASH, 8), 2.0) == [Working(X, 1)]
    assert [send.message for send in producer.finished(X, "of x", 3.0)] == [Finished(X, 1, 1, "of x")]


def test_a_computing_prefill_is_never_forgotten() -> None:
    producer = PushProducer(T)
    producer.expect(X, HASH, 8, 0.0)
    producer.wake(1e6)
    assert producer.expect(X, HASH, 8, 1e6) is None
    assert answers(producer, Want(X, 1, HASH, 8), 1e6) == [Working(X, 1)]


def test_a_reason_of_any_length_can_be_sent() -> None:
    producer = PushProducer(T)
    producer.expect(X, HASH, 8, 0.0)
    producer.receive(D, Want(X, 1, HASH, 8), 0.0)
    [send] = producer.failed(X, "no" * 10_000, 1.0)
    assert isinstance(send.message, Failed)


def test_reports_about_an_ended_prefill_change_nothing() -> None:
    producer = PushProducer(T)
    producer.expect(X, HASH, 8, 0.0)
    producer.receive(D, Want(X, 1, HASH, 8), 0.0)
    producer.finished(X, "t", 1.0)
    assert producer.progress(X, 4, table(4), 1.0) == []
    assert producer.preempted(X, 1.0) == []
    assert producer.failed(X, "late", 1.0) == []
    assert answers(producer, Want(X, 1, HASH, 8), 2.0) == [Finished(X, 1, 1, "t")]


def test_a_prefill_is_unwanted_once_its_consumer_has_withdrawn() -> None:
    producer = PushProducer(T)
    producer.expect(X, HASH, 8, 0.0)
    assert not producer.is_unwanted(X)
    producer.receive(D, Want(X, 1, HASH, 8), 0.0)
    assert not producer.is_unwanted(X)
    producer.receive(D, Withdraw(X, 1), 1.0)
    assert producer.is_unwanted(X)
    producer.receive(P, Want(X, 1, HASH, 8), 2.0)
    assert not producer.is_unwanted(X), "another consumer has come"
