"""The cast that most tests share: a prefill and a decode engine, and once a single one to compare with."""

from baton.cli.processes import free_ports
from tests.vllm.engines import VllmPlan, transfer

PLAIN = "plain"
SINGLE = VllmPlan("single", None, cores="1")
(P_CONTROL_PORT,) = free_ports(1)  # D may be sent there by a client: for stock proxies, which name P.
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
