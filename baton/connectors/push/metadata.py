"""Metadata of a step with push."""

from __future__ import annotations

from dataclasses import dataclass

from baton.connectors.pull.metadata import PullMetadata
from baton.connectors.push.layer_reports import LayerReportOrder


@dataclass(frozen=True, slots=True)
class PushMetadata(PullMetadata):
    layer_reports: LayerReportOrder | None = None  # None: computed layers are not reported.
