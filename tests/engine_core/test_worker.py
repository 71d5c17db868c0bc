"""Device of a rank, and check of its memory."""

import re

import msgspec
import pytest
import torch

from baton.core.config import DeviceConfig
from baton.core.errors import ConfigError, UserError
from baton.engine.attention import cuda, kv_memory
from baton.engine.executor.worker import Worker, device_of
from baton.engine.llm import LLM
from baton.engine.models import SingleRank, TensorParallelGroup


class Group(TensorParallelGroup):
    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


@pytest.mark.skipif(cuda.why_unavailable() is None, reason="there is a GPU")
def test_without_a_gpu_the_start_names_what_is_missing(make_config) -> None:
    config = msgspec.structs.replace(make_config(), device_config=DeviceConfig(device="cuda"))
    with pytest.raises(UserError, match=r"cuda cannot be used: .*; use cpu"):
        Worker(config, lambda *_: None, SingleRank())  # type: ignore[arg-type]


def test_each_rank_needs_a_gpu_of_its_own(make_config, monkeypatch: pytest.MonkeyPatch) -> None:
    config = msgspec.structs.replace(make_config(), device_config=DeviceConfig(device="cuda"))
    monkeypatch.setattr(cuda, "why_unavailable", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [device_of(config, Group(rank, 2)).index for rank in range(2)] == [0, 1]
    with pytest.raises(UserError, match="4 ranks need 4 GPUs, and this host has 2"):
        device_of(config, Group(0, 4))


def test_a_cache_beyond_free_memory_is_refused_with_the_number_of_blocks_that_fit(make_config) -> None:
    with pytest.raises(ConfigError) as refused:
        LLM(make_config(num_blocks=10**9))
    assert refused.value.field == "cache_config.num_gpu_blocks"
    told = re.search(
        r"need ([\d.]+) GiB on each rank, and ([\d.]+) GiB .* at most (\d+) blocks fit .*--num-blocks",
        str(refused.value),
    )
    assert told is not None, refused.value
    needed, free, most = float(told[1]), float(told[2]), int(told[3])
    assert most / 10**9 == pytest.approx(free / needed, rel=0.01)


def test_ranks_of_one_host_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    per_block = 1000 + kv_memory.BOOKKEEPING_BYTES
    monkeypatch.setattr(kv_memory, "available_bytes", lambda: 100 * per_block)
    cpu = torch.device("cpu")
    kv_memory.check_room(100, 1000, cpu, num_ranks=2)  # The other rank may have its share by now.
    with pytest.raises(ConfigError, match="at most 50 blocks fit"):
        kv_memory.check_room(101, 1000, cpu, num_ranks=2)
