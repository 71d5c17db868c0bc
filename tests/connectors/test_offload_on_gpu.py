"""Copies on separate streams: on a GPU, or on fake streams that do nothing until they are queried."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.connectors.storage.memory.cuda_copies import CudaCopies

NUM_BLOCKS, PATIENCE_S = 8, 30.0
HAS_GPU = torch.cuda.is_available()


class FakeCuda:
    """Streams whose work runs in order, and events that become visible late."""

    looks = 0

    class Stream:
        def __init__(self, device: Any) -> None:
            self.waited_for: list[Any] = []

        def wait_stream(self, other: Any) -> None:
            self.waited_for.append(other)

        def synchronize(self) -> None:
            return

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.looks = FakeCuda.looks

        def record(self, stream: Any) -> None:
            return

        def query(self) -> bool:
            self.looks -= 1
            return self.looks < 0

        def elapsed_time(self, other: Any) -> float:
            return 1.0

    @staticmethod
    def current_stream(device: Any) -> str:
        return "the engine's"

    @staticmethod
    @contextmanager
    def stream(stream: Any) -> Iterator[None]:
        yield


def caches_on(device: str, width: int) -> dict[str, torch.Tensor]:
    numbers = torch.arange(NUM_BLOCKS * 2 * width).reshape(NUM_BLOCKS, 2, 1, width)
    return {f"l{i}": (numbers + 1000 * i).to(torch.int16).to(device) for i in range(3)}


def check_round_trip(copies: CudaCopies, caches: dict[str, torch.Tensor], data: st.DataObject) -> None:
    before = {name: cache.clone() for name, cache in caches.items()}
    blocks = data.draw(st.lists(st.integers(0, NUM_BLOCKS - 1), unique=True, min_size=1))
    rows = data.draw(st.permutations(range(12)))[: len(blocks)]
    targets = data.draw(st.permutations(range(NUM_BLOCKS)))[: len(blocks)]
    copies.store(1, blocks, rows)
    assert copies.wait([1], PATIENCE_S)
    (end,) = copies.take_ended()
    assert (end.job, end.error, end.nbytes) == (1, "", len(blocks) * copies.row_bytes)
    for cache in caches.values():
        cache.zero_()
    copies.load(2, targets, rows)
    assert copies.wait([2], PATIENCE_S)
    assert [end.job for end in copies.take_ended()] == [2]
    for name, cache in caches.items():
        expected = torch.zeros_like(cache)
        for block, target in zip(blocks, targets, strict=True):
            expected[target] = before[name][block]
        assert torch.equal(cache, expected)


@pytest.mark.parametrize("width", [4, 5])  # A multiple of the word size, and not.
@pytest.mark.parametrize("staged_rows", [1, 3, 100])
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_stored_blocks_come_back_with_any_size_of_staging(
    width: int, staged_rows: int, data: st.DataObject
) -> None:
    FakeCuda.looks = 0
    caches = caches_on("cpu", width)
    row_bytes = 3 * 2 * width * 2
    copies = CudaCopies(caches, 12, cuda=FakeCuda, staging_bytes=staged_rows * row_bytes)
    check_round_trip(copies, caches, data)
    assert copies._storing.stream.waited_for == ["the engine's"]


def test_a_copy_has_ended_when_its_event_has() -> None:
    FakeCuda.looks = 2
    copies = CudaCopies(caches_on("cpu", 4), 12, cuda=FakeCuda)
    assert not copies.bind_wake(lambda: None), "the host must poll"
    copies.store(1, [0], [0])
    assert [copies.take_ended() for _ in range(2)] == [[], []]
    copies.store(2, [0], [99])  # This row does not exist.
    (end,) = (end for end in copies.take_ended() if end.job == 2)
    assert end.error
    copies.close(PATIENCE_S)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="no CUDA device")
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_stored_blocks_come_back_on_a_device(data: st.DataObject) -> None:
    caches = caches_on("cuda", 4)
    copies = CudaCopies(caches, 12, staging_bytes=100)
    check_round_trip(copies, caches, data)
