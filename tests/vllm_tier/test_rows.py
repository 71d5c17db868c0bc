"""Rows of memory as chunks, and their names."""

import pytest

from baton.hosts.vllm.tier.rows import Naming, Row, Rows

ROW_BYTES = 16
KEY = bytes([3]) * 36
NAMING = Naming(ROW_BYTES, (("current", b"s" * 32), ("old", b"o" * 32)))


def test_a_row_is_filled_and_copied() -> None:
    memory = bytearray(ROW_BYTES * 3)
    rows = Rows(memoryview(memory), NAMING)
    rows.install(Row(KEY, 1), memoryview(b"\7" * ROW_BYTES))
    assert memory == bytes(ROW_BYTES) + b"\7" * ROW_BYTES + bytes(ROW_BYTES)
    body = bytearray(ROW_BYTES)
    rows.fill(Row(KEY, 1), memoryview(body))
    assert body == b"\7" * ROW_BYTES
    with pytest.raises(ValueError, match="broadcast"):
        rows.install(Row(KEY, 3), memoryview(body))
    form = rows.form_of(Row(KEY))
    assert [(name.namespace, key) for name, key in form.names] == list(NAMING.signed)
    assert form.nbytes == ROW_BYTES
