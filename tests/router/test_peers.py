"""Routers side by side over the same engines: their messages, and what one knows of the others."""

import asyncio
import hmac
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.cli.processes import free_ports
from baton.core.errors import ConfigError, PeerError
from baton.router.fleet.notes import EngineLoad, Load, TurnKept, TurnTaken
from baton.router.fleet.peers import LATE_MAX_S, PEERS_MAX, SILENT_S, Message, News, Peers, seal, unseal
from baton.router.members.peers import PeerLink
from baton.router.processes.app import Router
from baton.router.values.settings import PeerSettings, RouterSettings
from tests.event_loop import pass_time, until
from tests.router.fakes import FakeEngine, Servers, System, answers, hangs, lends, system
from tests.router.test_turns import SESSION, keeps
from tests.router.test_workers import WAIT_S, Workers, command_for

SECRET = "the-secret-of-all-routers"
KEY = SECRET.encode()
ENGINE = ("decode", "http://d0")


def load(in_flight: int, num_queued: int = 0) -> Load:
    return Load(3, [EngineLoad(ENGINE, in_flight, 7, 1, 9, num_queued)])


def message(number: int, *notes: Any, router: str = "a", unix_s: float = 100.0) -> Message:
    return Message(router, number, unix_s, list(notes))


def heard(peers: Peers, sent: Message, now_s: float) -> tuple[list[Any], bool]:
    news = peers.hear(sent, now_s)
    return list(news.turns), news.is_new


# --- Messages


def test_a_message_is_read_as_it_was_written() -> None:
    sent = message(1, load(2), TurnKept("s", ENGINE, {"baton_ticket": "t"}), TurnTaken("s"))
    assert unseal(seal(sent, KEY), KEY, 100.0 + LATE_MAX_S) == sent


@given(st.binary(max_size=200), st.integers(0, 400))
def test_what_is_altered_is_an_error_of_the_peer(garbage: bytes, at: int) -> None:
    sealed = seal(message(1, load(2)), KEY)
    altered = bytearray(sealed)
    altered[at % len(altered)] ^= 1
    for data in (garbage, bytes(altered), sealed[:at] if at < len(sealed) else b""):
        with pytest.raises(PeerError):
            unseal(data, KEY, 100.0)


@pytest.mark.parametrize("unix_s", [100.0 + 2 * LATE_MAX_S, 100.0 - 2 * LATE_MAX_S])
def test_an_old_message_is_not_heard_again(unix_s: float) -> None:
    with pytest.raises(PeerError, match="old"):
        unseal(seal(message(1), KEY), KEY, unix_s)


def test_what_is_signed_and_no_message_is_an_error_too() -> None:
    data = seal(message(1), KEY)
    payload = msgspec.msgpack.encode(["a", 1, 100.0, [["Joined", "decode", "http://elsewhere"]]])
    assert len(data) > 32
    with pytest.raises(PeerError, match="another version"):
        unseal(hmac.digest(KEY, payload, "sha256") + payload, KEY, 100.0)


# --- Peers


STEPS = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(0, 5), st.sampled_from(["heard", "lost", "twice", "late"])),
    max_size=40,
)


@given(STEPS)
def test_after_a_heartbeat_of_each_the_load_is_true(steps: list[tuple[str, int, str]]) -> None:
    check_loads(Peers("own", KEY), steps)


class HearsOldNumbers(Peers):
    def hear(self, message: Message, now_s: float) -> News:
        for peer in self._peers.values():
            peer.number = 0
        return super().hear(message, now_s)


class NeverForgets(Peers):
    def expire(self, now_s: float) -> bool:
        return False


class ForgetsNumbers(Peers):
    def expire(self, now_s: float) -> bool:
        has_changed = super().expire(now_s)
        self._silent.clear()
        return has_changed


@pytest.mark.parametrize("mutant", [HearsOldNumbers, NeverForgets, ForgetsNumbers])
def test_a_mutant_of_the_link_is_noticed(mutant: type[Peers]) -> None:
    with pytest.raises(AssertionError):
        check_loads(mutant("own", KEY), [("a", 1, "late"), ("a", 2, "heard")])


def check_loads(peers: Peers, steps: list[tuple[str, int, str]]) -> None:
    """Messages are lost, repeated and late; then each router is heard once more, and falls silent."""
    now_s = 0.0
    true: dict[str, int] = {}
    late: list[Message] = []
    for number, (router, in_flight, what) in enumerate(steps, start=1):
        now_s += 0.01
        true[router] = in_flight
        sent = message(number, load(in_flight, 10 * in_flight), router=router)
        if what == "late":
            late.append(sent)
        for _ in range({"lost": 0, "late": 0, "heard": 1, "twice": 2}[what]):
            peers.hear(sent, now_s)
    for router, in_flight in true.items():
        peers.hear(message(1_000, load(in_flight, 10 * in_flight), router=router), now_s)
    for sent in late:
        assert heard(peers, sent, now_s) == ([], False)
    rows = peers.load().engines
    assert sum(row.in_flight for row in rows) == sum(true.values())
    assert sum(row.num_queued_tokens for row in rows) == 10 * sum(true.values())
    assert all(row.num_requests == row.num_failures == row.num_heard == 0 for row in rows)
    assert peers.load().num_requests == 0
    assert peers.expire(now_s + SILENT_S) is False
    assert peers.expire(now_s + SILENT_S + 0.01) is bool(true)
    for sent in late:
        assert heard(peers, sent, now_s + 2 * SILENT_S) == ([], False), "a dead router's message is late"
    assert all(row.in_flight == row.num_queued_tokens == 0 for row in peers.load().engines)


