"""A load of clients that each send one question after another, run in a thread."""

import asyncio
import random
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import httpx

from lab.chaos.answers import Answer, read_body, read_event
from lab.chaos.questions import Question

CONNECT_S = 30.0
LEAVE_MAX_S = 0.4  # Upper limit of the time until a client of the fault `disconnects` closes its connection.


@dataclass
class Load:
    """Clients that send questions from `start` until `stop`, which returns all answers.

    A request without an end after `hang_s` counts as hung.
    """

    url: str
    questions: Sequence[Question]
    num_clients: int
    hang_s: float
    seed: int = 0
    pause_s: float = 0.0  # Mean pause of a client between an answer and its next question.
    # Share of requests whose client disconnects early; may be changed while the load runs.
    leave_share: float = 0.0
    answers: list[Answer] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="load")
        self._error: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> list[Answer]:
        """Send no more questions, wait for open requests and return all answers.

        Raises the error that ended the load early, if there was one.
        """
        self._stopping.set()
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self.answers

    def abandon(self) -> None:
        """End at once, with requests open."""
        self._stopping.set()
        if self._loop is not None and self._task is not None:
            with suppress(RuntimeError):  # The loop has ended already.
                self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join()

    def take(self) -> list[Answer]:
        """Return the answers so far and remove them from the load."""
        taken, self.answers = self.answers, []
        return taken

    def num_ended_since(self, instant_s: float) -> int:
        """Return the number of complete answers to requests sent after that instant."""
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
                    clients.create_task(self._send_questions(client))
        except BaseException as error:
            self._error = error

    async def _send_questions(self, client: httpx.AsyncClient) -> None:
        while not self._stopping.is_set():
            question = self._rng.choice(self.questions)
            leaves = self._rng.random() < self.leave_share
            leave_s = self._rng.random() * LEAVE_MAX_S if leaves else None
            answer = await ask(client, question, hang_s=self.hang_s, leave_s=leave_s)
            self.answers.append(answer)
            if answer.status is None:
                # The router itself does not answer: wait instead of retrying in a tight loop.
                await asyncio.sleep(0.1)
            if self.pause_s:
                await asyncio.sleep(self.pause_s * 2 * self._rng.random())


async def ask(
    client: httpx.AsyncClient, question: Question, *, hang_s: float, leave_s: float | None = None
) -> Answer:
    """Send one request and wait for its end.

    The client disconnects after `leave_s` if that is given; otherwise it gives up after `hang_s`.
    """
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
                if line.startswith("data:"):
                    answer.note_event(time.monotonic())
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
    """Ask each question once. Returns the answers by question index."""
    answers = asyncio.run(_ask_all(url, questions, num_at_once, hang_s))
    return {answer.question: answer for answer in answers}
