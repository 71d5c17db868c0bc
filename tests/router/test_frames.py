"""Frames between the processes of one router: what one side may not send ends the connection."""

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from baton.router.fleet.links import NOTHING
from baton.router.fleet.notes import Drains, Joined, Probed, TurnTaken
from baton.router.processes.messages import (
    Charge,
    Collect,
    Drain,
    Fault,
    Recall,
    decode_from_coordinator,
    decode_from_worker,
)
from baton.router.shell.frames import FRAME_BYTES_MAX, LENGTH_BYTES, Asked, FrameStream
from baton.router.values.members import Member

ENGINE = ("decode", "http://d:1")


async def streams(
    decode: Callable[[bytes], Any] = decode_from_worker,
) -> tuple[FrameStream, socket.socket, list[Any], asyncio.Event]:
    """One end, the socket of the other end, the frames that came, and whether the connection is lost."""
    ours, theirs = socket.socketpair()
    frames: list[Any] = []
    lost = asyncio.Event()
    stream = FrameStream(decode, frames.append, lost.set)
    await asyncio.get_running_loop().create_unix_connection(lambda: stream, sock=ours)
    return stream, theirs, frames, lost


def framed(payload: bytes) -> bytes:
    return len(payload).to_bytes(LENGTH_BYTES, "little") + payload


@pytest.mark.parametrize(
    "sent",
    [
        framed(msgspec.msgpack.encode(Joined(Member("decode", "http://elsewhere:1")))),
        framed(msgspec.msgpack.encode(Drains(ENGINE, 0.0, is_leaving=True))),
        framed(msgspec.msgpack.encode(Probed(ENGINE, "healthy", "", None))),
        framed(msgspec.msgpack.encode(Drain(0.0))),
        framed(msgspec.msgpack.encode(Asked(1, Collect()))),
        framed(b"garbage"),
        framed(b""),
        (FRAME_BYTES_MAX + 1).to_bytes(LENGTH_BYTES, "little"),
    ],
)
async def test_a_worker_cannot_order_what_the_coordinator_orders(sent: bytes) -> None:
    _, theirs, frames, lost = await streams()
    theirs.sendall(framed(msgspec.msgpack.encode(NOTHING)) + sent + framed(msgspec.msgpack.encode(NOTHING)))
    await lost.wait()
    assert frames == [NOTHING], "what follows is not read"
    theirs.close()


@pytest.mark.parametrize("sent", [Asked(1, Charge("a", 1)), Asked(1, TurnTaken("s"))])
async def test_a_worker_answers_no_question_of_a_worker(sent: Any) -> None:
    _, theirs, frames, lost = await streams(decode_from_coordinator)
    theirs.sendall(framed(msgspec.msgpack.encode(Fault("a"))) + framed(msgspec.msgpack.encode(sent)))
    await lost.wait()
    assert frames == [Fault("a")]
    theirs.close()


async def test_a_question_ends_with_its_answer_its_time_or_the_connection() -> None:
    stream, theirs, _, lost = await streams()
    asked: list[Any] = []

    def answer(frame: Asked[Any]) -> None:
        asked.append(frame.question)
        if frame.question == Recall("a"):
            other.answer(frame, ["b"])
        elif len(asked) == 3:
            other.close()

    other = FrameStream(decode_from_coordinator, answer)
    await asyncio.get_running_loop().create_unix_connection(lambda: other, sock=theirs)
    assert await stream.ask(Recall("a"), list[str], 60.0) == ["b"]
    with pytest.raises(TimeoutError):
        await stream.ask(Collect(), list[str], 0.0)
    with pytest.raises(ConnectionError):
        await stream.ask(Collect(), list[str], 60.0)
    await lost.wait()
    with pytest.raises(ConnectionError):
        await stream.ask(Collect(), list[str], 60.0)
    assert asked == [Recall("a"), Collect(), Collect()]
