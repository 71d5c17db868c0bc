"""What an engine of the world is made of: the production machines, exactly.

A mutant (baton.sim.mutants) is this with one part replaced; nothing in production knows that it can be.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.core.ids import Address, Epoch, PromptHash
from baton.core.layout import ModelFingerprint, RankLayout
from baton.core.timers import Timers
from baton.protocol.effects import Send
from baton.protocol.grouped_prompt import GroupRoutes, plan_group_routes
from baton.protocol.messages import Envelope, Message
from baton.protocol.peers import admit
from baton.protocol.pull_consumer import PullConsumer
from baton.protocol.pull_producer import PullProducer
from baton.protocol.push_consumer import PushConsumer
from baton.protocol.push_producer import PushProducer
from baton.protocol.ticket import Ticket, check_ticket
from baton.sim.connection import ALL_CHECKS, Checks


def verify(
    ticket: Ticket,
    fingerprint: ModelFingerprint,
    prompt_hash_of: Callable[[int], PromptHash],
    num_tokens: int,
) -> None:
    check_ticket(
        ticket,
        fingerprint=fingerprint,
        prompt_hash_of=prompt_hash_of,
        num_prompt_tokens=num_tokens,
        block_tokens=1,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    producer: Callable[[Epoch, Timers], PullProducer] = PullProducer
    consumer: Callable[[Timers], PullConsumer] = PullConsumer
    push_producer: Callable[[Timers], PushProducer] = PushProducer
    push_consumer: Callable[[Timers, PullConsumer, int], PushConsumer] = PushConsumer
    admit: Callable[[Address, Envelope], tuple[tuple[Message, ...], list[Send]]] = admit
    verify: Callable[[Ticket, ModelFingerprint, Callable[[int], PromptHash], int], None] = verify
    plan_group_routes: Callable[
        [Sequence[RankLayout], Sequence[RankLayout], Sequence[int | None]], GroupRoutes
    ] = plan_group_routes
    drops_early: int = 0  # Tokens too early at which P gives a window's blocks back.
    bound_reads: bool = True  # The transport's part: a read from a successor's memory fails.
    checks: Checks = ALL_CHECKS  # ... and what a data connection verifies.
    replaces_links: bool = True  # A link that was lost is dialled again.
    seals_frames: bool = True  # The channel's part: a frame that was altered on the way is dropped.
    binds_senders: bool = True  # ... and so is one whose sender is not the process that sent it.


PRODUCTION = Parts()
