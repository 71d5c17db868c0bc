"""The conformance kit for KV connectors, ours and others': the contract, put to the test.

    machine (Hypothesis) --requests, steps, aborts, faults--> world: one engine, or two that hand over
    engine: the real scheduler --WatchedScheduler--> the connector <--WatchedWorker-- ranks with KV tensors
    every call --> story; every promise --> rules

`check_connector` runs it, `connector_suite` makes pytest run it, `baton check` prints the table. What has to
hold is in `rules`; docs/connectors.md is for authors.
"""

from baton.testing.contract.case import ConnectorCase
from baton.testing.contract.check import Verdict, check_connector
from baton.testing.contract.damage import cut_files
from baton.testing.contract.rules import RULES, Rule
from baton.testing.contract.story import ContractBroken
from baton.testing.contract.suite import connector_suite

__all__ = [
    "RULES",
    "ConnectorCase",
    "ContractBroken",
    "Rule",
    "Verdict",
    "check_connector",
    "connector_suite",
    "cut_files",
]
