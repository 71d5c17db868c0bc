"""Settings of the whole suite. Fixtures live beside the tests that use them."""

import gc
import inspect
import os
import tempfile
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.event_loop import run
from tests.fork_server import forking_programs

# Garbage collection is off until pytest has collected the tests: the objects that this makes stay, and
# garbage collections took a third of its CPU time.
gc.disable()

# Set before anything imports torch: the machine is small, and several engines run at once.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Threads of torch that spin while they wait for each other take 10 times the CPU time on a busy machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Where an engine without a secret generates one: not among the files of the user who runs the tests.
os.environ["XDG_STATE_HOME"] = os.path.join(tempfile.gettempdir(), f"baton-tests-{os.getuid()}")

# No test asserts wall time; examples that took long to draw or to run say that the machine was busy.
# Each run draws other examples, so many runs of 60 find what fewer runs of more would.
settings.register_profile(
    "baton", deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("baton")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put files that start processes first.

    Workers take whole files. A file of few long tests that begins last would keep the run waiting.
    """
    starting = {item.path for item in items if item.get_closest_marker("processes")}
    items.sort(key=lambda item: item.path not in starting)


def pytest_collection_finish() -> None:
    """Keep what collection has made (7,500 items, every module) out of each later garbage collection.

    Collections of the oldest generation took 40% of the CPU time of tests that run in this process.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)  # The default thresholds cost 6% of the CPU time of tests/router.
    gc.enable()


@pytest.fixture(scope="module")
def forked_programs() -> Iterator[None]:
    """Start the programs of a module's tests in a hundredth of the time, without their imports."""
    with forking_programs():
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run coroutine tests, each in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}))
    return True
