"""BatonPushConnector: the consumer reads the prompt's KV while the producer still computes it.

The router sends both legs at once. D finds P by P's signed introduction, asks for the transfer, and reads
what P announces. When the prefill ends, P lends the blocks as in pull, and D reads the tail. It also does all
that BatonPullConnector does, so one pair of engines serves both kinds of routers.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

from baton.connectors.pull.connector import BatonPullConnector
from baton.connectors.pull.identity import EngineIdentity
from baton.connectors.pull.layer_reports import LayerReporter
from baton.connectors.pull.scheduler import PullSchedulerHalf
from baton.connectors.pull.worker import PullWorkerHalf
from baton.connectors.push.announcer import PrefillAnnouncer
from baton.connectors.push.settings import PushSettings


class PushIdentity(EngineIdentity, frozen=True, kw_only=True):
    settings_kind: ClassVar[type[PushSettings]] = PushSettings

    settings: PushSettings
    does_push: bool = True


class BatonPushConnector(BatonPullConnector):
    identity_kind = PushIdentity
    scheduler_kind = partial(PullSchedulerHalf, announcer=PrefillAnnouncer)
    worker_kind = partial(PullWorkerHalf, reporter=LayerReporter)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return extra_config.get("stream") == "layer"  # Layers are reported from Python.
