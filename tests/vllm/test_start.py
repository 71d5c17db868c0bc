"""Refusals at start that need only vLLM's configuration, so no engine is started."""

import json
import subprocess
import sys

# As a worker of vLLM makes the connector, with the version of an installation.
SCRIPT = """
import json, sys
import vllm
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.plugins import load_general_plugins

load_general_plugins()
config = KVTransferConfig(**json.loads(sys.argv[1]))
kind = KVConnectorFactory.get_connector_class(config)
vllm.__version__ = sys.argv[2]

class Config:
    kv_transfer_config = config

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
kind(Config(), KVConnectorRole.SCHEDULER, None)
"""


def start(version: str, **fields: object) -> str:
    """Return the output of the attempt, which cannot succeed because there is no engine."""
    config = {"kv_connector": "BatonPullConnector", "kv_role": "kv_both", **fields}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(config), version],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode != 0
    return done.stdout + done.stderr


def test_an_untested_version_is_refused_unless_allowed() -> None:
    output = start("0.99.0")
    assert "this is vLLM 0.99.0" in output
    assert "allow_untested_vllm" in output
    allowed = start("0.99.0", kv_connector_extra_config={"allow_untested_vllm": True})
    assert "are tested with" not in allowed
    assert "vLLM 0.99.0 is untested" in allowed
