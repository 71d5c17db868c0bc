"""The operator's questions and orders: what the fleet is, and which engines belong to it.

GET  /status              the fleet, in the form of vLLM's disaggregation proxies, and more
POST /explain             a client's completion or chat: what each placement would cost (policy `cost`)
POST /instances/add       {"type": "prefill" | "decode", "instance": "host:port" | URL}
POST /instances/drain     {"instance": ...}: no new requests; those that run have `timeout_s` to end
POST /instances/remove    the same, and then the engine is forgotten

An engine is added if it answers a probe, and introduces itself before it gets requests.
"""

import asyncio
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import msgspec

from baton.core.errors import UserError
from baton.core.json_text import NotJson, decode_json
from baton.http.errors import ApiError
from baton.router.fleet import DRAIN_GRACE_S, Engine, Fleet
from baton.router.fleet_view import FleetView
from baton.router.legs import parse_body, shape_of
from baton.router.lookups import look_for
from baton.router.notes import Drains, Joined, Speeds
from baton.router.settings import Role, without_credentials
from baton.router.shell.index_client import IndexClient
from baton.router.shell.peers import PeerLink
from baton.router.shell.probes import Prober

METHODS = {
    "/status": "GET",
    "/explain": "POST",
    "/instances/add": "POST",
    "/instances/drain": "POST",
    "/instances/remove": "POST",
}
JSON = {"content-type": "application/json"}


