"""Fields of a multipart form, found without decoding its files. Pure.

Source: RFC 7578, RFC 2046 section 5.1.
"""

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from baton.core.errors import UserError

MEDIA_TYPE = "multipart/form-data"
PARTS_MAX = 128
PART_HEAD_BYTES_MAX = 8 << 10
FIELD_BYTES_MAX = 4 << 10  # Limit for a field that is no file.
_BOUNDARY = re.compile(r';\s*boundary=(?:"([^"]{1,70})"|([^\s;",]{1,70}))', re.IGNORECASE)
_NAME = re.compile(rb'^content-disposition:[^\r\n]*;\s*name="([^"\r\n]*)"', re.IGNORECASE | re.MULTILINE)
_IS_FILE = re.compile(rb"^content-disposition:[^\r\n]*;\s*filename\*?=", re.IGNORECASE | re.MULTILINE)


class Field(NamedTuple):
    text: str
    start: int  # Start of its bytes in the body.
    end: int


def is_form(headers: Mapping[str, str]) -> bool:
    """`headers`: names in lower case."""
    return headers.get("content-type", "").partition(";")[0].strip().lower() == MEDIA_TYPE


def fields_of(body: bytes, content_type: str) -> dict[str, Field]:
    """The last field of each name, without files and long fields. Raises UserError if the body is no form."""
    found = _BOUNDARY.search(content_type)
    if found is None:
        raise UserError("has no boundary", field="Content-Type")
    fields = {}
    for start, end in _parts(body, b"--" + (found[1] or found[2]).encode()):
        head_end = body.find(b"\r\n\r\n", start, min(end, start + PART_HEAD_BYTES_MAX) + 4)
        if head_end < 0:
            raise UserError("has a part without headers, or with too many", field="body")
        head, value = body[start:head_end], head_end + 4
        if (name := _NAME.search(head)) is None or _IS_FILE.search(head) or end - value > FIELD_BYTES_MAX:
            continue
        text = body[value:end].decode("utf-8", "replace")
        fields[name[1].decode("utf-8", "replace")] = Field(text, value, max(value, end))
    return fields


def _parts(body: bytes, delimiter: bytes) -> Iterator[tuple[int, int]]:
    """Where each part begins, after its delimiter's line, and ends."""
    at = 0 if body.startswith(delimiter) else body.find(b"\r\n" + delimiter) + 2
    if at == 1:
        raise UserError("is no multipart form: its boundary is nowhere", field="body")
    for _ in range(PARTS_MAX):
        at += len(delimiter)
        if body.startswith(b"--", at):
            return
        line_end = body.find(b"\r\n", at)
        # The part may be empty: then this is the next delimiter's line break, too.
        end = body.find(b"\r\n" + delimiter, line_end + 2) if line_end >= 0 else -1
        if end < 0:
            raise UserError("is no whole multipart form", field="body")
        yield line_end + 2, end
        at = end + 2
    raise UserError(f"has over {PARTS_MAX} parts", field="body")
