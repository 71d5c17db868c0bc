"""Body of `/baton/take_back`: what leads to a loan that no decode engine will fetch."""

from typing import Any

import msgspec

from baton.core.errors import UserError
from baton.core.transfer_params import MAX_TICKET_CHARS


class Lent(msgspec.Struct, frozen=True):
    """The ticket in the answer's `kv_transfer_params`, or the `transfer_id` in the request's."""

    baton_ticket: str | None = None
    transfer_id: str | None = None

    @property
    def checked(self) -> dict[str, Any]:
        """Raises UserError."""
        name = "transfer_id" if self.baton_ticket is None else "baton_ticket"
        value = getattr(self, name)
        if value is None:
            raise UserError("is missing, and so is transfer_id", field="baton_ticket")
        if not 0 < len(value) <= MAX_TICKET_CHARS:
            raise UserError(f"must have 1 to {MAX_TICKET_CHARS} characters", field=name)
        return {name: value}
