"""Body of `/baton/take_back`: the ticket in an answer's `kv_transfer_params`."""

import msgspec

from baton.core.errors import UserError
from baton.core.transfer_params import MAX_TICKET_CHARS


class Lent(msgspec.Struct, frozen=True):
    baton_ticket: str

    @property
    def checked_ticket(self) -> str:
        if not 0 < len(self.baton_ticket) <= MAX_TICKET_CHARS:
            raise UserError(f"must have 1 to {MAX_TICKET_CHARS} characters", field="baton_ticket")
        return self.baton_ticket
