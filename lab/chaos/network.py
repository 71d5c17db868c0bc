"""The runner's side of the network: starts the switch, sends it rules and runs commands on its hosts."""

import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from baton.cli.processes import Child, Fleet
from baton.core.errors import BatonError
from lab.chaos.proxy import ENGINE_PORT_OFFSET
from lab.chaos.rules import Rule
from lab.chaos.switch import address_of, enter_namespace, make_host

START_S = 60.0
ANSWER_S = 30.0
_LOOK_EVERY_S = 0.02
_LOOPBACK_BYTES = 250  # Values of one byte of an address.


class NetworkFailed(BatonError):
    """The switch did not start, does not answer or has ended."""


def refusal_reason() -> str | None:
    """Return why this process may not create network namespaces with TUN devices; None if it may."""
    try:
        host = make_host("probe", address_of(0))
    except OSError as error:
        return f"network namespaces or TUN devices are not allowed: {error}"
    os.close(host.tun)
    os.close(host.namespace)
    return None


class Network:
    """A network of named hosts with rules for the packets between them.

    An engine listens on the ports that others connect to plus `port_offset`.
    """

    port_offset = 0

    def __init__(self, child: Child, path: Path, addresses: Mapping[str, str]) -> None:
        self.addresses = addresses
        self._child = child
        deadline_s = time.monotonic() + START_S
        while not path.exists():
            if child.has_ended() or time.monotonic() > deadline_s:
                raise NetworkFailed(f"{child.name} did not start within {START_S:g} s: {child.log_tail()}")
            time.sleep(_LOOK_EVERY_S)
        self._sock = socket.socket(socket.AF_UNIX)
        self._sock.settimeout(ANSWER_S)
        self._sock.connect(str(path))
        self._answers = self._sock.makefile("rb")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._answers.close()
        self._sock.close()

    def enter(self, name: str) -> None:
        """Move the calling thread, and every process that it starts from now on, to that host."""

    def command_on(self, name: str, command: Sequence[str]) -> list[str]:
        """Return the command as it runs on that host."""
        return list(command)

    def replace_rules(self, rules: Sequence[Rule]) -> int:
        """Replace all rules. Returns the number of packets that the old rules affected."""
        return self._ask(list(rules))

    def strikes(self) -> int:
        """Return the number of packets that the current rules changed, delayed or dropped."""
        return self._ask(None)

    def _ask(self, rules: list[Rule] | None) -> int:
        try:
            self._sock.sendall(msgspec.json.encode(rules) + b"\n")
            answer = self._answers.readline()
        except OSError as error:
            raise NetworkFailed(f"{self._child.name} did not answer: {error}") from error
        if not answer:
            raise NetworkFailed(f"{self._child.name} has ended: {self._child.log_tail()}")
        return sum(msgspec.json.decode(answer, type=list[int]))


class Switched(Network):
    """A network in which each host has a network namespace, joined by the switch."""

    def __init__(self, fleet: Fleet, folder: Path, names: Sequence[str]) -> None:
        path = folder / "switch.sock"
        child = fleet.start("switch", [sys.executable, "-m", "lab.chaos.switch", str(path), *names])
        super().__init__(child, path, {name: address_of(index) for index, name in enumerate(names)})
        self._namespaces = msgspec.json.decode(path.with_suffix(".json").read_bytes(), type=dict[str, str])

    def enter(self, name: str) -> None:
        descriptor = os.open(self._namespaces[name], os.O_RDONLY)
        try:
            enter_namespace(descriptor)
        finally:
            os.close(descriptor)

    def command_on(self, name: str, command: Sequence[str]) -> list[str]:
        return ["nsenter", f"--net={self._namespaces[name]}", *command]


class Proxied(Network):
    """A network of loopback addresses, with a proxy for each engine, for machines that refuse namespaces.

    Each run uses other addresses. The first host is that of the clients and has no proxy.
    """

    port_offset = ENGINE_PORT_OFFSET

    def __init__(self, fleet: Fleet, folder: Path, names: Sequence[str]) -> None:
        high, low = divmod(os.getpid() % (_LOOPBACK_BYTES**2), _LOOPBACK_BYTES)
        addresses = {name: f"127.{high + 1}.{low + 1}.{i + 1}" for i, name in enumerate(names)}
        path = folder / "proxy.sock"
        named = [f"{name}={addresses[name]}" for name in names[1:]]
        child = fleet.start("proxy", [sys.executable, "-m", "lab.chaos.proxy", str(path), *named])
        super().__init__(child, path, addresses)
