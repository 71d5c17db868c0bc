"""A deterministic world in which everything that can go wrong does, and the invariants are checked by name.

Never imported by production code. `baton sim pull --seed N` replays one world.
"""
