"""`baton up` with real engines: it serves, restarts processes, and leaves none running.

The test of `kill -9` starts interpreters, as users do; the other one forks.
"""

import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from baton.cli.processes import free_ports
from baton.http.tls import TlsFiles
from tests.certificates import Authority, context_of
from tests.fork_server import forking_programs
from tests.system.engines import POLL_S

pytestmark = [pytest.mark.processes, pytest.mark.slow]

START_S = 240.0  # Time to start on a busy machine.
END_S = 60.0


class Up:
    def __init__(self, process: subprocess.Popen[str], url: str, log_folder: Path) -> None:
        self.process = process
        self.url = url
        self.log_folder = log_folder

    def family(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def serving(self, name: str) -> psutil.Process:
        """The child with this name, found by its log, which is its standard output."""
        log = str(self.log_folder / f"{name}.log")
        for child in psutil.Process(self.process.pid).children():
            if Path(f"/proc/{child.pid}/fd/1").readlink() == Path(log):
                return child
        raise AssertionError(f"no child writes to {log}")


@contextmanager
def up(model: Path, log_folder: Path, tls: TlsFiles | None = None) -> Iterator[Up]:
    port, scheme = free_ports(1)[0], "http" if tls is None else "https"
    command = [sys.executable, "-m", "baton.cli", "up", str(model), "--port", str(port)]
    command += [] if tls is None else ["--tls-cert", tls.cert, "--tls-key", tls.key]
    command += ["--num-blocks", "64", "--log-dir", str(log_folder), "--", "--max-num-seqs", "8"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    try:
        printed = []
        for line in process.stdout:
            printed.append(line)
            if "curl" in line:
                break
        else:
            raise AssertionError("baton up ended early:\n" + "".join(printed))
        yield Up(process, f"{scheme}://127.0.0.1:{port}", log_folder)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.communicate(timeout=END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def assert_gone(family: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(family, timeout=END_S)
    assert alive == []


@pytest.mark.timeout(START_S + 5 * END_S)
def test_it_serves_handed_over_prompts_and_restarts_processes_that_die(model: Path, tmp_path: Path) -> None:
    with forking_programs(), up(model, tmp_path) as system:
        prompt = list(range(300, 400))
        answer = ask(system, prompt)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-baton-prefill"] == "remote"
        assert answer.json()["usage"]["prompt_tokens"] == len(prompt)

        # A stream of a live engine continues while another engine dies.
        body = {"prompt": prompt, "max_tokens": 400, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{system.url}/v1/completions", json=body, timeout=END_S) as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("data: ")
            system.serving("prefill-0").kill()
            rest = list(lines)
        assert rest[-2:] == ["data: [DONE]", ""]
        assert not [line for line in rest if '"error":' in line]  # A model may answer with the word "error".

        deadline_s = time.monotonic() + START_S
        while (answer := ask(system, prompt)).headers.get("x-baton-prefill") != "remote":
            assert answer.status_code == 200, "the decode engine computes prompts meanwhile"
            assert time.monotonic() < deadline_s
            time.sleep(POLL_S)
        family = system.family()
        system.process.send_signal(signal.SIGTERM)
        printed, _ = system.process.communicate(timeout=END_S)
        assert "prefill-0 was ended by SIGKILL: restarting it in 1 s" in printed
        assert printed.endswith("stopped\n")
        assert system.process.returncode == 0
        assert_gone(family)


def ask(system: Up, prompt: list[int], *, verify: ssl.SSLContext | bool = True) -> httpx.Response:
    return httpx.post(
        f"{system.url}/v1/completions",
        json={"prompt": prompt, "max_tokens": 4, "temperature": 0},
        timeout=END_S,
        trust_env=False,
        verify=verify,
    )


@pytest.mark.timeout(START_S + 3 * END_S)
def test_its_router_may_have_tls_and_kill_dash_nine_leaves_no_orphan(model: Path, tmp_path: Path) -> None:
    """The certificate names another host than the address at which `baton up` waits for the router."""
    authority = Authority(tmp_path, "ours")
    with up(model, tmp_path, authority.issue("router.example")) as system:
        context = context_of(authority.ca)
        context.check_hostname = False
        assert ask(system, list(range(300, 400)), verify=context).status_code == 200
        family = system.family()
        assert len(family) >= 5  # Two engines with a core process each, and the router.
        system.process.kill()
        assert_gone(family)


def test_a_model_that_is_not_there_is_named_before_anything_starts(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "baton.cli", "up", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=START_S)
    assert ended.returncode == 2
    assert "config.json" in ended.stderr
