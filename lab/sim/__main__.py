"""python -m lab.sim pull|push [--seeds N] [--first SEED] [--minutes M] [--jobs N]
                                                                              many fast worlds
python -m lab.sim pull|push [--seeds N] [--first SEED] --digest             a hash of their traces
python -m lab.sim pull|push --seed SEED [--mutant GUARD]                    one world, line by line
python -m lab.sim mutants [--seeds N] [GUARD ...]                           each guard taken away
python -m lab.sim full [--mode MODE] [the same options]                     full worlds
python -m lab.sim full --mutants [--mode MODE] [--seeds N]                  each guard taken away
"""

import argparse
import sys

from baton.core.errors import UserError
from lab.sim.campaigns import FAST, GUARDS
from lab.sim.kernel.command import add_options, run, run_mutants
from lab.sim.kernel.runs import MODES

FAST_SEEDS = 1_000
FULL_SEEDS = 200


def main(argv: list[str]) -> int:
    try:
        return _full(argv[1:]) if argv[:1] == ["full"] else _fast(argv)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2


def _fast(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m lab.sim", description="Simulated worlds of the handoff.")
    commands = parser.add_subparsers(dest="command", required=True)
    for mode in MODES:
        worlds = commands.add_parser(mode, help=f"worlds that hand off by {mode}")
        add_options(worlds, FAST_SEEDS)
        worlds.add_argument("--mutant", choices=list(GUARDS[mode]), help="without this guard")
    mutants = commands.add_parser("mutants", help="is each missing guard noticed?")
    mutants.add_argument("--seeds", type=int, default=FAST_SEEDS)
    mutants.add_argument("guards", nargs="*", metavar="GUARD", default=[])
    options = parser.parse_args(argv)
    if options.command != "mutants":
        return run(FAST, options.command, options, FAST_SEEDS)
    wanted = options.guards
    guards = [(mode, guard) for mode in MODES for guard in GUARDS[mode] if not wanted or guard in wanted]
    if not guards:
        raise UserError("there is no such guard", field="mutants")
    return run_mutants(FAST, guards, 0, options.seeds)


def _full(argv: list[str]) -> int:
    from lab.sim.full import FULL  # Imports torch, as real halves do.

    parser = argparse.ArgumentParser(
        prog="python -m lab.sim full", description="Simulated worlds of whole engines, connectors and router."
    )
    add_options(parser, FULL_SEEDS)
    parser.add_argument("--mode", choices=list(FULL.mutants), default=MODES[0])
    parser.add_argument("--mutant", help="without this guard")
    parser.add_argument("--mutants", action="store_true", help="is each missing guard noticed?")
    options = parser.parse_args(argv)
    if not options.mutants:
        return run(FULL, options.mode, options, FULL_SEEDS)
    guards = [(options.mode, guard) for guard in FULL.mutants[options.mode]]
    return run_mutants(FULL, guards, options.first, options.seeds or FULL_SEEDS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
