"""Start of the configured executor. Each kind is imported only if it is used."""

from __future__ import annotations

from baton.core.config import EngineConfig
from baton.engine.executor import Executor


def start_executor(config: EngineConfig, connector_factory: str | None) -> Executor:
    """An executor whose ranks are ready. Raises UserError for a configuration that the user has to change,
    and ExecutorDied if ranks in other processes fail otherwise."""
    if config.parallel_config.executor == "multiprocess":
        from baton.engine.executor.multiprocess import MultiprocessExecutor

        return MultiprocessExecutor(config, connector_factory)
    if config.parallel_config.executor == "ray":
        from baton.engine.executor.ray import RayExecutor

        return RayExecutor(config, connector_factory)
    from baton.engine.executor.inprocess import InProcessExecutor

    return InProcessExecutor(config, connector_factory)
