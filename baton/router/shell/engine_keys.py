"""Keys that the router sends to engines. Their file is read again when it changes."""

import logging
import time
from collections.abc import Callable, Sequence

from baton.core.errors import ConfigError
from baton.http.auth import read_key_file
from baton.http.watched_files import WatchedFiles
from baton.router.values.settings import RouterSettings

logger = logging.getLogger(__name__)


class EngineKeys:
    """Engines' keys in one process. If an engine has none, the client's own key is passed on."""

    def __init__(self, settings: RouterSettings, now_s: Callable[[], float] = time.monotonic) -> None:
        self._default, self._by_url = settings.engine_api_key, settings.engine_api_keys
        self._file = settings.engine_key_file
        self._own_file = settings.doors.key_files.api_keys if settings.engines_have_own_key else None
        files = [path for path in (self._file, self._own_file) if path is not None]
        self._watched = WatchedFiles(files, are_read=False)
        self._now_s = now_s
        self._authorizations: dict[str, bytes | None] = {}  # Header values, by URL.

    def key_for(self, url: str) -> str | None:
        """The key for a URL of an engine: the engine's own, else that of all engines."""
        self._refresh_if_changed()
        return self._found(url)

    def authorization_for(self, url: str) -> bytes | None:
        """The header's value."""
        self._refresh_if_changed()
        if url not in self._authorizations:
            key = self._found(url)
            self._authorizations[url] = None if key is None else f"Bearer {key}".encode()
        return self._authorizations[url]

    def _found(self, url: str) -> str | None:
        for engine, key in self._by_url:
            if url == engine or url.startswith(f"{engine}/"):
                return key
        return self._default

    def _refresh_if_changed(self) -> None:
        """Read the files again if they have changed. Bad files change nothing."""
        if not self._watched.have_changed(self._now_s()):
            return
        default, by_url = self._default, self._by_url
        try:
            if self._own_file is not None:
                default = read_key_file(self._own_file, field=self._own_file)[0]
            if self._file is not None:
                of_all, by_url = split_engine_keys(read_key_file(self._file, field=self._file))
                default = of_all or default
        except ConfigError as error:
            logger.error("the keys for engines stay as they were: %s", error)
            return
        if (default, by_url) == (self._default, self._by_url):
            return
        self._default, self._by_url = default, by_url
        self._authorizations.clear()
        logger.info("read the keys for engines again")


def split_engine_keys(words: Sequence[str]) -> tuple[str | None, tuple[tuple[str, str], ...]]:
    """Words are keys, or an engine's URL and its key. Return the key of all others, and those by URL.

    Raises ConfigError.
    """
    default, by_url, rest = None, [], list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith(("http://", "https://")):
            default = default or word
        elif rest:
            by_url.append((word.rstrip("/"), rest.pop(0)))
        else:
            raise ConfigError(f"{word} has no key", field="engine_api_key_file")
    return default, tuple(by_url)
