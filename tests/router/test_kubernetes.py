"""Members from EndpointSlices: against a small API server over real HTTP, because there is no cluster here.

It lists and watches as Kubernetes documents (API concepts: "Efficient detection of changes", "410 Gone").
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import parse_qs

import pytest
from kubernetes_asyncio import client

from baton.cli.members import source_of
from baton.router.members.reader import SourceFailed
from baton.router.members.sources.kubernetes import KubernetesSource, Rule
from baton.router.values.members import Member
from tests.event_loop import until
from tests.router.fakes import FakeEngine, Servers, answers, lends, system
from tests.router.test_sources import is_up

PATH = "/apis/discovery.k8s.io/v1/namespaces/llm/endpointslices"
GONE = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version: 1 (7)"}


def slice_of(name: str, *hosts: str, role: str | None = "decode", **more: Any) -> dict[str, Any]:
    """A host with a minus before it is not ready."""
    labels = {"app": "baton"} | ({} if role is None else {"baton/role": role})
    return {
        "metadata": {"name": name, "namespace": "llm", "labels": labels, "resourceVersion": "7"},
        "addressType": "IPv4",
        "endpoints": [
            {"addresses": [host.removeprefix("-")], "conditions": {"ready": not host.startswith("-")}}
            for host in hosts
        ],
        "ports": [{"name": "http", "port": 8200}],
        **more,
    }


class ApiServer:
    """An ASGI application."""

    def __init__(self, *slices: dict[str, Any]) -> None:
        self.slices = {one["metadata"]["name"]: one for one in slices}
        self.version = 1
        self.asked: list[dict[str, str]] = []
        self.status = 200
        self._watches: list[asyncio.Queue[dict[str, Any] | None]] = []
        self._num_watches = 0

    def tell(self, kind: str, found: dict[str, Any]) -> None:
        """An event of every watch."""
        self.version += 1
        if kind == "DELETED":
            del self.slices[found["metadata"]["name"]]
        elif kind != "ERROR":
            self.slices[found["metadata"]["name"]] = found
        for watch in self._watches:
            watch.put_nowait({"type": kind, "object": found})
        if kind == "ERROR":
            self.end_watches()

    async def watched(self, num_times: int) -> None:
        await until(lambda: self._num_watches == num_times)

    def end_watches(self) -> None:
        for watch in self._watches:
            watch.put_nowait(None)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        query = {name: values[-1] for name, values in parse_qs(scope["query_string"].decode()).items()}
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        self.asked.append({**query, "path": scope["path"], "key": headers.get("authorization", "")})
        kind = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": self.status, "headers": kind})
        if query.get("watch") != "True":
            meta = {"resourceVersion": str(self.version)}
            listed = {"kind": "EndpointSliceList", "metadata": meta, "items": list(self.slices.values())}
            await send({"type": "http.response.body", "body": json.dumps(listed).encode()})
            return
        await send({"type": "http.response.body", "body": b"", "more_body": True})
        events: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self._watches.append(events)
        self._num_watches += 1
        try:
            while (event := await events.get()) is not None:
                line = json.dumps(event).encode() + b"\n"
                await send({"type": "http.response.body", "body": line, "more_body": True})
        finally:
            self._watches.remove(events)
        await send({"type": "http.response.body", "body": b""})


@asynccontextmanager
async def cluster(
    *slices: dict[str, Any], rule: Rule | None = None
) -> AsyncIterator[tuple[ApiServer, KubernetesSource]]:
    api, servers = ApiServer(*slices), Servers()
    configuration = client.Configuration(
        host=await servers.start(api), api_key={"BearerToken": "Bearer token"}
    )
    try:
        yield api, KubernetesSource(rule or Rule("llm", "app=baton"), configuration)
    finally:
        api.end_watches()
        await servers.stop()


def decode(*hosts: str) -> frozenset[Member]:
    return frozenset(Member("decode", f"http://{host}:8200") for host in hosts)


def test_the_option_of_the_manifests_is_understood() -> None:
    source = source_of("kubernetes:llm?selector=app=baton,tier in (a)&port=http&role_label=llm-d.ai/role")
    assert isinstance(source, KubernetesSource)
    assert source.rule == Rule("llm", "app=baton,tier in (a)", "llm-d.ai/role", "http")


async def test_slices_are_listed_and_watched() -> None:
    async with cluster(slice_of("a", "10.0.0.1", "-10.0.0.2")) as (api, source):
        found = source.members()
        assert (await anext(found)).members == decode("10.0.0.1")
        waiting = asyncio.ensure_future(anext(found))
        await api.watched(1)
        listed, watched = api.asked
        assert (listed["path"], listed["labelSelector"], listed["key"]) == (PATH, "app=baton", "Bearer token")
        assert (watched["labelSelector"], watched["resourceVersion"]) == ("app=baton", "1")
        api.tell("MODIFIED", slice_of("a", "10.0.0.1", "10.0.0.2"))
        assert (await waiting).members == decode("10.0.0.1", "10.0.0.2")
        api.tell("ADDED", slice_of("b", "10.0.0.3", role="prefill"))
        assert (await anext(found)).members == decode("10.0.0.1", "10.0.0.2") | {
            Member("prefill", "http://10.0.0.3:8200")
        }
        api.tell("DELETED", slice_of("a"))
        assert (await anext(found)).members == {Member("prefill", "http://10.0.0.3:8200")}
        await found.aclose()


async def test_a_version_that_is_gone_and_a_watch_that_ends_are_listed_again() -> None:
    async with cluster(slice_of("a", "10.0.0.1")) as (api, source):
        found = source.members()
        await anext(found)
        waiting = asyncio.ensure_future(anext(found))
        await api.watched(1)
        api.slices["a"] = slice_of("a", "10.0.0.9")  # The watch has missed it.
        api.tell("ERROR", GONE)
        assert (await waiting).members == decode("10.0.0.9")
        waiting = asyncio.ensure_future(anext(found))
        await api.watched(2)
        api.slices["a"] = slice_of("a", "10.0.0.5")
        api.end_watches()
        assert (await waiting).members == decode("10.0.0.5")
        await found.aclose()


async def test_an_api_that_refuses_or_is_away_is_a_failure() -> None:
    async with cluster(slice_of("a", "10.0.0.1")) as (api, source):
        api.status = 403
        with pytest.raises(SourceFailed, match="the API answers 403"):
            await anext(source.members())
    async with cluster(slice_of("a", "10.0.0.1"), slice_of("b", endpoints=[{}])) as (_, source):
        with pytest.raises(SourceFailed, match="the API's answer cannot be read"):
            await anext(source.members())
    with pytest.raises(SourceFailed, match="the API cannot be reached"):
        await anext(source.members())


async def test_a_router_follows_its_slices_over_a_lost_connection() -> None:
    servers = Servers()
    first, second = FakeEngine(answers), FakeEngine(answers)
    ports = {}
    for engine in (first, second):
        engine.url = await servers.start(engine)
        ports[engine.url] = int(engine.url.rpartition(":")[2])

    def slice_at(*engines: FakeEngine) -> list[dict[str, Any]]:
        return [
            slice_of(f"s{ports[one.url]}", "127.0.0.1", ports=[{"name": "http", "port": ports[one.url]}])
            for one in engines
        ]

    async with cluster(*slice_at(first)) as (api, source):
        options: dict[str, Any] = {"sources": [source], "has_sources": True}
        async with system([FakeEngine(lends)], [], **options) as s:
            await api.watched(1)
            api.end_watches()  # A restart of the API server ends them, too.
            await api.watched(2)
            for one in slice_at(second):
                api.tell("ADDED", one)
            await until(lambda: is_up(s, first) and is_up(s, second))
            api.tell("DELETED", slice_at(first)[0])
            await until(lambda: s.router.fleet.find(("decode", first.url)) is None)
            assert (await s.complete()).status_code == 200
            assert len(second.calls) == 1
    await servers.stop()


@pytest.mark.parametrize(
    ("found", "rule", "expected"),
    [
        (slice_of("a", "fd00::1", addressType="IPv6"), {}, decode("[fd00::1]")),
        (slice_of("a", "10.0.0.1", ports=None), {}, frozenset()),
        (slice_of("a", endpoints=None), {}, frozenset()),
        (slice_of("a", endpoints=[{"addresses": ["10.0.0.1"]}]), {}, decode("10.0.0.1")),
        (
            slice_of("a", "10.0.0.1", ports=[{"name": "m", "port": 9}, {"name": "http", "port": 8200}]),
            {"port": "http"},
            decode("10.0.0.1"),
        ),
        (
            slice_of("a", "10.0.0.1", role="both"),
            {"scheme": "https"},
            {Member("decode", "https://10.0.0.1:8200"), Member("prefill", "https://10.0.0.1:8200")},
        ),
        (slice_of("a", endpoints=[{"addresses": []}]), {}, "without an address"),
        (slice_of("a", "10.0.0.1", role="decod"), {}, "'decod'"),
        (slice_of("a", "10 0"), {}, "characters that a URL has not"),
        (slice_of("a", "10.0.0.1", role=None), {}, "label baton/role is None"),
        (slice_of("a", "10.0.0.1", ports=[{"port": 8}, {"port": 9}]), {}, "has 2 ports"),
    ],
)
async def test_members_of_a_slice(found: Any, rule: dict[str, str], expected: Any) -> None:
    async with cluster(found, rule=Rule("llm", "app=baton", **rule)) as (_, source):
        reading = source.members()
        listing = await anext(reading)
        if isinstance(expected, str):
            assert not listing.members
            assert expected in listing.skipped["a"]
        else:
            assert listing == (expected, {})
        await reading.aclose()
