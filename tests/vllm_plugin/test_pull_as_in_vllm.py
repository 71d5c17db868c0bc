"""The tests of pull with the halves that run in vLLM."""

from collections.abc import Iterator

import pytest

from tests.connectors.test_pull_failures import *  # noqa: F403
from tests.connectors.test_pull_handoff import *  # noqa: F403
from tests.vllm_plugin.world import VllmWorld


@pytest.fixture
def world() -> Iterator[VllmWorld]:
    world = VllmWorld()
    yield world
    world.close()
