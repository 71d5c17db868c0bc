"""Request lifecycle: appends tokens, ends requests, and makes their outputs.

    take_tokens --> an output, or the end if a stop token or a limit is reached
    finish, fail -> the end, of a busy request after its step in flight (`in_flight_steps`)
    end ----------> asks the connector once --lent, or still being filled--> held (`remote_kv`)
                                            --neither--> forgotten, its blocks free

Imports no torch and reads no clock.
"""

from collections.abc import Iterable

from baton.engine.api import EngineOutput, PromptLogprobs, RequestError, TokenLogprobs
from baton.engine.request import Request, RequestStatus
from baton.engine.scheduling.in_flight_steps import KeptEnd
from baton.engine.scheduling.state import SchedulerState


class RequestLifecycle:
    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._counts = state.counts
        self._outputs: list[EngineOutput] = []  # Outputs that were not handed out yet.
        self._finished_ids: set[str] = set()  # Ids that were not sent to the ranks yet.

    @property
    def has_news(self) -> bool:
        """Whether outputs wait for the front end, or finished ids for the ranks."""
        return bool(self._finished_ids or self._outputs)

    def take_outputs(self) -> list[EngineOutput]:
        """Outputs since the last call."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def take_last_output(self) -> EngineOutput:
        """The output of the request that has just ended, which need not wait for the end of a step."""
        return self._outputs.pop()

    def take_finished_ids(self) -> set[str]:
        """Ids of the requests that finished since the last call."""
        finished_ids, self._finished_ids = self._finished_ids, set()
        return finished_ids

    # --- Tokens ----------------------------------------------------------------------------------

    def take_tokens(
        self, request: Request, token_ids: list[int], logprobs: list[TokenLogprobs] | None
    ) -> bool:
        """Whether the tokens ended the request; the caller then takes it out of its queue."""
        if request.is_truncated:  # The request has another prompt than the client's.
            self.end(request, RequestStatus.FINISHED_LENGTH_CAPPED)
            return True
        final: RequestStatus | None = None
        num_output = len(request.all_token_ids) - request.num_prompt_tokens
        for num_taken, token_id in enumerate(token_ids, start=1):
            request.append_output_token(token_id)
            if token_id in request.stop_token_ids and num_output + num_taken >= request.min_tokens:
                final = RequestStatus.FINISHED_STOPPED
            elif num_output + num_taken >= request.max_tokens:
                final = RequestStatus.FINISHED_LENGTH_CAPPED
            else:
                continue
            token_ids = token_ids[:num_taken]
            logprobs = logprobs[:num_taken] if logprobs is not None else None
            break
        if logprobs is not None and request.kv_transfer_params is not None:
            request.output_logprobs += logprobs
        prompt_logprobs = request.take_prompt_logprobs()
        self._counts.num_generation_tokens += len(token_ids)
        if final is None:
            self._outputs.append(
                EngineOutput(
                    request_id=request.request_id,
                    new_token_ids=token_ids,
                    new_logprobs=logprobs,
                    prompt_logprobs=prompt_logprobs,
                    num_cached_tokens=request.num_cached_tokens,
                    num_transferred_tokens=request.num_transferred_tokens,
                    weights_id=""
                    if num_output > request.num_given_tokens
                    else self._state.kv_identity.value.weights_id,
                    scheduled_at_s=request.scheduled_at_s,
                )
            )
            return False
        stop_token_id = token_ids[-1] if final is RequestStatus.FINISHED_STOPPED else None
        self.end(
            request,
            final,
            token_ids=token_ids,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            stop_token_id=stop_token_id,
        )
        return True

    def end_found(self, request: Request) -> None:
        """End a request that computes nothing: what it has found and loaded is there."""
        request.num_cached_tokens = request.num_computed_tokens
        self._state.queues.remove(request)
        self.end(request, RequestStatus.FINISHED_LENGTH_CAPPED)

    # --- Ends ------------------------------------------------------------------------------------

    def fail(self, request: Request, error: RequestError) -> None:
        self.finish(request, RequestStatus.FINISHED_ERROR, error)

    def finish(self, request: Request, status: RequestStatus, error: RequestError | None = None) -> None:
        """End a request before its last token, from any queue."""
        state = self._state
        is_running = request.status is RequestStatus.RUNNING
        state.queues.remove(request)
        if is_running and state.in_flight.is_busy(request):
            state.in_flight.keep_end(KeptEnd(request, status, error))
        else:
            self.end(request, status, error=error)

    def end(
        self,
        request: Request,
        status: RequestStatus,
        *,
        token_ids: list[int] | None = None,
        logprobs: list[TokenLogprobs] | None = None,
        prompt_logprobs: PromptLogprobs | None = None,
        stop_token_id: int | None = None,
        error: RequestError | None = None,
    ) -> None:
        """Every request ends here. Asks the connector once, keeps lent blocks, and makes the last output."""
        assert not request.is_finished
        state = self._state
        request.status = status
        self._finished_ids.add(request.request_id)
        state.kv_cache.drop_outside_windows(request)  # A loan would keep the blocks that the last chunk saw.
        num_blocks = -(-request.num_computed_tokens // state.kv_cache.block_size)
        block_ids = tuple(ids[:num_blocks] for ids in state.kv_cache.get_block_ids(request.request_id))
        delay_free, params = state.connector.finished(request, block_ids)
        if not state.remote.hold(request, is_lent=delay_free):
            self.forget([request])
        self._outputs.append(
            EngineOutput(
                request_id=request.request_id,
                new_token_ids=token_ids if token_ids is not None else [],
                new_logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
                finish_reason=request.finish_reason,
                stop_token_id=stop_token_id,
                error=error,
                kv_transfer_params=params,
                num_cached_tokens=max(0, request.num_cached_tokens),
                num_transferred_tokens=request.num_transferred_tokens,
                weights_id=state.kv_identity.value.weights_id,
                scheduled_at_s=request.scheduled_at_s,
            )
        )

    def forget(self, requests: Iterable[Request]) -> None:
        """Free the blocks of finished requests that no transfer uses."""
        for request in requests:
            self._state.kv_cache.free(request)
            del self._state.requests[request.request_id]
