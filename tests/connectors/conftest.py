"""Models, engines and the world of pull. A file that needs others defines its own."""

import logging
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache

import pytest

from baton.checkpoints.checkpoint import load_model_config
from baton.checkpoints.random_model import write_checkpoint
from baton.connectors.storage.stores import lookup_thread
from baton.core.config import ModelConfig
from baton.engine.llm import LLM
from tests.connectors.engine_world import (
    AnswerOf,
    ModelOf,
    Start,
    answering,
    engines,
    small_model,
)
from tests.connectors.pull_world import World


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder = tmp_path_factory.mktemp("model")
    write_checkpoint(folder, hidden=64, layers=2, heads=4, kv_heads=2, vocab=512)
    return load_model_config(folder, max_model_len=256)


@pytest.fixture(scope="module")
def start(model: ModelConfig) -> Iterator[Start]:
    """Starts engines with any connector, which live until the last test of the file."""
    with engines(model) as start_engine:
        yield start_engine


@pytest.fixture(scope="module")
def alone(start: Start) -> LLM:
    """An engine without a connector, which produces the expected tokens."""
    return start()


@pytest.fixture(scope="session")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> ModelOf:
    """Models by family, and by the dtype of the cache that may follow its name."""
    return cache(lambda family: small_model(tmp_path_factory.mktemp(family.split()[0]), family))


@pytest.fixture(scope="session")
def answer_of(model_of: ModelOf) -> Iterator[AnswerOf]:
    """Answer of an engine with a model of this family and without a connector."""
    with answering(model_of) as answer:
        yield answer


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.close()


class RaisesErrors(logging.Handler):
    """Raises the exceptions that are logged."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info is not None and record.exc_info[1] is not None:
            raise record.exc_info[1]


@pytest.fixture(scope="module")
def failed_lookups_raise() -> Iterator[None]:
    """A lookup with a bug finds nothing in an engine. In a world without threads it fails the test."""
    handler = RaisesErrors()
    lookup_thread.logger.addHandler(handler)
    yield
    lookup_thread.logger.removeHandler(handler)
