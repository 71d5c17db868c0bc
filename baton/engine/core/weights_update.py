"""Update of the weights of a running engine from a folder of the same architecture.

    prepared --steps in flight end--> staged --no request of the old weights holds blocks--> changed
                                        |                                                       `--> in use
                                        `--refused, or the time is up: nothing has changed

    prepared   the folder was checked and digested, outside of the engine's loop
    staged     every rank has read and checked all weights, beside those in use
    changed    every rank computes with them; the prefix cache is empty, the connector knows them

The modes are those of vLLM's `pause_generation`:

    wait    requests run to their end; those that arrive meanwhile begin with the new weights
    abort   requests end at once, with what they have
    keep    requests go on: their tokens stay, and all their KV is computed again with the new weights

A rank that fails while it changes ends the engine: weights of two versions never compute together.
"""

from pathlib import Path
from typing import Literal, get_args

import msgspec

from baton.checkpoints.checkpoint import FilesState, files_state, load_model_config
from baton.core.config import ModelConfig
from baton.core.errors import BatonError, UserError
from baton.core.identity import check_version
from baton.engine.api import RequestError

PauseMode = Literal["wait", "abort", "keep"]
WAIT_S = 60.0  # Wait for requests to end ("wait"), or for loads that fill blocks in use ("keep").
WAIT_MAX_S = 86_400.0


class UpdateFailed(BatonError):
    """The weights were not updated, and nothing has changed."""


class UpdateUnderWay(UpdateFailed):
    """Another update is under way."""


class WeightsUpdate(msgspec.Struct, frozen=True, array_like=True):
    model_config: ModelConfig  # The configuration after the update.
    files: FilesState  # State of the weight files before they were digested.
    mode: PauseMode
    timeout_s: float

    @property
    def weights(self) -> tuple[str, str | None]:
        """Digest and name, as `KVIdentity.updated` takes them."""
        return self.model_config.weights_digest, self.model_config.weights_version or None


class UpdateEnd(msgspec.Struct, frozen=True, array_like=True):
    error: RequestError | None = None

    def check(self) -> None:
        """Raise the error, if there is one."""
        if self.error is None:
            return
        if self.error.is_users:
            raise UserError(self.error.message, field=self.error.field)
        raise UpdateFailed(self.error.message)


def prepare_update(
    current: ModelConfig, folder: str | Path, version: str | None, mode: str, timeout_s: float
) -> WeightsUpdate:
    """Check the arguments and digest the folder's weights, which takes seconds per ten gigabytes.

    Tokenizer, template, special tokens and limits of the folder are not taken. Raises UserError.
    """
    if mode not in get_args(PauseMode):
        raise UserError(f"must be {', '.join(get_args(PauseMode))}, is {mode!r:.100}", field="mode")
    if version is not None:
        check_version(version, field="version")
    if not 0 <= timeout_s <= WAIT_MAX_S:
        raise UserError(f"must be in [0, {WAIT_MAX_S:g}]", field="timeout_s")
    try:
        files = files_state(folder)
        new = load_model_config(
            folder,
            dtype=current.dtype,
            max_model_len=current.max_model_len,
            kv_cache_dtype=current.kv_cache_dtype,
        )
    except UserError:
        raise
    except (OSError, ValueError) as error:  # The folder vanished meanwhile, or its name has a zero byte.
        raise UserError(f"cannot be read: {error}", field="folder") from error
    if new.architecture_digest != current.architecture_digest:
        raise UserError(
            f"{str(folder)!r} is of another architecture than the model; an update changes weights only",
            field="folder",
        )
    updated = msgspec.structs.replace(
        current, model=new.model, weights_digest=new.weights_digest, weights_version=version or ""
    )
    return WeightsUpdate(updated, files, mode, timeout_s)  # type: ignore[arg-type]  # Checked above.
