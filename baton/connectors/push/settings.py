"""Settings of the push connector: pull's, and how early a consumer hears of what is ready.

{"stream": "layer", "host": "10.0.0.7", "transports": ["local", "tcp"]}
"""

from __future__ import annotations

from typing import Literal

from baton.connectors.pull.settings import PullSettings

Stream = Literal["off", "chunk", "layer"]


class PushSettings(PullSettings, frozen=True, kw_only=True):
    """Of a producer; a consumer takes whatever it is told.

    off: when the prefill has ended. chunk: after each step of it. layer: after each layer of each step, which
    costs the rank some ten microseconds a layer and is worth it where one step computes most of a prompt.
    """

    stream: Stream = "chunk"
