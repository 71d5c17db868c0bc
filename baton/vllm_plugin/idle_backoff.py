"""How an engine waits for a producer that has nothing to say yet.

While a request waits for a remote prefill, vLLM steps about a thousand times a second, since it cannot know
when that ends, and between its empty steps two processes spin. On a machine where the producer shares their
cores, that is time taken from the very prefill they wait for. So an empty step of which nothing can come
rests here, until a peer or a timer has something to say, or for `REST_S`: a request that arrives meanwhile is
seen that much later at most.
"""

import threading

REST_S = 0.005


class IdleBackoff:
    def __init__(self) -> None:
        self._has_news = threading.Event()

    def end(self) -> None:
        """From any thread: there may be something to do. Counts also for a rest that has not begun."""
        self._has_news.set()

    def take(self) -> None:
        self._has_news.wait(REST_S)
        self._has_news.clear()
