"""Finds a command whose extra of the package is not installed, and names that extra.

Imports only the standard library: the base install has no typer.
"""

import importlib.util
from collections.abc import Sequence

MODULES = {
    "check": ("hypothesis", "rich", "safetensors", "torch", "typer"),
    "cli": ("httpx", "rich", "typer"),
    "engine": (
        "httpx",
        "jinja2",
        "llguidance",
        "rich",
        "safetensors",
        "starlette",
        "tokenizers",
        "torch",
        "typer",
        "uvicorn",
    ),
    "router": ("httptools", "starlette", "typer", "uvicorn", "uvloop"),
}
"""Modules that each extra brings to the base install; a test compares them with pyproject.toml."""

COMMANDS = {
    "bench": ("engine",),
    "cache": ("cli",),
    "check": ("check",),
    "demo": ("engine", "router"),
    "doctor": ("engine",),
    "model": ("engine",),
    "route": ("router",),
    "serve": ("engine",),
    "top": ("cli",),
    "up": ("engine", "router"),
}


def missing_extra(arguments: Sequence[str]) -> str | None:
    """Return the error if the command of these arguments lacks a package of its extra."""
    command = next((argument for argument in arguments if not argument.startswith("-")), None)
    extras = COMMANDS.get(command or "", ())
    # Every command line is parsed by typer, also one without a command.
    wanted = ("typer", *(module for extra in extras for module in MODULES[extra]))
    absent = next((module for module in wanted if importlib.util.find_spec(module) is None), None)
    if absent is None:
        return None
    needed = f"kv-baton[{','.join(extras or ('cli',))}]"
    program = f"baton {command}" if extras else "baton"
    return f"{program} needs {needed}: pip install '{needed}' (no module named '{absent}')"
