"""Tests of armed write faults: the writes that fail, and the tensors that the connector gets."""

from collections.abc import Callable

import pytest
import torch

from baton.testing.contract.watched_memory import InjectedWriteError, WriteFault

Write = Callable[[torch.Tensor], object]

WRITES: dict[str, Write] = {
    "setitem": lambda cache: cache.__setitem__(1, torch.ones(2, 3)),
    "setitem of a view": lambda cache: cache.view(8, 3)[2:4].__setitem__(0, torch.ones(3)),
    "copy_ to one of unbind": lambda cache: cache.unbind(0)[1].copy_(torch.ones(2, 3)),
    "index_copy_": lambda cache: cache.index_copy_(0, torch.tensor([1]), torch.ones(1, 2, 3)),
    "out": lambda cache: torch.index_select(torch.ones(1, 2, 3), 0, torch.tensor([0]), out=cache[1:2]),
    "as_strided": lambda cache: cache.as_strided((2, 12), (12, 1))[0].copy_(torch.ones(12)),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_one_armed_write_fails_and_changes_nothing(write: Write) -> None:
    fired: list[str] = []
    cache = torch.zeros(4, 2, 3)
    fault = WriteFault(lambda: fired.append("fired"))
    shown = fault.show({"layer": cache})["layer"]
    fault.arm()
    with pytest.raises(InjectedWriteError):
        write(shown)
    assert (fired, fault.num_fired) == (["fired"], 1)
    assert not cache.any()
    write(shown)
    assert cache.any()


def test_a_write_elsewhere_does_not_fail() -> None:
    cache = torch.zeros(4, 2, 3)
    fault = WriteFault(lambda: None)
    shown = fault.show({"layer": cache})["layer"]
    fault.arm()
    for staging in (shown[1].clone(), torch.empty(2, 3), shown.to(torch.float64)[0]):
        staging.copy_(shown[1])
        assert type(staging) is torch.Tensor
    assert fault.num_fired == 0
    assert shown.data_ptr() == cache.data_ptr()
