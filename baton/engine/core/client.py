"""Client of an engine core for asyncio programs: starts the core's process and exchanges messages with it.

    client = await EngineClient.start(config, connector_factory="baton.assemble:connector_factory")
    async for output in client.generate(request): ...
    await client.close()

No request waits for a core that has ended: its end closes the socket, and every open and later `generate`
raises EngineDeadError with the reason. A core that hangs is killed, and the requests of a stopped one fail
(`liveness`).
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from typing import Any, Self

import msgspec

from baton.core.config import EngineConfig, ModelConfig
from baton.core.errors import BatonError, ConfigError, UserError
from baton.engine.api import EngineOutput, EngineRequest, SchedulerStats
from baton.engine.core import core_messages as messages
from baton.engine.core.core_messages import FromCore, Start, ToCore
from baton.engine.core.weights_update import (
    WAIT_S,
    UpdateEnd,
    UpdateFailed,
    UpdateUnderWay,
    WeightsUpdate,
    prepare_update,
)
from baton.engine.process.channel import FrameSplitter, frame
from baton.engine.process.child import KILL_WAIT_S, Child
from baton.engine.process.liveness import HangWatch, StopWatch, process_tree
from baton.engine.runner.malloc_tuning import compute_environment

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 900.0  # Reading a large model's weights from a slow disk, on every rank.
STOP_TIMEOUT_S = 20.0  # Connector halves and ranks have 10 s of these.
DRAIN_ANSWER_S = 5.0  # Beyond the time that a drain may take; a step can be long.
LONG_PROMPT_TOKENS = 1 << 16  # The client sends at most one such prompt in a turn of the event loop.
# Time for the orderly end of a core whose front end died. Its answers are of no use, and a supervisor starts
# the next engine on the same ports.
PARENT_GRACE_S = 2.0


class EngineDeadError(BatonError):
    """The engine core has ended; the text is the reason. Another engine may serve the request."""


class EngineUnreadyError(BatonError):
    """A process of the engine is stopped, or its ranks restart. Another engine may serve the request."""


_Answer = EngineOutput | EngineDeadError | EngineUnreadyError


class EngineClient(asyncio.Protocol):
    """Created by `start`. Used from one event loop."""

    def __init__(self, child: Child, config: EngineConfig) -> None:
        step_timeout_s = config.step_timeout_s
        self.model_config = config.model_config  # Names the weights that compute now.
        self.on_weights: Callable[[ModelConfig], None] | None = None
        self._update: WeightsUpdate | None = None  # The update that the core performs, if any.
        self._updated: asyncio.Future[UpdateEnd] | None = None  # Done when that update has ended.
        self.on_stats: Callable[[SchedulerStats], None] | None = None
        self._child = child
        self._splitter = FrameSplitter()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromCore)
        # Queues of outputs, until the last output. None: the request was closed early and its outputs are
        # dropped.
        self._answers: dict[str, asyncio.Queue[_Answer] | None] = {}
        self._started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._dead = asyncio.Event()  # No more messages will come.
        self._buried = asyncio.Event()  # The process and its children have ended.
        self._sending_long = asyncio.Lock()
        self._drained: asyncio.Future[bool] | None = None
        self._introduction: str | None = None
        self._death: EngineDeadError | None = None
        self._burial: asyncio.Task[None] | None = None
        self._transport: asyncio.Transport | None = None
        self._step_timeout_s = step_timeout_s
        self._hang_watch = HangWatch(lambda: self._send(messages.Ping()), self._hangs, step_timeout_s)
        self._stop_watch = StopWatch(self._stalls)
        self._is_stalled = False  # True while a process is stopped.
        self._restarting: str | None = None  # The reason, while ranks restart.

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        *,
        connector_factory: str | None = None,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> Self:
        """Returns when the engine is ready. Raises ConfigError, or EngineDeadError with its message."""
        child = Child.spawn(
            "baton.engine.core.core_process:main",
            name="baton-core",
            grace_s=PARENT_GRACE_S,
            leads_group=True,
            environment={"OMP_NUM_THREADS": str(config.device_config.num_threads), **compute_environment()},
        )
        client = cls(child, config)
        try:
            client._transport, _ = await asyncio.get_running_loop().create_unix_connection(
                lambda: client, sock=child.socket
            )
            client._send(Start(config, connector_factory))
            async with asyncio.timeout(start_timeout_s):
                await client._started
        except TimeoutError as error:
            await client._kill()
            raise EngineDeadError(f"the engine core was not ready within {start_timeout_s:.0f} s") from error
        except BaseException:
            await client._kill()
            raise
        client._watch()
        return client

    @property
    def pid(self) -> int:
        """Process id of the core."""
        return self._child.process.pid

    async def introduction(self) -> str | None:
        """The connector's introduction, for consumers without a ticket of this engine; None if it has none.

        It changes only when the core restarts its ranks, and when its weights change.
        """
        return self._introduction

    @property
    def is_dead(self) -> bool:
        return self._dead.is_set()

    async def wait_dead(self) -> None:
        await self._dead.wait()

    @property
    def unready_reason(self) -> str | None:
        """The reason to send requests to other engines for now; None while this one serves."""
        if self._restarting is not None:
            return f"the engine starts its ranks anew: {self._restarting}"
        return self._stop_watch.stopped

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
        """Ends after the output that has a `finish_reason`. Closed earlier, it aborts the request.

        Raises UserError for a request id in use, EngineDeadError as soon as the core is gone, and
        EngineUnreadyError while ranks restart or after a process has been stopped for STALLED_S.
        """
        if self._death is not None:
            raise EngineDeadError(str(self._death))
        self._is_stalled = self._is_stalled and self._stop_watch.stopped is not None
        if (self._restarting is not None or self._is_stalled) and (reason := self.unready_reason) is not None:
            raise EngineUnreadyError(reason)
        if request.request_id in self._answers:
            raise UserError(f"{request.request_id!r} is in use; choose a new one", field="request_id")
        answers: asyncio.Queue[_Answer] = asyncio.Queue()
        self._answers[request.request_id] = answers
        try:
            if len(request.prompt_token_ids) < LONG_PROMPT_TOKENS:
                self._submit(request)
            else:
                # Encoding takes up to 10 ms; a request with many samples sends its prompt many times.
                async with self._sending_long:
                    self._submit(request)
                    await asyncio.sleep(0)
            while True:
                answer = await answers.get()
                if not isinstance(answer, EngineOutput):
                    raise type(answer)(str(answer))
                yield answer
                if answer.finish_reason is not None:
                    return
        finally:
            if self._answers.get(request.request_id) is answers:
                self._answers[request.request_id] = None
                self._send(messages.Abort(request.request_id))
            while not answers.empty():
                self._drop(answers.get_nowait())

    async def abort(self, request_id: str) -> None:
        """The request's `generate` ends with finish reason "abort", unless it ends otherwise first."""
        self._send(messages.Abort(request_id))

    def take_back(self, params: dict[str, Any]) -> None:
        """Release the loan of these `kv_transfer_params` of a finished request: no consumer will fetch it."""
        self._send(messages.TakeBack(params))

    async def update_weights(
        self, folder: str, version: str | None = None, *, mode: str = "wait", timeout_s: float = WAIT_S
    ) -> None:
        """See `LLM.update_weights`. Raises UpdateUnderWay, too.

        A caller that is cancelled does not end the update.
        """
        if self._updated is not None:
            raise UpdateUnderWay("another update of the weights is under way")
        updated = self._updated = asyncio.get_running_loop().create_future()
        try:
            update = await asyncio.to_thread(
                prepare_update, self.model_config, folder, version, mode, timeout_s
            )
        except BaseException:
            self._updated = None
            raise
        if self._death is not None:
            raise EngineDeadError(str(self._death))
        if (reason := self.unready_reason) is not None:
            self._updated = None
            raise EngineUnreadyError(reason)
        self._update = update
        self._hang_watch.stop()  # Reading the weights may take longer than a step.
        self._send(messages.UpdateWeights(update))
        try:
            async with asyncio.timeout(timeout_s + START_TIMEOUT_S):
                end = await asyncio.shield(updated)
        except TimeoutError:
            self._hangs()
            raise EngineDeadError(str(self._death)) from None
        end.check()

    def _end_update(self, end: UpdateEnd | BatonError) -> None:
        updated, self._updated = self._updated, None
        update, self._update = self._update, None
        if updated is None or updated.done():
            return
        if isinstance(end, BatonError):
            updated.set_exception(end)
            updated.exception()  # Marks the error as seen: the caller may be gone.
            return
        if update is not None and end.error is None:
            self.model_config = update.model_config
            if self.on_weights is not None:
                self.on_weights(self.model_config)
        updated.set_result(end)

    async def drain(self, timeout_s: float) -> bool:
        """Prepare `close`: grant no more loans, and wait until no request runs and no loan is open.

        False if that took longer than `timeout_s`, or the core has ended.
        """
        if self._drained is None:
            self._drained = asyncio.get_running_loop().create_future()
            if self._death is not None:
                self._drained.set_result(False)
            self._send(messages.Drain(timeout_s))
        try:
            async with asyncio.timeout(timeout_s + DRAIN_ANSWER_S):
                return await asyncio.shield(self._drained)
        except TimeoutError:
            return False

    async def close(self) -> None:
        """End the core's process. Idempotent. Kills it after STOP_TIMEOUT_S."""
        self._hang_watch.stop()
        self._stop_watch.stop()
        self._send(messages.Stop())
        self._child.resume()
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await self._buried.wait()
        except TimeoutError:
            logger.warning("the engine core did not end within %.0f s; killing it", STOP_TIMEOUT_S)
            self._child.process.kill()
            try:
                async with asyncio.timeout(KILL_WAIT_S):
                    await self._buried.wait()
            except TimeoutError:  # The core is stuck in a driver; no signal can end it.
                logger.error("the engine core, process %d, cannot be ended", self.pid)

    async def _kill(self) -> None:
        self._child.process.kill()
        if self._transport is not None:
            await self._buried.wait()
        else:
            await asyncio.to_thread(self._child.kill)

    def _submit(self, request: EngineRequest) -> None:
        try:
            self._send(messages.AddRequest(request))
        except (UnicodeEncodeError, OverflowError) as error:  # Half a surrogate pair, a token id beyond u64.
            self._answers.pop(request.request_id)
            raise UserError(f"cannot be sent to the engine: {error}", field="request") from error

    def _send(self, message: ToCore) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame(self._encoder.encode(message)))

    # --- Received messages --------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        self._hang_watch.note_message()
        for payload in self._splitter.feed(data):
            match self._decoder.decode(payload):
                case messages.Outputs(outputs):
                    if outputs.stats is not None and self.on_stats is not None:
                        # A separate call: an exception of a metric must not close the connection.
                        asyncio.get_running_loop().call_soon(self.on_stats, outputs.stats)
                    self._deliver(outputs.outputs)
                case messages.Started(introduction):
                    self._introduction = introduction
                    if not self._started.done():
                        self._started.set_result(None)
                case messages.Restarting(reason, failed):
                    logger.error("the engine lost a rank and restarts its ranks: %s", reason)
                    self._introduction = None
                    self._restarting = reason
                    self._end_update(UpdateFailed(f"the engine starts its ranks anew: {reason}"))
                    self._deliver(failed)
                    self._fail_open(EngineUnreadyError(f"the engine starts its ranks anew: {reason}"))
                    self._hang_watch.stop()  # Loading the weights may take longer than a step.
                case messages.Restarted(introduction):
                    logger.warning("the engine has restarted its ranks")
                    self._introduction = introduction
                    self._restarting = None
                    self._watch()
                case messages.StartFailed(message, is_users):
                    error = ConfigError(message) if is_users else EngineDeadError(message)
                    if not self._started.done():
                        self._started.set_exception(error)
                case messages.Drained(is_whole):
                    if self._drained is not None and not self._drained.done():
                        self._drained.set_result(is_whole)
                case messages.WeightsUpdated(end, introduction):
                    self._introduction = introduction
                    self._end_update(end)
                    self._hang_watch.start()
                case messages.Pong():
                    pass  # Any message shows that the core is alive.
                case messages.Stopped(reason):
                    self._die(f"the engine core ended: {reason}")  # The shutdown that follows may take long.

    def _deliver(self, outputs: list[EngineOutput]) -> None:
        for output in outputs:
            if output.finish_reason is not None:
                answers = self._answers.pop(output.request_id, None)
            else:
                answers = self._answers.get(output.request_id)
            if answers is not None:
                answers.put_nowait(output)
            else:
                self._drop(output)

    def _drop(self, answer: _Answer) -> None:
        """Drop an answer that no request waits for. Its ticket reaches no consumer, so the loan ends now."""
        if isinstance(answer, EngineOutput) and answer.kv_transfer_params is not None:
            self.take_back(answer.kv_transfer_params)

    def _watch(self) -> None:
        """Start to watch a core that has just started its ranks."""
        self._hang_watch.start()
        self._stop_watch.start(process_tree(self.pid))

    def _stalls(self, reason: str) -> None:
        logger.error("%s; its requests fail", reason)
        self._is_stalled = True
        self._fail_open(EngineUnreadyError(reason))

    def _fail_open(self, error: EngineUnreadyError) -> None:
        """Fail the open requests; their later outputs are dropped."""
        for answers in self._answers.values():
            if answers is not None:
                answers.put_nowait(error)

    def _hangs(self) -> None:
        how = f"the engine core hangs: no step has ended for {self._step_timeout_s:g} s (step_timeout_s)"
        logger.error("%s; killing it", how)
        self._die(how)
        self._child.process.kill()

    def connection_lost(self, exc: Exception | None) -> None:
        self._burial = asyncio.get_running_loop().create_task(self._bury())

    async def _bury(self) -> None:
        self._die(await asyncio.to_thread(self._child.describe_exit))
        await asyncio.to_thread(self._child.stop, STOP_TIMEOUT_S)
        self._buried.set()

    def _die(self, how: str) -> None:
        """No output will arrive from now on. Waiting callers get the reason; the first reason stays."""
        if self._death is not None:
            return
        self._hang_watch.stop()
        self._stop_watch.stop()
        death = self._death = EngineDeadError(how)
        if not self._started.done():
            self._started.set_exception(EngineDeadError(f"{how}, before it was ready"))
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(False)
        self._end_update(death)
        answers_of, self._answers = self._answers, {}
        for answers in answers_of.values():
            if answers is not None:
                answers.put_nowait(death)
        self._dead.set()
