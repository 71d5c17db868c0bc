"""Faults specific to cuda_ipc: endpoints, devices, and a machine without a GPU."""

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from baton.core.errors import ConfigError, PeerError, TransferError
from baton.testing.transport_producers import (
    HostDevice,
    ProcessProducer,
    make_cuda_ipc_on_host,
    new_address,
    regions_of,
)
from baton.transport import make_transport
from baton.transport.cuda_ipc.transport import CudaIpcEndpoint, CudaIpcTransport

TIMEOUT_S = 60.0


class CountingDevice(HostDevice):
    """Counts the open mappings."""

    @property
    def num_open(self) -> int:
        return len(self._opened)


@pytest.fixture(scope="module")
def producer() -> Iterator[ProcessProducer]:
    producer = ProcessProducer(make_cuda_ipc_on_host, seed=6)
    yield producer
    producer.close()


@pytest.mark.processes
def test_a_peer_on_another_gpu_is_refused(producer: ProcessProducer, monkeypatch: pytest.MonkeyPatch) -> None:
    device = CountingDevice()
    monkeypatch.setattr(device, "uuid_of", lambda index: b"another one")
    with closing(CudaIpcTransport(new_address("reader"), driver=device)) as reader:
        reader.register(regions_of(np.zeros((1, 4096), dtype=np.uint8)))
        with pytest.raises(TransferError, match="another GPU"):
            reader.connect(producer.address, producer.endpoint)
    assert device.num_open == 0


@pytest.mark.processes
@pytest.mark.parametrize("field", ["nonce", "generation", "handle"])
def test_a_tampered_endpoint_maps_nothing(producer: ProcessProducer, field: str) -> None:
    named = msgspec.msgpack.decode(producer.endpoint, type=CudaIpcEndpoint)
    short = tuple(msgspec.structs.replace(region, handle=b"x") for region in named.regions)
    wrong: dict[str, Any] = {"nonce": bytes(32), "generation": 5, "handle": short}
    replaced = {"regions" if field == "handle" else field: wrong[field]}
    forged = msgspec.msgpack.encode(msgspec.structs.replace(named, **replaced))
    device = CountingDevice()
    with closing(CudaIpcTransport(new_address("reader"), driver=device)) as reader:
        reader.register(regions_of(np.zeros((1, 4096), dtype=np.uint8)))
        with pytest.raises(PeerError):
            reader.connect(producer.address, forged)
    assert device.num_open == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_machine_without_a_gpu_is_reported() -> None:
    with pytest.raises(ConfigError, match="no CUDA driver"):
        make_transport("cuda_ipc", address=new_address("engine"))
