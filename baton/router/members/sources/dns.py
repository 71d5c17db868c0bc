"""Members that DNS names: addresses (A, AAAA) of one name, or targets of its services (SRV, RFC 2782)."""

import asyncio
from collections.abc import AsyncGenerator
from ipaddress import ip_address

import dns.asyncresolver
import dns.exception
import dns.resolver
from dns.rdtypes.IN.SRV import SRV

from baton.router.members.reader import SourceFailed
from baton.router.values.members import Listing, Member, read_entries
from baton.router.values.settings import Role

ASK_S = 5.0  # Time for one question, over all name servers.


class DnsSource:
    """Implements `Source`. A name that does not exist, or has no records, is a failure: the members stay."""

    def __init__(
        self,
        name: str,
        role: Role,
        *,
        port: int | None,
        scheme: str = "http",
        every_s: float = 5.0,
        server: tuple[str, int] | None = None,
        model: str | None = None,
    ) -> None:
        """`port`: None: the records of this name are SRV, which have ports. `server`: address and port,
        instead of those of /etc/resolv.conf.
        """
        self.name = f"dns:{name}"
        self.silent_after_s = 3 * every_s + 2 * ASK_S
        self._host, self._role, self._port, self._scheme, self._model = name, role, port, scheme, model
        self._every_s, self._server = every_s, server

    async def members(self) -> AsyncGenerator[Listing, None]:
        resolver = self._resolver()
        while True:
            try:
                places = await (self._services(resolver) if self._port is None else self._hosts(resolver))
            except dns.exception.DNSException as error:
                raise SourceFailed(f"cannot be resolved: {error}") from error
            yield read_entries(
                ((place, f"{self._scheme}://{place}") for place in places),
                lambda address: (Member(self._role, address, self._model),),
            )
            await asyncio.sleep(self._every_s)

    def _resolver(self) -> dns.asyncresolver.Resolver:
        try:
            resolver = dns.asyncresolver.Resolver(configure=self._server is None)
        except dns.exception.DNSException as error:
            raise SourceFailed(f"no name servers: {error}") from error
        if self._server is not None:
            host, port = self._server
            resolver.nameservers, resolver.port = [host], port
        resolver.lifetime = ASK_S
        return resolver

    async def _hosts(self, resolver: dns.asyncresolver.Resolver) -> list[str]:
        """Raises DNSException."""
        answers = await resolver.resolve_name(self._host, lifetime=ASK_S)
        found = [ip_address(text) for text in answers.addresses()]
        if not found:
            raise SourceFailed("has no address")
        return [f"[{one}]:{self._port}" if one.version == 6 else f"{one}:{self._port}" for one in found]

    async def _services(self, resolver: dns.asyncresolver.Resolver) -> list[str]:
        """Raises DNSException. Priorities and weights are not used: the router weighs engines itself."""
        answer = await resolver.resolve(self._host, "SRV")
        found = [record for record in answer if isinstance(record, SRV)]
        return [f"{record.target.to_text(omit_final_dot=True).rstrip('.')}:{record.port}" for record in found]