def test_only_what_waits_at_the_engines_is_news_of_a_load() -> None:
    peers = Peers("own", KEY)
    peers.read(Peers("a", KEY).write([load(1)], 100.0), 100.0, 0.0)
    before = peers.load()
    rows = [msgspec.structs.replace(row, num_heard=99, num_requests=99) for row in load(1).engines]
    peers.hear(message(2, Load(3, rows)), 0.0)
    assert peers.load() == before
    peers.hear(message(3, load(2)), 0.0)
    assert peers.load() != before


def test_a_router_that_was_silent_is_heard_again() -> None:
    peers = Peers("own", KEY)
    peers.hear(message(5, load(1)), 0.0)
    assert peers.expire(2 * SILENT_S)
    assert heard(peers, message(5, load(1)), 2 * SILENT_S) == ([], False)
    assert heard(peers, message(6, load(3)), 2 * SILENT_S) == ([], True)
    assert [row.in_flight for row in peers.load().engines] == [3]


def test_a_dead_routers_name_is_kept_no_longer_than_its_messages_count() -> None:
    peers = Peers("own", KEY)
    for number in range(3):
        peers.hear(message(1, router=str(number)), 0.0)
    peers.expire(2 * SILENT_S)
    assert len(peers._silent) == 3
    peers.expire(2 * LATE_MAX_S + 1.0)
    assert not peers._silent


def test_turns_are_heard_once_and_a_router_does_not_hear_itself() -> None:
    peers, kept = Peers("own", KEY), TurnKept("s", ENGINE, {})
    assert heard(peers, message(1, kept), 0.0) == ([kept], True)
    assert heard(peers, message(1, kept), 0.0) == ([], False)
    assert heard(peers, message(2, TurnTaken("s")), 0.0) == ([TurnTaken("s")], False)
    assert heard(peers, message(1, kept, router="own"), 0.0) == ([], False)


def test_the_number_of_routers_is_limited() -> None:
    peers = Peers("own", KEY)
    for number in range(PEERS_MAX):
        peers.hear(message(1, router=str(number)), 0.0)
    with pytest.raises(PeerError, match="more than"):
        peers.hear(message(1, router="one more"), 0.0)


@pytest.mark.parametrize(
    "fields", [("10.0.0.1:5600", (), SECRET), ("tcp://a:1", ("b",), SECRET), ("tcp://a:1", (), "")]
)
def test_settings_are_checked(fields: tuple[Any, ...]) -> None:
    with pytest.raises(ConfigError):
        PeerSettings(*fields)


# --- Two routers in front of the same engines


@asynccontextmanager
async def pair(
    prefill: list[FakeEngine], decode: list[FakeEngine], *, secret: str = SECRET, **settings: Any
) -> AsyncIterator[tuple[System, System]]:
    anywhere = "tcp://127.0.0.1:*"
    async with system([*prefill], [*decode], peers=PeerSettings(anywhere, (), SECRET), **settings) as a:
        other = msgspec.structs.replace(
            a.router._parts.settings, peers=PeerSettings(anywhere, (link_of(a.router).endpoint,), secret)
        )
        b = Router(other)
        try:
            b.start()
            url = f"http://127.0.0.1:{await b.listen('127.0.0.1', 0)}"
            link_of(a.router).connect(link_of(b).endpoint)
            async with httpx.AsyncClient(base_url=url, timeout=None, verify=False) as client:
                yield a, System(client, b)
        finally:
            await b.close()


def link_of(router: Router) -> PeerLink:
    assert router.control is not None
    assert router.control.peers is not None
    return router.control.peers


def loads(s: System) -> list[int]:
    return [engine.load for engine in s.router.fleet.engines if engine.role == "decode"]


async def test_each_router_sees_what_the_other_asks_of_the_engines() -> None:
    d = [FakeEngine(hangs), FakeEngine(hangs)]
    async with pair([FakeEngine(lends)], d, first_token=False) as (a, b):
        asking = [asyncio.create_task(a.complete())]
        await until(lambda: sum(loads(b)) == 1)
        asking.append(asyncio.create_task(b.complete()))
        await until(lambda: loads(a) == loads(b) == [1, 1])
        assert [len(one.calls) for one in d] == [1, 1]
        status = (await b.client.get("/status")).json()
        assert [one["requests"] for one in status["routers"]] == [1]
        for task in asking:
            task.cancel()
        await until(lambda: loads(a) == loads(b) == [0, 0])


