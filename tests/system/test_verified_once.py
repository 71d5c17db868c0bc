"""Over all processes of an engine, a ticket and an introduction are verified once for each request."""

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from baton.cli.processes import Fleet
from tests.system.engines import Engine, Engines, make_prompt, tokens_of

pytestmark = [pytest.mark.processes, pytest.mark.slow]

TRANSFER = {
    "kv_role": "kv_both",
    "kv_connector": "BatonPushConnector",
    "kv_connector_module_path": "tests.system.counting_push",
}


@pytest.fixture(scope="module")
def count_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("count") / "verified"


@pytest.fixture(scope="module")
def engines(
    small_model: Path, tmp_path_factory: pytest.TempPathFactory, count_file: Path
) -> Iterator[list[Engine]]:
    env = {**os.environ, "COUNT_FILE": str(count_file)}
    with Fleet(tmp_path_factory.mktemp("logs"), env=env) as fleet, closing(Engines(fleet)) as engines:
        yield engines.start(("p", small_model, TRANSFER), ("d", small_model, TRANSFER))


@pytest.fixture
def verified(count_file: Path) -> Path:
    count_file.write_text("")
    return count_file


def tokens_in(verified: Path) -> list[str]:
    return [line.split()[1] for line in verified.read_text().splitlines()]


def test_of_a_request_that_pulls(engines: list[Engine], verified: Path) -> None:
    p, d = engines
    prompt = make_prompt(1)
    params = p.prefill(prompt)
    assert len(tokens_of(d.complete(prompt, params))) == 12
    assert tokens_in(verified) == [params["baton_ticket"]]
    assert d.metric("kv_peer_transfers_total") == 1


def test_of_a_request_that_is_refused(engines: list[Engine], verified: Path) -> None:
    p, d = engines
    prompt = make_prompt(2)
    params = {**p.prefill(prompt), "baton_ticket": "nonsense"}
    for stream in (False, True):
        verified.write_text("")
        refused = d.complete(prompt, params, stream=stream)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "kv_transfer_params.baton_ticket"
        assert tokens_in(verified) == ["nonsense"]


def test_of_a_request_that_streams(engines: list[Engine], verified: Path) -> None:
    p, d = engines
    introduction = p.client.get(f"{p.url}/baton/introduction").json()["introduction"]
    params = {
        "do_remote_prefill": True,
        "transfer_id": "t",
        "remote_engine_id": "p",
        "baton_introduction": introduction,
    }
    prompt = make_prompt(3)
    answer = p.complete(prompt, {"do_remote_decode": True, "transfer_id": "t"}, max_tokens=1).json()
    assert len(tokens_of(d.complete(prompt, params))) == 12
    assert tokens_in(verified) == [introduction, answer["kv_transfer_params"]["baton_ticket"]]
