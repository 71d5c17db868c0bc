"""What both legs of one request call their transfer, if no router has named it: the request itself.

    cmpl-1f00d-0-9c41e7ab        a client's id, the index of the completion, and what this engine added
    cmpl-1f00d-0                 what both engines know of it

Two engines add different endings to one id; a retry adds another. The index stays: each completion of a
request has a prompt of its own to fetch.
"""

from __future__ import annotations

import hashlib
import re

from baton.core.ids import TransferId
from baton.core.transfer_params import MAX_TRANSFER_ID_CHARS

_ENDING = re.compile(r"-[0-9a-f]{8}\Z")
_PREFIX = "request:"  # No router's name looks like it.


def transfer_of_request(request_id: str) -> TransferId:
    name = _PREFIX + _ENDING.sub("", request_id)
    if len(name) > MAX_TRANSFER_ID_CHARS or not name.isascii():  # A client's id is anything at all.
        name = _PREFIX + hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()
    return TransferId(name)
