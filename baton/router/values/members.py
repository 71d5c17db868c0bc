"""Members that the fleet should have: merges the names of several sources into orders.

    options --------\
    file ------------\
    DNS, Kubernetes --> Membership --Join, Leave, Hold--> fleet
    registrations ---/
    administrator --/

A source names all of its members each time. The last members of a source that fails or is silent stay. The
first source in order decides on the model and weight of a member that several sources name.

`read_entries` skips an entry that cannot be read (a label is missing, an address is no URL), and reads the
source's other entries. A source that has only such entries has failed.

An order of the administrator is valid as long as any source names the engine: a removed engine does not come
back until every source has dropped it, or the administrator adds it again. Engines that leave are drained.

The last serving members of a role never leave because of a source: a registry that has lost its contents
must not empty the fleet. They leave when another member of their role has served for HELD_S.

Pure: time is an argument. `shell/members.py` reads the sources and executes the orders.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from math import inf
from typing import NamedTuple, TypeAlias, TypeVar

import msgspec

from baton.core.errors import UserError
from baton.http.registration import Registration
from baton.router.values.settings import EngineKey, Role, check_url, without_credentials

REGISTRATIONS_MAX = 4096  # The holder of a key that may only register must not fill the router's memory.
HELD_S = 15.0  # Time in which the other engines of a registry register again, too.
ADMINISTRATOR = "administrator"
ROLES: tuple[Role, ...] = ("prefill", "decode")
Entry = TypeVar("Entry")


class Member(msgspec.Struct, frozen=True, array_like=True):
    """An engine in one role. An engine that serves in both roles is two members."""

    role: Role
    address: str  # The engine's root URL, perhaps with credentials.
    model: str | None = None  # Name of its model, if it does not report names.
    weight: float = 1.0  # Share of requests, compared with 1 of the others.

    @property
    def url(self) -> str:
        return without_credentials(self.address)

    @property
    def key(self) -> EngineKey:
        return self.role, self.url


def address_in(instance: str) -> str:
    """The root URL of an instance that is named as `host:port` or by a URL."""
    return (instance if "://" in instance else f"http://{instance}").rstrip("/")


def member_of(registration: Registration) -> Member:
    address = address_in(registration.instance)
    return Member(registration.type, address, registration.model, registration.weight)


class Listing(NamedTuple):
    """All members that a source names."""

    members: frozenset[Member]
    skipped: Mapping[str, str] = {}  # Entries that cannot be read, with the reasons.


def read_entries(entries: Iterable[tuple[str, Entry]], read: Callable[[Entry], Iterable[Member]]) -> Listing:
    """Read each entry by itself. `entries`: names for the log, and entries. `read` raises UserError."""
    members: set[Member] = set()
    skipped: dict[str, str] = {}
    for name, entry in entries:
        try:
            found = frozenset(read(entry))
            for member in found:
                check_url(member.address, "address")
        except UserError as error:
            skipped[name.rpartition("@")[2]] = str(error)  # A name may be a URL: its password is left out.
        else:
            members |= found
    return Listing(frozenset(members), skipped)


class Join(NamedTuple):
    """Add a member, or change it."""

    member: Member


class Leave(NamedTuple):
    """Drain a member, and then forget it."""

    key: EngineKey


class Hold(NamedTuple):
    """Keep a member that no source names, because it is one of the last serving members of its role."""

    key: EngineKey


Order: TypeAlias = Join | Leave | Hold


class Membership:
    def __init__(self, sources: Sequence[str] = (), first: Iterable[Member] = ()) -> None:
        """`sources`: the first one decides if several name an engine. `first`: the fleet's members so far."""
        self._named: dict[str, frozenset[Member]] = dict.fromkeys((ADMINISTRATOR, *sources), frozenset())
        self._removed: set[EngineKey] = set()
        self._roles: dict[str, Role] = {}  # Roles that the administrator has changed, by URL.
        self._current = {member.key: member for member in first}
        self._held: dict[EngineKey, float] = {}  # When each may leave. inf: it is one of the last.

    @property
    def members(self) -> Collection[Member]:
        """The members that the fleet has now, without those that drain."""
        return self._current.values()

    @property
    def held(self) -> Collection[EngineKey]:
        return self._held.keys()

    @property
    def held_until_s(self) -> float:
        """When the next held member may leave. inf: none may, until others serve."""
        return min(self._held.values(), default=inf)

    def named_by(self, source: str) -> int:
        return len(self._named[source])

    # --- Sources

    def hear(
        self, source: str, members: Iterable[Member], now_s: float, serving: Collection[EngineKey]
    ) -> list[Order]:
        """Take all members that this source names now. `serving`: the engines that can get requests."""
        self._named[source] = frozenset(members)
        return self.look(now_s, serving)

    def look(
        self, now_s: float, serving: Collection[EngineKey], *, ordered: Collection[EngineKey] = ()
    ) -> list[Order]:
        """Compute the orders. Call it repeatedly while members are held.

        `ordered`: members that may leave even as the last ones of their role.
        """
        wanted = self._wanted()
        orders: list[Order] = [
            Join(member) for key, member in wanted.items() if self._current.get(key) != member
        ]
        self._current.update(wanted)
        for role in ROLES:
            stay = [key for key in wanted if key[0] == role]
            others_serve = any(key in serving for key in stay)
            gone = [key for key in self._current if key[0] == role and key not in wanted]
            # A member that does not serve is only kept if its role would have none without it.
            last = {key for key in gone if not others_serve and (key in serving or not stay)} - {*ordered}
            orders += self._let_go(gone, last, ordered, now_s)
        for key in wanted:
            self._held.pop(key, None)
        return orders

    def _let_go(
        self, gone: list[EngineKey], last: set[EngineKey], ordered: Collection[EngineKey], now_s: float
    ) -> list[Order]:
        orders: list[Order] = []
        for key in gone:
            until_s = self._held.get(key)
            if key in last:
                self._held[key] = inf
                orders += [Hold(key)] if until_s is None else []
                continue
            if until_s == inf and key not in ordered:
                until_s = self._held[key] = now_s + HELD_S
            if until_s is None or until_s <= now_s or key in ordered:
                self._held.pop(key, None)
                del self._current[key]
                orders.append(Leave(key))
        return orders

    def _wanted(self) -> dict[EngineKey, Member]:
        named = [one for members in self._named.values() for one in sorted(members, key=_order)]
        urls = {one.url for one in named}
        self._roles = {url: role for url, role in self._roles.items() if url in urls}
        wanted: dict[EngineKey, Member] = {}
        for one in named:
            role = self._roles.get(one.url, one.role)
            wanted.setdefault((role, one.url), msgspec.structs.replace(one, role=role))
        self._removed &= wanted.keys()
        return {key: member for key, member in wanted.items() if key not in self._removed}

    # --- The administrator

    def add(self, member: Member, now_s: float, serving: Collection[EngineKey]) -> list[Order]:
        """Add a member by an order of the administrator, also one that was removed."""
        self._removed.discard(member.key)
        self._roles.pop(member.url, None)
        named = [one for one in self._named[ADMINISTRATOR] if one.key != member.key]
        return self.hear(ADMINISTRATOR, [*named, member], now_s, serving)

    def remove(self, key: EngineKey, now_s: float, serving: Collection[EngineKey]) -> list[Order]:
        """Remove an engine until every source has dropped it."""
        self._named[ADMINISTRATOR] = frozenset(
            one for one in self._named[ADMINISTRATOR] if (self._roles.get(one.url, one.role), one.url) != key
        )
        self._removed.add(key)
        return self.look(now_s, serving, ordered=[key])

    def change_role(self, url: str, role: Role, now_s: float, serving: Collection[EngineKey]) -> list[Order]:
        """Change the role of an engine until every source has dropped it, whatever role a source names."""
        self._removed = {key for key in self._removed if key[1] != url}
        self._roles[url] = role
        return self.look(now_s, serving, ordered=[(other, url) for other in ROLES if other != role])


