"""The values that the benchmark and its client process exchange."""

import msgspec


class Job(msgspec.Struct):
    url_port: int
    body: str
    num_requests: int
    num_at_once: int
    num_events: int  # `data:` lines of a good answer; 0: an answer that is no stream.
    decode_port: int = 0  # If set, the client sends both legs itself, the first one to `url_port`.
    pause_s: float = 0.0  # Each client waits for up to this time before each request.
    headers: dict[str, str] = {}
    ca: str = ""  # If set, `url_port` has TLS, with a certificate of this file.
    hold_s: float = 0.0  # If set, each connection keeps its stream open for this time after the first event.


class Result(msgspec.Struct):
    first_s: list[float]  # Times from the request to the first byte of the answer's body.
    total_s: list[float]
    wall_s: float
    num_bad: int
