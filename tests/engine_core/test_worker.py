"""A rank and its device."""

import msgspec
import pytest
import torch

from baton.core.config import DeviceConfig
from baton.core.errors import UserError
from baton.engine.attention import cuda
from baton.engine.executor.worker import Worker, device_of
from baton.engine.models import SingleRank, TensorParallelGroup


class Group(TensorParallelGroup):
    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


@pytest.mark.skipif(cuda.why_unavailable() is None, reason="there is a GPU")
def test_without_a_gpu_the_start_says_what_is_missing(make_config) -> None:
    config = msgspec.structs.replace(make_config(), device_config=DeviceConfig(device="cuda"))
    with pytest.raises(UserError, match=r"cuda cannot be used: .*; use cpu"):
        Worker(config, lambda *_: None, SingleRank())  # type: ignore[arg-type]


def test_each_rank_needs_a_gpu_of_its_own(make_config, monkeypatch: pytest.MonkeyPatch) -> None:
    config = msgspec.structs.replace(make_config(), device_config=DeviceConfig(device="cuda"))
    monkeypatch.setattr(cuda, "why_unavailable", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [device_of(config, Group(rank, 2)).index for rank in range(2)] == [0, 1]
    with pytest.raises(UserError, match="4 ranks need as many GPUs, and there are 2"):
        device_of(config, Group(0, 4))
