"""The prefix store with loads in threads: only the loading request waits, not the engine's steps."""

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from prefix_store import PrefixStoreConnector, SchedulerHalf, WorkerHalf


class BackgroundSchedulerHalf(SchedulerHalf):
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        num_tokens, _ = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return num_tokens, bool(num_tokens)  # True: the request waits until get_finished returns its id.


class BackgroundWorkerHalf(WorkerHalf):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._threads = ThreadPoolExecutor(2)
        self._loading: dict[str, Future[set[int]]] = {}

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for request_id, name, block_ids in self._get_connector_metadata().loads:  # type: ignore[attr-defined]
            # The load owns these blocks until get_finished returns its id, even if the request is aborted.
            self._loading[request_id] = self._threads.submit(self._load, name, block_ids)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return the ids of ended loads, failed or not. Called after each step, even an empty one."""
        ended = {request_id for request_id, load in self._loading.items() if load.done()}
        for request_id in ended:
            self._failed |= self._loading.pop(request_id).result()
        return None, ended or None

    def shutdown(self) -> None:
        self._threads.shutdown(cancel_futures=True)


class BackgroundStoreConnector(PrefixStoreConnector):
    make_scheduler_half = classmethod(lambda cls, config, kv_cache_config: BackgroundSchedulerHalf(config))
    make_worker_half = classmethod(lambda cls, config, kv_cache_config: BackgroundWorkerHalf(config))
