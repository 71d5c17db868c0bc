"""Back-off of an engine that waits for a producer without news.

While a request waits for a remote prefill, vLLM steps about a thousand times a second, because it cannot
know when that ends, and two processes spin between its empty steps. On a machine that the producer shares,
this takes CPU time from the prefill. So an empty step without work waits here until a peer or a timer has
news, or for `REST_S`: a new request is delayed by that at most.
"""

import threading

REST_S = 0.005


class IdleBackoff:
    def __init__(self) -> None:
        self._has_news = threading.Event()

    def end(self) -> None:
        """End the wait, from any thread: there may be work. Also ends a wait that has not begun."""
        self._has_news.set()

    def take(self) -> None:
        self._has_news.wait(REST_S)
        self._has_news.clear()
