"""Transports by name, and the choice between them."""

import logging
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from baton.core.config import ClusterSecret
from baton.core.errors import ConfigError, PeerError, TransferError
from baton.core.ids import Address
from baton.core.layout import Region
from baton.testing.transport_producers import new_address
from baton.transport import (
    available_names,
    choose_transport,
    make_transport,
    make_transports,
    register_all,
    registry,
)
from baton.transport.base.interface import Transport
from baton.transport.local.transport import LocalEndpoint
from baton.transport.nixl import transport as nixl

SECRET = ClusterSecret(b"the secret of this cluster")


class Engine:
    def __init__(self, engine_id: str) -> None:
        self.address: Address = new_address(engine_id)
        self.memory = np.zeros(4096, dtype=np.uint8)
        self.transports: dict[str, Transport] = make_transports(address=self.address, secret=SECRET)
        regions = [Region(self.memory.ctypes.data, self.memory.nbytes)]
        self.endpoints = register_all(self.transports, regions)

    def close(self) -> None:
        for transport in self.transports.values():
            transport.close()


@pytest.fixture
def engines() -> Iterator[tuple[Engine, Engine]]:
    ours, theirs = Engine("ours"), Engine("theirs")
    yield ours, theirs
    ours.close()
    theirs.close()


def elsewhere(endpoint: bytes) -> bytes:
    named = msgspec.msgpack.decode(endpoint, type=LocalEndpoint)
    process = msgspec.structs.replace(named.process, boot_id="another host")
    return msgspec.msgpack.encode(msgspec.structs.replace(named, process=process))


def test_the_same_host_is_reached_by_local(engines: tuple[Engine, Engine]) -> None:
    ours, theirs = engines
    assert choose_transport(ours.transports, theirs.endpoints, theirs.address).transport.name == "local"


def test_a_transport_can_be_forced(engines: tuple[Engine, Engine]) -> None:
    ours, theirs = engines
    chosen = choose_transport(ours.transports, theirs.endpoints, theirs.address, order=["tcp"])
    assert (chosen.transport.name, chosen.peer.address) == ("tcp", theirs.address)


def test_tcp_is_used_if_local_fails_and_the_reason_is_logged(
    engines: tuple[Engine, Engine], caplog: pytest.LogCaptureFixture
) -> None:
    ours, theirs = engines
    endpoints = {**theirs.endpoints, "local": elsewhere(theirs.endpoints["local"])}
    with caplog.at_level(logging.INFO, "baton.transport"):
        assert choose_transport(ours.transports, endpoints, theirs.address).transport.name == "tcp"
    assert "another host" in caplog.text


def test_the_choice_is_logged_with_its_alternatives(
    engines: tuple[Engine, Engine], caplog: pytest.LogCaptureFixture
) -> None:
    ours, theirs = engines
    endpoints = {**theirs.endpoints, "nixl": b""}
    with caplog.at_level(logging.INFO, "baton.transport"):
        choose_transport(ours.transports, endpoints, theirs.address)
    (line,) = (record.message for record in caplog.records if record.name == "baton.transport.registry")
    assert line == "theirs is reached by local; nixl is offered by one side only; tcp left in reserve"


def test_nixl_is_offered_only_with_an_rdma_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(registry, "is_installed", lambda: True)
    monkeypatch.setattr(nixl, "RDMA_DEVICES", tmp_path)
    assert available_names() == ("local", "tcp")
    (tmp_path / "mlx5_0").mkdir()
    assert available_names() == ("local", "nixl", "tcp")
    assert available_names("cuda") == ("cuda_ipc", "nixl")
    monkeypatch.setattr(registry, "is_installed", lambda: False)
    assert available_names() == ("local", "tcp")
    assert available_names("cuda") == ("cuda_ipc",)


def test_if_no_transport_connects_every_reason_is_named(engines: tuple[Engine, Engine]) -> None:
    ours, theirs = engines
    theirs.transports["tcp"].close()
    endpoints = {**theirs.endpoints, "local": elsewhere(theirs.endpoints["local"])}
    with pytest.raises(TransferError, match=r"local: .*another host.*tcp: .*cannot reach"):
        choose_transport(ours.transports, endpoints, theirs.address)


def test_no_other_transport_is_tried_for_a_peer_with_a_false_identity(engines: tuple[Engine, Engine]) -> None:
    ours, theirs = engines
    with pytest.raises(PeerError):
        choose_transport(ours.transports, {**theirs.endpoints, "local": b"nonsense"}, theirs.address)


def test_without_a_common_transport_both_lists_are_named(engines: tuple[Engine, Engine]) -> None:
    ours, theirs = engines
    with pytest.raises(TransferError, match=r"theirs \['nixl'\]"):
        choose_transport(ours.transports, {"nixl": b""}, theirs.address)


def test_an_unknown_name_is_a_configuration_error_and_leaves_none_open() -> None:
    with pytest.raises(ConfigError, match="pigeon"):
        make_transports(["local", "pigeon"], address=new_address("ours"))


def test_each_known_name_makes_its_transport() -> None:
    for name in ("memory", "local", "tcp"):
        transport = make_transport(name, address=new_address("ours"))
        assert transport.name == name
        transport.close()


def test_a_transport_that_cannot_be_registered_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    transports = make_transports(address=new_address("ours"), secret=SECRET)
    with pytest.raises(TransferError, match="local, tcp"):
        register_all(transports, [Region(4096, 4096, "cuda:0")])
    assert "host memory only" in caplog.text
    for transport in transports.values():
        transport.close()
