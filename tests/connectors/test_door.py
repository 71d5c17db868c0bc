"""Malformed params are an error of the request. What another configuration would accept is computed here."""

from collections.abc import Callable
from typing import Any

import pytest

from baton.core.config import ClusterSecret
from baton.core.errors import BadTransferParams
from baton.protocol.signed_token import TokenSigner
from tests.connectors.pull_world import BLOCK, Engine, World
from tests.connectors.push_world import PushWorld, stream_params
from tests.vllm_plugin.world import VllmWorld

OTHER_CLUSTER = ClusterSecret(b"another cluster's secret")
TOKENS = list(range(9))


@pytest.fixture
def params(world: World) -> dict[str, Any]:
    """A producer's answer."""
    return world.engine("p").prefill("r", TOKENS)


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_valid_request_passes(world: World, params: dict[str, Any], policy: str) -> None:
    d = world.engine("d", policy=policy)
    for number, valid in enumerate([None, {}, {"do_remote_decode": True, "transfer_id": "t"}, params]):
        d.submit(str(number), TOKENS, valid)
    assert d.half.num_open_fetches == 1


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
    world: World, params: dict[str, Any], policy: str, change: dict[str, Any], field: str
) -> None:
    d = world.engine("d", policy=policy)
    with pytest.raises(BadTransferParams, match=field):
        d.submit("r", TOKENS, {**params, **change})
    assert not d.half._intents._parsed, "the host forgets the request"


def test_a_foreign_signature_is_refused_only_under_policy_fail(world: World, params: dict[str, Any]) -> None:
    assert not world.engine("d", secret=OTHER_CLUSTER).admit(d_request(world, params))
    with pytest.raises(BadTransferParams, match="signature"):
        world.engine("e", secret=OTHER_CLUSTER, policy="fail").submit("r", TOKENS, params)


def d_request(world: World, params: dict[str, Any]) -> Any:
    return world.engines[-1].submit("r", TOKENS, params)


def test_each_role_accepts_its_leg_only(world: World, params: dict[str, Any]) -> None:
    with pytest.raises(BadTransferParams, match="do_remote_prefill"):
        world.engine("d", role="kv_producer").submit("r", TOKENS, params)
    with pytest.raises(BadTransferParams, match="do_remote_decode"):
        world.engine("e", role="kv_consumer").submit("r", TOKENS, {"do_remote_decode": True})


# --- Verified once -----------------------------------------------------------------------------------


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every ticket and introduction that is opened."""
    opened: list[str] = []
    open_token = TokenSigner.open

    def count(self: TokenSigner[Any], text: str, *keys: bytes | None) -> Any:
        opened.append(text)
        return open_token(self, text, *keys)

    monkeypatch.setattr(TokenSigner, "open", count)
    return opened


@pytest.mark.parametrize("make_world", [World, PushWorld, VllmWorld])
def test_a_ticket_is_verified_once(make_world: Callable[[], World], opened: list[str]) -> None:
    world = make_world()
    try:
        p, d = world.engine("p"), world.engine("d")
        params = p.prefill("r", TOKENS)
        request = d.fetch("r", TOKENS, params)
        world.settle()
        d.read_out(request)
        assert opened == [params["baton_ticket"]]
        assert not d.half._intents._parsed
    finally:
        world.close()


def test_a_stream_verifies_its_introduction_once_and_its_ticket_once(opened: list[str]) -> None:
    world = PushWorld()
    try:
        p, d = world.engine("p"), world.engine("d")
        params = stream_params(p, "t")
        request = d.submit("r", TOKENS, params)
        d.admit(request)
        p.begin("r", TOKENS)
        p.prefill_in_chunks("r", BLOCK, len(TOKENS) - BLOCK)
        answer = p.finished["r"]
        assert answer is not None
        world.settle()
        d.read_out(request)
        assert opened == [params["baton_introduction"], answer["baton_ticket"]]
    finally:
        world.close()


def test_during_a_rotation_engines_hand_over_in_both_directions(world: World) -> None:
    old, new = b"the old secret of the cluster", b"the new secret of the cluster"
    first = world.engine("first", secret=ClusterSecret(old, new))
    second = world.engine("second", secret=ClusterSecret(new, old))
    pairs: list[tuple[Engine, Engine]] = [(first, second), (second, first)]
    for number, (p, d) in enumerate(pairs):
        request = d.submit(f"r{number}", TOKENS, p.prefill(f"r{number}", TOKENS))
        assert d.admit(request)
        world.settle()
        assert d.read_out(request).valid_tokens == 9