class Reply(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes


class _Order(msgspec.Struct):
    instance: str
    type: Literal["prefill", "decode"] | None = None
    timeout_s: float | None = None


def watch_drain(loop: asyncio.AbstractEventLoop, fleet: Fleet, engine: Engine) -> None:
    """Let other engines continue its streams soon, and end what is left at the drain's deadline."""
    until_s = engine.drain_until_s
    assert until_s is not None
    loop.call_at(min(until_s, loop.time() + DRAIN_GRACE_S), fleet.hand_over, engine, until_s)
    loop.call_at(until_s, fleet.end_drain, engine, until_s)


class Admin:
    def __init__(
        self, view: FleetView, prober: Prober, index: IndexClient | None, peers: PeerLink | None
    ) -> None:
        self._view, self._settings, self._fleet = view, view.settings, view.fleet
        self._prober, self._index, self._peers = prober, index, peers
        settings = view.settings
        # Without a key, only this machine may change the fleet. The Host is checked on loopback only.
        self._is_open = bool(settings.doors.api_keys) or settings.checked_hosts is not None

    async def answer(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Reply:
        """`path` is one of METHODS. The keys in `headers` have been checked."""
        try:
            if method != METHODS[path]:
                raise not_allowed(method, path)
            if path == "/status":
                return _json(self._status())
            if path == "/explain":
                return _json(await self._explain(parse_body(body)))
            if not self._is_open:
                why = "the fleet is changed with an API key only; start the router with --api-key-file"
                raise ApiError(403, why, code="no_admin_key")
            return _json({"message": await self._carry_out(path, _parse(body))})
        except UserError as error:
            return refusal(ApiError.of_user(error))
        except ApiError as error:
            return refusal(error)

    async def _explain(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Raises UserError, ApiError."""
        view, now_s = self._view, asyncio.get_running_loop().time()
        if self._settings.policy != "cost":
            raise ApiError(400, "only --policy cost weighs placements")
        shape, is_chat = shape_of(body), body.get("messages") is not None
        priority = body.get("priority")
        routed = view.route(
            shape.prefix_key,
            body.get("model"),
            shape.num_prompt_tokens,
            priority if isinstance(priority, int) else 0,
        )
        look = look_for(view, body, shape, routed, now_s, is_chat=is_chat)
        if look is not None and self._index is not None:
            found = await self._index.find(look)
            num_tokens = found.num_tokens or shape.num_prompt_tokens
            routed = replace(routed, num_tokens=num_tokens, cached=found.cached, home=found.home)
        return {
            "num_prompt_tokens": routed.num_tokens,
            "not_handed_over": shape.direct_reason,
            "cached_tokens": routed.cached,
            "candidates": self._fleet.explain(routed, view.pairs.load_s),
        }

    async def _carry_out(self, path: str, order: _Order) -> str:
        """Return what was done. Raises UserError, ApiError."""
        address = order.instance if "://" in order.instance else f"http://{order.instance}"
        address = address.rstrip("/")
        if path == "/instances/add":
            if order.type is None:
                raise UserError('is missing; "prefill" or "decode"', field="type")
            return await self._add(order.type, address)
        url = without_credentials(address)
        engines = [one for one in self._fleet.engines if one.url == url and order.type in (None, one.role)]
        if not engines:
            raise UserError(f"{url} is no engine of this router; GET /status lists them", field="instance")
        timeout_s = self._settings.drain_timeout_s if order.timeout_s is None else order.timeout_s
        if not 0 <= timeout_s < math.inf:
            raise UserError("must be a number of seconds, at least 0", field="timeout_s")
        done = [self._drain(one, timeout_s, is_leaving=path == "/instances/remove") for one in engines]
        if not any(one.role == "decode" and one.is_eligible for one in self._fleet.engines):
            done.append("No decode engine is left: /health answers 503.")
        return " ".join(done)

    async def _add(self, role: Role, address: str) -> str:
        known = self._fleet.engines
        engine = self._fleet.add(role, address)
        self._fleet.tell(Joined(role, address))
        if engine not in known:
            await self._prober.probe(engine)
            if not engine.is_up:
                self._drain(engine, 0.0, is_leaving=True)
                why = f"{engine.last_error}; start the engine first"
                raise UserError(f"{engine.url} does not serve: {why}", field="instance")
            self._prober.watch(engine)
        added = f"Added {node_of(engine)} to {role}_instances."
        return added if engine.refused is None else f"{added} It gets no requests: it {engine.refused}."

    def _drain(self, engine: Engine, timeout_s: float, *, is_leaving: bool) -> str:
        loop = asyncio.get_running_loop()
        until_s = loop.time() + timeout_s
        self._fleet.drain(engine, until_s, is_leaving=is_leaving)
        self._fleet.tell(Drains(engine.key, timeout_s, is_leaving))
        node, what = node_of(engine), f"{engine.role}_instances"
        if engine.is_removed:
            return f"Removed {node} from {what}."
        watch_drain(loop, self._fleet, engine)
        then = f", and is then removed from {what}" if engine.is_leaving else ""
        return f"{node} drains {engine.load} requests for at most {timeout_s:g} s{then}."

    def _status(self) -> Mapping[str, Any]:
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
                    "in_flight": engine.load,
                    "queued_tokens": engine.queued_tokens,
                    "indexed_blocks": engine.num_indexed_blocks,
                    **_speeds(engine),
                    "breaker": engine.health.breaker(now_s),
                    "weight": round(engine.share(now_s), 3),
                    "reason": engine.refused or engine.last_error,
                }
                for engine in self._fleet.engines
            ],
        }


def _speeds(engine: Engine) -> Mapping[str, float | None]:
    """As this process has learned them, or another one of this router."""
    speeds = engine.speeds or engine.elsewhere.speeds or Speeds(None, None, None)
    return msgspec.structs.asdict(speeds)


def node_of(engine: Engine) -> str:
    """In the form of vLLM's proxies: host:port."""
    return engine.url.removeprefix("http://")


def _parse(body: bytes) -> _Order:
    try:
        return decode_json(body, _Order)
    except NotJson as error:
        wanted = '{"type": "prefill" or "decode", "instance": "host:port"}'
        raise UserError(f"{error}; expected {wanted}", field="body") from error


def _json(value: Mapping[str, Any]) -> Reply:
    return Reply(200, JSON, msgspec.json.encode(value))


def refusal(error: ApiError, **headers: str) -> Reply:
    return Reply(error.status, {**JSON, **error.headers(), **headers}, msgspec.json.encode(error.body()))


def not_allowed(method: str, path: str) -> ApiError:
    return ApiError(405, f"{method} {path}: Method Not Allowed")
