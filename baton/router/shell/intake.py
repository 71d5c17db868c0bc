"""Takes in the requests of clients: refuses them, answers them, or drives them.

A client that goes away, in whatever phase, ends its request at once: its legs are closed, and the engines
abort.
"""

import logging
import re
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from baton.core.errors import UserError
from baton.core.retention import SESSION_HEADER
from baton.http.auth import AuthFile
from baton.http.errors import ApiError
from baton.http.forms import is_form
from baton.router.fleet.admission import NO_OBJECTIVE, objective_of
from baton.router.fleet.links import Links
from baton.router.fleet.turns import session_of
from baton.router.request.answers import end_to_end
from baton.router.request.machine import Machine, Request
from baton.router.request.pass_through import FORM_PATHS, PATHS, Looked, Passed, PassThrough, read_form
from baton.router.request.reply import SHUTTING_DOWN
from baton.router.request.timeline import Recorder
from baton.router.shell.client_http import DEFECT, REQUEST_ID, Incoming, Reply
from baton.router.shell.in_flight import InFlight
from baton.router.shell.legs import Ask
from baton.router.shell.rate_limiting import Charges, Charging
from baton.router.shell.requests import RequestDriver, Requests, report_refusal
from baton.router.values.dialects import DIALECTS, Dialect
from baton.router.values.errors import RouterError
from baton.router.values.legs import CHARS_PER_TOKEN, parse_body, shape_of, take_kept, without_alias
from baton.tracing.trace_context import TRACEPARENT, TRACESTATE

logger = logging.getLogger(__name__)

METHODS = {
    **dict.fromkeys(DIALECTS, "POST"),
    **{path: passed.method for path, passed in PATHS.items()},
}
JSON = {"content-type": "application/json"}
_GOOD_REQUEST_ID = re.compile(r"[!-~]{1,256}")