def _order(member: Member) -> tuple[str, str, str, float]:
    return member.role, member.address, member.model or "", member.weight


class Registrations:
    """Engines that have registered, each until its registration expires."""

    def __init__(self) -> None:
        self._ends_at_s: dict[EngineKey, tuple[Member, float]] = {}
        self._looks_at_s: float | None = None

    @property
    def members(self) -> frozenset[Member]:
        return frozenset(member for member, _ in self._ends_at_s.values())

    def note(self, member: Member, ttl_s: float, now_s: float) -> bool:
        """Note a registration. True: the members have changed. Raises UserError for too many.

        `ttl_s`: time to the end of the registration; 0: the engine leaves.
        """
        if ttl_s > 0 and member.key not in self._ends_at_s and len(self._ends_at_s) >= REGISTRATIONS_MAX:
            raise UserError(f"{REGISTRATIONS_MAX} engines are registered already", field="instance")
        before = self._ends_at_s.pop(member.key, None)
        if ttl_s > 0:
            self._ends_at_s[member.key] = (member, now_s + ttl_s)
        return (before is None or before[0] != member) if ttl_s > 0 else before is not None

    def expire(self, now_s: float, next_s: float) -> bool:
        """Drop expired registrations. True: the members have changed.

        Call it at least every `next_s` seconds. A router that stood still could not hear its engines
        meanwhile. It extends their registrations by that time.
        """
        late_s = 0.0 if self._looks_at_s is None else max(0.0, now_s - self._looks_at_s)
        self._looks_at_s = now_s + next_s
        if late_s > next_s:
            for key, (member, ends_at_s) in self._ends_at_s.items():
                self._ends_at_s[key] = (member, ends_at_s + late_s)
        over = [key for key, (_, ends_at_s) in self._ends_at_s.items() if ends_at_s <= now_s]
        for key in over:
            del self._ends_at_s[key]
        return bool(over)
