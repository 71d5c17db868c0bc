"""Request validation: what the client must correct gets a 400; what the engine can handle passes."""

from collections.abc import Iterator
from typing import Any

import pytest

from baton.assemble import make_door
from baton.connectors.pull import intent as pull_door
from baton.core.config import ClusterSecret
from baton.core.errors import BadTransferParams
from baton.protocol.ticket import Ticket, open_ticket
from tests.connectors.pull_world import World, engine_config
from tests.connectors.push_world import PushWorld

OTHER_CLUSTER = ClusterSecret(b"another cluster's secret")


@pytest.fixture
def params() -> Iterator[dict[str, Any]]:
    """A producer's answer."""
    world = World()
    yield world.engine("p").prefill("r", list(range(9)))
    world.close()


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_valid_request_passes(params: dict[str, Any], policy: str) -> None:
    validate = make_door(engine_config("d", policy=policy))
    validate(None)
    validate({})
    validate({"do_remote_decode": True, "transfer_id": "t"})
    validate(params)


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"baton_ticket": None}, r"baton_ticket"),
        ({"baton_ticket": "nonsense"}, r"baton_ticket"),
        ({"baton_ticket": 7}, r"baton_ticket"),
        ({"remote_engine_id": "q"}, r"remote_engine_id"),
        ({"do_remote_decode": True}, r"kv_transfer_params"),
        ({"remote_block_ids": [[-1]]}, r"remote_block_ids"),
    ],
)
def test_what_the_engine_cannot_handle_is_refused(
    params: dict[str, Any], policy: str, change: dict[str, Any], field: str
) -> None:
    validate = make_door(engine_config("d", policy=policy))
    with pytest.raises(BadTransferParams, match=field):
        validate({**params, **change})


def test_a_foreign_signature_is_refused_only_under_policy_fail(params: dict[str, Any]) -> None:
    make_door(engine_config("d", secret=OTHER_CLUSTER))(params)
    with pytest.raises(BadTransferParams, match="signature"):
        make_door(engine_config("d", secret=OTHER_CLUSTER, policy="fail"))(params)


def test_each_role_accepts_its_leg_only(params: dict[str, Any]) -> None:
    with pytest.raises(BadTransferParams, match="do_remote_prefill"):
        make_door(engine_config("d", role="kv_producer"))(params)
    with pytest.raises(BadTransferParams, match="do_remote_decode"):
        make_door(engine_config("d", role="kv_consumer"))({"do_remote_decode": True})


def test_a_ticket_is_verified_once_by_each_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A push-capable consumer uses the params when the request arrives, is expected, and ends."""
    opened: list[str] = []

    def count(text: str, *keys: bytes | None) -> Ticket:
        opened.append(text)
        return open_ticket(text, *keys)

    monkeypatch.setattr(pull_door, "open_ticket", count)
    world = PushWorld()
    try:
        p, d = world.engine("p"), world.engine("d")
        params = p.prefill("r", list(range(9)))
        request = d.submit("r", list(range(9)), params)
        assert d.admit(request)
        world.settle()
        d.read_out(request)
        assert opened == [params["baton_ticket"]]
        assert not d.half._requests._parsed
    finally:
        world.close()


def test_during_a_rotation_engines_hand_over_in_both_directions() -> None:
    old, new = b"the old secret of the cluster", b"the new secret of the cluster"
    world = World()
    try:
        first = world.engine("first", secret=ClusterSecret(old, new))
        second = world.engine("second", secret=ClusterSecret(new, old))
        for number, (p, d) in enumerate([(first, second), (second, first)]):
            request = d.submit(f"r{number}", list(range(9)), p.prefill(f"r{number}", list(range(9))))
            assert d.admit(request)
            world.settle()
            assert d.read_out(request).valid_tokens == 9
    finally:
        world.close()
