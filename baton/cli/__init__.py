"""The `baton` command. Reads the environment and the configuration file; nothing below it does.

`main` imports what it needs when it is called, so that `import baton.cli` costs nothing.
"""


def main() -> None:
    """Entry point of the `baton` command."""
    from baton.cli.main import app

    app(prog_name="baton")
