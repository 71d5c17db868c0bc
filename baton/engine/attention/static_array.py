"""An array that the host fills and a device reads at a fixed address, as graphs require."""

import numpy as np
import numpy.typing as npt
import torch


class StaticArray:
    """On a CPU one buffer; on a GPU pinned host memory and its copy on the device."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._host = torch.zeros(shape, dtype=dtype, pin_memory=is_cuda)
        self._array: npt.NDArray[np.integer] = self._host.numpy()
        self.tensor = self._host.to(device) if is_cuda else self._host

    def fill(self, values: npt.NDArray[np.integer]) -> None:
        """Write `values` from the first element of each dimension on. Elements beyond them do not change.

        The device has finished the last step before the next one is prepared, so it does not read the host's
        buffer meanwhile.
        """
        self._array[tuple(slice(count) for count in values.shape)] = values
        if self.tensor is not self._host:
            self.tensor.copy_(self._host, non_blocking=True)
