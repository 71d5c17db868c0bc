"""Simulated worlds: one event queue, one seed, many faults, and a checker for each invariant.

    campaigns  many worlds
    kernel     clock, faults, reads, lies
    host       whole engines, with connectors and router, their wires, and the course of a world
    checkers   one for each invariant
    mutants    production with one guard taken away

Production code never imports this package. `python -m lab.sim pull --seed N` replays one world.
"""
