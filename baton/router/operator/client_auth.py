"""Checks of the requests of one process's ports, and fetches of the keys with which tokens are signed."""

import asyncio
import logging
from collections.abc import Callable

from baton.core.errors import ConfigError
from baton.http.auth import OPEN_PATHS, Authenticator, AuthFile
from baton.http.gate import Checks
from baton.http.jwt_tokens import JwtVerifier
from baton.router.operator import page
from baton.router.request.pass_through import FORM_PATHS
from baton.router.shell.asking import Asker, AskFailed
from baton.router.shell.engine_http import EnginePool
from baton.router.shell.tasks import Tasks
from baton.router.values.settings import RouterSettings

logger = logging.getLogger(__name__)

FETCH_TIMEOUT_S = 5.0


class ClientAuth:
    """Made and used in one event loop. `start` it, and `close` it."""

    def __init__(self, settings: RouterSettings, auth: AuthFile, on_fault: Callable[[str], None]) -> None:
        """`on_fault`: the task that fetches keys has ended with a defect."""
        self._settings, self._auth, self._loop = settings, auth, asyncio.get_running_loop()
        self._jwt = settings.doors.auth.jwt
        self._is_due = asyncio.Event()
        self._tasks = Tasks(on_fault)
        self._verifier = None
        if self._jwt is not None:
            self._verifier = JwtVerifier(self._jwt, on_due=self._is_due.set)

    def checks(self, is_admin: Callable[[str], bool]) -> Checks:
        """`is_admin`: whether a path of this port is one of the administrator's."""
        doors = self._settings.doors
        authenticator = Authenticator(
            doors.api_keys,
            admin_keys=doors.admin_keys,
            register_keys=doors.register_keys,
            files=doors.key_files,
            auth=self._auth,
            verifier=self._verifier,
            is_admin=is_admin,
            now_s=self._loop.time,
            open_paths=OPEN_PATHS | page.PATHS,
        )
        return Checks(authenticator, allowed_hosts=self._settings.checked_hosts, form_paths=FORM_PATHS)

    def start(self) -> None:
        if self._jwt is not None and self._jwt.jwks_url is not None:
            work = self._keep_fresh(self._jwt.jwks_url)
            self._tasks.start(work, "the keys of tokens are not fetched any more")

    async def close(self) -> None:
        await self._tasks.close()

    async def _keep_fresh(self, url: str) -> None:
        assert self._verifier is not None
        pool = EnginePool(connect_s=FETCH_TIMEOUT_S)
        asker = Asker(pool)
        try:
            while True:
                self._is_due.clear()
                self._verifier.note_fetch(self._loop.time())
                try:
                    answer = await asker.ask(url, timeout_s=FETCH_TIMEOUT_S)
                    if answer.status != 200:
                        raise AskFailed(f"answered with status {answer.status}")
                    self._verifier.use_jwks(answer.body.decode())
                except (TimeoutError, AskFailed, ConfigError, UnicodeDecodeError) as error:
                    logger.error("the keys at %s cannot be fetched: %s", url, str(error) or "too late")
                    self._verifier.note_failed_fetch(self._loop.time())
                try:
                    async with asyncio.timeout_at(self._verifier.next_fetch_s):
                        await self._is_due.wait()
                except TimeoutError:
                    pass
        finally:
            await pool.close()
