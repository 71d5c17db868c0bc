"""The `baton` command. Only this package reads the environment and the configuration file.

`main` imports what it needs when it is called, so that `import baton.cli` is cheap.
"""


def main() -> None:
    """Entry point of the `baton` command."""
    import sys

    from baton.cli.extras import missing_extra

    if (error := missing_extra(sys.argv[1:])) is not None:
        sys.exit(error)
    from baton.cli.main import app

    app(prog_name="baton")
