"""`baton sim`: runs the handoff protocol in simulated worlds, seed by seed.
baton sim pull --seeds 10000           many worlds; a violation prints the command that replays it
baton sim pull --seed 42               one world, line by line
baton sim mutants                      removes each guard and checks that the removal is noticed
"""

from typing import Annotated

import typer

app = typer.Typer(add_completion=False)


@app.command(context_settings={"ignore_unknown_options": True})
def sim(
    arguments: Annotated[
        list[str],
        typer.Argument(metavar="MODE|mutants ...", help="What to run; `baton sim pull -- --help` lists it."),
    ],
) -> None:
    """Run the handoff in simulated worlds: loss, crashes, stopped processes, skewed clocks, replays."""
    from baton.sim.__main__ import main

    raise typer.Exit(main(arguments))
