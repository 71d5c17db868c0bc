"""Tests of the proxies, which replace the switch where namespaces are refused, with an echo server."""

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from baton.cli.processes import Fleet
from lab.chaos.network import Network, Proxied
from lab.chaos.proxy import ENGINE_PORT_OFFSET, Route
from lab.chaos.rules import DATA_PORT, FRONT, HTTP_PORT, Rule

SENT = bytes(range(256)) * 400
TIMEOUT_S = 30.0


@contextmanager
def echo_server(address: str, port: int) -> Iterator[None]:
    def serve() -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            with sock, ExitStack() as stack:
                stack.callback(sock.close)
                try:
                    while data := sock.recv(65536):
                        sock.sendall(data)
                except OSError:
                    continue

    listener = socket.create_server((address, port))
    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(TIMEOUT_S)
        listener.close()


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    folder = tmp_path_factory.mktemp("proxies")
    with Fleet(folder) as fleet, Proxied(fleet, folder, (FRONT, "p0")) as network:
        address = network.addresses["p0"]
        with (
            echo_server(address, DATA_PORT + ENGINE_PORT_OFFSET),
            echo_server(address, HTTP_PORT + ENGINE_PORT_OFFSET),
        ):
            yield network


def ask(network: Network, port: int = DATA_PORT, timeout_s: float = TIMEOUT_S) -> bytes:
    with socket.create_connection((network.addresses["p0"], port), timeout=timeout_s) as sock:
        sock.sendall(SENT)
        got = b""
        while len(got) < len(SENT):
            data = sock.recv(65536)
            if not data:
                raise ConnectionResetError
            got += data
        return got


@pytest.mark.processes
@pytest.mark.slow
def test_rules_corrupt_reset_and_stall_a_stream(network: Network) -> None:
    assert ask(network) == SENT
    network.replace_rules([Rule(source="d0", target="p0", corrupt=1.0)])
    got = ask(network)
    assert got != SENT
    assert sum((x ^ y).bit_count() for x, y in zip(got, SENT, strict=True)) <= network.strikes()
    network.replace_rules([Rule(source="p0", target="d0", reset=1.0)])
    with pytest.raises(ConnectionResetError):
        ask(network)
    network.replace_rules([Rule(source="d0", target="p0", loss=1.0)])
    with pytest.raises(TimeoutError):
        ask(network, timeout_s=0.2)
    assert ask(network, HTTP_PORT) == SENT
    network.replace_rules([])
    assert ask(network) == SENT


@pytest.mark.processes
@pytest.mark.slow
def test_an_engine_that_does_not_listen_resets_its_callers(network: Network) -> None:
    with pytest.raises(ConnectionResetError):
        ask(network, DATA_PORT + 1)


def test_rules_apply_to_their_direction_and_channel_only() -> None:
    inward = Route("p0", "data", is_inward=True)
    outward = Route("p0", "data", is_inward=False)
    http = Route("p0", "http", is_inward=True)
    rule = Rule(source="d0", target="p0", loss=1.0)
    assert [route.matches(rule) for route in (inward, outward, http)] == [True, False, False]
    rule = Rule(source="p0", target="d0", channel="control")
    assert [route.matches(rule) for route in (inward, outward, http)] == [False, False, False]
    rule = Rule(source=FRONT, target="p0")
    assert [route.matches(rule) for route in (inward, outward, http)] == [False, False, True]
