'''Declaration of a command's option, in the type of the field of settings that it sets.

    class Limits(msgspec.Struct):
        """Limits of the router.

        max_waiting: Requests that wait in the router; more get 429
        """

        max_waiting: Annotated[AtLeast1, Option()] = 1024

The field gives the option's name, type and default. The class's docstring gives its help; one that ends
without a full stop gets the default. `baton.cli.settings` reads the value from command line, environment and
file, and `scripts/settings_page` lists all options.
'''

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

import msgspec

AtLeast0: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
AtLeast1: TypeAlias = Annotated[int, msgspec.Meta(ge=1)]


@dataclass(frozen=True, slots=True)
class Option:
    """`parse` makes the field's value of the option's: of a list of texts, or of one text for a `Literal`."""

    name: str = ""  # Key of the file, from which the names of option and variable follow. Empty: the field's.
    section: str = ""  # Table of the file, for a command that has several.
    metavar: str | None = None
    short: str | None = None
    is_argument: bool = False
    content: str | None = None  # Environment variable with the content of the file that this option names.
    variable: str | None = None  # Environment variable of an option whose command has no others.
    parse: Callable[[Any], Any] | None = None
