"""`python -m baton.cli`: the `baton` command without its script."""

from baton.cli import main

if __name__ == "__main__":
    main()
