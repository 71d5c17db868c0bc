"""Ranks report within a step which layers are computed, only on request, and with an authenticated key."""

import queue
import socket
import threading
from collections.abc import Iterator

import pytest
import torch

from baton.connectors.pull.layer_reports import _REPORT, LayerReporter, LayerReportReceiver

PATIENCE_S = 60.0
LAYER = torch.empty(0)


@pytest.fixture
def heard() -> "queue.Queue[tuple[int, int, int]]":
    return queue.Queue()


@pytest.fixture
def receiver(heard: "queue.Queue[tuple[int, int, int]]") -> Iterator[LayerReportReceiver]:
    receiver = LayerReportReceiver(lambda *report: heard.put(report))
    yield receiver
    receiver.close(PATIENCE_S)
    receiver.close(PATIENCE_S)
    assert not [thread for thread in threading.enumerate() if thread.name == "baton-layers"]


@pytest.fixture
def reporter() -> Iterator[LayerReporter]:
    reporter = LayerReporter(3)
    yield reporter
    reporter.close(PATIENCE_S)


def test_each_layer_is_reported_as_it_is_computed(
    receiver: LayerReportReceiver, reporter: LayerReporter, heard: "queue.Queue[tuple[int, int, int]]"
) -> None:
    reporter.begin(receiver.order(7))
    for layer in range(3):
        reporter.layer_computed(layer, LAYER)
    assert [heard.get(timeout=PATIENCE_S) for _ in range(3)] == [(3, 7, 1), (3, 7, 2), (3, 7, 3)]


def test_layers_out_of_order_are_left_to_the_end_of_the_step(
    receiver: LayerReportReceiver, reporter: LayerReporter, heard: "queue.Queue[tuple[int, int, int]]"
) -> None:
    reporter.begin(receiver.order(7))
    reporter.layer_computed(1, LAYER)
    reporter.layer_computed(0, LAYER)
    reporter.layer_computed(0, LAYER)
    reporter.begin(receiver.order(8))
    reporter.layer_computed(0, LAYER)
    assert [heard.get(timeout=PATIENCE_S) for _ in range(2)] == [(3, 7, 1), (3, 8, 1)]


def test_without_a_request_nothing_is_reported(
    receiver: LayerReportReceiver, reporter: LayerReporter, heard: "queue.Queue[tuple[int, int, int]]"
) -> None:
    reporter.begin(None)
    reporter.layer_computed(0, LAYER)
    reporter.begin(receiver.order(1))
    reporter.layer_computed(0, LAYER)
    assert heard.get(timeout=PATIENCE_S) == (3, 1, 1)


def test_a_report_with_a_wrong_key_is_ignored(
    receiver: LayerReportReceiver, reporter: LayerReporter, heard: "queue.Queue[tuple[int, int, int]]"
) -> None:
    order = receiver.order(7)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        for frame in (b"", b"x", b"x" * 1000, _REPORT.pack(b"k" * 16, 3, 7, 9)):
            stranger.sendto(frame, "\0" + order.socket_name)
    reporter.begin(order)
    reporter.layer_computed(0, LAYER)
    assert heard.get(timeout=PATIENCE_S) == (3, 7, 1)
    assert heard.empty()


def test_a_missing_receiver_does_not_affect_the_rank(reporter: LayerReporter) -> None:
    receiver = LayerReportReceiver(lambda *report: None)
    order = receiver.order(1)
    receiver.close(PATIENCE_S)
    reporter.begin(order)
    reporter.layer_computed(0, LAYER)


def test_the_owner_is_told_of_a_failed_listener() -> None:
    def fail(*report: int) -> None:
        raise KeyError("unknown step")

    receiver, reporter = LayerReportReceiver(fail), LayerReporter(0)
    reporter.begin(receiver.order(1))
    reporter.layer_computed(0, LAYER)
    receiver._thread.join(PATIENCE_S)
    with pytest.raises(RuntimeError, match="died"):
        receiver.raise_if_dead()
    receiver.close(PATIENCE_S)
    reporter.close(PATIENCE_S)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu_a_layer_is_reported_when_the_device_has_computed_it(
    receiver: LayerReportReceiver, reporter: LayerReporter, heard: "queue.Queue[tuple[int, int, int]]"
) -> None:
    layer = torch.zeros(1024, 1024, device="cuda")
    reporter.begin(receiver.order(1))
    torch.cuda._sleep(int(5e7))
    before = torch.cuda.Event()
    before.record()
    reporter.layer_computed(0, layer)
    assert heard.get(timeout=PATIENCE_S) == (3, 1, 1)
    assert before.query()
