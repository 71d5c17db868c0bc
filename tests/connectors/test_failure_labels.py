"""Label `reason` of `baton:kv_transfer_failures`: the value for each kind of failure.

A peer's text is involved in many failures, but must never become a label.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton.core.ids import Address, BlockId, EngineId, Epoch, TransferId
from baton.core.reasons import FailureCode, FailureReason, Fault
from baton.protocol.block_runs import PlanError
from baton.protocol.handshake import PROTOCOL_VERSION, encode_ranks
from baton.protocol.messages import WIRE_VERSION, Announced, Envelope, Failed, Finished, Refused, Welcome
from baton.testing.host.config import model_config
from tests.connectors.pull_world import BLOCK
from tests.connectors.push_world import PushEngine, PushWorld
from tests.connectors.test_push_by_name import NO_PEER, P_PEER, decode_leg

TOKENS = [i % 97 for i in range(3 * BLOCK + 1)]
T = TransferId("t")
PATIENT = {"timers": {"silence_s": 150.0, "hold_s": 200.0}}
EVIL = "evil words: of a peer, all of them"


class Scene:
    """A producer and a consumer, which fails to fetch request "r"."""

    def __init__(self, world: PushWorld, monkeypatch: pytest.MonkeyPatch) -> None:
        self.world, self.monkeypatch = world, monkeypatch
        self.p = world.engine("p", num_blocks=64)
        self.d = self.consumer()

    def consumer(self, **extra: Any) -> PushEngine:
        return self.world.engine("d", num_blocks=64, extra={"allowed_peers": [P_PEER, NO_PEER], **extra})

    def fetch(self, *, is_held: bool = False, d: PushEngine | None = None) -> None:
        if is_held:
            self.world.network.hold()
        (d or self.d).fetch("r", TOKENS, self.p.prefill("r", TOKENS))
        self.world.settle()

    def follow(self) -> int:
        """Returns the claim's number."""
        self.d.admit(self.d.follow("r", TOKENS, self.p))
        self.world.settle()
        return self.d.half._fetches._fetches["r"].claim

    def prefill(self, tokens: list[int] = TOKENS, transfer_id: str = T) -> str:
        """Returns the ticket."""
        params = {"do_remote_decode": True, "transfer_id": transfer_id}
        answer = self.p.prefill(f"of {transfer_id}", tokens, params=params)
        ticket: str = answer["baton_ticket"]
        return ticket

    def say(self, *messages: Any) -> None:
        """P sends this to D, regardless of the state of P's machines."""
        address, agent = self.p.half._agent.address, self.d.half._agent
        agent.receive(Envelope(WIRE_VERSION, address, agent.address, messages), self.world.now)
        self.world.settle()

    def welcome(self, payload: bytes, **changes: Any) -> None:
        """An answer to D's Hello that P's machines would not give."""
        self.world.wire.drop = [Welcome]
        self.fetch()
        model = model_config().kv_identity("baton-1")
        self.say(Welcome(PROTOCOL_VERSION, msgspec.structs.replace(model, **changes), payload))

    def card(self, **layout: Any) -> Any:
        """P's card, with changes of its layout."""
        card = self.p.workers[0].get_handshake_metadata().card  # type: ignore[union-attr]
        return msgspec.structs.replace(card, layout=msgspec.structs.replace(card.layout, **layout))


def breaks(*_: Any) -> Any:
    raise RuntimeError("a fault of ours")


def read_fails(scene: Scene) -> None:
    scene.world.network.fail_next(EVIL)
    scene.fetch()


def loan_expires(scene: Scene) -> None:
    params = scene.p.prefill("r", TOKENS)
    scene.world.pass_time(31)
    scene.d.fetch("r", TOKENS, params)


def producer_restarts(scene: Scene) -> None:
    params = scene.p.prefill("r", TOKENS)
    scene.p.kill()
    scene.world.engine("p", num_blocks=64)
    scene.d.fetch("r", TOKENS, params)


