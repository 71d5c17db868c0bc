"""The front end with a simulated core: outputs reach their caller, or their loans end."""

import asyncio
import random
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import msgspec
import pytest

from baton.core.config import EngineConfig
from baton.engine.api import EngineOutput, EngineOutputs, EngineRequest, FinishReason, SamplingParams
from baton.engine.core.client import EngineClient, EngineUnreadyError
from baton.engine.core.core_messages import (
    Abort,
    AddRequest,
    Drain,
    Drained,
    FromCore,
    Outputs,
    Restarted,
    Restarting,
    Start,
    Started,
    Stop,
    TakeBack,
    ToCore,
)
from baton.engine.process.channel import FrameSplitter, frame
from baton.engine.process.child import Child

BOUND_S = 30.0  # Only reached when something is wrong.


class NoProcess:
    """Replaces the process of a simulated core."""

    pid = 2**22 + 1  # Above every process id of Linux.

    def kill(self) -> None:
        pass

    def send_signal(self, number: int) -> None:
        pass

    def wait(self, timeout: float | None = None) -> int:
        return 0


class PlayedCore:
    """The other end of the client's socket. `heard` holds the messages that the client has sent."""

    def __init__(self) -> None:
        self.ours, self._theirs = socket.socketpair()
        self.heard: list[ToCore] = []
        self._hears = asyncio.Condition()
        self._decoder = msgspec.msgpack.Decoder(ToCore)

    async def run(self) -> None:
        reader, self._writer = await asyncio.open_unix_connection(sock=self._theirs)
        splitter = FrameSplitter()
        while received := await reader.read(1 << 16):
            async with self._hears:
                self.heard += [self._decoder.decode(payload) for payload in splitter.feed(received)]
                self._hears.notify_all()
            if any(isinstance(message, Start) for message in self.heard[-1:]):
                self.send(Started())
            if any(isinstance(message, Stop) for message in self.heard):
                self._writer.close()
                return

    def send(self, *messages: FromCore) -> None:
        """Send all messages in one write, so that the client receives them at once."""
        self._writer.write(b"".join(frame(msgspec.msgpack.encode(message)) for message in messages))

    async def hears(self, message: ToCore) -> None:
        async with self._hears:
            await self._hears.wait_for(lambda: message in self.heard)

    def taken_back(self) -> list[dict[str, Any]]:
        return [message.kv_transfer_params for message in self.heard if isinstance(message, TakeBack)]


def output(request_id: str, finish_reason: FinishReason | None = None) -> Outputs:
    ended = EngineOutput(
        request_id=request_id,
        new_token_ids=[1],
        finish_reason=finish_reason,
        kv_transfer_params=ticket(request_id) if finish_reason else None,
    )
    return Outputs(EngineOutputs(outputs=[ended]))


def ticket(request_id: str) -> dict[str, Any]:
    return {"baton_ticket": f"of {request_id}"}


def request(request_id: str) -> EngineRequest:
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=[1, 2],
        sampling_params=SamplingParams(),
        arrival_time_s=0.0,
    )


Played = Callable[[], AbstractAsyncContextManager[tuple[EngineClient, PlayedCore]]]


@pytest.fixture
def played(make_config: Callable[..., EngineConfig], monkeypatch: pytest.MonkeyPatch) -> Played:
    """A client and its simulated core."""

    @asynccontextmanager
    async def play() -> AsyncIterator[tuple[EngineClient, PlayedCore]]:
        core = PlayedCore()
        child: Any = Child("baton-core", NoProcess(), core.ours)  # type: ignore[arg-type]
        monkeypatch.setattr(Child, "spawn", lambda *_, **__: child)
        playing = asyncio.create_task(core.run())
        client = await EngineClient.start(make_config())
        yield client, core
        await client.close()
        await playing

    return play


async def began(client: EngineClient, core: PlayedCore, name: str) -> AsyncGenerator[EngineOutput, None]:
    """A stream whose first token has arrived."""
    stream = client.generate(request(name))
    first = asyncio.ensure_future(anext(stream))
    await core.hears(AddRequest(request(name)))
    core.send(output(name))
    await first
    return stream


