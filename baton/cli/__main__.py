"""Runs the `baton` command as `python -m baton.cli`."""

from baton.cli import main

if __name__ == "__main__":
    main()
