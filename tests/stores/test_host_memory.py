"""Allocation is refused before memory runs out, even with several ranks."""

from pathlib import Path

import numpy as np
import pytest

from baton.core.errors import ConfigError
from baton.stores.host import memory as host_memory
from baton.stores.host.memory import GIB, available_bytes, touch


def write_group(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(f"{content}\n")


def write_own(root: Path, lines: str) -> None:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(lines)


def test_a_containers_limit_bounds_its_free_memory(tmp_path: Path) -> None:
    write_own(tmp_path, "0::/\n")
    stat = "anon 700\ninactive_file 100\nactive_file 5"
    write_group(tmp_path / "sys/fs/cgroup", memory__max=1000, memory__current=900, memory__stat=stat)
    assert available_bytes(tmp_path) == 200


def test_the_tightest_limit_of_all_parent_groups_counts(tmp_path: Path) -> None:
    write_own(tmp_path, "0::/pods/mine\n")
    top, stat = tmp_path / "sys/fs/cgroup", "inactive_file 0"
    write_group(top, memory__max="max", memory__current=5, memory__stat=stat)
    write_group(top / "pods", memory__max=700, memory__current=600, memory__stat=stat)
    write_group(top / "pods/mine", memory__max=400, memory__current=100, memory__stat=stat)
    assert available_bytes(tmp_path) == 100


def test_limits_of_cgroups_v1_are_read(tmp_path: Path) -> None:
    write_own(tmp_path, "9:name=systemd:/\n4:memory:/docker/0123\n1:cpu,cpuacct:/\n")
    write_group(
        tmp_path / "sys/fs/cgroup/memory",
        memory__limit_in_bytes=500,
        memory__usage_in_bytes=600,
        memory__stat="inactive_file 1\ntotal_inactive_file 350",
    )
    assert available_bytes(tmp_path) == 250


def test_free_memory_is_never_negative(tmp_path: Path) -> None:
    write_own(tmp_path, "0::/\n")
    write_group(tmp_path / "sys/fs/cgroup", memory__max=10, memory__current=20, memory__stat="anon 20")
    assert available_bytes(tmp_path) == 0


def test_without_control_groups_it_is_the_machines_memory(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) > 1 << 20


def test_memory_taken_by_another_rank_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks each see room for their share, but there is not enough for both."""
    monkeypatch.setattr(host_memory, "PART_BYTES", 100)
    left = iter([1000, 600, 200, 99])
    with pytest.raises(ConfigError, match=r"cpu_gib: this rank's share .* only 0.00 GiB of memory are free"):
        touch(np.empty(400, np.uint8), "cpu_gib", available=lambda: next(left))
    assert next(left, None) is None, "free memory must be checked before each part"


def test_allocated_memory_is_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "PART_BYTES", 64)
    memory = np.ones(150, np.uint8)
    touch(memory, "cpu_gib", available=lambda: GIB)
    assert not memory.any()
