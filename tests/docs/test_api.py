"""`docs/api.md` contains the server's table of request fields."""

from pathlib import Path

from baton.server.protocol.fields import tables

PAGE = Path(__file__).parents[2] / "docs" / "api.md"


def test_the_page_shows_the_table_of_the_code() -> None:
    text = PAGE.read_text()
    begin = text.index("## `POST /v1/completions`")
    assert text[begin:].strip() == tables().strip(), "write `python -m baton.server.protocol.fields` there"
