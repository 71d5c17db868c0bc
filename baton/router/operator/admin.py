"""Answers the administrator's requests: reports the fleet's state and changes its members.

GET  /status              the fleet, in the form of vLLM's disaggregation proxies, and more
POST /explain             a client's completion or chat: what each placement would cost (policy `cost`)
POST /instances/add       {"type": "prefill" | "decode", "instance": "host:port" | URL}
POST /instances/drain     {"instance": ...}: no new requests; those that run have `timeout_s` to end
POST /instances/remove    the same, and then the engine is forgotten
POST /instances/role      {"instance": ..., "type": ...}: it drains in its present role, and joins in this one
POST /instances/register  an engine registers itself, and repeats this: see `baton.http.registration`

An engine is added if it answers a probe, and introduces itself before it gets requests.
"""

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import msgspec

from baton.core.errors import UserError
from baton.http.errors import ApiError
from baton.http.gate import is_own_origin
from baton.http.json_body import decode_as
from baton.http.registration import PATH as REGISTER_PATH
from baton.http.registration import Registration, check_weight
from baton.router.fleet.engine import Engine
from baton.router.fleet.notes import Speeds
from baton.router.fleet.view import FleetView
from baton.router.members.peers import PeerLink
from baton.router.members.reader import Members, node_of
from baton.router.request.lookups import look_for
from baton.router.shell.index_client import IndexClient
from baton.router.values.dialects import CHAT, COMPLETIONS
from baton.router.values.legs import parse_body, shape_of
from baton.router.values.members import Member, address_in, member_of
from baton.router.values.settings import Role, check_url, without_credentials

METHODS = {
    "/status": "GET",
    "/explain": "POST",
    "/instances/add": "POST",
    "/instances/drain": "POST",
    "/instances/remove": "POST",
    "/instances/role": "POST",
    REGISTER_PATH: "POST",
}
JSON = {"content-type": "application/json"}
INSTANCE_CHARS = 256  # The log shows so much of a registration that is refused.
ORDER_HEADER = "x-baton-order"  # The page sends this header with an order.


