"""Members that Kubernetes names: ready endpoints of services with a role label, from their EndpointSlices."""

from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import aiohttp
from kubernetes_asyncio import client, config, watch
from kubernetes_asyncio.client.exceptions import ApiException
from kubernetes_asyncio.config.config_exception import ConfigException

from baton.core.errors import UserError
from baton.router.members.reader import SourceFailed
from baton.router.values.members import ROLES, Listing, Member, read_entries
from baton.router.values.settings import Role

ROLE_LABEL = "baton/role"
BOTH = "both"
WATCH_S = 240.0  # The slices are listed again after it: a watch that has silently died costs no more.
ASK_S = 10.0
GONE = 410


class Rule(NamedTuple):
    """Selects the slices, and tells how to read them."""

    namespace: str
    selector: str  # Selects by the slices' labels, which are those of their service.
    role_label: str = ROLE_LABEL
    port: str | None = None  # Name or number. None: the only one.
    scheme: str = "http"


class KubernetesSource:
    """Implements `Source`. In a pod it uses the pod's service account, elsewhere the user's kubeconfig."""

    silent_after_s = WATCH_S + 3 * ASK_S

    def __init__(self, rule: Rule, configuration: client.Configuration | None = None) -> None:
        self.name = f"kubernetes:{rule.namespace}"
        self.rule, self._configuration = rule, configuration

    async def members(self) -> AsyncGenerator[Listing, None]:
        try:
            async with client.ApiClient(await self._configured()) as api:
                while True:
                    async for slices in self._slices(client.DiscoveryV1Api(api)):
                        yield members_of(slices, self.rule)
        except ApiException as error:
            raise SourceFailed(f"the API answers {error.status}: {error.reason}") from error
        except (aiohttp.ClientError, TimeoutError) as error:
            raise SourceFailed(f"the API cannot be reached: {error!r}") from error
        except ValueError as error:  # The client's library checks required fields, which the API does, too.
            raise SourceFailed(f"the API's answer cannot be read: {error}") from error

    async def _configured(self) -> client.Configuration:
        if self._configuration is not None:
            return self._configuration
        found = client.Configuration()
        try:
            try:
                config.load_incluster_config(client_configuration=found)  # type: ignore[no-untyped-call]
            except ConfigException:
                await config.load_kube_config(client_configuration=found)
        except ConfigException as error:
            raise SourceFailed(f"no cluster is configured: {error}") from error
        return found

    async def _slices(self, api: client.DiscoveryV1Api) -> AsyncGenerator[list[Any], None]:
        """All slices, at first and after each change, for one watch. Raises ApiException, ClientError."""
        rule = self.rule
        listed = await api.list_namespaced_endpoint_slice(
            rule.namespace, label_selector=rule.selector, _request_timeout=ASK_S
        )
        slices = {one.metadata.name: one for one in listed.items}
        yield list(slices.values())
        stream = watch.Watch().stream(
            api.list_namespaced_endpoint_slice,
            rule.namespace,
            label_selector=rule.selector,
            resource_version=listed.metadata.resource_version,
            timeout_seconds=int(WATCH_S),
            _request_timeout=aiohttp.ClientTimeout(total=WATCH_S + ASK_S, sock_connect=ASK_S),
        )
        async with stream:
            with suppress(StopAsyncIteration):
                while True:
                    try:
                        event = await anext(stream)
                    except ApiException as error:
                        if error.status == GONE:
                            return  # The version is too old: list again.
                        raise
                    if event["type"] == "BOOKMARK":
                        continue
                    found = event["object"]
                    if event["type"] == "DELETED":
                        slices.pop(found.metadata.name, None)
                    else:
                        slices[found.metadata.name] = found
                    yield list(slices.values())


def members_of(slices: Iterable[Any], rule: Rule) -> Listing:
    """`slices`: of V1EndpointSlice."""
    return read_entries(((one.metadata.name, one) for one in slices), lambda one: _members_in(one, rule))


def _members_in(one: Any, rule: Rule) -> Iterator[Member]:
    """Raises UserError for a slice that the rule cannot read."""
    roles = _roles_of(one, rule)
    port = _port_of(one, rule)
    if port is None:
        return  # The slice has no endpoints yet.
    for endpoint in one.endpoints or ():
        # None means ready (discovery.k8s.io/v1). A pod that terminates is not ready.
        if endpoint.conditions is not None and endpoint.conditions.ready is False:
            continue
        if not endpoint.addresses:
            raise UserError("has an endpoint without an address")
        # Addresses of one endpoint are alike; consumers use the first one.
        host = endpoint.addresses[0]
        host = f"[{host}]" if one.address_type == "IPv6" else host
        yield from (Member(role, f"{rule.scheme}://{host}:{port}") for role in roles)


def _roles_of(one: Any, rule: Rule) -> tuple[Role, ...]:
    label = (one.metadata.labels or {}).get(rule.role_label)
    if label == BOTH:
        return ROLES
    found = tuple(role for role in ROLES if role == label)
    if not found:
        allowed = ", ".join((*ROLES, BOTH))
        raise UserError(f"label {rule.role_label} is {label!r}; label its service with one of {allowed}")
    return found


def _port_of(one: Any, rule: Rule) -> int | None:
    """None: there is none yet."""
    ports = [port for port in one.ports or () if port.port is not None]
    if rule.port is not None:
        ports = [port for port in ports if rule.port in (port.name, str(port.port))]
    if len(ports) > 1:
        raise UserError(f"has {len(ports)} ports; name one with ?port=")
    return ports[0].port if ports else None
