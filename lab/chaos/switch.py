"""A network of hosts on one machine: a network namespace per host, joined by a switch in user space.

    namespace p0 [tun 10.77.0.2] <--\\
    namespace d0 [tun 10.77.0.4] <---> this process: reads IP packets, applies rules, writes them out
    namespace front [tun ...]    <--/

`python -m lab.chaos.switch CONTROL_SOCKET HOST...` creates the namespaces and keeps them open until it ends.
Each line on the control socket is a JSON list of rules, which replaces all rules; the answer is a JSON list
with the number of packets that each old rule affected. A line `null` keeps the rules and answers with the
current numbers.
"""

import ctypes
import fcntl
import heapq
import os
import random
import selectors
import socket
import struct
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import msgspec

from lab.chaos.packets import SOURCE, TARGET, is_ipv4
from lab.chaos.rules import Rule, RuleBook

SUBNET = "10.77.0"
NETMASK = "255.255.255.0"
MTU = 9000  # Large, because each packet costs Python some microseconds.
PACKET_BYTES_MAX = 65535
BURST = 32  # Packets read from one host before the next host is read.
CLONE_NEWNET = 0x40000000
_DEVICE = b"tun0"
_TUNSETIFF = 0x400454CA
_IFF_TUN_NO_PI = 0x1001
_SIOCSIFADDR, _SIOCSIFNETMASK, _SIOCSIFMTU = 0x8916, 0x891C, 0x8922
_SIOCGIFFLAGS, _SIOCSIFFLAGS = 0x8913, 0x8914
_IFF_UP = 1

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Host:
    """One host. `namespace` and `tun` are file descriptors of the namespace and of its TUN device."""

    name: str
    address: str
    namespace: int
    tun: int


def address_of(index: int) -> str:
    """Return the address of the host with this index in the order of the command line."""
    return f"{SUBNET}.{index + 1}"


def unshare(flags: int) -> None:
    """Give the calling thread namespaces of its own. Raises OSError where that is not allowed."""
    if _libc.unshare(flags) != 0:
        raise OSError(ctypes.get_errno(), f"unshare({flags:#x}): {os.strerror(ctypes.get_errno())}")


def enter_namespace(descriptor: int) -> None:
    """Move the calling thread, and what it starts from now on, into a network namespace. Raises OSError."""
    if _libc.setns(descriptor, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), f"setns: {os.strerror(ctypes.get_errno())}")


def make_host(name: str, address: str) -> Host:
    """Create a namespace with a loopback and one TUN device. Raises OSError where either is not allowed."""
    made: list[Host] = []
    errors: list[OSError] = []

    def make() -> None:
        try:
            unshare(CLONE_NEWNET)
            namespace = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
            tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", _DEVICE, _IFF_TUN_NO_PI))
            _bring_up(b"lo", None)
            _bring_up(_DEVICE, address)
            made.append(Host(name, address, namespace, tun))
        except OSError as error:
            errors.append(error)

    # Only this thread changes its namespace; the process keeps its own.
    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return made[0]


def _bring_up(device: bytes, address: str | None) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        if address is not None:
            for request, value in ((_SIOCSIFADDR, address), (_SIOCSIFNETMASK, NETMASK)):
                packed = struct.pack("HH4s8x", socket.AF_INET, 0, socket.inet_aton(value))
                fcntl.ioctl(sock, request, struct.pack("16s16s", device, packed))
            fcntl.ioctl(sock, _SIOCSIFMTU, struct.pack("16si12x", device, MTU))
        answer = fcntl.ioctl(sock, _SIOCGIFFLAGS, struct.pack("16sh14x", device, 0))
        flags = struct.unpack("16sh14x", answer)[1] | _IFF_UP
        fcntl.ioctl(sock, _SIOCSIFFLAGS, struct.pack("16sh14x", device, flags))


class Switch:
    """Forwards packets between hosts until the process is ended."""

    def __init__(self, hosts: Sequence[Host], listener: socket.socket, book: RuleBook) -> None:
        self._by_address = {socket.inet_aton(host.address): host for host in hosts}
        self._listener = listener
        self._book = book
        self._queue: list[tuple[float, int, int, bytes]] = []  # Due time, order of arrival, tun, packet.
        self._order = count()
        self._selector = selectors.DefaultSelector()
        for host in hosts:
            self._selector.register(host.tun, selectors.EVENT_READ, host)
        self._selector.register(listener, selectors.EVENT_READ, None)
        self._partial_lines: dict[socket.socket, bytes] = {}

    def run(self) -> None:
        while True:
            timeout_s = max(0.0, self._queue[0][0] - time.monotonic()) if self._queue else None
            for key, _ in self._selector.select(timeout_s):
                if isinstance(key.data, Host):
                    self._read_burst(key.data)
                elif key.fileobj is self._listener:
                    caller, _ = self._listener.accept()
                    self._partial_lines[caller] = b""
                    self._selector.register(caller, selectors.EVENT_READ, None)
                elif isinstance(key.fileobj, socket.socket):
                    self._serve_control(key.fileobj)
            self._deliver_due()

    def _read_burst(self, host: Host) -> None:
        for _ in range(BURST):
            try:
                packet = os.read(host.tun, PACKET_BYTES_MAX)
            except BlockingIOError:
                return
            if not is_ipv4(packet):
                continue  # The kernel sends IPv6 neighbour discovery on every device.
            source = self._by_address.get(packet[SOURCE])
            target = self._by_address.get(packet[TARGET])
            if source is None or target is None:
                continue
            now_s = time.monotonic()
            for delivery in self._book.decide(packet, source.name, target.name, now_s):
                if delivery.due_s <= now_s:
                    self._write(delivery.packet)
                else:
                    entry = (delivery.due_s, next(self._order), target.tun, delivery.packet)
                    heapq.heappush(self._queue, entry)

    def _deliver_due(self) -> None:
        now_s = time.monotonic()
        while self._queue and self._queue[0][0] <= now_s:
            self._write(heapq.heappop(self._queue)[-1])

    def _write(self, packet: bytes) -> None:
        """Write to the host that the header names, since a reset also goes to the packet's source."""
        host = self._by_address[packet[TARGET]]
        try:
            os.write(host.tun, packet)
        except OSError as error:  # The device's queue is full: the packet is lost, as on a wire.
            print(f"switch: lost a packet for {host.name}: {error}", file=sys.stderr)

    def _serve_control(self, caller: socket.socket) -> None:
        received = caller.recv(1 << 16)
        if not received:
            self._selector.unregister(caller)
            del self._partial_lines[caller]
            caller.close()
            return
        *lines, self._partial_lines[caller] = (self._partial_lines[caller] + received).split(b"\n")
        for line in lines:
            rules = msgspec.json.decode(line, type=list[Rule] | None)
            strikes = self._book.strikes
            if rules is not None:
                self._book.replace(rules)
            caller.sendall(msgspec.json.encode(strikes) + b"\n")


def main(control_path: Path, names: Sequence[str]) -> None:
    hosts = [make_host(name, address_of(index)) for index, name in enumerate(names)]
    with socket.socket(socket.AF_UNIX) as listener:
        # The socket's path appears only when the network is complete and the file with the namespaces is
        # written.
        making = control_path.with_suffix(".making")
        listener.bind(str(making))
        listener.listen()
        folder = f"/proc/{os.getpid()}/fd"
        named = {host.name: f"{folder}/{host.namespace}" for host in hosts}
        control_path.with_suffix(".json").write_bytes(msgspec.json.encode(named))
        making.rename(control_path)
        Switch(hosts, listener, RuleBook(random.Random(0))).run()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
