"""An OTLP/HTTP collector in the process of the test, and the spans that it was sent as trees."""

import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

POLL_S = 0.02


@dataclass
class Node:
    """A span, with those below it by time."""

    name: str
    service: str
    trace_id: str
    span_id: str
    parent_id: str
    start_s: float
    end_s: float
    attributes: dict[str, Any]
    events: list[str]
    children: list["Node"] = field(default_factory=list)
    path: str = ""

    def all(self) -> Iterator["Node"]:
        yield self
        for child in self.children:
            yield from child.all()

    def names(self, depth: int = 0) -> Iterator[str]:
        yield f"{'  ' * depth + self.name:32}{self.service}"
        for child in self.children:
            yield from child.names(depth + 1)

    def lines(self, depth: int = 0, origin_s: float | None = None) -> Iterator[str]:
        origin_s = self.start_s if origin_s is None else origin_s
        start_ms, took_ms = (self.start_s - origin_s) * 1e3, (self.end_s - self.start_s) * 1e3
        yield f"{'  ' * depth + self.name:30} {self.service:14} {start_ms:9.2f} ms {took_ms:9.2f} ms"
        for child in self.children:
            yield from child.lines(depth + 1, origin_s)


class Collector:
    def __init__(self) -> None:
        collector = self
        self._lock = threading.Lock()
        self._spans: list[Node] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                request = ExportTraceServiceRequest()
                request.ParseFromString(self.rfile.read(int(self.headers["content-length"])))
                collector._take(request)
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, name="collector")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def spans(self) -> list[Node]:
        with self._lock:
            return list(self._spans)

    def clear(self) -> None:
        with self._lock:
            self._spans.clear()

    def wait_tree(self, caller: str, *, num_spans: int, timeout_s: float) -> Node:
        """The latest tree below the span of a caller that has sent no span itself."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            tree = self._tree(caller)
            if tree is not None and len(list(tree.all())) >= num_spans:
                return tree
            shown = "nothing" if tree is None else "\n".join(tree.lines())
            assert time.monotonic() < deadline_s, f"only these spans came:\n{shown}"
            time.sleep(POLL_S)

    def _tree(self, caller: str) -> Node | None:
        below: defaultdict[str, list[Node]] = defaultdict(list)
        for span in self.spans():
            below[span.parent_id].append(span)

        def grown(node: Node, path: str) -> Node:
            node.path = f"{path}{node.name}"
            node.children = sorted(below[node.span_id], key=lambda child: child.start_s)
            for child in node.children:
                grown(child, f"{node.path}/")
            return node

        return grown(below[caller][-1], "") if below[caller] else None

    def _take(self, request: ExportTraceServiceRequest) -> None:
        for of_resource in request.resource_spans:
            service = {one.key: one.value.string_value for one in of_resource.resource.attributes}
            for of_scope in of_resource.scope_spans:
                nodes = [
                    Node(
                        span.name,
                        service["service.name"],
                        span.trace_id.hex(),
                        span.span_id.hex(),
                        span.parent_span_id.hex(),
                        span.start_time_unix_nano / 1e9,
                        span.end_time_unix_nano / 1e9,
                        {one.key: _value(one.value) for one in span.attributes},
                        [event.name for event in span.events],
                    )
                    for span in of_scope.spans
                ]
                with self._lock:
                    self._spans += nodes


def _value(value: Any) -> Any:
    found = getattr(value, value.WhichOneof("value"))
    return [_value(one) for one in found.values] if hasattr(found, "values") else found