def producer_is_stopped(scene: Scene) -> None:
    scene.fetch(is_held=True)
    scene.world.wire.is_cut = True
    scene.world.pass_time(15)


def read_hangs(scene: Scene) -> None:
    scene.d.shutdown()
    scene.d = scene.consumer(**PATIENT)
    scene.fetch(is_held=True)
    scene.world.pass_time(121, every_s=2.0)


def producer_is_dead(scene: Scene) -> None:
    params = scene.p.prefill("r", TOKENS)
    scene.p.kill()
    scene.d.fetch("r", TOKENS, params)
    scene.world.pass_time(6)


def allocation_breaks(scene: Scene) -> None:
    scene.world.network.hold()
    request = scene.d.submit("r", TOKENS, scene.p.prefill("r", TOKENS))
    scene.world.settle()
    with scene.monkeypatch.context() as broken:
        broken.setattr(scene.d.half._fetches._reads, "start_if_ready", breaks)
        scene.d.admit(request)


def producer_refuses(scene: Scene) -> None:
    scene.world.wire.drop = [Welcome]
    scene.fetch()
    scene.say(Refused((EVIL,)))


def models_differ(scene: Scene) -> None:
    scene.welcome(b"", model=EVIL)


def weights_differ(scene: Scene) -> None:
    scene.welcome(b"", weights=EVIL)


def cards_are_garbage(scene: Scene) -> None:
    scene.welcome(b"garbage")


def cards_are_too_many(scene: Scene) -> None:
    scene.welcome(msgspec.msgpack.encode([]))


def endpoint_is_too_long(scene: Scene) -> None:
    card = msgspec.structs.replace(scene.card(), endpoints={EVIL: bytes(1 << 17)})
    scene.welcome(msgspec.msgpack.encode([card]))


def layout_is_unsound(scene: Scene) -> None:
    scene.welcome(msgspec.msgpack.encode([scene.card(num_blocks=0)]))


def layouts_differ(scene: Scene) -> None:
    layers = scene.card().layout.layers
    layers = tuple(msgspec.structs.replace(layer, name=f"{EVIL}{layer.name}") for layer in layers)
    scene.welcome(encode_ranks([scene.card(layers=layers)]))


def packings_differ(scene: Scene) -> None:
    def plan(*_: Any) -> Any:
        raise PlanError(f"packing of {EVIL!r} in no group")

    scene.monkeypatch.setattr(scene.d.half._fetches._reads.planner, "pairs", plan)
    scene.fetch()


def peers_are_too_many(scene: Scene) -> None:
    scene.fetch(is_held=True)
    scene.d.half._agent.peers._peers_max = 1
    scene.d.half._agent.greet(Address(EngineId("another"), Epoch(7)), scene.world.now)


def prefill_is_aborted(scene: Scene) -> None:
    claim = scene.follow()
    scene.say(Failed(T, claim, EVIL))


def prefill_is_silent(scene: Scene) -> None:
    scene.d.admit(scene.d.submit("r", TOKENS, decode_leg(NO_PEER)))
    scene.world.pass_time(11)


def prefill_is_another(scene: Scene) -> None:
    scene.d.admit(scene.d.submit("r", TOKENS, decode_leg(remote_engine_id=EVIL)))


def blocks_change(scene: Scene) -> None:
    claim = scene.follow()
    scene.say(Announced(T, claim, 1, BLOCK, ((BlockId(1),),)))
    scene.say(Announced(T, claim, 1, 2 * BLOCK, ((BlockId(2), BlockId(3)),)))


def ticket_is_garbage(scene: Scene) -> None:
    claim = scene.follow()
    scene.say(Finished(T, claim, 1, EVIL))


def ticket_is_of_another_transfer(scene: Scene) -> None:
    claim, ticket = scene.follow(), scene.prefill(transfer_id="another")
    scene.say(Finished(T, claim, 1, ticket))


