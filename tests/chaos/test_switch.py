"""The switch with real namespaces: an echo server on one host, a client on the other."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.cli.processes import Fleet
from lab.chaos.network import Network, Switched, refusal_reason
from lab.chaos.rules import Rule

pytestmark = [pytest.mark.processes, pytest.mark.slow]

CLIENT_S = 60

ECHO = """
import socket
listener = socket.create_server(("0.0.0.0", 9000))
print("listens", flush=True)
while True:
    sock, _ = listener.accept()
    try:
        while data := sock.recv(65536):
            sock.sendall(data)
    except OSError:
        pass
"""
CLIENT = """
import socket, sys
try:
    with socket.create_connection((sys.argv[1], 9000), timeout=float(sys.argv[2])) as sock:
        sent = bytes(range(256)) * 400
        sock.sendall(sent)
        got = b""
        while len(got) < len(sent):
            got += sock.recv(65536)
    print("differing bytes:", sum(x != y for x, y in zip(sent, got)))
except (TimeoutError, ConnectionError) as error:
    print(type(error).__name__)
"""


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    if refusal := refusal_reason():
        pytest.skip(refusal)
    folder = tmp_path_factory.mktemp("network")
    with Fleet(folder) as fleet, Switched(fleet, folder, ("a", "b")) as network:
        server = fleet.start("echo", network.command_on("b", [sys.executable, "-c", ECHO]))
        while not server.log_tail():
            assert fleet.wait_exit(0.05) is None
        yield network


def ask(network: Network, timeout_s: float = 30.0) -> str:
    command = [sys.executable, "-c", CLIENT, network.addresses["b"], str(timeout_s)]
    done = subprocess.run(
        network.command_on("a", command), capture_output=True, text=True, timeout=CLIENT_S, check=True
    )
    return done.stdout.strip()


def test_rules_corrupt_reset_and_cut_a_connection(network: Network, tmp_path: Path) -> None:
    assert ask(network) == "differing bytes: 0"
    network.replace_rules([Rule(loss=0.05, duplicate=0.1, reorder=0.1)])
    assert ask(network) == "differing bytes: 0"
    assert network.replace_rules([Rule(source="a", corrupt=1.0)]) > 0
    differing = ask(network)
    assert differing.startswith("differing bytes:")
    assert differing != "differing bytes: 0"
    network.replace_rules([Rule(source="b", target="a", reset=1.0)])
    assert ask(network) == "ConnectionResetError"
    network.replace_rules([Rule(source="b", loss=1.0)])
    assert ask(network, timeout_s=0.3) == "TimeoutError"
    assert network.strikes() > 0
    network.replace_rules([])
    assert ask(network) == "differing bytes: 0"
