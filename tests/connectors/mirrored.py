"""Pull and push as on a GPU with `kv_buffer_device: cpu`, with tensors on the CPU standing for the device's.

Found by module path. What the host copies is counted, and can be made to fail.
"""

from collections import Counter
from typing import Any, ClassVar

import msgspec

from baton.connectors.pull import BatonPullConnector, EngineIdentity
from baton.connectors.push import BatonPushConnector
from baton.contract.base import CopyBlocksOp


class _Counted:
    blocks: ClassVar[Counter[str]] = Counter()  # Copied blocks, by direction.
    fails: ClassVar[str | None] = None  # The direction in which copies fail.

    def set_host_xfer_buffer_ops(self, copy_operation: CopyBlocksOp) -> None:
        def copy(source: Any, target: Any, taken: list[int], placed: list[int], direction: Any) -> None:
            if direction == _Counted.fails:
                raise RuntimeError("the device does not answer")
            _Counted.blocks[direction] += len(taken)
            copy_operation(source, target, taken, placed, direction)

        super().set_host_xfer_buffer_ops(copy)  # type: ignore[misc]


class MirroredPull(_Counted, BatonPullConnector):
    @classmethod
    def identity_of(cls, vllm_config: Any) -> EngineIdentity:
        return msgspec.structs.replace(super().identity_of(vllm_config), device="cuda", buffer_device="cpu")


class MirroredPush(_Counted, BatonPushConnector):
    @classmethod
    def identity_of(cls, vllm_config: Any) -> EngineIdentity:
        return msgspec.structs.replace(super().identity_of(vllm_config), device="cuda", buffer_device="cpu")


COUNTED = _Counted