def ticket_is_for_another_prompt(scene: Scene) -> None:
    claim = scene.follow()
    scene.world.wire.is_cut = True
    scene.say(Finished(T, claim, 1, scene.prefill(TOKENS[: 2 * BLOCK])))


def ticket_is_for_other_blocks(scene: Scene) -> None:
    claim = scene.follow()
    scene.world.wire.is_cut = True
    scene.say(Announced(T, claim, 1, BLOCK, ((BlockId(60),),)))
    scene.say(Finished(T, claim, 1, scene.prefill()))


def loan_is_in_use(scene: Scene) -> None:
    scene.world.network.hold()
    params = scene.p.prefill("q", TOKENS, params={"do_remote_decode": True, "transfer_id": T})
    scene.d.fetch("q", TOKENS, params)
    claim = scene.follow()
    scene.say(Finished(T, claim, 1, params["baton_ticket"]))


def transfer_is_in_use(scene: Scene) -> None:
    scene.follow()
    scene.d.admit(scene.d.submit("q", TOKENS, decode_leg(transfer_id=T)))


LABELS: dict[Callable[[Scene], None], set[str]] = {
    read_fails: {"read failed"},
    loan_expires: {"the producer no longer holds the blocks"},
    producer_restarts: {"the producer has restarted or is gone"},
    producer_is_stopped: {"the producer has not answered"},
    read_hangs: {"deadline passed"},
    producer_is_dead: {"no answer to 5 hellos"},
    allocation_breaks: {"internal error", "aborted"},
    producer_refuses: {"refused by the peer"},
    models_differ: {"incompatible"},
    weights_differ: {"other weights"},
    cards_are_garbage: {"malformed rank cards"},
    cards_are_too_many: {"malformed rank cards"},
    endpoint_is_too_long: {"malformed rank cards"},
    layout_is_unsound: {"malformed rank cards"},
    layouts_differ: {"layouts differ"},
    packings_differ: {"layouts differ"},
    peers_are_too_many: {"crowded out by other peers"},
    prefill_is_aborted: {"the producer gave up"},
    prefill_is_silent: {"the producer has said nothing"},
    prefill_is_another: {"the producer is another"},
    blocks_change: {"the producer announced other blocks than before"},
    ticket_is_garbage: {"kv_transfer_params.baton_ticket"},
    ticket_is_of_another_transfer: {"the ticket is of another transfer"},
    ticket_is_for_another_prompt: {"the ticket is for another prompt"},
    ticket_is_for_other_blocks: {"the ticket is for other blocks than were announced"},
    loan_is_in_use: {"its loan is in use here"},
    transfer_is_in_use: {"its transfer is in use here"},
}


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    world = PushWorld()
    yield Scene(world, monkeypatch)
    world.network.release()
    world.close()


@pytest.mark.parametrize("fail", LABELS, ids=lambda fail: fail.__name__)
def test_each_kind_of_failure_has_its_label_whatever_its_text(
    scene: Scene, fail: Callable[[Scene], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def reworded(self: FailureReason, code: FailureCode, text: str = "") -> None:
        object.__setattr__(self, "code", code)
        object.__setattr__(self, "text", "other words, and: more")

    monkeypatch.setattr(FailureReason, "__init__", reworded)
    fail(scene)
    scene.world.settle()
    assert set(scene.d.counted("failures")) == LABELS[fail]
    assert not any(outcome.valid_tokens for outcome in scene.d.outcomes.values())


def test_no_other_label_exists_and_all_are_documented() -> None:
    told = set().union(*LABELS.values())
    rare = {"not used for long", "blocks of another size"}  # A peer that rests for minutes; block groups.
    assert {code.value for code in FailureCode} == told | rare
    guide = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
    assert [code for code in FailureCode if f"`{code}`" not in guide] == []


def test_the_labels_of_refusals() -> None:
    told = {
        "size",
        "schema",
        "version",
        "signature",
        "model",
        "weights",
        "layout",
        "prompt",
        "in use",
        "params",
        "unnamed",
    }
    assert {fault.value for fault in Fault} == told
