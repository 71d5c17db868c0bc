"""Conformance kit for KV connectors: drives a connector with random requests and checks the contract.

    state machine (Hypothesis) --requests, steps, aborts, faults--> world: one engine, or a pair (P and D)
    engine: the real scheduler --WatchedScheduler--> the connector <--WatchedWorker-- ranks with KV tensors
    every call is recorded in the story; every rule is checked and counted

`check_connector` runs it, `connector_suite` runs it under pytest, `baton check` prints the table. `rules`
lists what must hold; docs/connectors.md is for authors of connectors.
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
