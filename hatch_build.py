"""Build hook of hatchling: compiles the libraries of Baton, each if the C compiler can.

Without them the package is pure Python: `local` reads by cross-memory attach, `tcp` is slower, and the
embedded engine's attention gathers its keys.
"""

import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SCRIPT = "scripts/build-library"
LIBRARIES = {"gather": "baton/transport/_gather.so", "decode": "baton/engine/attention/_decode.so"}
TIMEOUT_S = 120.0


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
        try:
            subprocess.run([Path(self.root, SCRIPT), name], check=True, timeout=TIMEOUT_S)
        except (OSError, subprocess.SubprocessError) as error:
            Path(self.root, library).unlink(missing_ok=True)  # Of an older source.
            self.app.display_warning(f"{library} is not built, which makes Baton slower: {error}")
            return False
        return True
