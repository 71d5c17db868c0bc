"""Conformance of the sources of members: an entry that cannot be read is skipped and named, the others count.

Each source has a world of its own, in which a test publishes entries. The rule is `read_entries`.
"""

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any, Self

import dns.message
import dns.rrset
import pytest
import redis.asyncio

from baton.cli.members import read_members, source_of
from baton.cli.processes import free_ports
from baton.cli.route import COMMAND
from baton.http.registration import PATH
from baton.router.members.reader import LOOK_S, REFUSED_MAX, REGISTRATIONS, TTL_S, Source
from baton.router.members.sources.file import FileSource
from baton.router.members.sources.kubernetes import Rule
from tests.event_loop import pass_time, until
from tests.router.fakes import FakeEngine, System, answers, lends, system
from tests.router.test_kubernetes import ApiServer, cluster, slice_of
from tests.router.test_sources import LOCAL, SERVERS, key_server, metric, urls

PORTS = (8201, 8202)  # The two entries that can be read have these.


class World(ABC):
    """One source, and what it reads."""

    source: Source | None = None  # None: the router's own.
    name = ""
    shown = ""  # What the name of the odd entry contains.

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        await self.open()
        if self.source is not None:
            self.name = self.source.name
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    @abstractmethod
    async def open(self) -> None: ...

    @abstractmethod
    async def publish(self, s: System | None, ports: tuple[int, ...], *, has_odd: bool) -> None:
        """Name decode engines at these ports of 127.0.0.1, and an entry that cannot be read."""


class File(World):
    shown = "127.0.0.1:1/v1"

    async def open(self) -> None:
        self._path = self._folder / "route.toml"
        self.source = FileSource(self._path, lambda: read_members(self._path, COMMAND.read_file, ("decode",)))

    async def publish(self, s: System | None, ports: tuple[int, ...], *, has_odd: bool) -> None:
        named = [f"http://127.0.0.1:{port}" for port in ports]
        odd = ["http://127.0.0.1:1/v1"] if has_odd else []
        self._path.write_text(f"[route]\ndecode = {json.dumps([*odd, *named])}\n")


class Dns(World):
    """A name server that answers SRV questions."""

    shown = "name:8200"

    async def open(self) -> None:
        self._records: list[str] = []
        server, _ = await asyncio.get_running_loop().create_datagram_endpoint(
            lambda: self._Server(self), ("127.0.0.1", 0)
        )
        self._stack.callback(server.close)
        port = server.get_extra_info("sockname")[1]
        self.source = source_of(f"dns://127.0.0.1:{port}/_http._tcp.d.test?role=decode&every_s=1")

    async def publish(self, s: System | None, ports: tuple[int, ...], *, has_odd: bool) -> None:
        odd = [r"0 0 8200 bad\032name."] if has_odd else []
        self._records = [*odd, *(f"0 0 {port} 127.0.0.1." for port in ports)]

    class _Server:
        def __init__(self, world: "Dns") -> None:
            self._world = world

        def connection_made(self, transport: Any) -> None:
            self._transport = transport

        def datagram_received(self, data: bytes, address: Any) -> None:
            question = dns.message.from_wire(data)
            answer = dns.message.make_response(question)
            name = question.question[0].name
            answer.answer.append(dns.rrset.from_text(name, 1, "IN", "SRV", *self._world._records))
            self._transport.sendto(answer.to_wire(), address)

        def connection_lost(self, error: Exception | None) -> None: ...


class Kubernetes(World):
    shown = "odd"
    odd: Any = slice_of("odd", "10.0.0.9", role="decod")
    _api: ApiServer

    async def open(self) -> None:
        self._api, self.source = await self._stack.enter_async_context(cluster(rule=Rule("llm", "app=baton")))

    async def publish(self, s: System | None, ports: tuple[int, ...], *, has_odd: bool) -> None:
        if s is not None:
            await until(lambda: bool(self._api._watches))  # The API server repeats no event.
        wanted = {
            f"s{port}": slice_of(f"s{port}", "127.0.0.1", ports=[{"name": "http", "port": port}])
            for port in ports
        } | ({"odd": self.odd} if has_odd else {})
        for found in wanted.values():
            self._api.tell("ADDED", found)
        for name, found in [*self._api.slices.items()]:
            if name not in wanted:
                self._api.tell("DELETED", found)


class NoLabel(Kubernetes):
    odd = slice_of("odd", "10.0.0.9", role=None)


class TwoPorts(Kubernetes):
    odd = slice_of("odd", "10.0.0.9", ports=[{"port": 8}, {"port": 9}])


class NoAddress(Kubernetes):
    odd = slice_of("odd", endpoints=[{"addresses": []}])


