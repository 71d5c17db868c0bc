"""Options that `baton up` and `baton demo` share."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from baton.core.option import AtLeast1, Option

if TYPE_CHECKING:
    from baton.cli.system import EngineArguments


class SystemSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Options of `baton up` and `baton demo`.

    mode: pull (default): one leg after the other; push: both at once, KV moves early.
    stream: When KV moves in push: off, chunk or layer.
    tp: Tensor-parallel size of each engine.
    prefill_tp: Tensor-parallel size of prefill engines, if different.
    decode_tp: Tensor-parallel size of decode engines, if different.
    block_size: Tokens in a KV block.
    prefill_block_size: Tokens in a KV block of prefill engines, if different.
    num_blocks: KV blocks of each engine.
    dtype: float32, bfloat16 or float16.
    log_dir: Folder for the logs.
    """

    mode: Annotated[str | None, Option()] = None
    stream: Annotated[str | None, Option()] = None
    tp: Annotated[AtLeast1, Option()] = 1
    prefill_tp: Annotated[AtLeast1 | None, Option()] = None
    decode_tp: Annotated[AtLeast1 | None, Option()] = None
    block_size: Annotated[AtLeast1 | None, Option()] = None
    prefill_block_size: Annotated[AtLeast1 | None, Option()] = None
    num_blocks: Annotated[Annotated[int, msgspec.Meta(ge=2)] | None, Option()] = None
    dtype: Annotated[str | None, Option()] = None
    log_dir: Annotated[Path, Option()] = Path(".baton/logs")

    def arguments(self, model: Path, **more: Any) -> "EngineArguments":
        """Arguments of decode engines; `more`: fields that no common option sets."""
        from baton.cli.system import EngineArguments

        return EngineArguments(
            model,
            tp=self.decode_tp or self.tp,
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            dtype=self.dtype,
            **more,
        )

    def prefill_arguments(self, arguments: "EngineArguments") -> "EngineArguments":
        """Arguments of prefill engines. `arguments`: those of decode engines."""
        block_size = self.prefill_block_size or self.block_size
        return replace(arguments, tp=self.prefill_tp or self.tp, block_size=block_size)
