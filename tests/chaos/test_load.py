"""The load on a small server that answers, fails, cuts connections and hangs."""

import socketserver
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from lab.chaos.load import Load, ask_all
from lab.chaos.questions import make_questions

QUESTIONS = make_questions(12)
TIMEOUT_S = 30.0
NUM_CLIENTS = 3
WHOLE = b'{"choices": [{"text": "a", "token_ids": [1]}]}'
STREAM = b'data: {"choices": [{"text": "a", "token_ids": [1]}]}\n\ndata: [DONE]\n\n'


class Server(ThreadingHTTPServer):
    """An HTTP server. A test sets `mode`, which decides how requests end."""

    daemon_threads = True
    mode = "right"

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.is_closing = threading.Event()
        self._received = threading.Condition()
        self._num_received = 0

    def note_request(self) -> None:
        with self._received:
            self._num_received += 1
            self._received.notify_all()

    def wait_for_answers(self, count: int) -> None:
        """Wait until `count` requests that arrive from now on have ended.

        Each client has one open request at a time.
        """
        with self._received:
            wanted = self._num_received + count + NUM_CLIENTS
            assert self._received.wait_for(lambda: self._num_received >= wanted, TIMEOUT_S)

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore errors of clients that disconnect."""


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        assert isinstance(self.server, Server)
        self.server.note_request()
        is_streamed = b'"stream":true' in body.replace(b" ", b"")
        content = STREAM if is_streamed else WHOLE
        if self.server.mode == "hang":
            self.server.is_closing.wait(TIMEOUT_S)
        if self.server.mode == "error":
            content = b'{"error": {"message": "no engine"}}'
        self.send_response(503 if self.server.mode == "error" else 200)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[:20] if self.server.mode == "cut" else content)

    def log_message(self, *arguments: object) -> None:
        """Log nothing."""


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.is_closing.set()
        server.shutdown()
        thread.join()


def url_of(server: socketserver.TCPServer) -> str:
    return f"http://127.0.0.1:{server.server_address[1]}"


def load_on(server: Server, *, hang_s: float = TIMEOUT_S) -> Load:
    return Load(url_of(server), QUESTIONS, num_clients=NUM_CLIENTS, hang_s=hang_s)


def test_every_question_is_answered_once(server: Server) -> None:
    answers = ask_all(url_of(server), QUESTIONS, num_at_once=4, hang_s=TIMEOUT_S)
    assert sorted(answers) == list(range(12))
    assert all(answer.is_complete and answer.token_ids == [1] for answer in answers.values())


def test_a_load_runs_until_it_is_stopped_and_returns_all_answers(server: Server) -> None:
    load = load_on(server)
    load.start()
    server.wait_for_answers(20)
    taken = load.take()
    server.wait_for_answers(5)
    rest = load.stop()
    assert len(taken) >= 20
    assert len(rest) >= 5
    assert all(answer.is_complete for answer in [*taken, *rest])


@pytest.mark.parametrize(("mode", "field"), [("error", "error"), ("cut", "failure")])
def test_errors_and_cut_connections_are_distinguished(server: Server, mode: str, field: str) -> None:
    server.mode = mode
    load = load_on(server)
    load.start()
    server.wait_for_answers(6)
    assert all(getattr(answer, field) and not answer.is_complete for answer in load.stop())


def test_an_unfinished_request_is_hung(server: Server) -> None:
    server.mode = "hang"
    load = load_on(server, hang_s=0.1)
    load.start()
    server.wait_for_answers(3)
    assert all(answer.is_hung for answer in load.stop())


def test_an_abandoned_load_ends_with_requests_open(server: Server) -> None:
    server.mode = "hang"
    load = load_on(server)
    load.start()
    load.abandon()
    assert load.answers == []


def test_clients_that_leave_are_not_hung(server: Server) -> None:
    server.mode = "hang"
    load = load_on(server)
    load.leave_share = 1.0
    load.start()
    server.wait_for_answers(3)
    assert all(answer.was_left and not answer.is_hung for answer in load.stop())
