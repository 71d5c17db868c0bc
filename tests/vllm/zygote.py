"""Process that has imported vLLM and forks a server for each line of its input.

    {"arguments": ["--model", ...], "path": [folder of modules, ...], "log": file}  ->  pid of the server

An engine of vLLM has at least three processes, and most of a start is that each imports vLLM. Here no process
imports it again: the server is a fork of this process and forks the others, as vLLM does on a GPU.
"""

import ctypes
import json
import multiprocessing
import os
import signal
import sys

import vllm.v1.worker.cpu_worker  # noqa: F401 - so that no fork imports it.
from vllm.entrypoints.launchers.api_server.entry import main

PR_SET_PDEATHSIG = 1

fork = multiprocessing.get_context("fork")
multiprocessing.get_context = lambda method=None: fork  # vLLM asks for "spawn" on a CPU.

while line := sys.stdin.readline():
    if (pid := os.fork()) == 0:
        break
    os.setpgid(pid, pid)
    print(pid, flush=True)
else:
    sys.exit()  # The caller has ended or needs no more servers. The kernel ends those that are left.

ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
given = json.loads(line)
log = os.open(given["log"], os.O_WRONLY | os.O_APPEND)
for descriptor, replaced in ((os.open(os.devnull, os.O_RDONLY), 0), (log, 1), (log, 2)):
    os.dup2(descriptor, replaced)
sys.path[:0] = given["path"]
sys.argv[1:] = given["arguments"]
main()
