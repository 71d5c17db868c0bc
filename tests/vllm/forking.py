"""Fleet whose vLLM servers can be forks of one process that has imported vLLM."""

import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from subprocess import PIPE, Popen

from baton.cli.processes import Child, Fleet


class ForkingFleet(Fleet):
    """Fleet that can also fork vLLM's servers from one process that has imported vLLM."""

    def __init__(self, log_folder: Path, *, env: Mapping[str, str]) -> None:
        super().__init__(log_folder, env=env)
        # -P: the modules beside it must not hide others.
        command = [sys.executable, "-P", str(Path(__file__).with_name("zygote.py"))]
        with (log_folder / "zygote.log").open("wb") as log:
            self._zygote = Popen(command, stdin=PIPE, stdout=PIPE, stderr=log, text=True, env=env)

    def fork(self, name: str, arguments: Sequence[str], path: Sequence[str]) -> Child:
        """Start a server. `path`: folders in which it also finds modules."""
        assert self._zygote.stdin is not None
        assert self._zygote.stdout is not None
        log_path = self.log_folder / f"{name}.log"
        log_path.write_bytes(b"")
        request = {"arguments": arguments, "path": path, "log": str(log_path)}
        print(json.dumps(request), file=self._zygote.stdin, flush=True)
        pid = self._zygote.stdout.readline()
        assert pid, (self.log_folder / "zygote.log").read_text()
        child = Forked(name, int(pid), log_path)
        self.children.append(child)
        return child

    def stop(self) -> None:
        super().stop()
        self._zygote.communicate()  # The zygote ends with its input.


class Forked(Child):
    """Server that the zygote has forked and does not reap, so that its number is not reused."""

    def __init__(self, name: str, pid: int, log_path: Path) -> None:
        self.name, self.pid, self.log_path = name, pid, log_path
        self._pidfd = os.pidfd_open(pid)
        self._is_reaped = False

    def describe_exit(self) -> str:
        return "has ended"

    def reap(self) -> None:
        if not self._is_reaped:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._is_reaped = True
            os.close(self._pidfd)