class Reply(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes


class _Instance(msgspec.Struct):
    instance: str


class _Order(_Instance):
    type: Literal["prefill", "decode"] | None = None
    timeout_s: float | None = None
    model: str | None = None
    weight: float = 1.0


class Admin:
    def __init__(
        self, view: FleetView, members: Members, index: IndexClient | None, peers: PeerLink | None
    ) -> None:
        self._view, self._settings, self._fleet = view, view.settings, view.fleet
        self._members, self._index, self._peers = members, index, peers
        settings = view.settings
        # If there is no key, only this machine may change the fleet. The Host is checked on loopback only.
        doors = settings.doors
        self._is_open = bool(doors.api_keys or doors.admin_keys) or settings.checked_hosts is not None

    async def answer(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Reply:
        """`path` is one of METHODS. The keys in `headers` have been checked."""
        try:
            if method != METHODS[path]:
                raise not_allowed(method, path)
            if path == "/status":
                return _json(self.status())
            if path == "/explain":
                return _json(await self._explain(parse_body(body, self._settings.model_aliases)))
            _check_origin(headers)
            if not self._is_open:
                why = "the fleet is changed with an API key only; start the router with --admin-api-key-file"
                raise ApiError(403, why, code="no_admin_key")
            if path == REGISTER_PATH:
                return _json({"message": self._register(body)})
            return _json({"message": await self._carry_out(path, decode_as(body, _Order))})
        except UserError as error:
            return refusal(ApiError.of_user(error))
        except ApiError as error:
            return refusal(error)

    async def _explain(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Raises UserError, ApiError."""
        view, now_s = self._view, asyncio.get_running_loop().time()
        if self._settings.policy != "cost":
            raise ApiError(400, "only --policy cost weighs placements")
        dialect = COMPLETIONS if body.get("messages") is None else CHAT
        shape = shape_of(body, dialect)
        priority = body.get("priority")
        routed = view.route(
            shape.prefix_key,
            body.get("model"),
            shape.num_prompt_tokens,
            priority if isinstance(priority, int) else 0,
        )
        look = look_for(view, body, shape, routed, now_s, dialect)
        if look is not None and self._index is not None:
            found = await self._index.find(look)
            num_tokens = found.num_tokens or shape.num_prompt_tokens
            routed = replace(routed, num_tokens=num_tokens, cached=found.cached, home=found.home)
        return {
            "num_prompt_tokens": routed.num_tokens,
            "not_handed_over": shape.direct_reason,
            "cached_tokens": {url: held.num_tokens for url, held in routed.cached.items()},
            "cached_tokens_by_tier": {
                url: dict(zip(("gpu", "host", "store"), held.by_tier, strict=True))
                for url, held in routed.cached.items()
            },
            "candidates": self._fleet.choice.explain(routed, view.pairs.load_s),
        }

    async def _carry_out(self, path: str, order: _Order) -> str:
        """Return what was done. Raises UserError, ApiError."""
        address = address_in(order.instance)
        if path in ("/instances/add", "/instances/role") and order.type is None:
            raise UserError('is missing; "prefill" or "decode"', field="type")
        if path == "/instances/add":
            return await self._add(order)
        url = without_credentials(address)
        is_change = path == "/instances/role"
        engines = [
            one
            for one in self._fleet.engines
            if one.url == url and (is_change or order.type in (None, one.role))
        ]
        if not engines:
            raise UserError(f"{url} is no engine of this router; GET /status lists them", field="instance")
        timeout_s = self._settings.drain_timeout_s if order.timeout_s is None else order.timeout_s
        if not 0 <= timeout_s < math.inf:
            raise UserError("must be a number of seconds, at least 0", field="timeout_s")
        if is_change:
            done = self._change_role(engines, order, timeout_s)
        elif path == "/instances/remove":
            done = [self._members.remove(one, timeout_s) for one in engines]
        else:
            done = [self._members.drain(one, timeout_s, is_leaving=False) for one in engines]
        if not any(one.role == "decode" and one.is_eligible for one in self._fleet.engines):
            done.append("No decode engine is left: /health answers 503.")
        return " ".join(done)

    async def _add(self, order: _Order) -> str:
        assert order.type is not None
        check_weight(order.weight)
        member = Member(order.type, address_in(order.instance), order.model, order.weight)
        engine = await self._members.add(member)
        added = f"Added {node_of(engine)} to {engine.role}_instances."
        return added if engine.refused is None else f"{added} It gets no requests: it {engine.refused}."

    def _change_role(self, engines: Sequence[Engine], order: _Order, timeout_s: float) -> list[str]:
        """Raises UserError."""
        present = [one for one in engines if not one.is_leaving]
        if any(one.role == order.type for one in present):
            raise UserError(f"{engines[0].url} is a {order.type} engine already", field="type")
        if not present:
            raise UserError(f"{engines[0].url} is leaving; add it again", field="instance")
        assert order.type is not None
        return self._members.change_role(present[0], order.type, timeout_s)

    def _register(self, body: bytes) -> str:
        """Raises UserError."""
        instance = "an engine"
        try:
            instance = decode_as(body, _Instance).instance
            registration = decode_as(body, Registration)
            registration.check()
            member = member_of(registration)
            check_url(member.address, "instance")
            self._members.registrations.note(member, registration.ttl_s)
        except UserError as error:
            self._members.registrations.refuse(instance.rpartition("@")[2][:INSTANCE_CHARS], str(error))
            raise
        return f"Registered for {registration.ttl_s:g} s." if registration.ttl_s else "It leaves."

    @property
    def is_open(self) -> bool:
        """Whether orders are carried out, with a key if there is one."""
        return self._is_open

    def status(self) -> Mapping[str, Any]:
        now_s = asyncio.get_running_loop().time()
        nodes: dict[Role, list[str]] = {"prefill": [], "decode": []}
        for engine in self._fleet.engines:
            nodes[engine.role].append(node_of(engine))
        return {
            "prefill_node_count": len(nodes["prefill"]),
            "decode_node_count": len(nodes["decode"]),
            "prefill_nodes": nodes["prefill"],
            "decode_nodes": nodes["decode"],
            "models": sorted({name for engine in self._fleet.engines for name in engine.names or ()}),
            "updates": self._fleet.models.updates(),
            "sources": [msgspec.structs.asdict(one) for one in self._members.sources()],
            "mode": self._settings.mode,
            "policy": self._settings.policy,
            "queues": [] if self._view.admission is None else self._view.admission.snapshot(),
            "routers": [] if self._peers is None else self._peers.snapshot(),
            "engines": [
                {
                    "type": engine.role,
                    "url": engine.url,
                    "state": engine.state,
                    "model": engine.identity.name if engine.identity is not None else None,
                    "weights": engine.weights,
                    "in_flight": engine.load,
                    "queued_tokens": engine.queued_tokens,
                    "indexed_blocks": engine.num_indexed_blocks,
                    **_speeds(engine),
                    "breaker": engine.health.breaker(now_s),
                    "weight": round(engine.share(now_s), 3),
                    "reason": engine.refused or (None if engine.is_up else engine.last_error),
                    "last_error": engine.last_error,
                    "last_error_unix_s": engine.last_error_unix_s,
                }
                for engine in self._fleet.engines
            ],
        }


def _check_origin(headers: Mapping[str, str]) -> None:
    """Raises ApiError for an order that a browser sends from a page that is not this router's own.

    Browsers add Origin to a POST, and Sec-Fetch-Site; a page of another origin cannot set ORDER_HEADER
    without asking, which this server does not answer (CSRF).
    """
    origin, site = headers.get("origin"), headers.get("sec-fetch-site")
    if origin is None and site is None:
        return
    is_own = origin is not None and is_own_origin(headers)
    if not is_own or site not in (None, "same-origin") or ORDER_HEADER not in headers:
        raise ApiError(403, "orders of a browser come from this router's own page only", code="cross_origin")


def _speeds(engine: Engine) -> Mapping[str, float | None]:
    """The engine's speeds, as this process has learned them, or another one of this router."""
    speeds = engine.speeds or engine.elsewhere.speeds or Speeds(None, None, None)
    return msgspec.structs.asdict(speeds)


def _json(value: Mapping[str, Any]) -> Reply:
    return Reply(200, JSON, msgspec.json.encode(value))


def refusal(error: ApiError, **headers: str) -> Reply:
    return Reply(error.status, {**JSON, **error.headers(), **headers}, msgspec.json.encode(error.body()))


def not_allowed(method: str, path: str) -> ApiError:
    return ApiError(405, f"{method} {path}: Method Not Allowed")
