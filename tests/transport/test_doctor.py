"""The doctor tries the transports, and reports what to change."""

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

from baton.cli import doctor
from baton.cli.doctor import (
    Finding,
    look_at_engine,
    look_at_machine,
    look_at_optional,
    look_at_peer,
    print_findings,
)
from baton.connectors.pull.identity import TICKET_KEY_PURPOSE
from baton.core.config import ClusterSecret
from baton.core.engine_card import EngineCard
from baton.core.identity import KVIdentity
from baton.core.ids import Address, EngineId, Epoch
from baton.engine.attention import compiled
from baton.protocol.introduction import Introduction, sign_introduction
from baton.protocol.messages import PUBLIC_KEY_BYTES
from baton.server.introduction import secret_ids
from baton.transport import self_test as module
from baton.transport.self_test import Outcome, self_test
from tests.transport.copy_library import built


@pytest.mark.processes
@pytest.mark.slow
def test_each_transport_is_tried_and_failures_give_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REPEATS", 1)
    local, tcp, pigeon = self_test(["local", "tcp", "pigeon"])
    for outcome in (local, tcp):
        assert outcome.error is None
        assert outcome.gb_per_s is not None
        assert outcome.gb_per_s > 0
    assert pigeon.gb_per_s is None
    assert "not a transport" in (pigeon.error or "")


def run(
    monkeypatch: pytest.MonkeyPatch, *outcomes: Outcome, options: tuple[str, ...] = ()
) -> tuple[int, str]:
    monkeypatch.setattr(module, "self_test", lambda names: list(outcomes))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(doctor, "PTRACE_SCOPE", Path("/nonexistent"))
    result = CliRunner().invoke(doctor.app, options, env={"BATON_SECRET": "", "COLUMNS": "160"})
    return result.exit_code, result.stdout


def test_a_machine_on_which_everything_works_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, Outcome("local", 3.0), Outcome("tcp", 1.5))[0] == 0


def test_what_does_not_work_is_named_as_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    status, output = run(monkeypatch, Outcome("local", None, "the kernel forbids it"), Outcome("tcp", 1.5))
    assert status == 1
    for words in ("the kernel forbids it", "1.50 GB/s", "BATON_SECRET", "CUDA", "RDMA"):
        assert words in output


def test_a_machine_on_which_nothing_works_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    status, _ = run(monkeypatch, Outcome("local", None, "no"), Outcome("tcp", None, "no"))
    assert status == 1


def test_the_findings_can_be_read_by_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    status, output = run(monkeypatch, Outcome("local", None, "no"), Outcome("tcp", 1.5), options=("--json",))
    findings = {finding["subject"]: finding for finding in json.loads(output)}
    assert status == 1
    assert findings["local"] == {"subject": "local", "is_good": False, "found": "does not work", "mend": "no"}
    assert findings["tcp"]["is_good"] is True


def test_brackets_in_a_remedy_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    print_findings([Finding("x", None, "not installed", "pip install 'kv-baton[nixl]'")], Console(width=160))
    assert "pip install 'kv-baton[nixl]'" in capsys.readouterr().out


def test_a_strict_ptrace_scope_is_named_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    scope = tmp_path / "ptrace_scope"
    monkeypatch.setattr(doctor, "PTRACE_SCOPE", scope)

    def found() -> Finding:
        return next(f for f in look_at_machine("x" * 16) if f.subject == "ptrace_scope")

    assert found().is_good is None
    scope.write_text("1\n")
    assert found().is_good is True
    scope.write_text("3\n")
    assert found().is_good is False
    assert "ptrace_scope=1" in found().mend


def test_a_secret_is_never_shown() -> None:
    secret = "swordfish-swordfish"
    findings = list(look_at_machine(secret))
    assert next(f for f in findings if f.subject == "cluster secret").found == "set"
    assert secret not in str(findings)


def test_readable_peers_are_distinguished_from_unreadable_ones() -> None:
    assert look_at_peer(os.getpid()).is_good is True
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    gone = look_at_peer(child.pid)
    assert gone.is_good is False
    assert "check that it runs" in gone.mend


