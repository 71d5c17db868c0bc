"""python -m lab.sim pull|push [--seeds N] [--first SEED] [--minutes M] [--jobs N]   many worlds
python -m lab.sim pull|push [--seeds N] [--first SEED] --digest                   a hash of their traces
python -m lab.sim pull|push --seed SEED [--mutant GUARD]                          one world, line by line
python -m lab.sim mutants [--first SEED] [--seeds N] [GUARD ...]                  each guard taken away
"""

import argparse
import sys

from baton.core.errors import UserError
from lab.sim.campaigns import WORLDS
from lab.sim.kernel.command import add_options, run, run_mutants
from lab.sim.kernel.runs import MODES

SEEDS = 200


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m lab.sim", description="Simulated worlds of whole engines, connectors and router."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for mode in MODES:
        worlds = commands.add_parser(mode, help=f"worlds that hand off by {mode}")
        add_options(worlds, SEEDS)
        worlds.add_argument("--mutant", choices=list(WORLDS.mutants[mode]), help="without this guard")
    mutants = commands.add_parser("mutants", help="is each missing guard noticed?")
    mutants.add_argument("--seeds", type=int, default=SEEDS)
    mutants.add_argument("--first", type=int, default=0, help="the first seed")
    mutants.add_argument("guards", nargs="*", metavar="GUARD", default=[])
    options = parser.parse_args(argv)
    try:
        if options.command != "mutants":
            return run(WORLDS, options.command, options, SEEDS)
        wanted = options.guards
        guards = [(mode, guard) for mode in MODES for guard in WORLDS.mutants[mode]]
        guards = [(mode, guard) for mode, guard in guards if not wanted or guard in wanted]
        if not guards:
            raise UserError("there is no such guard", field="mutants")
        return run_mutants(WORLDS, guards, options.first, options.seeds)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