class Intake:
    def __init__(
        self,
        requests: Requests,
        links: Links,
        in_flight: InFlight,
        auth: AuthFile,
        charges: Charges | None,
    ) -> None:
        """`charges`: None if the settings have no rate limits."""
        self._requests, self._view, self._settings = requests, requests.view, requests.view.settings
        self._links, self._in_flight = links, in_flight
        self._auth, self._charges = auth, charges

    def take(self, incoming: Incoming, reply: Reply) -> None:
        """The path is one of METHODS."""
        request_id = incoming.headers.get(REQUEST_ID, "")
        if not _GOOD_REQUEST_ID.fullmatch(request_id):
            request_id = str(uuid.uuid4())
        reply.extra = {REQUEST_ID: request_id}
        recorder = self._in_flight.begin(incoming, request_id)
        self._try(lambda: self._begin(incoming, reply, request_id, recorder), reply, recorder)

    def _try(self, begin: Callable[[], None], reply: Reply, recorder: Recorder) -> None:
        try:
            begin()
        except UserError as error:
            self._refuse(reply, ApiError.of_user(error), recorder)
        except ApiError as error:
            report_refusal(self._view.fleet, error, reply.extra[REQUEST_ID])
            self._refuse(reply, error, recorder)
        except Exception:
            logger.exception("%s: a request has failed", reply.extra[REQUEST_ID])
            self._refuse(reply, ApiError(500, DEFECT), recorder)

    def _refuse(self, reply: Reply, error: ApiError, recorder: Recorder) -> None:
        reply.refuse(error)
        self._in_flight.end(recorder, error.status)

    def _begin(self, incoming: Incoming, reply: Reply, request_id: str, recorder: Recorder) -> None:
        """Raises UserError, ApiError."""
        path = incoming.path
        if self._in_flight.is_draining:
            raise RouterError.unavailable(SHUTTING_DOWN)
        if isinstance(incoming.body, ApiError):
            raise incoming.body
        num_max = self._settings.max_requests
        if self._links.num_requests > num_max:
            raise RouterError.unavailable(f"{num_max} requests are in flight; try again")
        headers = {**self._passed_on(incoming.headers), REQUEST_ID: request_id}
        if (span := recorder.span) is not None:
            headers.pop(TRACESTATE, None)
            headers.pop(TRACEPARENT, None)
            if not span.is_sampled:  # Else each leg has a span of its own.
                headers |= span.headers
        ends_at_s = incoming.received_at_s + self._settings.timeouts.total_s
        ask = Ask(incoming.method, incoming.target, headers, ends_at_s)
        if path == "/v1/models" and (cards := self._view.fleet.models.model_cards()) is not None:
            reply.whole(200, {**JSON, **reply.extra}, msgspec.json.encode({"object": "list", "data": cards}))
            return self._in_flight.end(recorder, 200)
        aliases, dialect = self._settings.model_aliases, DIALECTS.get(path)
        if dialect is not None:
            body = parse_body(incoming.body, aliases)
            if not dialect.is_optional or self._is_split(body, dialect, incoming.received_at_s):
                recorder.asked(body)
                return self._charge(
                    incoming,
                    body,
                    reply,
                    recorder,
                    lambda: self._complete(incoming, body, ask, reply, recorder),
                )
        if path in PATHS:
            num_estimated = None
            if path in FORM_PATHS and is_form(incoming.headers):
                raw, looked = read_form(incoming.body, incoming.headers["content-type"], aliases)
                num_estimated = 0  # Files are no text.
            else:
                raw = without_alias(incoming.body, aliases)
                looked = Looked.of_json(raw)
                if incoming.method == "POST":
                    num_estimated = len(raw) // CHARS_PER_TOKEN
            passed = Passed(request_id, path, raw, incoming.received_at_s, looked)
            return self._charge(
                incoming,
                num_estimated,
                reply,
                recorder,
                lambda: self._drive(PassThrough(self._view, passed), ask, reply, recorder),
            )

    def _is_split(self, body: dict[str, Any], dialect: Dialect, now_s: float) -> bool:
        return not dialect.is_whole(body) and self._view.may_split(dialect.path, now_s)

    def _charge(
        self,
        incoming: Incoming,
        cost: dict[str, Any] | int | None,
        reply: Reply,
        recorder: Recorder,
        then: Callable[[], None],
    ) -> None:
        """`cost`: number of tokens, or the body that has them; None: nothing. Raises UserError, ApiError."""
        tenant = incoming.caller.tenant
        rate = self._auth.current.rate_of(tenant)
        if self._charges is None or not rate.is_limited or cost is None:
            return then()
        num_tokens = 0
        if rate.prompt_tokens_per_minute is not None:
            num_tokens = (
                cost if isinstance(cost, int) else shape_of(cost, DIALECTS[incoming.path]).num_prompt_tokens
            )
        charges = self._charges
        verdict = charges.charge_here(tenant, num_tokens)
        if verdict is not None:
            self._requests.metrics.charged(verdict.outcome)
            if (error := verdict.error) is not None:
                return self._refuse(reply, error, recorder)
            reply.rate_headers = verdict.headers
            return then()

        def begin() -> None:
            self._in_flight.take_from_handler(recorder, reply)
            self._try(then, reply, recorder)

        charging = Charging(
            lambda: charges.charge(tenant, num_tokens),
            reply,
            begin,
            self._requests.metrics.charged,
            lambda status: self._in_flight.end(recorder, status),
        )
        return self._in_flight.hand_to(charging, recorder, reply)

    def _complete(
        self, incoming: Incoming, body: dict[str, Any], ask: Ask, reply: Reply, recorder: Recorder
    ) -> None:
        """Raises UserError, ApiError."""
        admission, caller = self._settings.admission, incoming.caller
        session, named = incoming.headers.get(SESSION_HEADER), caller.tenant if caller.is_named else ""
        ask.kept = take_kept(body, session=session, tenant=named)
        objective = NO_OBJECTIVE
        if admission is not None:
            objective = objective_of(admission, body, incoming.headers, named)
        request = Request(
            id=ask.headers[REQUEST_ID],
            body=body,
            dialect=DIALECTS[incoming.path],
            session=session_of(session, named),
            received_at_s=incoming.received_at_s,
            objective=objective,
        )
        self._drive(Machine(self._view, request), ask, reply, recorder)

    def _drive(self, machine: Machine | PassThrough, ask: Ask, reply: Reply, recorder: Recorder) -> None:
        driver = RequestDriver(self._requests, machine, ask, reply, recorder)
        self._in_flight.hand_to(driver, recorder, reply)
        driver.begin(lambda status: self._in_flight.end(recorder, status))

    def _passed_on(self, headers: Mapping[str, str]) -> dict[str, str]:
        """Drop a key that is meant for this router, or that the engines' own keys replace."""
        passed = end_to_end(headers)
        settings = self._settings
        if not settings.doors.is_open or settings.engine_api_key or settings.engine_api_keys:
            passed.pop("authorization", None)
            passed.pop("x-api-key", None)
        return passed