class FakeEngine(BaseHTTPRequestHandler):
    """The two pages that the doctor reads; `page` is the introduction's."""

    page = b""

    def do_GET(self) -> None:
        body = b"" if self.path == "/health" else self.page
        self.send_response(200 if self.path == "/health" or self.page else 404)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        return


@pytest.fixture
def engine_url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), FakeEngine) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def introduce(
    secret: ClusterSecret, control_url: str, lost_links: Mapping[str, int] = MappingProxyType({})
) -> bytes:
    kv_identity = KVIdentity("m", "r", "float32", 1, 1, 8, "seed")
    signed = sign_introduction(
        Introduction(
            address=Address(EngineId("p0"), Epoch(1)),
            control_url=control_url,
            public_key=bytes(PUBLIC_KEY_BYTES),
            kv_identity=kv_identity,
            tp_size=1,
            block_tokens=16,
        ),
        secret.derive(TICKET_KEY_PURPOSE),
    )
    page = EngineCard(
        "p0",
        signed,
        "kv_producer",
        16,
        1,
        100,
        "m",
        kv_identity,
        secret_ids(secret),
        dict(lost_links),
    )
    return msgspec.json.encode(page)


def test_another_engine_is_asked_for_its_secret_and_its_control_port(
    engine_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = ClusterSecret(b"a secret of 16 bytes"), ClusterSecret(b"another one, of 16 bytes")
    open_port = engine_url.replace("http", "tcp")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        closed_port = f"tcp://127.0.0.1:{unused.getsockname()[1]}"

        monkeypatch.setattr(FakeEngine, "page", introduce(ours, open_port))
        assert [finding.is_good for finding in look_at_engine(engine_url, ours)] == [True, True, True]
        monkeypatch.setattr(FakeEngine, "page", introduce(ours, closed_port))
        *_, last = look_at_engine(engine_url, ours)
        assert (last.is_good, "cannot be reached" in last.found) == (False, True)
        monkeypatch.setattr(FakeEngine, "page", introduce(theirs, open_port))
        *_, last = look_at_engine(engine_url, ours)
        assert (last.is_good, last.found) == (False, "another one")
        monkeypatch.setattr(FakeEngine, "page", b"")
        assert [finding.is_good for finding in look_at_engine(engine_url, ours)] == [None]
        [gone] = look_at_engine(closed_port.replace("tcp", "http"), ours)
        assert gone.is_good is False


def test_links_that_an_engine_has_lost_are_shown_by_peer(
    engine_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = ClusterSecret(b"a secret of 16 bytes")
    lost = {"prefill-1": 3, "prefill-0": 1}
    monkeypatch.setattr(FakeEngine, "page", introduce(secret, engine_url.replace("http", "tcp"), lost))
    _, first, second, *rest = look_at_engine(engine_url, secret)
    assert [first.subject, second.subject] == [
        f"{engine_url} links to {p}" for p in ("prefill-0", "prefill-1")
    ]
    assert first.is_good is None
    assert first.found.startswith("1 lost")
    assert second.found.startswith("3 lost")
    assert [finding.is_good for finding in rest] == [True, True]

    _, output = run(monkeypatch, Outcome("tcp", 1.5), options=("--json", "--peer", engine_url))
    assert second.subject in {finding["subject"] for finding in json.loads(output)}
    _, output = run(monkeypatch, Outcome("tcp", 1.5), options=("--peer", engine_url))
    assert "3 lost" in output


@pytest.mark.parametrize("library", ["missing", "older", "present"])
def test_the_state_of_the_attention_library_is_told(
    library: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if library == "present" and not compiled.LIBRARY.exists():
        pytest.skip("no C compiler on this machine")
    if library != "present":
        path = tmp_path / "_decode.so"
        if library == "older":
            path.write_bytes(built().read_bytes())  # This library has other functions.
        monkeypatch.setattr(compiled, "LIBRARY", path)
    (finding,) = (
        finding for finding in look_at_optional(has_nixl=False) if finding.subject == "attention library"
    )
    assert finding.is_good is (True if library == "present" else None)
    assert ("scripts/build-library decode" in finding.mend) == (library != "present")
