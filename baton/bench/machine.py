"""Description of the machine that a benchmark runs on."""

import os
import platform
import re
from contextlib import suppress
from pathlib import Path


def machine_line() -> str:
    """Return processor, cores, kernel, Python and load in one line."""
    load_1min = os.getloadavg()[0]
    return (
        f"{_processor()}, {os.cpu_count()} cores, Linux {platform.release()}, "
        f"Python {platform.python_version()}, load {load_1min:.2f}"
    )


def _processor() -> str:
    with suppress(OSError):
        if found := re.search(
            r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), flags=re.MULTILINE
        ):
            return found[1]
    return platform.processor() or platform.machine()