async def test_a_session_finds_its_turn_at_the_other_router_once() -> None:
    p, d = FakeEngine(lends), FakeEngine(keeps)
    async with pair([p], [d], first_token=False) as (a, b):
        await until(lambda: link_of(a.router).snapshot() != [] != link_of(b.router).snapshot())
        body = {"prompt": [1, 2, 3]}
        await a.client.post("/v1/completions", json=body, headers=SESSION)
        await until(lambda: bool(b.router._parts.view.turns.kept()))
        d.respond = answers
        await b.client.post("/v1/completions", json=body, headers=SESSION)
        await until(lambda: not a.router._parts.view.turns.kept())
        await a.client.post("/v1/completions", json=body, headers=SESSION)
    tickets = [call.body["kv_transfer_params"].get("baton_ticket") for call in p.calls]
    assert tickets == [None, "of D", None]


async def test_a_router_that_joins_learns_the_turns_that_are_kept() -> None:
    async with system(
        [FakeEngine(lends)],
        [FakeEngine(keeps)],
        peers=PeerSettings("tcp://127.0.0.1:*", (), SECRET),
        first_token=False,
    ) as a:
        await a.client.post("/v1/completions", json={"prompt": [1]}, headers=SESSION)
        settings = PeerSettings("tcp://127.0.0.1:*", (link_of(a.router).endpoint,), SECRET)
        late = Router(msgspec.structs.replace(a.router._parts.settings, peers=settings))
        try:
            late.start()
            link_of(a.router).connect(link_of(late).endpoint)
            await until(lambda: bool(late._parts.view.turns.kept()))
        finally:
            await late.close()


async def test_a_router_that_dies_is_no_load_any_more() -> None:
    async with pair([FakeEngine(lends)], [FakeEngine(hangs)], first_token=False) as (a, b):
        asking = asyncio.create_task(a.complete())
        await until(lambda: loads(b) == [1])
        a.router.links.leave(link_of(a.router))  # A router that is killed sends no last message.
        pass_time(2 * SILENT_S)
        await until(lambda: loads(b) == [0])
        asking.cancel()


async def test_a_router_with_another_secret_is_not_heard(caplog: pytest.LogCaptureFixture) -> None:
    async with pair([FakeEngine(lends)], [FakeEngine(answers)], secret="another secret of others") as (a, b):
        await until(lambda: caplog.text.count("not signed with this router's peer secret") >= 2)
        assert link_of(a.router).snapshot() == []
        assert (await a.complete()).status_code == (await b.complete()).status_code == 200


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.usefixtures("forked_programs")
async def test_routers_of_several_processes_share_loads_and_one_is_killed() -> None:
    servers = Servers()
    p, d = FakeEngine(lends), FakeEngine(hangs)
    ports = free_ports(4)
    started: list[Workers] = []
    try:
        p.url, d.url = await servers.start(p), await servers.start(d)
        for own, other in ((0, 1), (1, 0)):
            url = f"http://127.0.0.1:{ports[own]}"
            binds = [f"tcp://127.0.0.1:{ports[2 + index]}" for index in (own, other)]
            command = [*command_for(url, p.url, d.url), "--peer-bind", binds[0], "--peer", binds[1]]
            env = {**os.environ, "BATON_PEER_SECRET": SECRET}
            process = await asyncio.create_subprocess_exec(*command, env=env, start_new_session=True)
            started.append(Workers(url, process))
        for one in started:
            while await one.status_of("/health") != 200:
                assert one.process.returncode is None
                await asyncio.sleep(0.05)
        a, b = started

        async def load_at(one: Workers) -> int:
            async with one.client() as client:
                engines = (await client.get("/status")).json()["engines"]
            return next(int(engine["in_flight"]) for engine in engines if engine["type"] == "decode")

        async with a.client() as client, asyncio.timeout(WAIT_S):
            asking = asyncio.create_task(client.post("/v1/completions", json={"prompt": "a"}))
            while await load_at(b) != 1:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            os.killpg(a.process.pid, signal.SIGKILL)
            while await load_at(b) != 0:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            with pytest.raises(httpx.TransportError):
                await asking
    finally:
        for one in started:
            if one.process.returncode is None:
                os.killpg(one.process.pid, signal.SIGKILL)
            await one.process.wait()
        await servers.stop()


async def test_a_note_before_the_link_is_open_is_not_sent() -> None:
    """A client's request may come between the opening of the port and that of the link."""
    settings = PeerSettings("tcp://127.0.0.1:*", (), SECRET)
    router = Router(RouterSettings(prefill_urls=("http://p:1",), decode_urls=("http://d:1",), peers=settings))
    router.fleet.tell(TurnTaken("s"))
    router.fleet.on_load()
    await router.close()
