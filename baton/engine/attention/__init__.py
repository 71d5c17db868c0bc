"""Paged attention: one interface (`backend`), one implementation for each kind of device.

cpu    sdpa     torch's scaled-dot-product attention over gathered blocks; decoded tokens by `compiled`
cuda   cuda     a Triton kernel that reads through the block table; for a latent or quantised cache `sdpa`
"""

from baton.core.errors import UserError
from baton.engine.attention.backend import AttentionBackend, AttentionShape
from baton.engine.attention.compiled import compiled_decode
from baton.engine.attention.sdpa import SdpaBackend

__all__ = ["AttentionBackend", "AttentionShape", "build_backend"]


def build_backend(shape: AttentionShape) -> AttentionBackend:
    """The backend for the shape's device. Raises UserError if it cannot run."""
    match shape.device.type:
        case "cpu":
            return SdpaBackend(shape, compiled_decode(shape))
        case "cuda":
            from baton.engine.attention.cuda import CudaBackend, require_cuda

            require_cuda()
            reads_as_stored = shape.latent_dim is None and not shape.is_quantised
            return CudaBackend(shape) if reads_as_stored else SdpaBackend(shape)
        case other:
            raise UserError(f"must be cpu or cuda, is {other!r}", field="device")
