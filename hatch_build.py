"""Build hook of hatchling: compiles the copy library of `baton.transport.gather` if there is a C compiler.

Without one the package is pure Python, and `local` reads by cross-memory attach.
"""

import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

LIBRARY = "baton/transport/_gather.so"
TIMEOUT_S = 120.0


class GatherBuildHook(BuildHookInterface[Any]):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        try:
            subprocess.run([Path(self.root, "scripts/build-gather")], check=True, timeout=TIMEOUT_S)
        except (OSError, subprocess.SubprocessError) as error:
            Path(self.root, LIBRARY).unlink(missing_ok=True)  # Of an older source.
            self.app.display_warning(
                f"the copy library is not built, and same-host reads are slower: {error}"
            )
            return
        build_data["artifacts"].append(LIBRARY)  # git ignores it.
        if version == "standard":  # An editable install refers to the source tree.
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["tag"] = f"py3-none-{platform}"
            build_data["pure_python"] = False
