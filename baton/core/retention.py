"""Retention: how long the KV of a request's tokens is to stay in tiers, and to which tenant it belongs.

    "kv_transfer_params": {"baton_retention": {"priority": 10, "ttl_s": 300, "ends_session": false},
                           "baton_tenant": "search"}

priority      chunks with a lower one go first; 0 without it
ttl_s         seconds since the last use, after which a chunk goes before all others
ends_session  after this request the chunks that only its session has used go first
baton_tenant  whose quota the chunks count for. A router sets it; without it the cache salt stands for it

The session is the request's `session_id` (the header X-Session-Id), among those of its tenant. vLLM's own
offloading does not pass it to tiers; there `baton_session` beside `baton_tenant` names it. vLLM's `kv_hints`
may ask for the same: actions "retain", with `priority` and `ttl_s` in the payload, and "demote", which is
`ends_session`.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Mapping
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from baton.core.errors import BadTransferParams
from baton.core.transfer_params import FIELD, actions_of
from baton.core.validation import explain

RETENTION: Final = "baton_retention"
TENANT: Final = "baton_tenant"
SESSION: Final = "baton_session"
SESSION_HEADER: Final = "x-session-id"
SESSION_CHARS_MAX: Final = 256  # Limit of `session_id`, too.
NEEDS_SESSION: Final = "needs a session: set session_id, or the header X-Session-Id"
PRIORITY_MAX: Final = 100
RAISED_SHARE: Final = 0.5
"""Share of a tier for chunks with a priority above 0, so that clients cannot take all of it. Beyond it the
tier gives priority 0 to chunks of the lowest of these priorities, the least recently used first.
"""
TTL_MAX_S: Final = 10**9
TENANT_CHARS_MAX: Final = 256
TENANT_BYTES: Final = 8

Priority = Annotated[int, Meta(ge=-PRIORITY_MAX, le=PRIORITY_MAX)]
Seconds = Annotated[int, Meta(ge=1, le=TTL_MAX_S)]


class AskedRetention(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    priority: Priority = 0
    ttl_s: Seconds | None = None
    ends_session: bool = False


class Retention(msgspec.Struct, frozen=True):
    priority: int = 0
    ttl_s: int | None = None
    tenant: str = ""  # Digest in hex, so that stores do not show names; "": none.
    session: str = ""  # The tenant's digest and the session's name; "": none.
    ends_session: bool = False


PLAIN: Final = Retention()
_NOTHING_ASKED: Final = AskedRetention()


def parse_retention(raw: Mapping[str, Any] | None) -> AskedRetention:
    """Parse the retention asked for. Raises BadTransferParams naming the field and the allowed values."""
    if raw is None or (value := raw.get(RETENTION)) is None:
        return _NOTHING_ASKED
    try:
        return msgspec.convert(value, AskedRetention)
    except msgspec.ValidationError as error:
        problem, path = explain(error, AskedRetention)
        raise BadTransferParams(
            f"{problem}; allowed are priority ({-PRIORITY_MAX} to {PRIORITY_MAX}), ttl_s (1 to {TTL_MAX_S} "
            "seconds) and ends_session (true or false)",
            field=f"{FIELD}.{RETENTION}{path}",
        ) from error


def parse_tenant(raw: Mapping[str, Any] | None) -> str:
    """Name of the tenant, "" without one. Raises BadTransferParams."""
    value = (raw or {}).get(TENANT)
    if value is None:
        return ""
    if not isinstance(value, str) or len(value) > TENANT_CHARS_MAX:
        raise BadTransferParams(
            f"must be a string of at most {TENANT_CHARS_MAX} characters", field=f"{FIELD}.{TENANT}"
        )
    return value


def session_in(raw: Mapping[str, Any] | None) -> str | None:
    """Session that `baton_session` names. A value that is no name counts as not given."""
    value = raw.get(SESSION) if isinstance(raw, Mapping) else None
    return value if isinstance(value, str) and 0 < len(value) <= SESSION_CHARS_MAX else None


def retention_of(request: Any) -> Retention:
    """`request`: a host's (`contract.host.Request`), perhaps with vLLM's `session_id` and `kv_hints`.

    A wrong value that the host has not refused counts as not given.
    """
    return make_retention(
        request.kv_transfer_params,
        getattr(request, "kv_hints", None),
        session=getattr(request, "session_id", None),
        cache_salt=request.cache_salt,
    )


def make_retention(
    params: Mapping[str, Any] | None, hints: Any, *, session: str | None, cache_salt: str | None
) -> Retention:
    """`hints`: vLLM's KvHintsEnvelope, or None. The params come first."""
    asked, tenant = _NOTHING_ASKED, ""
    if isinstance(params, Mapping):
        with contextlib.suppress(BadTransferParams):
            asked = parse_retention(params)
        with contextlib.suppress(BadTransferParams):
            tenant = parse_tenant(params)
    if asked is _NOTHING_ASKED and hints is not None:
        asked = _asked_by_hints(hints)
    owner = tenant or cache_salt or ""
    if asked is _NOTHING_ASKED and not owner and not session:
        return PLAIN
    digest = ""
    if owner:
        kind = b"tenant" if tenant else b"salt"  # A salt may have another tenant's name.
        digest = hashlib.blake2b(
            owner.encode("utf-8", "surrogatepass"), digest_size=TENANT_BYTES, person=kind
        ).hexdigest()
    # Tenants choose names of sessions alike: one must not end another's.
    of_tenant = f"{digest}:{session}" if session else ""
    return Retention(asked.priority, asked.ttl_s, digest, of_tenant, asked.ends_session)


def _asked_by_hints(hints: Any) -> AskedRetention:
    """Actions of other types, and payloads that do not fit, are another component's."""
    asked = _NOTHING_ASKED
    for kind, payload in actions_of(hints):
        if kind == "demote":
            asked = msgspec.structs.replace(asked, ends_session=True)
        elif kind == "retain" and payload:
            given = {name: payload[name] for name in ("priority", "ttl_s") if name in payload}
            try:
                read = msgspec.convert(given, AskedRetention)
            except msgspec.ValidationError:
                continue
            asked = msgspec.structs.replace(read, ends_session=asked.ends_session)
    return asked
