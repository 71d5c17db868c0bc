"""Engines that most tests share: one for prefill, one for decode, and once a single one for comparison.

P and D start as users start them; some tests kill them.
"""

import os

from baton.cli.processes import is_port_free
from tests.vllm.engines import VllmPlan, transfer

PLAIN = "plain"
SINGLE = VllmPlan("single", None)
# Clients may send D to this port, for stock proxies that name P. P must get it again after a restart, so it
# is no ephemeral port, which the system might give to D when it tries to reach P.
_FIRST_PORT = 15_000 + os.getpid() % 15_000
P_CONTROL_PORT = next(port for port in range(_FIRST_PORT, 32_000) if is_port_free("127.0.0.1", port))
# vLLM finds one connector by its entry point and the other by its module.
P = VllmPlan(
    "p",
    transfer("BatonPushConnector", "kv_producer", "p", extra={"port": P_CONTROL_PORT}),
    is_forked=False,
)
D = VllmPlan(
    "d",
    transfer(
        "BatonPushConnector",
        "kv_consumer",
        "d",
        kv_connector_module_path="baton.hosts.vllm",
        extra={"allowed_peers": [f"127.0.0.1:{P_CONTROL_PORT}"]},
    ),
    is_forked=False,
)