class Redis(World):
    shown = "baton:member:decode:odd"

    async def open(self) -> None:
        (port,) = free_ports(1)
        await self._stack.enter_async_context(key_server("valkey", self._folder, port))
        url = f"redis://:secret@127.0.0.1:{port}/0"
        self.source = source_of(url)
        self._client = await self._stack.enter_async_context(redis.asyncio.Redis.from_url(url))

    async def publish(self, s: System | None, ports: tuple[int, ...], *, has_odd: bool) -> None:
        if has_odd:
            odd = b'{"instance": "a:1", "type": "decode", "weight": 1e400}'
            await self._client.set("baton:member:decode:odd", odd)
        for port in ports:
            value = json.dumps({"instance": f"127.0.0.1:{port}", "type": "decode"})
            await self._client.set(f"baton:member:decode:{port}", value)
        for unwanted in {"odd", *map(str, PORTS)} - {*(["odd"] if has_odd else []), *map(str, ports)}:
            await self._client.delete(f"baton:member:decode:{unwanted}")


class Registered(World):
    name, shown = REGISTRATIONS, "127.0.0.1:1/v1"

    async def open(self) -> None: ...

    async def publish(self, s: System | None, ports: tuple[int, ...], *, has_odd: bool) -> None:
        assert s is not None
        if has_odd:
            odd = {"instance": "127.0.0.1:1/v1", "type": "decode"}
            assert (await s.client.post(PATH, json=odd)).status_code == 400
        else:
            pass_time(TTL_S)
        for port in ports:
            good = {"instance": f"127.0.0.1:{port}", "type": "decode", "ttl_s": 3600}
            assert (await s.client.post(PATH, json=good)).status_code == 200


WORLDS = [File, Dns, Kubernetes, NoLabel, TwoPorts, NoAddress, Redis, Registered]


@asynccontextmanager
async def router_of(world: World) -> AsyncIterator[System]:
    sources = [] if world.source is None else [world.source]
    async with system([FakeEngine(lends)], [FakeEngine(answers)], sources=sources, **LOCAL) as s:
        yield s


async def state_of(s: System, world: World) -> dict[str, Any]:
    states = (await s.client.get("/status")).json()["sources"]
    (found,) = (one for one in states if one["name"] == world.name)
    return dict(found)


async def until_state(s: System, world: World, state: str, num_members: int = 0) -> dict[str, Any]:
    for look in count(1):
        found = await state_of(s, world)
        if found["state"] == state and found["members"] >= num_members:
            return found
        await look_again(look)
    raise AssertionError


@pytest.mark.parametrize("kind", WORLDS)
async def test_an_entry_that_cannot_be_read_costs_only_itself(
    kind: type[World], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if kind is Redis and SERVERS["valkey"] is None:
        pytest.skip("no valkey-server")
    first, second = (f"http://127.0.0.1:{port}" for port in PORTS)
    async with kind(tmp_path) as world:
        if world.source is not None:
            await world.publish(None, PORTS[:1], has_odd=True)
        async with router_of(world) as s:
            if world.source is None:
                await world.publish(s, PORTS[:1], has_odd=True)
            await until(lambda: first in urls(s))
            found = await until_state(s, world, "degraded")
            ((name, why),) = found["skipped"].items()
            assert world.shown in name
            assert found["members"] == 1
            assert f"{world.name}: the entry {name} is skipped: {why}" in caplog.text
            assert metric(s, "baton:router_source_skipped_entries", source=world.name) == 1
            assert (await s.client.get("/fleet/snapshot")).json()["sources"] == [
                one for one in (await s.client.get("/status")).json()["sources"]
            ]
            await world.publish(s, PORTS, has_odd=True)  # The source goes on.
            await until_member(s, second)
            assert caplog.text.count("is skipped") == 1
            await world.publish(s, PORTS, has_odd=False)
            found = await until_state(s, world, "up", 2)
            assert (found["skipped"], found["reason"]) == ({}, None)
            assert metric(s, "baton:router_source_skipped_entries", source=world.name) == 0
            assert (await s.client.get("/health")).json()["status"] != "broken"
            assert "secret" not in caplog.text


async def until_member(s: System, url: str) -> None:
    for look in count(1):
        if url in urls(s):
            return
        await look_again(look)


async def look_again(look: int) -> None:
    """Time passes rarely: a question on its way must not be late on a busy machine."""
    await asyncio.sleep(0.02)
    if look % 20 == 0:
        pass_time(LOOK_S)


@pytest.mark.parametrize("kind", [File, Dns, Kubernetes, Redis])
async def test_a_source_of_unreadable_entries_only_has_failed(kind: type[World], tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{PORTS[0]}"
    async with kind(tmp_path) as world:
        await world.publish(None, PORTS[:1], has_odd=False)
        async with router_of(world) as s:
            await until_member(s, url)
            await world.publish(s, (), has_odd=True)
            found = await until_state(s, world, "failed")
            assert "no entry can be read" in found["reason"]
            assert url in urls(s)
            assert found["members"] == 1


async def test_refused_registrations_that_are_shown_are_bounded(tmp_path: Path) -> None:
    async with Registered(tmp_path) as world, router_of(world) as s:
        for number in range(2 * REFUSED_MAX):
            body = {"instance": f"u:secret@h{number}:1/v1" + "a" * 1000, "type": "both"}
            assert (await s.client.post(PATH, json=body)).status_code == 400
        found = await until_state(s, world, "degraded")
        assert len(found["skipped"]) == REFUSED_MAX
        assert "secret" not in json.dumps(found)
        assert max(map(len, found["skipped"])) < 300