async def test_a_last_output_after_the_caller_has_left_returns_its_loan(played: Played) -> None:
    async with played() as (client, core):
        stream = await began(client, core, "a")
        await stream.aclose()
        await core.hears(Abort("a"))
        core.send(output("a", "length"))
        await core.hears(TakeBack(ticket("a")))


async def test_an_unread_last_output_returns_its_loan(played: Played) -> None:
    async with played() as (client, core):
        stream = await began(client, core, "a")
        other = client.generate(request("b"))
        waiting = asyncio.ensure_future(anext(other))
        await core.hears(AddRequest(request("b")))
        core.send(output("a", "length"), output("b"))
        await waiting  # Then the output of "a" has arrived as well.
        await stream.aclose()
        await core.hears(TakeBack(ticket("a")))
        await other.aclose()


async def test_the_reader_of_an_output_owns_its_loan(played: Played) -> None:
    async with played() as (client, core):
        stream = await began(client, core, "a")
        core.send(output("a", "length"))
        assert (await anext(stream)).kv_transfer_params == ticket("a")
        await stream.aclose()
        closing = await began(client, core, "b")  # All messages about "a" have been sent before.
        assert core.taken_back() == []
        await closing.aclose()


async def test_no_request_waits_while_ranks_restart(played: Played) -> None:
    async with played() as (client, core):
        stream = await began(client, core, "a")
        failed = EngineOutput(request_id="a", new_token_ids=[], finish_reason="error")
        crossing = asyncio.ensure_future(anext(client.generate(request("b"))))
        await core.hears(AddRequest(request("b")))
        core.send(Restarting("rank 1 is gone", [failed]))
        assert await anext(stream) == failed
        assert client.unready_reason is not None  # The reason is known as soon as a client has its error.
        for refused in (crossing, anext(client.generate(request("c")))):
            with pytest.raises(EngineUnreadyError, match="starts its ranks anew: rank 1 is gone"):
                await refused
        assert client.unready_reason == "the engine starts its ranks anew: rank 1 is gone"
        draining = asyncio.ensure_future(client.drain(BOUND_S))
        await core.hears(Drain(BOUND_S))
        core.send(Restarted(), Drained(True))
        await draining  # The other message has arrived as well.
        await (await began(client, core, "d")).aclose()
        assert client.unready_reason is None


@pytest.mark.parametrize("seed", range(5))
async def test_under_random_cancellation_each_loan_is_either_read_or_returned(
    played: Played, seed: int
) -> None:
    """Callers are cancelled at moments that the seed chooses, around the moment of their last output."""
    names = [str(number) for number in range(60)]
    draw = random.Random(seed)

    async with played() as (client, core):
        read: list[dict[str, Any]] = []

        async def call(name: str) -> None:
            stream = client.generate(request(name))
            try:
                async for answer in stream:
                    read.extend([answer.kv_transfer_params] if answer.kv_transfer_params else [])
            finally:
                await stream.aclose()

        calls = {name: asyncio.create_task(call(name)) for name in names}
        for name in names:
            await core.hears(AddRequest(request(name)))
        deeds = [(draw.random(), draw.choice(["leave", "end"]), name) for name in names for _ in range(2)]
        for _, deed, name in sorted(deeds):
            if deed == "leave":
                calls[name].cancel()
            else:
                core.send(output(name))
            for _ in range(draw.randrange(3)):
                await asyncio.sleep(0)
        for name in names:
            core.send(output(name, "length"))
            if draw.random() < 0.5:
                calls[name].cancel()
            for _ in range(draw.randrange(4)):
                await asyncio.sleep(0)
        await asyncio.gather(*calls.values(), return_exceptions=True)
        for name in names:
            if ticket(name) not in read:
                await core.hears(TakeBack(ticket(name)))
        assert not [params for params in core.taken_back() if params in read]
        assert len(core.taken_back()) + len(read) == len(names)
        assert core.taken_back(), "some callers were cancelled"
