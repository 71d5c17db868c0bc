"""Content of a host's adapters: digests of the files that it has loaded, for as long as they are known.

    loading(adapter) --files' state noted--> LOADED --digest computed, in the background--> named
    LOADED --another path, or other files, under its id or its path--> VOID, for good

A host loads an adapter when it is told to, and again when it needs one that it had dropped. So files that
change later may be in use, or not. The state of a file contains its ctime, which no program can set back.
Equal states at two times therefore mean that all loads between them have read the same bytes. A request is
named by its adapter's digest only if the state is the same from before the first load until it is asked for.

The caches of a host tell adapters apart by name and path. So a path whose files have changed once may stand
for either content, and stays unnamed even after the host has loaded it anew.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias
from weakref import WeakKeyDictionary

from baton.contract import host

logger = logging.getLogger(__name__)

FILES: Final = (
    "adapter_config.json",  # The rank and the scaling.
    "adapter_model.bin",
    "adapter_model.pt",
    "adapter_model.safetensors",
)
"""All that vLLM reads of an adapter's folder. It reads one file of weights; the digest is of all."""

_State: TypeAlias = tuple[tuple[str, int, int, int, int, int], ...]
"""Each file's name, device, inode, bytes, mtime_ns, ctime_ns. Empty: the folder has none of them."""


@dataclass(slots=True, eq=False)
class _Loaded:
    """One load of an adapter under an id of the host."""

    path: str
    state: _State
    is_void: bool


class Adapters:
    """Adapters of one host, by its ids. Thread-safe.

    Args:
        compute: runs a job that reads files, on another thread.
    """

    def __init__(self, compute: Callable[[Callable[[], None]], None]) -> None:
        self._compute = compute
        self._lock = threading.Lock()
        self._loaded: dict[int, _Loaded] = {}  # Loaded adapters by id.
        self._states: dict[str, _State] = {}  # State of the files at the first load, by path of the adapter.
        self._digests: dict[_State, str] = {}
        self._requests: WeakKeyDictionary[host.Request, _Loaded] = WeakKeyDictionary()

    def loading(self, adapter: Any) -> None:
        """The host is about to load the adapter, unless it has it. `adapter`: vLLM's LoRARequest."""
        with self._lock:
            self._load(adapter, anew=adapter.load_inplace)

    def seen(self, request: host.Request) -> None:
        """A request with an adapter has come. Called before the host computes any of it."""
        with self._lock:
            if request not in self._requests:
                self._requests[request] = self._load(_adapter_of(request), anew=False)

    def digest_of(self, request: host.Request) -> str | None:
        """Digest of the adapter that has computed the request, and computes it; None: it is not known."""
        with self._lock:
            if request not in self._requests and request.num_computed_tokens:
                return None  # The adapter may have changed since.
        self.seen(request)
        adapter = _adapter_of(request)
        with self._lock:
            loaded = self._requests[request]
            loaded.is_void |= _state_of(loaded.path) != loaded.state
            if loaded.is_void or self._loaded[adapter.lora_int_id] is not loaded:
                return None
            digest = self._digests.get(loaded.state)
        # The flag changes how the tensors of experts are read.
        return None if digest is None else f"{digest} {int(getattr(adapter, 'is_3d_lora_weight', False))}"

    def _load(self, adapter: Any, *, anew: bool) -> _Loaded:
        loaded = self._loaded.get(adapter.lora_int_id)
        if loaded is None or anew:
            state = _state_of(adapter.lora_path)
            is_void = not state or self._states.setdefault(adapter.lora_path, state) != state
            loaded = self._loaded[adapter.lora_int_id] = _Loaded(adapter.lora_path, state, is_void)
            if not is_void and state not in self._digests:
                self._compute(lambda: self._digest(loaded))
        loaded.is_void |= loaded.path != adapter.lora_path
        return loaded

    def _digest(self, loaded: _Loaded) -> None:
        digest = hashlib.sha256()
        try:
            for name, _, _, num_bytes, _, _ in loaded.state:
                digest.update(f"{name} {num_bytes} ".encode())
                with (_folder_of(loaded.path) / name).open("rb") as file:
                    digest.update(hashlib.file_digest(file, "sha256").digest())
        except OSError as error:
            logger.warning("the adapter in %s cannot be read (%s); its KV is not shared", loaded.path, error)
            return
        if _state_of(loaded.path) == loaded.state:
            # `compute` may be called with the lock held, so it is not taken here.
            self._digests[loaded.state] = digest.hexdigest()


def _adapter_of(request: host.Request) -> Any:
    return request.lora_request  # type: ignore[attr-defined]  # Only vLLM's requests have adapters.


def _folder_of(path: str) -> Path:
    return Path(path).expanduser()


def _state_of(path: str) -> _State:
    """Return a local folder's state; empty for anything else, such as a name on a hub."""
    found = []
    for name in FILES:
        try:
            file = os.stat(_folder_of(path) / name)
        except (OSError, ValueError, RuntimeError):  # RuntimeError: "~" of a user that there is not.
            continue
        found.append((name, file.st_dev, file.st_ino, file.st_size, file.st_mtime_ns, file.st_ctime_ns))
    return tuple(found)
