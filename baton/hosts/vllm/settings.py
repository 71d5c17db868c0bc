"""Plug-in settings in vLLM's `kv_connector_extra_config`, beside the connector's own settings.

{"allow_untested_vllm": true, "secret_file": "/run/baton/secret", "revision": "2026-11-20", "port": 14600}

The cluster secret is no setting, because vLLM logs its configuration and every user of the machine can read a
command line. It comes from the file that `secret_file` names, from BATON_SECRET in the environment, or from a
file of the user that the first engine creates (`baton.core.secret_source`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Self

import msgspec

from baton.connectors.extra_config import FIELD
from baton.core.config import ClusterSecret
from baton.core.errors import ConfigError
from baton.core.secret_source import find_secret
from baton.core.validation import explain

logger = logging.getLogger(__name__)


class PluginSettings(msgspec.Struct, frozen=True, kw_only=True):
    allow_untested_vllm: bool = False
    secret_file: str | None = None
    insecure_no_secret: bool = False  # Move KV on this host without a secret; for tests.
    # Names the weights instead of a digest of all their bytes, which takes seconds per ten gigabytes at
    # start. The operator must make sure that engines with equal revisions have equal weights.
    revision: str | None = None
    otlp_traces_endpoint: str | None = None  # Where spans go. None: see `traces.endpoint_of`.

    def __post_init__(self) -> None:
        if self.revision == "":
            raise ConfigError("must not be empty", field=f"{FIELD}.revision")

    @classmethod
    def split(cls, extra: Mapping[str, Any]) -> tuple[Self, dict[str, Any]]:
        """Return (plug-in settings, the connector's settings). Raises ConfigError that names a wrong
        plug-in setting.
        """
        names = cls.__struct_fields__
        try:
            ours = msgspec.convert({key: extra[key] for key in names if key in extra}, cls)
        except msgspec.ValidationError as error:
            problem, path = explain(error, cls)
            raise ConfigError(problem, field=FIELD + path) from error
        return ours, {key: value for key, value in extra.items() if key not in names}

    def find_secret(self, environment: Mapping[str, str]) -> ClusterSecret | None:
        """Find the cluster secret. Raises ConfigError for a file that cannot be read or a key that is too
        short.
        """
        found = find_secret(
            environment,
            file=self.secret_file,
            field=f"{FIELD}.secret_file",
            is_file_first=True,
            moves_kv=True,
            is_insecure=self.insecure_no_secret,
        )
        if found.warning:
            logger.warning(found.warning)
        return found.secret
