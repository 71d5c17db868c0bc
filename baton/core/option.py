"""Declaration of a command's option, in the type of the field of settings that it sets.

    class Limits(msgspec.Struct):
        max_waiting: Annotated[AtLeast1, Option("Requests that wait in the router; more get 429.")] = 1024

The field gives the option's name, type and default. `baton.cli.settings` reads it from command line,
environment and file, and `scripts/settings_page` lists it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

import msgspec

AtLeast0: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
AtLeast1: TypeAlias = Annotated[int, msgspec.Meta(ge=1)]


@dataclass(frozen=True, slots=True)
class Option:
    """`help`: without a full stop, its reader adds the default.

    `parse` makes the field's value of the option's, which is a list of texts, or one text for a `Literal`.
    """

    help: str
    name: str = ""  # Key of the file, from which the names of option and variable follow. Empty: the field's.
    section: str = ""  # Table of the file, for a command that has several.
    metavar: str | None = None
    short: str | None = None
    is_argument: bool = False
    content: str | None = None  # Environment variable with the content of the file that this option names.
    parse: Callable[[Any], Any] | None = None
