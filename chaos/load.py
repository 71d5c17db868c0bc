"""Clients that ask one question after another, in a thread of their own."""

import asyncio
import random
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import httpx

from chaos.answers import Answer, read_body, read_event
from chaos.questions import Question

CONNECT_S = 30.0
LEAVE_MAX_S = 0.4  # A client of a disconnect storm leaves after up to so long.


@dataclass
class Load:
    """`start`, then `stop`, which returns all answers. A request without an end after `hang_s` is hung."""

    url: str
    questions: Sequence[Question]
    num_clients: int
    hang_s: float
    seed: int = 0
    pause_s: float = 0.0  # Of a client between an answer and its next question, in the mean.
    leave_share: float = 0.0  # Of requests whose client leaves; may be changed while it runs.
    answers: list[Answer] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._dice = random.Random(self.seed)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="load")
        self._error: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> list[Answer]:
        """Ask nothing more, wait for what is open. Raises what ended the load early."""
        self._stopping.set()
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self.answers

    def abandon(self) -> None:
        """End now, with requests open."""
        self._stopping.set()
        if self._loop is not None and self._task is not None:
            with suppress(RuntimeError):  # The loop has just ended.
                self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join()

    def take(self) -> list[Answer]:
        """Answers so far, which the load then forgets."""
        taken, self.answers = self.answers, []
        return taken

    def num_ended_since(self, instant_s: float) -> int:
        """Complete answers to requests that were sent after that instant."""
        return sum(a.is_complete and a.started_s >= instant_s for a in list(self.answers))

    async def _run(self) -> None:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=self.num_clients)
        timeout = httpx.Timeout(None, connect=CONNECT_S)
        try:
            async with (
                httpx.AsyncClient(
                    base_url=self.url, timeout=timeout, limits=limits, trust_env=False
                ) as client,
                asyncio.TaskGroup() as clients,
            ):
                for _ in range(self.num_clients):
                    clients.create_task(self._ask_on(client))
        except BaseException as error:
            self._error = error

    async def _ask_on(self, client: httpx.AsyncClient) -> None:
        while not self._stopping.is_set():
            question = self._dice.choice(self.questions)
            leaves = self._dice.random() < self.leave_share
            leave_s = self._dice.random() * LEAVE_MAX_S if leaves else None
            answer = await ask(client, question, hang_s=self.hang_s, leave_s=leave_s)
            self.answers.append(answer)
            if answer.status is None:
                await asyncio.sleep(0.1)  # The router itself is gone: do not spin.
            if self.pause_s:
                await asyncio.sleep(self.pause_s * 2 * self._dice.random())


async def ask(
    client: httpx.AsyncClient, question: Question, *, hang_s: float, leave_s: float | None = None
) -> Answer:
    """One request to its end. The client leaves after `leave_s`, and gives up after `hang_s`."""
    answer = Answer(question.index, time.monotonic())
    limit_s = hang_s if leave_s is None else leave_s
    try:
        async with asyncio.timeout(limit_s):
            await _receive(client, question, answer)
    except TimeoutError:
        answer.was_left, answer.is_hung = leave_s is not None, leave_s is None
    except httpx.HTTPError as error:
        answer.failure = f"{type(error).__name__}: {error}"
    answer.ended_s = time.monotonic()
    return answer


async def _receive(client: httpx.AsyncClient, question: Question, answer: Answer) -> None:
    body = {**question.body, "stream": question.is_streamed}
    async with client.stream("POST", question.path, json=body) as response:
        answer.status = response.status_code
        if question.is_streamed and response.status_code == 200:
            async for line in response.aiter_lines():
                read_event(answer, line)
        else:
            read_body(answer, await response.aread())


async def _ask_all(url: str, questions: Sequence[Question], num_at_once: int, hang_s: float) -> list[Answer]:
    slots = asyncio.Semaphore(num_at_once)

    async def ask_one(client: httpx.AsyncClient, question: Question) -> Answer:
        async with slots:
            return await ask(client, question, hang_s=hang_s)

    async with httpx.AsyncClient(base_url=url, timeout=None, trust_env=False) as client:
        return list(await asyncio.gather(*(ask_one(client, question) for question in questions)))


def ask_all(url: str, questions: Sequence[Question], *, num_at_once: int, hang_s: float) -> dict[int, Answer]:
    """Each question once; answers by the question's index."""
    answers = asyncio.run(_ask_all(url, questions, num_at_once, hang_s))
    return {answer.question: answer for answer in answers}
