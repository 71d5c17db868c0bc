"""Messages between the front end and the engine core's process, as msgpack.

front end --Start-----------------------> core     front end <--Started | StartFailed----- core
          --AddRequest, Abort, TakeBack --->                 <--Outputs-----------------
          --Ping, Drain, UpdateWeights, Stop->               <--Pong, Drained, WeightsUpdated, Stopped--
"""

from typing import Any

import msgspec

from baton.core.config import EngineConfig
from baton.engine.api import EngineOutput, EngineOutputs, EngineRequest
from baton.engine.core.weights_update import UpdateEnd, WeightsUpdate


class Start(msgspec.Struct, frozen=True, tag="Start", array_like=True):
    config: EngineConfig
    connector_factory: str | None


class AddRequest(msgspec.Struct, frozen=True, tag="AddRequest", array_like=True):
    request: EngineRequest


class Abort(msgspec.Struct, frozen=True, tag="Abort", array_like=True):
    request_id: str


class TakeBack(msgspec.Struct, frozen=True, tag="TakeBack", array_like=True):
    """Release the loan of these params of a finished request: no consumer will fetch it."""

    kv_transfer_params: dict[str, Any]


class Ping(msgspec.Struct, frozen=True, tag="Ping", array_like=True):
    """Liveness check, answered between two steps."""


class Drain(msgspec.Struct, frozen=True, tag="Drain", array_like=True):
    """Grant no more loans; answer when no loan is open and no request runs, or after `timeout_s`."""

    timeout_s: float


class UpdateWeights(msgspec.Struct, frozen=True, tag="UpdateWeights", array_like=True):
    """Answer when the update has ended. Only one at a time."""

    update: WeightsUpdate


class Stop(msgspec.Struct, frozen=True, tag="Stop", array_like=True):
    """Shut down and end."""


class Started(msgspec.Struct, frozen=True, tag="Started", array_like=True):
    """Ready for requests."""

    introduction: str | None = None  # The scheduler half's. It holds until a restart or other weights.


class StartFailed(msgspec.Struct, frozen=True, tag="StartFailed", array_like=True):
    message: str
    is_users: bool  # Whether the configuration has to change.


class Restarting(msgspec.Struct, frozen=True, tag="Restarting", array_like=True):
    """A rank died and all are restarted. Open requests end with `failed`; new ones are refused.

    Both are in one message, so that the front end is not ready when a client gets its error.
    """

    reason: str
    failed: list[EngineOutput] = []


class Restarted(msgspec.Struct, frozen=True, tag="Restarted", array_like=True):
    """Ready for requests again, with a new epoch for peers."""

    introduction: str | None = None


class Outputs(msgspec.Struct, frozen=True, tag="Outputs", array_like=True):
    outputs: EngineOutputs


class Pong(msgspec.Struct, frozen=True, tag="Pong", array_like=True):
    """The answer to Ping."""


class Drained(msgspec.Struct, frozen=True, tag="Drained", array_like=True):
    """The answer to Drain."""

    is_whole: bool  # False: the time was up first.


class WeightsUpdated(msgspec.Struct, frozen=True, tag="WeightsUpdated", array_like=True):
    """The answer to UpdateWeights."""

    end: UpdateEnd
    introduction: str | None = None


class Stopped(msgspec.Struct, frozen=True, tag="Stopped", array_like=True):
    """The core's last message. No open request will be answered."""

    reason: str


ToCore = Start | AddRequest | Abort | TakeBack | Ping | Drain | UpdateWeights | Stop
FromCore = (
    Started | StartFailed | Restarting | Restarted | Outputs | Pong | Drained | WeightsUpdated | Stopped
)
