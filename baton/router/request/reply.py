"""The client's answer: its status, its bytes, and its end. The client gets one answer, or one error."""

from baton.router.fleet.engine import Engine
from baton.router.request.answers import LegAnswer, end_to_end
from baton.router.request.events import Head, Send
from baton.router.request.step import Outbox
from baton.router.request.tokens.first_tokens import FirstTokens
from baton.router.request.tokens.stream import FirstToken
from baton.router.values.errors import RouterError
from baton.router.values.sse import END

CLIENT_CLOSED_REQUEST = 499  # nginx's; for the metrics only, the client does not receive it.
SHUTTING_DOWN = "the router is shutting down"
EVENT_STREAM = LegAnswer(200, {"content-type": "text/event-stream; charset=utf-8"}, b"", is_stream=True)


class Reply:
    def __init__(self, outbox: Outbox, first: FirstTokens, request_id: str, received_at_s: float) -> None:
        self._outbox, self._first = outbox, first
        self._request_id, self._received_at_s = request_id, received_at_s
        self._is_first_counted = False
        self._dialect, self._is_numbered = first.dialect, first.dialect.is_numbered
        self._num_sent = 0  # Events that the client has, where they are numbered.
        self.status: int | None = None  # Status of the client's answer, once it has begun.
        self.error: RouterError | None = None  # The answer of a client that has been sent nothing.

    @property
    def has_begun(self) -> bool:
        return self.status is not None

    def begin(self, answer: LegAnswer, where: str | None, *, num_bytes: int | None = None) -> None:
        """Send status and headers. `where`: the place of the prefill. `num_bytes`: length of the body."""
        assert self.status is None
        self.status = answer.status
        self._outbox.count("first_byte_seconds", value=self._outbox.now_s - self._received_at_s)
        headers = {**end_to_end(answer.headers), "x-request-id": self._request_id}
        if where is not None:
            headers["x-baton-prefill"] = where
        if num_bytes is not None:
            headers["content-length"] = str(num_bytes)
        self._outbox.emit(Head(answer.status, headers))

    def send(self, data: bytes, *, is_last: bool = False) -> None:
        if data or is_last:
            if self._is_numbered:
                self._num_sent += data.count(END)
            self._outbox.emit(Send(data, is_last=is_last))

    def send_whole(self, answer: LegAnswer, where: str | None, *, body: bytes | None = None) -> None:
        body = answer.body if body is None else body
        self.begin(answer, where, num_bytes=len(body))
        self.send(body, is_last=True)

    def tell_first(self, head: LegAnswer, first: FirstToken, where: str) -> bool:
        """Send an engine's first token. False: the client has it. RouterError: it has another one."""
        try:
            is_for_client = self._first.take(first)
        except RouterError:
            self.count_first("no")
            raise
        if not is_for_client:
            self.count_first("yes")
            return False
        self.begin(head, where)
        self.send(first.events)
        return True

    def count_first(self, outcome: str) -> None:
        """Count it once for each stream, also if several decode engines had to be asked."""
        if outcome == "no" or not self._is_first_counted:
            self._is_first_counted = self._is_first_counted or outcome != "no"
            self._outbox.count("first_tokens", outcome)

    # --- The end, before the answer is complete

    def leave(self) -> None:
        """The client is gone."""
        self.status = CLIENT_CLOSED_REQUEST

    def stop(self, *, is_done: bool) -> None:
        """The router shuts down. `is_done`: all that matters has been sent."""
        if self.status is None:
            self.error = RouterError.unavailable(SHUTTING_DOWN)
        elif is_done:
            self.send(b"", is_last=True)
        else:
            self._send_error(SHUTTING_DOWN, status=503)

    def refuse(self, error: RouterError) -> None:
        """No attempt is left."""
        if self.status is None:
            self.error = error
        else:
            self._outbox.log("after the first token: %s", error)
            self.break_off(str(error))

    def break_off(self, message: str, engine: Engine | None = None) -> None:
        self._outbox.count("broken_streams")
        self._outbox.report("broken_stream", engine, message)
        self._send_error(message)

    def _send_error(self, message: str, *, status: int = 502) -> None:
        event = self._dialect.error_event(message, status=status, num_sent=self._num_sent)
        self.send(event, is_last=True)
