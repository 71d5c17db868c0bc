"""Retention that a request asks for: at the door, and from vLLM's requests."""

from types import SimpleNamespace
from typing import Any

import pytest

from baton.core.errors import BadTransferParams
from baton.core.retention import (
    PLAIN,
    AskedRetention,
    Retention,
    make_retention,
    parse_retention,
    parse_tenant,
    retention_of,
)


@pytest.mark.parametrize(
    ("raw", "asked"),
    [
        (None, AskedRetention()),
        ({"do_remote_decode": True}, AskedRetention()),
        ({"baton_retention": None}, AskedRetention()),
        ({"baton_retention": {"priority": -100, "ttl_s": 1}}, AskedRetention(-100, 1)),
        ({"baton_retention": {"ttl_s": None, "ends_session": True}}, AskedRetention(ends_session=True)),
    ],
)
def test_what_is_asked_is_read(raw: dict[str, Any] | None, asked: AskedRetention) -> None:
    assert parse_retention(raw) == asked


@pytest.mark.parametrize(
    ("value", "field"),
    [
        ("high", ""),
        ({"priority": 101}, ".priority"),
        ({"priority": 1.5}, ".priority"),
        ({"priority": True}, ".priority"),
        ({"ttl_s": 0}, ".ttl_s"),
        ({"ttl_s": "1h"}, ".ttl_s"),
        ({"ends_session": 1}, ".ends_session"),
        ({"ttl": 5}, ""),
    ],
)
def test_the_error_names_the_field_and_what_is_allowed(value: Any, field: str) -> None:
    with pytest.raises(BadTransferParams) as caught:
        parse_retention({"baton_retention": value})
    assert str(caught.value).startswith(f"kv_transfer_params.baton_retention{field}: ")
    assert "priority (-100 to 100), ttl_s (1 to 1000000000 seconds)" in str(caught.value)


@pytest.mark.parametrize("value", [5, "x" * 257, ["a"]])
def test_a_bad_tenant_is_refused(value: Any) -> None:
    with pytest.raises(
        BadTransferParams, match=r"kv_transfer_params\.baton_tenant: must be a string of at most"
    ):
        parse_tenant({"baton_tenant": value})


def action(kind: str, payload: Any) -> SimpleNamespace:
    return SimpleNamespace(action_id="1", action_type=kind, action_version="1", payload=payload)


def made(
    params: Any = None, *actions: SimpleNamespace, session: str | None = None, salt: str | None = None
) -> Any:
    hints = SimpleNamespace(protocol_version="1", message_id="m", actions=list(actions))
    return make_retention(params, hints if actions else None, session=session, cache_salt=salt)


def test_hints_of_vllm_say_the_same() -> None:
    assert made(None, action("retain", {"priority": 7, "ttl_s": 60, "target": "all"})) == Retention(7, 60)
    assert made(None, action("Demote", {}), session="s") == Retention(session=":s", ends_session=True)
    assert made(None, action("retain", {"priority": "high"}), action("prefetch", {"priority": 9})) == PLAIN
    params = {"baton_retention": {"priority": 1}}
    assert made(params, action("retain", {"priority": 7})) == Retention(1), "the params come first"


def test_the_tenant_is_the_routers_name_or_the_salt() -> None:
    of_router = made({"baton_tenant": "search"}, salt="pepper").tenant
    of_salt = made(salt="pepper").tenant
    assert len({of_router, of_salt, made({"baton_tenant": "pepper"}).tenant, ""}) == 4
    assert made(salt="pepper", session="s").tenant == of_salt
    assert "search" not in of_router
    assert len(of_router) == 16


def test_a_malformed_retention_leaves_the_tenant() -> None:
    params = {"baton_retention": {"priority": "high"}, "baton_tenant": "search"}
    assert made(params) == made({"baton_tenant": "search"})
    assert made({"baton_retention": {"priority": 3}, "baton_tenant": 5}) == Retention(3)


def test_a_session_is_its_tenants() -> None:
    of_a, of_b = {"baton_tenant": "a"}, {"baton_tenant": "b"}
    asked = [made(of_a, session="1"), made(of_b, session="1"), made(session="1"), made(salt="a", session="1")]
    assert len({one.session for one in asked}) == 4
    assert made(of_a, session="1") == made(of_a, session="1")
    assert made({"baton_tenant": "a"}).session == "", "a tenant without a session has none"


def test_a_request_without_vllms_newer_fields_is_plain() -> None:
    request = SimpleNamespace(kv_transfer_params={"baton_retention": "?"}, cache_salt=None)
    assert retention_of(request) is PLAIN
    request.session_id = "s"
    assert retention_of(request) == Retention(session=":s")
