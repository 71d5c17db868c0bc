"""The cast that most tests share: a prefill and a decode engine, and once a single one to compare with."""

import os

from baton.cli.processes import is_port_free
from tests.vllm.engines import VllmPlan, transfer

PLAIN = "plain"
SINGLE = VllmPlan("single", None, cores="1")
# D may be sent there by a client: for stock proxies, which name P. P has to get it again after its death, so
# it is none of the ports that systems give out by themselves, to D's own attempts to reach P for example.
_FIRST_PORT = 15_000 + os.getpid() % 15_000
P_CONTROL_PORT = next(port for port in range(_FIRST_PORT, 32_000) if is_port_free("127.0.0.1", port))
# One by its entry point, the other by its module: vLLM's two ways to find a connector.
P = VllmPlan(
    "p", transfer("BatonPushConnector", "kv_producer", "p", extra={"port": P_CONTROL_PORT}), cores="0"
)
D = VllmPlan(
    "d",
    transfer(
        "BatonPushConnector",
        "kv_consumer",
        "d",
        kv_connector_module_path="baton.vllm_plugin",
        extra={"allowed_peers": [f"127.0.0.1:{P_CONTROL_PORT}"]},
    ),
    cores="1",
)
