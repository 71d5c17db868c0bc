"""Each guard taken away, one at a time, to prove that worlds find it missing.

    machines    protocol machines without a guard
    halves      scheduler halves without a guard
    weights     engines that use KV of other weights
    guards      all mutants, by mode and guard

A mutant is the production parts with one replaced. Production code cannot switch a guard off.
"""
