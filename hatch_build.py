"""Build hook of hatchling: compiles the libraries of Baton, each if the C compiler can.

Without them the package is pure Python: `local` reads by cross-memory attach, `tcp` is slower, and the
embedded engine's attention gathers its keys. A build that fails leaves the library of an earlier one, which
other environments may use: a library that Baton cannot use lacks the functions of this version.
"""

import os
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SCRIPT = "scripts/build-library"
LIBRARIES = {"gather": "baton/transport/base/_gather.so", "decode": "baton/engine/attention/_decode.so"}
REPORT = "BATON_BUILD_REPORT"  # A file for warnings. pip shows none of a build that succeeds.


class LibraryBuildHook(BuildHookInterface[Any]):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        built = [library for name, library in LIBRARIES.items() if self._builds(name, library)]
        if not built:
            return
        build_data["artifacts"] += built  # git ignores them.
        if version == "standard":  # An editable install refers to the source tree.
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["tag"] = f"py3-none-{platform}"
            build_data["pure_python"] = False

    def _builds(self, name: str, library: str) -> bool:
        script = Path(self.root, SCRIPT)
        try:
            ended = subprocess.run([script, name], capture_output=True, text=True, check=False)
        except OSError as error:
            reason = str(error)
        else:
            if ended.returncode == 0:
                return True
            reason = ended.stderr.strip() or f"{SCRIPT} ended with status {ended.returncode}"
        left = "an earlier build stays" if Path(self.root, library).exists() else "Baton is slower without it"
        self._warn(f"{library} is not built; {left}. Run {SCRIPT} {name} to try again. The reason: {reason}")
        return False

    def _warn(self, text: str) -> None:
        self.app.display_warning(text)
        if report := os.environ.get(REPORT):
            with Path(report).open("a") as file:
                file.write(f"{text}\n")
