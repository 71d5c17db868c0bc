"""Worker process: takes jobs from its socket, one at a time, and answers each.

A job is a function's name and arguments in msgpack. Its memory is bounded by RLIMIT_AS. Its processor time
is bounded by a timer of the kernel, whose signal ends the process even inside C code. The process ends
with its parent: at the end of its stream, and by a signal of the kernel while it is stopped or busy.
"""

import ctypes
import importlib
import os
import resource
import signal
import socket
import sys
from typing import Any

import msgspec

from baton.core.errors import UserError
from baton.http.workers import HEADER_BYTES, JobResult, receive_exactly

MEMORY_BYTES = 1 << 30  # Far above a chat of the largest size; far below what a host has.
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15


def main(descriptor: int) -> None:
    # Ctrl-C in a terminal reaches the whole group; the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = os.getppid()
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_NAME, b"baton-worker", 0, 0, 0)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        return
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with socket.socket(fileno=descriptor) as stream:
        while (payload := _next_job(stream)) is not None:
            answer = _answer(payload)
            stream.sendall(len(answer).to_bytes(HEADER_BYTES, "little") + answer)


def _next_job(stream: socket.socket) -> bytes | None:
    try:
        return receive_exactly(stream, int.from_bytes(receive_exactly(stream, HEADER_BYTES), "little"))
    except EOFError:
        return None


def _answer(payload: bytes) -> bytes:
    try:
        target, processor_s, arguments = msgspec.msgpack.decode(payload, type=tuple[str, float, list[Any]])
        module, _, name = target.partition(":")
        function = getattr(importlib.import_module(module), name)
        signal.setitimer(signal.ITIMER_PROF, processor_s)
        try:
            value = function(*arguments)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        return msgspec.msgpack.encode(JobResult("value", value))
    except UserError as error:
        return msgspec.msgpack.encode(JobResult("user", error.problem, error.field))
    except MemoryError:
        return msgspec.msgpack.encode(JobResult("memory", None))
    except Exception as error:
        return msgspec.msgpack.encode(JobResult("failed", f"{type(error).__name__}: {error}"[:1000]))
