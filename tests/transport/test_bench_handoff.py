"""The handoff benchmark's own arithmetic, tables and pictures; engines are started by `make bench` only."""

import io
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import httpx
import pytest
from rich.console import Console

from baton.bench.asking import Answer, AskingError, ask, lend
from baton.bench.handoff import Lengthwise, Overheads, Prompts, main, plot, print_overheads, print_rows


def row(**changed: float) -> Lengthwise:
    values = {"single_s": 1.0, "handoff_s": 1.03, "second_gap_s": 0.05, "step_s": 0.045, **changed}
    return Lengthwise("pull", 512, **values)


def test_the_goals_are_shares_of_the_single_engine_plus_a_little() -> None:
    assert row(handoff_s=1.034).meets_first_goal
    assert not row(handoff_s=1.036).meets_first_goal
    assert row(second_gap_s=0.054).meets_second_goal
    assert not row(second_gap_s=0.056).meets_second_goal


def test_the_tables_say_what_is_met() -> None:
    console = Console(record=True, width=150, file=io.StringIO())
    print_rows([row(), row(handoff_s=2.0)], console)
    print_overheads([Overheads("pull", 0.012, 0.001, 0.03, 1.01)], console)
    text = console.export_text()
    assert text.count("missed") == 2
    assert "12.0" in text
    assert "3.0%" in text


def test_pictures_are_drawn_where_they_are_asked_for(tmp_path: Path) -> None:
    pictures = plot([row(), row(handoff_s=2.0)], tmp_path / "benchmarks")
    assert [picture.name for picture in pictures] == ["handoff-first-token.png", "handoff-second-token.png"]
    assert all(picture.read_bytes().startswith(b"\x89PNG") for picture in pictures)


def test_no_prompt_begins_like_another() -> None:
    prompts = Prompts()
    assert len({tuple(prompts.of(64)[:4]) for _ in range(100)}) == 100


def test_an_unknown_mode_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--modes", "pull,pigeon"])
    assert "pigeon" in capsys.readouterr().err


def test_gaps_are_counted_from_the_second_token_on() -> None:
    answer = Answer((5, 6, 7, 8), (1.0, 1.5, 1.75, 2.0))
    assert (answer.first_token_s, answer.second_gap_s) == (1.0, 0.5)
    assert answer.later_gaps_s == (0.25, 0.25)


class Handler(BaseHTTPRequestHandler):
    answer = b""
    status = 200

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(self.answer)))
        self.end_headers()
        self.wfile.write(self.answer)

    def log_message(self, format: str, *args: object) -> None:
        return


@pytest.fixture
def server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_tokens_are_noted_as_they_come(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    events = b"".join(
        b'data: {"choices": [{"token_ids": %s}]}\n\n' % tokens for tokens in (b"[4]", b"[5, 6]")
    )
    monkeypatch.setattr(Handler, "answer", events + b"data: [DONE]\n")
    with httpx.Client(trust_env=False) as client:
        answer = ask(client, server, [1, 2], max_tokens=3)
        assert answer.token_ids == (4, 5, 6)
        assert answer.arrived_s == tuple(sorted(answer.arrived_s))
        with pytest.raises(AskingError, match="3 tokens instead of 4"):
            ask(client, server, [1, 2], max_tokens=4)


def test_a_refusal_is_no_measurement(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Handler, "answer", b"no room")
    monkeypatch.setattr(Handler, "status", 503)
    with httpx.Client(trust_env=False) as client:
        with pytest.raises(AskingError, match="503"):
            ask(client, server, [1], max_tokens=1)
        with pytest.raises(AskingError, match="lent nothing"):
            lend(client, server, [1], "t")


def test_an_answer_that_lends_nothing_is_no_measurement(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Handler, "answer", b"{}")
    with httpx.Client(trust_env=False) as client, pytest.raises(AskingError, match="lent nothing"):
        lend(client, server, [1], "t")
