"""Byte-stream proxies in front of engines, for machines that refuse network namespaces.

    router, peers --> ADDRESS:port  [this process]  ADDRESS:port + ENGINE_PORT_OFFSET --> engine

A proxy does not see packets, so loss, duplication and reordering need the switch. A cut stalls the streams,
like a network that loses every packet; waiting bytes pass when the cut ends. A proxy does not know which
engine connects to it, so a rule about two engines applies to all connections to one of them.

`python -m lab.chaos.proxy CONTROL_SOCKET NAME=ADDRESS...` runs it. The control socket has the
protocol of the switch's.
"""

import asyncio
import random
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from lab.chaos.rules import CONTROL_PORT, DATA_PORT, FRONT, HTTP_PORT, RANKS_MAX, Channel, Rule

ENGINE_PORT_OFFSET = 1000  # An engine listens on its proxy's port plus this.
CHUNK_BYTES = 16 << 10
LOOK_EVERY_S = 0.02  # How often a stalled stream checks for the end of a cut.

PORTS: dict[int, Channel] = {
    HTTP_PORT: "http",
    CONTROL_PORT: "control",
    **{DATA_PORT + rank: "data" for rank in range(RANKS_MAX)},
}


@dataclass(frozen=True, slots=True)
class Route:
    """One direction of a proxy's connections. `is_inward`: from a client to the engine."""

    engine: str
    channel: Channel
    is_inward: bool

    def matches(self, rule: Rule) -> bool:
        """Return whether the rule applies.

        Only clients and the router use HTTP; engines use the other channels among themselves.
        """
        here, there = (rule.target, rule.source) if self.is_inward else (rule.source, rule.target)
        return (
            here == self.engine
            and (there == FRONT) == (self.channel == "http")
            and rule.channel in ("any", self.channel)
        )


class Proxies:
    """All proxies of a run, and the current rules."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._rules: Sequence[Rule] = ()
        self._strikes = 0

    async def serve(self, control_path: Path, addresses: dict[str, str]) -> None:
        engines = addresses.items()
        servers = [await self._listen(name, address, port) for name, address in engines for port in PORTS]
        making = control_path.with_suffix(".making")
        servers.append(await asyncio.start_unix_server(self._serve_control, making))
        making.rename(control_path)
        await asyncio.gather(*(server.serve_forever() for server in servers))

    async def _listen(self, engine: str, address: str, port: int) -> asyncio.Server:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with suppress(OSError):
                await self._join(engine, address, port, reader, writer)
            writer.close()

        return await asyncio.start_server(serve, address, port)

    async def _join(
        self, engine: str, address: str, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Forward both directions of one connection until one of them ends. Raises OSError."""
        try:
            far_reader, far_writer = await asyncio.open_connection(address, port + ENGINE_PORT_OFFSET)
        except OSError:
            _reset(writer)  # The engine refuses connections, so the proxy does too.
            return
        inward, outward = Route(engine, PORTS[port], True), Route(engine, PORTS[port], False)
        try:
            async with asyncio.TaskGroup() as pumps:
                pumps.create_task(self._pump(inward, reader, far_writer))
                pumps.create_task(self._pump(outward, far_reader, writer))
        except* OSError:
            _reset(writer)
            _reset(far_writer)

    async def _pump(self, route: Route, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        """Forward bytes. Raises OSError when an end is reset, or a rule resets it."""
        while data := await source.read(CHUNK_BYTES):
            while (rule := self._rule_for(route)) is not None and rule.loss >= 1:
                self._strikes += 1
                await asyncio.sleep(LOOK_EVERY_S)
            if rule is not None:
                data = await self._apply(rule, data)
            sink.write(data)
            await sink.drain()
        if sink.can_write_eof():
            sink.write_eof()

    async def _apply(self, rule: Rule, data: bytes) -> bytes:
        """Apply the rule to some bytes. Raises ConnectionResetError for a connection that the rule resets."""
        wait_s = rule.delay_s + self._rng.random() * rule.jitter_s
        if rule.rate_bytes_s is not None:
            wait_s += len(data) / rule.rate_bytes_s
        if wait_s > 0:
            self._strikes += 1
            await asyncio.sleep(wait_s)
        if self._rng.random() < rule.reset:
            self._strikes += 1
            raise ConnectionResetError
        if self._rng.random() < rule.corrupt:
            self._strikes += 1
            at = self._rng.randrange(len(data))
            data = data[:at] + bytes([data[at] ^ 1 << self._rng.randrange(8)]) + data[at + 1 :]
        return data

    def _rule_for(self, route: Route) -> Rule | None:
        return next((rule for rule in self._rules if route.matches(rule)), None)

    async def _serve_control(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            rules = msgspec.json.decode(line, type=list[Rule] | None)
            writer.write(msgspec.json.encode([self._strikes]) + b"\n")
            if rules is not None:
                self._rules, self._strikes = rules, 0
            await writer.drain()


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close the connection with a reset instead of an end of stream."""
    sock = writer.get_extra_info("socket")
    with suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    writer.transport.abort()


if __name__ == "__main__":
    named = dict(argument.split("=") for argument in sys.argv[2:])
    asyncio.run(Proxies(random.Random(0)).serve(Path(sys.argv[1]), named))
