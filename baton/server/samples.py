"""Samples of one HTTP request: converts engine outputs to pieces of text and merges them into one stream.

    engine.generate -> SampleText -> Piece --+
    engine.generate -> SampleText -> Piece --+--> pieces()          one task per sample
    ...                                      +

Leaving the context ends every sample that still runs: its task is cancelled, which closes the engine's
iterator, which aborts the engine request. It also takes back the loan of a piece that the consumer has not
handled. The first error ends all samples.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Self

from msgspec import structs

from baton.core.transfer_params import CACHED_TOKENS, cached_tokens
from baton.engine.api import EngineOutput, EngineRequest, PromptLogprobs, TokenLogprobs
from baton.engine.core.client import EngineClient
from baton.http.errors import ApiError
from baton.server.metrics import ServerMetrics
from baton.server.text import SampleText
from baton.server.transfer_ask import TransferAsk


@dataclass(frozen=True, slots=True)
class Sample:
    """One choice of the answer."""

    index: int
    prompt_index: int
    request: EngineRequest
    text: SampleText
    ask: TransferAsk
    include_stop: bool = False  # Show the stop token or string that ended it.
    waits_for_first: bool = False  # Submit once the first sample has its first token.
    continues_elsewhere: bool = False  # Reaching the limit does not end the answer.
    is_cut: bool = False  # The context has less room than the client's limit.


@dataclass(frozen=True, slots=True)
class Finish:
    """How a sample ended."""

    reason: str | None  # "stop" or "length". None: the answer continues in another engine.
    stop_reason: int | str | None
    kv_transfer_params: dict[str, Any] | None
    num_cached_tokens: int
    num_transferred_tokens: int


@dataclass(slots=True)
class Piece:
    """The part that one engine output adds to one sample. `text` lags `token_ids` while text is held back."""

    sample: Sample
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: PromptLogprobs | None = None  # Part of the first token's piece, if they were asked for.
    finish: Finish | None = None
    num_cached_tokens: int = 0
    num_transferred_tokens: int = 0
    weights_id: str = ""  # `EngineOutput.weights_id`.


_END = None  # Mark in the queue: one sample has ended.


class RunningSamples:
    """`async with RunningSamples(...) as running: async for piece in running.pieces()`."""

    def __init__(self, engine: EngineClient, samples: Sequence[Sample], metrics: ServerMetrics) -> None:
        self._engine = engine
        self._samples = samples
        self._metrics = metrics
        self._queue: asyncio.Queue[Piece | BaseException | None] = asyncio.Queue()
        self._has_first_token = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        # Params, by sample, with a ticket that the client has not been sent.
        self._lent: dict[int, dict[str, Any]] = {}

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._run(sample)) for sample in self._samples]
        return self

    async def __aexit__(self, *error: object) -> None:
        # No task runs after the last piece. This must not suspend then: a cancellation would lose the answer.
        if running := [task for task in self._tasks if not task.done()]:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        for params in self._lent.values():
            self._engine.take_back(params)

    async def pieces(self) -> AsyncIterator[Piece]:
        """Yield pieces until all samples have ended. Raises the error of the first sample that fails.

        A piece counts as delivered when the consumer asks for the next one.
        """
        num_running = len(self._samples)
        while num_running:
            item = await self._queue.get()
            if item is _END:
                num_running -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item
                if item.finish is not None:
                    self._lent.pop(item.sample.index, None)

    async def _run(self, sample: Sample) -> None:
        try:
            if sample.waits_for_first:
                await self._has_first_token.wait()
            async with aclosing(_pieces_of(sample, self._engine, self._metrics)) as pieces:
                async for piece in pieces:
                    if piece.finish is not None and piece.finish.kv_transfer_params is not None:
                        self._lent[sample.index] = piece.finish.kv_transfer_params
                    self._queue.put_nowait(piece)
                    self._has_first_token.set()
        except Exception as error:  # `pieces` raises it, in the task that answers this request.
            self._queue.put_nowait(error)
        else:
            self._queue.put_nowait(_END)


async def _pieces_of(
    sample: Sample, engine: EngineClient, metrics: ServerMetrics
) -> AsyncGenerator[Piece, None]:
    observer = metrics.observe(sample.request)
    is_first = sample.ask.names_first
    try:
        async with aclosing(engine.generate(sample.request)) as outputs:
            async for output in outputs:
                if output.finish_reason in ("error", "abort") and output.kv_transfer_params is not None:
                    engine.take_back(output.kv_transfer_params)
                _raise_if_failed(output)
                observer.output(output)
                parts = _with_first_alone(sample, output) if is_first else (output,)
                is_first = is_first and not output.new_token_ids
                for piece in (_piece(sample, part) for part in parts):
                    ends = piece.finish is not None and piece.finish.reason is not None
                    if ends and sample.continues_elsewhere:
                        assert piece.finish is not None
                        piece.finish = _end_here(piece.finish, engine)
                    if piece.finish is not None:
                        observer.finish(piece.finish.reason or "length")
                    yield piece
                    if piece.finish is not None:
                        return  # Ended by a stop string: closing the iterator aborts the rest.
        raise AssertionError("the engine ended a request without a finish reason")
    except (GeneratorExit, asyncio.CancelledError):
        observer.finish("abort")
        raise
    finally:
        observer.finish("error")  # No effect if it has ended.


def _with_first_alone(sample: Sample, output: EngineOutput) -> Sequence[EngineOutput]:
    """Split the first token off: a router compares it with the first token of another engine.

    An engine that loads a prompt with tokens of its answer reports these and the next one at once. Where the
    context ends after the first token, the end is split off as well: the prefill engine does not know it.
    """
    ends_context = sample.is_cut and not sample.continues_elsewhere and output.finish_reason == "length"
    if len(output.new_token_ids) < 2 and not ends_context:
        return (output,)
    logprobs = output.new_logprobs
    first = structs.replace(
        output,
        new_token_ids=output.new_token_ids[:1],
        new_logprobs=None if logprobs is None else logprobs[:1],
        finish_reason=None,
        stop_token_id=None,
        kv_transfer_params=None,
    )
    rest = structs.replace(
        output,
        new_token_ids=output.new_token_ids[1:],
        new_logprobs=None if logprobs is None else logprobs[1:],
        prompt_logprobs=None,
    )
    return first, rest


def _raise_if_failed(output: EngineOutput) -> None:
    match output.finish_reason:
        case "error":
            assert output.error is not None
            if output.error.is_users:
                raise ApiError(400, output.error.message, param=output.error.field)
            raise ApiError(500, output.error.message, code="engine_error")
        case "abort":
            raise ApiError(503, "the engine aborted the request", code="aborted")


def _piece(sample: Sample, output: EngineOutput) -> Piece:
    """Decode the output's tokens, up to a stop string."""
    piece = Piece(
        sample,
        prompt_logprobs=output.prompt_logprobs,
        num_cached_tokens=max(0, output.num_cached_tokens),
        num_transferred_tokens=output.num_transferred_tokens,
        weights_id=output.weights_id,
    )
    logprobs = output.new_logprobs or []
    # Ended by EOS or by a stop token: that token is the last one and is not shown.
    ended_by_token = output.finish_reason == "stop" and not sample.include_stop
    shown = len(output.new_token_ids) - (1 if ended_by_token else 0)
    for position, token_id in enumerate(output.new_token_ids):
        piece.token_ids.append(token_id)
        piece.logprobs += logprobs[position : position + 1]
        if position < shown:
            piece.text += sample.text.feed(token_id)
        if sample.text.stopped_by is not None:
            break
    continues = sample.continues_elsewhere and output.finish_reason == "length"
    if output.finish_reason is not None and sample.text.stopped_by is None and not continues:
        piece.text += sample.text.finish()
    if sample.text.stopped_by is not None:
        piece.finish = _finish(sample, "stop", sample.text.stopped_by, output)
    elif continues:
        piece.finish = _finish(sample, None, None, output)
    elif output.finish_reason is not None:
        # The engine names the end-of-sequence token too; only a requested stop token is a reason.
        asked_for = output.stop_token_id in sample.request.sampling_params.stop_token_ids
        stop_reason = output.stop_token_id if asked_for else None
        piece.finish = _finish(sample, output.finish_reason, stop_reason, output)
    return piece


def _end_here(finish: Finish, engine: EngineClient) -> Finish:
    """End an answer that its first token has ended: no engine continues it or fetches its KV."""
    if finish.kv_transfer_params is not None:
        engine.take_back(finish.kv_transfer_params)
    return replace(finish, kv_transfer_params=None)


def _finish(
    sample: Sample, reason: str | None, stop_reason: int | str | None, output: EngineOutput
) -> Finish:
    params, num_cached = output.kv_transfer_params, output.num_cached_tokens
    if (at_prefill := sample.ask.num_cached_at_prefill) is not None:
        num_local = num_cached - output.num_transferred_tokens
        num_cached = cached_tokens(num_local, output.num_transferred_tokens, at_prefill)
    if params is not None and num_cached > 0:
        params = {**params, CACHED_TOKENS: num_cached}
    return Finish(
        reason=reason,
        stop_reason=stop_reason,
        kv_transfer_params=params,
        num_cached_tokens=num_cached,
        num_transferred_tokens=output.num_transferred_tokens,
    )
