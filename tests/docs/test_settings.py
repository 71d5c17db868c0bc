"""`docs/settings.md` is what `scripts/settings_page.py` prints, and every option has a help."""

import os
from pathlib import Path

import msgspec

from baton.cli import route, serve_settings
from baton.cli.settings import helps_of
from tests.docs.test_counts import printed

PAGE = Path(__file__).parents[2] / "docs" / "settings.md"


def test_the_page_shows_the_options_of_the_code() -> None:
    page = printed("settings_page.py")
    if os.environ.get("WRITE_GOLDEN"):
        PAGE.write_text(page)
    assert PAGE.read_text() == page, "write `python scripts/settings_page.py` there"


def test_every_option_has_a_help_and_every_help_a_field() -> None:
    for command in (serve_settings.COMMAND, route.COMMAND):
        for kind, settings in command.by_kind.items():
            helps = helps_of(kind).keys()
            assert helps == {one.field for one in settings}
            assert helps <= {field.name for field in msgspec.structs.fields(kind)}
