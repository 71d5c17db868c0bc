"""An engine core that hangs: its server reports it and ends, instead of hanging with it."""

import select
import threading
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from baton.cli.processes import Fleet
from baton.server.run import EXIT_ENGINE_DIED
from tests.system.engines import WAIT_S, Engines, make_prompt, tokens_of

pytestmark = [pytest.mark.processes, pytest.mark.slow]


def test_a_core_that_is_stopped_ends_its_server_with_a_clear_error(
    small_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with Fleet(tmp_path_factory.mktemp("logs")) as fleet, closing(Engines(fleet)) as engines:
        (engine,) = engines.start(("e", small_model, None), options={"e": ["--step-timeout-s", "6"]})
        tokens_of(engine.complete(make_prompt(1)))
        [core] = [process for process in engine.processes() if process.name() == "baton-core"]
        answers: list[httpx.Response] = []
        core.suspend()
        asking = threading.Thread(target=lambda: answers.append(engine.complete(make_prompt(2))))
        asking.start()
        asking.join(WAIT_S)
        assert select.select([engine.child], [], [], WAIT_S)[0], "the server outlives its engine"
        (answer,) = answers
        assert answer.status_code == 503
        assert (
            "stopped" in answer.json()["error"]["message"]
        )  # The engine, or on a busy host one of its processes.
        assert "the engine core hangs" in engine.child.log_tail()
        assert engine.child.exit_status() == EXIT_ENGINE_DIED != 0
        assert not core.is_running()
