"""An array of the host that a device reads at an address that stays, as a graph demands."""

import numpy as np
import numpy.typing as npt
import torch


class StaticArray:
    """On a CPU, one memory; on a GPU, pinned host memory and its copy."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._host = torch.zeros(shape, dtype=dtype, pin_memory=is_cuda)
        self._array: npt.NDArray[np.integer] = self._host.numpy()
        self.tensor = self._host.to(device) if is_cuda else self._host

    def fill(self, values: npt.NDArray[np.integer]) -> None:
        """From the first element of each dimension on; what lies beyond stays as it is.

        The device has done the last step when the next one is put together, so nothing reads the host's side.
        """
        self._array[tuple(slice(count) for count in values.shape)] = values
        if self.tensor is not self._host:
            self.tensor.copy_(self._host, non_blocking=True)
