"""The view of a supervisor, `ps` and a shell: names of processes, exit statuses, temporary folders.

The names themselves are in `names`, with those of threads.
"""

from baton.cli import serve, with_parent
from baton.engine.process import child
from baton.router import run as route_run
from baton.server import run as serve_run
from tests.golden.golden import literals

NAME_BYTES_MAX = 15  # Of Linux; a longer one is cut.


def test_exit_statuses() -> None:
    assert (serve_run.EXIT_STOPPED, serve_run.EXIT_ENGINE_DIED, serve.EXIT_BAD_CONFIG) == (0, 1, 2)
    assert (route_run.EXIT_STOPPED, route_run.EXIT_NOT_STARTED) == (0, 3)
    assert (child.PARENT_GONE, with_parent.PARENT_IS_GONE) == (70, 70)


def test_processes_can_be_told_apart_by_name() -> None:
    names = ("baton-core", "baton-rank-{}", "baton-worker")
    assert set(names) <= literals("baton/engine", "baton/http")
    assert all(len(name.replace("{}", "000")) <= NAME_BYTES_MAX for name in names)


def test_temporary_folders() -> None:
    assert {"baton-ranks-", "baton-kit-", "baton-check-", "baton-kv-"} <= literals("baton")
