"""The command around the router: light, and clear about arguments that cannot work."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from baton.cli.route import app

URLS = ["--prefill", "http://p:1/", "--decode", "http://d:1/"]


def test_the_router_needs_no_torch() -> None:
    script = "import sys, baton.router.app; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--prefill", "p:1", "--decode", "http://d:1"], "prefill_urls"),
        (["--prefill", "http://p:1", "--decode", "http://d:1/v1"], "decode_urls"),
        ([*URLS, "--policy", "best"], "policy"),
        ([*URLS, "--on-prefill-failure", "retry"], "on_prefill_failure"),
        ([*URLS, "--idle-timeout-s", "0"], "timeouts.idle_s"),
        (["--prefill", "http://p:1"], "--decode"),
    ],
)
def test_arguments_that_cannot_work_are_refused_by_name(arguments: list[str], complaint: str) -> None:
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200", "TERM": "dumb"})
    assert result.exit_code == 2
    assert complaint in result.output
